"""``autotune check``: what fails a profile and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune import models
from autotune.check import CheckResult, run_check
from autotune.condition import Condition
from autotune.console import Console
from autotune.cost.device import fingerprint
from autotune.decoding_profile import load_profile, save_profile
from autotune.errors import UserError
from autotune.models import reference
from autotune.profile_runner import TUNED, ProfileRunner
from autotune.trees.verification import WetapVerification
from tests.conftest import Pair
from tests.documents import decoding_profile, write_workload


@pytest.fixture
def world(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lossless profile, a lossy one that accepts anything, and a workload."""
    target, draft = (reference(str(path)) for path in (pair.target_folder, pair.draft_folder))
    lossless = decoding_profile(target, draft, visual_keep=1.0, hardware=fingerprint("cpu"))
    save_profile(tmp_path / "lossless.json", lossless)
    verification = {"verification": WetapVerification(threshold=1e-9), "lossless": False}
    lossy = lossless.model_copy(update={"points": [lossless.point.model_copy(update=verification)]})
    save_profile(tmp_path / "lossy.json", lossy)
    write_workload(tmp_path, [{"prompt": "Go on.", "split": "evaluate", "max_new_tokens": 20}] * 2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(profile: str, min_speedup: float | None = None) -> CheckResult:
    return run_check(Path(profile), "workload.jsonl", min_speedup, 2, 0, "cpu", Console())


def test_equal_outputs_pass(world: Path) -> None:
    found = check("lossless.json")
    assert (found.verdict, found.exit_code, found.identical_outputs, found.lossless) == ("passed", 0, 2, True)


def test_another_output_fails_a_profile_that_promises_the_target_s(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = ProfileRunner.decode

    def wrong(self: ProfileRunner, arm: Any, inputs: Any, prompt: Any) -> Any:
        tokens, stats = decode(self, arm, inputs, prompt)
        return (tokens if arm.name != TUNED else [*tokens[:-1], 0]), stats

    monkeypatch.setattr(ProfileRunner, "decode", wrong)
    found = check("lossless.json")
    assert found.exit_code == 1 and found.verdict == "failed: the output is not that of plain decoding"


def test_in_reduced_precision_a_near_tie_passes_and_is_reported(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half the answers of bfloat16 part somewhere; another token at a clear margin fails as ever."""
    prompts = [{"prompt": f"Go on with number {n}.", "split": "evaluate", "max_new_tokens": 60} for n in range(6)]
    write_workload(world, prompts)
    load_model = models.load_model
    monkeypatch.setattr(models, "load_model", lambda name, **options: load_model(name, **options).bfloat16())
    found = run_check(Path("lossless.json"), "workload.jsonl", None, 6, 0, "cpu", Console())
    assert found.identical_outputs < 6 == found.num_prompts, "nothing differs: the test proves nothing"
    assert len(found.divergences) == 6 - found.identical_outputs
    assert all(": a near tie" in divergence and "margin" in divergence for divergence in found.divergences)
    assert (found.verdict, found.exit_code) == ("passed", 0)
    assert "output differs at token" in capsys.readouterr().err

    decode = ProfileRunner.decode

    def wrong(self: ProfileRunner, arm: Any, inputs: Any, prompt: Any) -> Any:
        tokens, stats = decode(self, arm, inputs, prompt)
        return (tokens if arm.name != TUNED else [*tokens[:3], 5, *tokens[4:]]), stats

    monkeypatch.setattr(ProfileRunner, "decode", wrong)
    found = run_check(Path("lossless.json"), "workload.jsonl", None, 6, 0, "cpu", Console())
    assert found.exit_code == 1 and any(": not a tie" in divergence for divergence in found.divergences)


def test_a_lossy_profile_promises_no_output(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = check("lossy.json")
    assert found.identical_outputs < 2 and found.exit_code == 0 and not found.lossless
    assert "LOSSY profile" in capsys.readouterr().err


def test_a_speedup_that_cannot_be_reached_fails(world: Path) -> None:
    found = check("lossless.json", min_speedup=1000.0)
    assert found.exit_code == 1 and found.verdict == "failed: the speedup lies below 1000"


def test_a_minimum_of_nothing_is_refused(world: Path) -> None:
    with pytest.raises(UserError, match="--min-speedup must be above 0; got -1"):
        check("lossless.json", min_speedup=-1.0)


# --------------------------------------------------------------------------------------------------- operating points


def write_points(world: Path, *tasks: str) -> None:
    """Prompts of these tasks, and a profile with a lossy point for the task ``loose``."""
    lossless, lossy = (load_profile(world / f"{name}.json") for name in ("lossless", "lossy"))
    loose = lossy.point.model_copy(update={"when": Condition(workload="loose")})
    save_profile(world / "points.json", lossless.model_copy(update={"points": [loose, lossless.point]}))
    prompts = [{"prompt": "Go on.", "split": "evaluate", "max_new_tokens": 20, "task": task} for task in tasks]
    write_workload(world, prompts)


def test_only_outputs_of_lossless_points_must_be_the_target_s(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompt by both: one may differ and does."""
    write_points(world, "loose", "strict")
    found = check("points.json")
    assert (found.exit_code, found.identical_outputs, found.lossless, found.divergences) == (0, 1, False, [])
    decode = ProfileRunner.decode

    def wrong(self: ProfileRunner, arm: Any, inputs: Any, prompt: Any) -> Any:
        tokens, stats = decode(self, arm, inputs, prompt)
        return (tokens if arm.name != TUNED else [*tokens[:-1], 0]), stats

    monkeypatch.setattr(ProfileRunner, "decode", wrong)
    found = check("points.json")
    assert found.exit_code == 1 and [one.split(": ")[0] for one in found.divergences] == ["workload.jsonl:2"]


def test_a_check_counts_by_the_point_of_each_prompt(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lossy point accepts whatever is drafted, and takes fewer rounds than the lossless one on the same prompt."""
    write_points(world, "strict", "loose")
    runs: dict[str, Any] = {}
    run = ProfileRunner.run

    def noted(self: ProfileRunner, arm: Any, prompt: Any) -> Any:
        found = run(self, arm, prompt)
        if arm.name == TUNED:
            runs[prompt.settings.task] = found
        return found

    monkeypatch.setattr(ProfileRunner, "run", noted)
    check("points.json")
    assert runs["loose"].rounds < runs["strict"].rounds == len(runs["strict"].accepted_lengths)
