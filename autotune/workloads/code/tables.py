"""Records as sentences, JSON, CSV and Markdown tables, and their translation into each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from numpy.random import Generator

Record = dict[str, str | int | float | bool]


def _prose(records: Sequence[Record]) -> str:
    return "\n".join(", ".join(f"{key} is {value}" for key, value in record.items()) + "." for record in records)


def _json(records: Sequence[Record]) -> str:
    return json.dumps(list(records), indent=2)


def _csv(records: Sequence[Record]) -> str:
    return "\n".join([",".join(records[0]), *(",".join(str(value) for value in record.values()) for record in records)])


def _table(records: Sequence[Record]) -> str:
    rows = ["| " + " | ".join(str(value) for value in record.values()) + " |" for record in records]
    return "\n".join(["| " + " | ".join(records[0]) + " |", "|" + " --- |" * len(records[0]), *rows])


FORMS: dict[str, tuple[str, Callable[[Sequence[Record]], str]]] = {
    "prose": ("sentences", _prose),
    "json": ("JSON", _json),
    "csv": ("CSV", _csv),
    "table": ("a Markdown table", _table),
}
TRANSLATIONS = (
    ("prose", "json"),
    ("csv", "json"),
    ("table", "json"),
    ("prose", "table"),
    ("json", "table"),
    ("json", "csv"),
)


def random_records(names: Sequence[str], rng: Generator) -> list[Record]:
    """Two to five records of two to four fields, with keys and words from ``names``."""
    kinds = {str(key): int(rng.integers(4)) for key in rng.choice(list(names), int(rng.integers(2, 5)), replace=False)}

    def value(kind: int) -> str | int | float | bool:
        match kind:
            case 0:
                return int(rng.integers(1000))
            case 1:
                return round(float(rng.uniform(0, 100)), 1)
            case 2:
                return bool(rng.integers(2))
        return str(rng.choice(list(names)))

    return [{key: value(kind) for key, kind in kinds.items()} for _ in range(int(rng.integers(2, 6)))]


def fill_table(names: Sequence[str], rng: Generator) -> tuple[str, str]:
    """A request to write records in another form, and the records in that form."""
    given, wanted = TRANSLATIONS[int(rng.integers(len(TRANSLATIONS)))]
    records = random_records(names, rng)
    return f"Write the records as {FORMS[wanted][0]}.\n\n{FORMS[given][1](records)}", FORMS[wanted][1](records)
