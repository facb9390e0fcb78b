"""Earlier sessions: results of checks on other days, as a baseline.

A stored time is from another process on another day. A stored ratio to plain decoding is no better: the machine's speed
cancels, its state does not. The day-to-day spread of unchanged programs is therefore estimated from the sessions
themselves, and times gate only if the resulting power is high enough. Counts have no noise: those of the latest session are
compared exactly.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from pydantic import Field
from scipy.stats import nct, t

from autotune.check.result import SESSIONS, Gate, GateVerdict
from autotune.check.sequential import Design
from autotune.documents.decoding_profile import PromptEvidence
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance
from autotune.errors import NotComparable
from autotune.files import Document

MIN_SESSIONS = 10
MIN_POWER = 0.95


class CheckSession(Document):
    """One check that passed, on one workload."""

    provenance: Provenance
    hardware: Fingerprint
    precision: str
    target: ModelReference
    workload: str
    workload_sha256: str
    prompts: list[PromptEvidence]

    @property
    def decode_ms(self) -> float:
        return sum(prompt.decode_ms for prompt in self.prompts)


class Baseline(Document, kind="check-baseline", made_by="autotune check --baseline"):
    """Sessions, oldest first."""

    sessions: list[CheckSession] = Field(default_factory=list)


def load_baseline(path: Path) -> Baseline:
    """The document in ``path``, or an empty one if the file does not exist.

    Raises:
        UserError: it cannot be read.
    """
    if not path.exists():
        return Baseline()
    return Baseline.load(path)


def add_sessions(path: Path, sessions: list[CheckSession]) -> None:
    """Append sessions to the document in ``path``."""
    earlier = load_baseline(path).sessions
    Baseline(sessions=[*earlier, *sessions]).save(path)


def comparable_sessions(baseline: Baseline, current: CheckSession, source: Path) -> list[CheckSession]:
    """Sessions with the model, workload and device of the current one.

    Raises:
        NotComparable: the workload's sessions all have another model, or other prompts.
    """
    same_name = [session for session in baseline.sessions if session.workload == current.workload]
    same_prompts = [session for session in same_name if session.workload_sha256 == current.workload_sha256]
    if same_name and not same_prompts:
        raise NotComparable(
            f"{source}: all {len(same_name)} sessions of {current.workload} have other prompts; check the same prompts, or "
            "start another baseline"
        )
    model = (current.target.sha256, current.precision)
    same_model = [session for session in same_prompts if (session.target.sha256, session.precision) == model]
    if same_prompts and not same_model:
        raise NotComparable(
            f"{source}: all sessions of {current.workload} decoded {same_prompts[-1].target.id} with other weights or "
            "precision; start another baseline"
        )
    return [session for session in same_model if session.hardware.key == current.hardware.key]


def sessions_gate(sessions: list[CheckSession], current: CheckSession, design: Design) -> Gate:
    """The gate on the time of the current session compared with earlier ones. Skipped if they are too few or too different."""
    verdict, summary = _verdict(sessions, current, design)
    return Gate(name=SESSIONS, workload=current.workload, verdict=verdict, summary=summary)


def _verdict(sessions: list[CheckSession], current: CheckSession, design: Design) -> tuple[GateVerdict, str]:
    required = f"{MIN_SESSIONS} are required"
    if len(sessions) < 2:
        return "skipped", f"{len(sessions)} earlier sessions on this device; {required}"
    log_times = np.log([session.decode_ms for session in sessions])
    deviation = float(log_times.std(ddof=1))
    change = math.log(current.decode_ms) - float(log_times.mean())
    summary = (
        f"{100 * math.expm1(change):+.1f} % decoding time compared with {len(sessions)} sessions, which differ by "
        f"{100 * deviation:.1f} % (standard deviation)"
    )
    if len(sessions) < MIN_SESSIONS:
        return "skipped", f"{summary}; {required}"
    power = predicted_power(deviation, len(sessions), design)
    if power < MIN_POWER:
        return "skipped", (
            f"{summary}: a slowdown of {100 * design.limit:g} % would be detected in only {100 * power:.0f} % of checks; "
            "use --against"
        )
    distance = (change - math.log1p(design.tolerance)) / _prediction_deviation(deviation, len(sessions))
    p_within_tolerance = float(t.sf(distance, len(sessions) - 1))
    has_failed = p_within_tolerance <= design.fail_risk / design.num_workloads
    return "failed" if has_failed else "passed", f"{summary}; p = {p_within_tolerance:.2g}"


def predicted_power(deviation: float, num_sessions: int, design: Design) -> float:
    """Probability that another session detects a slowdown of the limit: Student's t of one new value."""
    degrees = num_sessions - 1
    shift = math.log1p(design.limit) - math.log1p(design.tolerance)
    critical = t.isf(design.fail_risk / design.num_workloads, degrees)
    return float(nct.sf(critical, degrees, shift / _prediction_deviation(deviation, num_sessions)))


def _prediction_deviation(deviation: float, num_sessions: int) -> float:
    """Standard deviation of the difference between a new session and the mean of these; at least a clock's resolution."""
    return max(deviation, 1e-6) * math.sqrt(1 + 1 / num_sessions)
