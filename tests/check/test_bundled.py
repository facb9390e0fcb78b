"""The exact gate on the bundled pair: lossless, and a lower accepted length is found.

Counts are exact on the device that made the profile. On another device a near tie may fall the other way, so the
shipped counts are advisory there, and the gate is tested with counts of this machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.check.job import run_check
from autotune.check.result import CheckResult
from autotune.check.settings import CheckSettings
from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile, Evidence
from autotune.documents.provenance import stamp
from autotune.files import data_root
from autotune.machine.device import fingerprint
from tests.check.test_job import accept_less

SHIPPED = data_root() / "profiles" / "cpu" / "digits.decode.json"


@pytest.mark.filterwarnings("ignore:.*tuned on")
@pytest.mark.parametrize("num_prompts", [1, pytest.param(8, marks=pytest.mark.nightly)])
def test_the_exact_gate_on_the_bundled_pair(num_prompts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(profile: Path) -> CheckResult:
        return run_check(CheckSettings(profile=profile, num_prompts=num_prompts, device="cpu"), Console())

    shipped = check(SHIPPED)
    lossless, counts = shipped.gates
    assert (lossless.verdict, shipped.exit_code) == ("passed", 0), shipped.gates
    assert counts.verdict in ("passed", "warned"), counts
    assert shipped.workloads[0].identical_outputs == num_prompts

    measured_here = {
        "hardware": fingerprint("cpu"),
        "provenance": stamp(),
        "evidence": Evidence(prompts=shipped.workloads[0].prompts),
    }
    DecodingProfile.load(SHIPPED).model_copy(update=measured_here).save(tmp_path / "here.json")
    if num_prompts > 1:
        assert [gate.verdict for gate in check(tmp_path / "here.json").gates] == ["passed", "passed"]
    accept_less(monkeypatch, lambda: 2)
    worse = check(tmp_path / "here.json")
    assert [gate.verdict for gate in worse.gates] == ["passed", "failed"] and worse.exit_code == 1


def test_the_shipped_profile_has_all_counts_that_are_compared() -> None:
    profile = DecodingProfile.load(SHIPPED)
    assert len(profile.evidence.prompts) >= 12 and profile.point.measured is not None
    for prompt in profile.evidence.prompts:
        assert len(prompt.accepted_lengths) == prompt.target_forwards == prompt.rounds
    assert SHIPPED.stat().st_size < 40_000
