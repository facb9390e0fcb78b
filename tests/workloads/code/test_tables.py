"""Every form of the records holds the same values: forms are parsed again."""

from __future__ import annotations

import csv
import json

import numpy as np

from autotune.workloads.code.tables import FORMS, TRANSLATIONS, fill_table, random_records

NAMES = ("alpha", "beta", "gamma", "delta", "width")


def parse(form: str, text: str) -> list[list[str]]:
    """Keys, then the values of each record, as text."""
    lines = text.splitlines()
    if form == "json":
        records = json.loads(text)
        return [list(records[0]), *([str(value) for value in record.values()] for record in records)]
    if form == "csv":
        return list(csv.reader(lines))
    if form == "table":
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        return [rows[0], *rows[2:]]
    pairs = [[pair.split(" is ") for pair in line.removesuffix(".").split(", ")] for line in lines]
    return [[key for key, _ in pairs[0]], *([value for _, value in row] for row in pairs)]


def test_forms_hold_the_same_values() -> None:
    for seed in range(30):
        records = random_records(NAMES, np.random.default_rng(seed))
        expected = [list(records[0]), *([str(value) for value in record.values()] for record in records)]
        for form, (_, write) in FORMS.items():
            assert parse(form, write(records)) == expected, form


def test_the_answer_is_the_request_in_another_form() -> None:
    seen = set()
    for seed in range(60):
        prompt, answer = fill_table(NAMES, np.random.default_rng(seed))
        request, _, given = prompt.partition("\n\n")
        wanted = next(form for form, (name, _) in FORMS.items() if request == f"Write the records as {name}.")
        sources = [source for source, target in TRANSLATIONS if target == wanted]
        assert any(_parses(source, given) == parse(wanted, answer) for source in sources)
        seen.add(wanted)
    assert seen == {"json", "table", "csv"}


def _parses(form: str, text: str) -> list[list[str]] | None:
    try:
        return parse(form, text)
    except (ValueError, IndexError):
        return None
