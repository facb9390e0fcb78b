"""Earlier sessions gate on time only if they are enough, similar, and of the same work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.check import baseline
from autotune.check.baseline import (
    CheckSession,
    add_sessions,
    comparable_sessions,
    load_baseline,
    predicted_power,
    sessions_gate,
)
from autotune.check.sequential import Design
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference
from autotune.errors import NotComparable, UserError
from tests.check.sample_documents import prompt_evidence
from tests.sample_documents import DEVICE, PROVENANCE, TARGET

ELSEWHERE = Fingerprint(name="slate", kind="cpu", model="A slate", num_cores=1, memory_bytes=1)


def session(decode_ms: float = 100.0, **fields: Any) -> CheckSession:
    known: dict[str, Any] = {
        "provenance": PROVENANCE,
        "hardware": DEVICE,
        "precision": "float32",
        "target": TARGET,
        "workload": "digits",
        "workload_sha256": "c" * 64,
        "prompts": [prompt_evidence(decode_ms=decode_ms)],
    }
    return CheckSession(**{**known, **fields})


def sessions(count: int, spread: float) -> list[CheckSession]:
    """Sessions of about 100 ms whose log-times have exactly this standard deviation."""
    x = np.random.default_rng(0).normal(size=count)
    x = spread * (x - x.mean()) / x.std(ddof=1)
    return [session(100.0 * float(np.exp(value))) for value in x]


def test_similar_sessions_gate() -> None:
    known = sessions(12, 0.003)
    assert sessions_gate(known, session(100.5), Design()).verdict == "passed"
    slower = sessions_gate(known, session(105.0), Design())
    assert (
        slower.verdict == "failed"
        and "+5.0 % decoding time compared with 12 sessions, which differ by 0.3 %" in slower.summary
    )
    assert sessions_gate(known, session(80.0), Design()).verdict == "passed"


def test_few_sessions_do_not_gate() -> None:
    gate = sessions_gate(sessions(9, 0.003), session(200.0), Design())
    assert gate.verdict == "skipped" and gate.summary.endswith("10 are required")
    assert sessions_gate([], session(), Design()).summary.startswith("0 earlier sessions on this device")


def test_sessions_that_differ_do_not_gate_and_report_the_power() -> None:
    gate = sessions_gate(sessions(20, 0.05), session(200.0), Design())
    assert gate.verdict == "skipped"
    assert "a slowdown of 5 % would be detected in only 5 % of checks; use --against" in gate.summary


@pytest.mark.parametrize("spread", [0.006, 0.02])
def test_predicted_power_agrees_with_simulation(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten sessions and one more that is slower by the limit, 300 times."""
    monkeypatch.setattr(baseline, "MIN_POWER", 0.0)  # gate whatever the power
    design, rng = Design(), np.random.default_rng(0)
    found = 0
    for _ in range(300):
        known = [session(float(np.exp(value))) for value in rng.normal(0.0, spread, 10)]
        now = session(1.05 * float(np.exp(rng.normal(0.0, spread))))
        found += sessions_gate(known, now, design).verdict == "failed"
    assert found / 300 == pytest.approx(predicted_power(spread, 10, design), abs=0.07)


def test_only_sessions_of_the_same_work_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    add_sessions(path, [session(), session(hardware=ELSEWHERE), session(workload="other.jsonl")])
    add_sessions(path, [session(50.0)])
    known = load_baseline(path)
    assert len(known.sessions) == 4
    assert [one.decode_ms for one in comparable_sessions(known, session(), path)] == [100.0, 50.0]
    assert comparable_sessions(known, session(workload="new.jsonl"), path) == []
    with pytest.raises(NotComparable, match="all 3 sessions of digits have other prompts"):
        comparable_sessions(known, session(workload_sha256="d" * 64), path)
    other = ModelReference(id="tests/target", sha256="f" * 64)
    with pytest.raises(
        NotComparable, match="all sessions of digits decoded tests/target with other weights or precision"
    ):
        comparable_sessions(known, session(target=other), path)


def test_another_document_is_refused_as_a_baseline(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text('{"schema": "autotune.decoding-profile/1"}')
    with pytest.raises(UserError, match=r"schema must be 'autotune.check-baseline/1'"):
        load_baseline(path)
