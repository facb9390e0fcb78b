"""Backends that race each other: shares of the budget, the deployment, failures, and what a second run keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.deployment import BackendResult
from autotune.errors import UserError
from autotune.search import backend_race, backends
from autotune.study.search_settings import SearchSettings
from tests.sample_documents import write_workload
from tests.search.fake_backend import FakeBackend


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeBackend]:
    """Backends ``one`` and ``two`` that load any model: by the name of the model, as they were made last."""
    monkeypatch.chdir(tmp_path)
    found: dict[str, FakeBackend] = {}

    def kind(name: str) -> type[FakeBackend]:
        def make(backend: Any, model: str, **options: Any) -> None:
            FakeBackend.__init__(backend, model)
            if model == "absent":
                raise UserError("absent: no such model; give another")
            backend.ms |= MS.get(model, {})
            backend.token = 9 if model == "quantized" else 7
            backend.dies_after = DIES.get(model, {})
            backend.precision = "Q4_1" if model == "quantized" else "bfloat16"
            found[f"{name}={model}"] = backend

        return type("Made", (FakeBackend,), {"name": name, "__init__": make})

    for name in ("one", "two"):
        monkeypatch.setitem(backends.BACKENDS, name, kind(name))
    monkeypatch.setattr(backend_race, "has_own_weights", lambda _, profile: profile.precision == "bfloat16")
    return found


MS: dict[str, dict[str, float]] = {
    "slow": {"off": 10.0, "copy": 8.0},
    "fast": {"off": 9.0, "copy": 5.0},
    "quantized": {"off": 3.0, "copy": 4.0},
    "dying": {"off": 2.0, "copy": 1.0},
}
DIES: dict[str, dict[str, int]] = {"dying": {}}


def searched(tmp_path: Path, *named: str, **fields: Any) -> DecodingProfile:
    workload = write_workload(tmp_path, [{"prompt": f"Go on {n}."} for n in range(40)])
    settings = SearchSettings(
        backends=named, target="digits/target", workload=str(workload), output=Path("p.json"), **fields
    )
    return backend_race.search_backends(settings, Console())


def rows(profile: DecodingProfile) -> dict[str, BackendResult]:
    return {f"{result.backend}={result.model.id}": result for result in profile.evidence.backends}


def test_the_fastest_with_the_targets_own_weights_is_deployed(tmp_path: Path, made: dict[str, FakeBackend]) -> None:
    profile = searched(tmp_path, "one=slow", "one=quantized", "two=fast")
    found = rows(profile)
    assert [name for name, result in found.items() if result.is_deployed] == ["two=fast"]
    assert (
        profile.backend == "two" and profile.point.deployment is not None and profile.point.deployment.label == "copy"
    )
    num_prompts = found["two=fast"].num_prompts
    seconds = {name: result.seconds / num_prompts for name, result in found.items()}
    assert seconds == pytest.approx({"one=slow": 0.08, "one=quantized": 0.03, "two=fast": 0.05}, rel=0.02)
    speedups = {name: result.speedup for name, result in found.items()}
    assert speedups == pytest.approx({"one=slow": 9 / 8, "one=quantized": 3.0, "two=fast": 9 / 5}, rel=0.02)
    assert {name: result.agreement for name, result in found.items()} == {
        "one=slow": 1,
        "one=quantized": 0,
        "two=fast": 1,
    }
    assert {name for name, result in found.items() if not result.has_own_weights} == {"one=quantized"}
    assert found["one=quantized"].label == "off"
    assert [name for name, result in found.items() if result.is_slower] == ["one=slow"]
    assert found["one=slow"].num_prompts == 8  # of 20: the first look decides
    assert DecodingProfile.load("p.json") == profile


def test_backends_of_equal_speed_are_not_called_slower(tmp_path: Path, made: dict[str, FakeBackend]) -> None:
    found = rows(searched(tmp_path, "one=fast", "two=fast"))
    assert not any(result.is_slower for result in found.values())
    assert {result.num_prompts for result in found.values()} == {20}


def test_any_weights_are_deployed_if_they_may_be(tmp_path: Path, made: dict[str, FakeBackend]) -> None:
    profile = searched(tmp_path, "one=quantized", "two=fast", any_weights=True)
    assert profile.precision == "Q4_1" and rows(profile)["one=quantized"].is_deployed
    assert profile.point.deployment is not None and profile.point.deployment.label == "off"


def test_a_backend_that_fails_is_a_line_and_the_race_goes_on(
    tmp_path: Path, made: dict[str, FakeBackend], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One loads no such model, and another one ends in the race, which is the first that begins after 16 prompts."""
    arms_of = backend_race.arms_of

    def dying(profile: DecodingProfile, **options: Any) -> Any:
        DIES["dying"] = {"copy": 2}
        return arms_of(profile, **options)

    monkeypatch.setattr(backend_race, "arms_of", dying)
    monkeypatch.setitem(DIES, "dying", {})
    profile = searched(tmp_path, "one=absent", "one=dying", "two=fast")
    found = rows(profile)
    assert found["two=fast"].is_deployed and found["two=fast"].num_prompts > 2
    assert found["one=absent"].failure == "absent: no such model; give another"
    assert found["one=dying"].failure == "the server ended while it was used"
    error = capsys.readouterr().err
    assert (
        error.count("left out   one=absent: absent: no such model")
        == error.count("left out   one=dying: the server")
        == 1
    )


def test_without_a_backend_that_can_be_tuned_there_is_no_profile(tmp_path: Path, made: dict[str, FakeBackend]) -> None:
    with pytest.raises(UserError, match=r"^one=absent: absent: no such model; give another; two=absent: "):
        searched(tmp_path, "one=absent", "two=absent")
    assert not Path("p.json").exists()


def test_the_same_command_tunes_nothing_twice(tmp_path: Path, made: dict[str, FakeBackend]) -> None:
    first = searched(tmp_path, "one=slow", "two=fast")
    again = searched(tmp_path, "one=slow", "two=fast")
    assert made["one=slow"].num_recorded == made["two=fast"].num_recorded == 0
    assert (
        again.evidence.backends == first.evidence.backends
        and again.provenance.settings_key == first.provenance.settings_key
    )


def test_several_backends_share_the_budget(
    tmp_path: Path, made: dict[str, FakeBackend], capsys: pytest.CaptureFixture[str]
) -> None:
    searched(tmp_path, "one=slow", "two=fast", budget_s=50.0)
    assert capsys.readouterr().err.count(": tuned in 20 s of the budget") == 2
