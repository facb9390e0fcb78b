"""Two profiles compared by their documents: figures by hand, what has changed, and ``autotune diff``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune.cli.main import main
from autotune.documents.decoding_profile import DecodingProfile, Evidence
from autotune.documents.provenance import ModelReference
from autotune.documents.speculation import Speculation
from autotune.evaluation.profile_difference import ACCEPTANCE, COST, SPEEDUP, difference_of
from tests.check.sample_documents import prompt_evidence
from tests.engine_profiles import LOADS, SPECULATION, engine_profile
from tests.sample_documents import DEVICE

NAMES = ("a.json", "b.json")


def profile(
    rounds: Sequence[int] = (10, 20, 10, 20),
    ms: Sequence[float] = (100, 200, 100, 200),
    *,
    first: int = 0,
    speculation: Speculation = SPECULATION,
    answer: str = "same",
    **fields: Any,
) -> DecodingProfile:
    """Answers of 40 decoded tokens to prompts from ``first`` on, each of which takes plain decoding 5 ms."""
    runs = [
        prompt_evidence(f"{n}", task="chat" if n < 2 else "copy", rounds=rows, decode_ms=took, tokens_sha256=answer)
        for n, (rows, took) in enumerate(zip(rounds, ms, strict=True), start=first)
    ]
    known = engine_profile(speculation=speculation, prompts=runs, plain_token_ms=[5.0] * len(runs))
    return known.model_copy(update=fields)


def test_the_ratio_of_speedups_is_acceptance_times_cost() -> None:
    """A: 800 ms plainly, 600 ms tuned, 160 tokens in 60 passes; B: 150 fewer ms in 50 passes."""
    found = difference_of(profile(), profile((10, 15, 10, 15), (75, 150, 75, 150)), NAMES)
    values = {name: [row[side][0] for side in ("A", "B", "B over A")] for name, row in found.figures.items()}
    assert values[SPEEDUP] == pytest.approx([800 / 600, 800 / 450, 600 / 450])
    assert values[ACCEPTANCE] == pytest.approx([160 / 60, 160 / 50, 60 / 50])
    assert values[COST] == pytest.approx([2.0, 450 / 50 / 5, 0.9])
    assert values["plain decoding, ms per token"] == pytest.approx([5, 5, 1])
    assert values["the profile, ms per token"] == pytest.approx([600 / 160, 450 / 160, 0.75])
    assert values[f"{ACCEPTANCE}, chat"] == values[f"{ACCEPTANCE}, copy"] == pytest.approx([80 / 30, 80 / 25, 1.2])
    assert all(value == pytest.approx(math.prod((values[ACCEPTANCE][2], 1 / values[COST][2]))) for value in [4 / 3])
    assert all(row[side][1] <= row[side][0] <= row[side][2] for row in found.figures.values() for side in row)
    assert found.explanation == [
        "The speedup of B is 1.33 (1.33-1.33) times that of A: 1.20 by acceptance times 1.11 by the cost of a pass.",
        "Changed: nothing that profiles record.",
    ]
    assert [row[-1] for row in found.tables()[1].rows][:2] == ["overlap", "overlap"], (
        "prompts differ more than profiles"
    )


@pytest.mark.parametrize(
    ("b", "kind", "names"),
    [
        (profile(precision="Q8_0"), "other settings", ["precision"]),
        (
            profile(speculation=Speculation(type="ngram-simple", options={"size-n": 1, "size-m": 48})),
            "other settings",
            [f"deployment.speculation.{name}" for name in ("type", "options.n-match", "options.n-min", "options.n-max")]
            + ["deployment.speculation.options.size-n", "deployment.speculation.options.size-m"],
        ),
        (profile(hardware=DEVICE.model_copy(update={"model": "A slide rule"})), "other hardware", ["hardware.model"]),
    ],
)
def test_what_has_changed(b: DecodingProfile, kind: str, names: list[str]) -> None:
    found = difference_of(profile(), b, NAMES)
    assert {kind: list(fields) for kind, fields in found.settings.items()} == {kind: names}
    assert f"Changed: {kind} ({', '.join(names)})." in found.explanation


@pytest.mark.parametrize(
    ("b", "num_shared", "num_figures", "last"),
    [
        (profile(first=2), 2, 5, "Changed: nothing that profiles record."),
        (profile(first=9), 0, 5, "Not comparable by task: they have no held-out prompt in common."),
        (profile(answer="other"), 4, 7, "Only 0 of 4 answers are the same."),
        (profile(evidence=Evidence()), 0, 0, "Not comparable by task: they have no held-out prompt in common."),
    ],
)
def test_profiles_of_other_prompts(b: DecodingProfile, num_shared: int, num_figures: int, last: str) -> None:
    found = difference_of(profile(), b, NAMES)
    assert (found.num_shared_prompts, len(found.figures), found.explanation[-1]) == (num_shared, num_figures, last)
    assert found.explanation[0].startswith(
        "The speedup of B is 1.00" if num_figures else "A or B has no times of plain decoding"
    )


def test_answers_of_one_token_have_no_figures() -> None:
    """The third prompt of B, which is then no prompt that both have decoded."""
    a, b = profile(), profile()
    runs = [
        run.model_copy(update={"new_tokens": 1, "rounds": 0} if n == 2 else {})
        for n, run in enumerate(b.evidence.prompts)
    ]
    found = difference_of(a, b.model_copy(update={"evidence": b.evidence.model_copy(update={"prompts": runs})}), NAMES)
    assert found.num_shared_prompts == 3 and found.figures[ACCEPTANCE]["A"][0] == pytest.approx(120 / 50)


def test_loads_that_both_have_are_compared_by_throughput() -> None:
    """60 and 40 tokens/s; B has the first load alone, with twice A's throughput."""
    twice = LOADS[0].chosen.model_copy(update={"tokens_per_second": (120.0, 110.0, 132.0)})
    profiles = list[DecodingProfile]()
    for loads in (LOADS, [LOADS[0].model_copy(update={"chosen": twice})]):
        evidence = profile().evidence
        assert evidence.engine is not None
        engine = evidence.engine.model_copy(update={"loads": loads})
        profiles.append(profile(evidence=evidence.model_copy(update={"engine": engine})))
    figures = difference_of(*profiles, NAMES).figures
    assert figures["tokens/s, 4 at once"] == {
        "A": (60.0, 55.0, 66.0),
        "B": (120.0, 110.0, 132.0),
        "B over A": (2.0, 110 / 66, 132 / 55),
    }
    assert not [name for name in figures if "16 at once" in name]


def test_the_command(tmp_path: Path) -> None:
    a, b, other = (str(tmp_path / name) for name in ("a.json", "b.json", "other.json"))
    profile().save(a)
    profile((10, 15, 10, 15)).save(b)
    profile(target=ModelReference(id="another/target", sha256="d" * 64)).save(other)
    done = CliRunner().invoke(main, ["diff", a, b])
    assert done.exit_code == 0 and done.stdout.strip().startswith("The speedup of B is 1.00"), done.output
    assert "Figures of 4 shared held-out prompts" in done.stderr and "Settings" not in done.stderr
    printed = json.loads(CliRunner().invoke(main, ["diff", a, b, "--json"]).stdout)
    assert printed["schema"] == "autotune.profile-difference/1" and printed["figures"][ACCEPTANCE]["B"][0] == 3.2
    refused = CliRunner().invoke(main, ["diff", a, other])
    assert refused.exit_code == 2 and refused.stdout == ""
    assert "its target is another/target, that of" in refused.stderr.splitlines()[-1]
