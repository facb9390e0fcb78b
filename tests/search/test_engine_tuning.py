"""The tuning of an engine: replay chooses what runs, races decide, and what was recorded stays."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.console import Console
from autotune.documents.decoding_profile import AR, DecodingProfile
from autotune.errors import UserError
from autotune.search.engine_tuning import tune_engine
from autotune.study.search_settings import SearchSettings
from tests.sample_documents import write_workload
from tests.search.fake_backend import FakeBackend

ALL = ("copy", "copy(2)", "guess", "guess(2)")


def tuned(backend: FakeBackend, folder: Path, **options: Any) -> DecodingProfile:
    """Tuned on the first 24 of 32 prompts, with 32 held out."""
    workload = write_workload(folder, [{"prompt": f"Go on {n}."} for n in range(64)])
    settings = SearchSettings(target="digits/target", workload=str(workload), **options)
    return tune_engine(backend, settings, 60.0, folder, Console())


def test_the_profile_deploys_what_was_fastest_in_the_engine(tmp_path: Path) -> None:
    """Replay thinks that copy(2) is the fastest, and the race finds guess(2)."""
    backend = FakeBackend()
    backend.ms |= {"copy(2)": 8.0, "guess(2)": 5.0, "guess": 7.0}
    backend.predicted = {"off": 10.0, "copy(2)": 4.0, "guess(2)": 5.0, "guess": 7.0}
    profile = tuned(backend, tmp_path)
    assert profile.backend == "fake" and profile.precision == "bfloat16" and profile.target == backend.model
    deployment, evidence = profile.point.deployment, profile.evidence
    assert (
        deployment is not None
        and deployment.label == "guess(2)"
        and deployment.command == ["fake", "model", "guess(2)"]
    )
    assert profile.point.measured is not None and profile.point.measured.speedup == pytest.approx(2.0, rel=0.02)
    assert evidence.engine is not None and evidence.engine.num_replayed == {"copy": 2, "guess": 2}
    assert [one.label for one in evidence.engine.predicted] == ["copy(2)", "guess(2)", "guess", "copy"]
    assert evidence.engine.as_predicted == {"guess": (8, 8), "copy(2)": (8, 8), "guess(2)": (8, 8)}
    assert evidence.best_default == "guess"
    assert {gain.over: gain.speedup for gain in evidence.gains} == pytest.approx({AR: 2.0, "guess": 1.4}, rel=0.02)
    assert [arm.name for arm in evidence.compared] == [AR, "guess", "guess(2)"]
    # the first look of 16 prompts decides
    assert len(evidence.prompts) == 16 and evidence.prompts[0].arm == "model guess(2)"
    assert (
        DecodingProfile.parse({"schema": profile.schema_id(), **profile.model_dump(mode="json")}, source="p") == profile
    )


@pytest.mark.parametrize(("ms", "num_prompts"), [(12.0, 16), (10.0, 32)])
def test_speculation_is_left_off_unless_it_is_significantly_faster(tmp_path: Path, ms: float, num_prompts: int) -> None:
    backend = FakeBackend()
    backend.ms |= dict.fromkeys(ALL, ms)
    profile = tuned(backend, tmp_path)
    assert profile.point.deployment is not None and profile.point.deployment.speculation is None
    assert len(profile.evidence.prompts) == num_prompts and profile.evidence.prompts[0].arm == "model off"
    assert profile.evidence.gains[0].speedup == pytest.approx(10.0 / ms, rel=0.02)


def test_an_arm_that_ends_is_left_out_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = FakeBackend()
    backend.ms |= {"copy(2)": 5.0, "guess(2)": 6.0}
    backend.dies_after, backend.broken = {"copy(2)": 3}, ("guess",)
    profile = tuned(backend, tmp_path)
    assert profile.point.deployment is not None and profile.point.deployment.label == "guess(2)"
    assert "left out   copy(2): the server ended while it was used" in capsys.readouterr().err


@pytest.mark.parametrize("label", ["off", "copy"])
def test_what_was_served_is_not_served_again(tmp_path: Path, label: str) -> None:
    """Plain decoding ends in the first race; with the only other arms too, nothing is left."""
    backend = FakeBackend()
    backend.ms |= {"copy": 5.0}
    backend.dies_after = {label: 3} if label == "off" else dict.fromkeys(ALL, 3)
    with pytest.raises(UserError, match=r"^fake: the server ended while it was used$"):
        tuned(backend, tmp_path)
    again = FakeBackend()
    again.ms |= {"copy": 5.0}
    profile = tuned(again, tmp_path)
    assert profile.point.deployment is not None and profile.point.deployment.label == "copy"
    first = [len(arm.decoded) for arm in again.arms[:3]]
    assert first == [5, 5, 5]


@pytest.mark.parametrize(("spent_s", "line"), [(20.0, ""), (45.0, "they fit into --budget 8m")])
def test_a_stage_that_ends_late_names_a_sufficient_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, spent_s: float, line: str
) -> None:
    """Answers have 18 of the 60 seconds of tuning, in a budget of 180: 20 are hardly more, and 45 need 450."""
    backend, clock = FakeBackend(), SimpleNamespace(now=0.0)
    monkeypatch.setattr("autotune.search.engine_tuning.time.monotonic", lambda: clock.now)
    record = backend.record

    def slow_record(*arguments: Any) -> Any:
        clock.now += spent_s
        return record(*arguments)

    monkeypatch.setattr(backend, "record", slow_record)
    tuned(backend, tmp_path, budget_s=180.0)
    shown = capsys.readouterr().err
    assert line in shown and ("late " in shown) == bool(line)


def test_a_running_server_gets_a_prediction(tmp_path: Path) -> None:
    backend = FakeBackend()
    backend.is_fixed, backend.ms = True, {"off": 10.0, "copy(2)": 5.0}
    profile = tuned(backend, tmp_path)
    assert profile.point.measured is None and backend.arms == []
    assert profile.point.deployment is not None and profile.point.deployment.label == "copy(2)"


def test_without_a_type_that_is_replayed_exactly_there_is_nothing_to_tune(tmp_path: Path) -> None:
    backend = FakeBackend()
    backend.prices.left_out = {"copy": "another rule", "guess": "another rule"}
    with pytest.raises(UserError, match="fake: no speculation is left to tune"):
        tuned(backend, tmp_path)
