"""Sessions of other days: what a profile took whenever it was checked. They judge by time only where that means
something.

A stored time is of another process on another day, and a stored ratio to plain decoding is no better: the machine's
speed cancels, its state does not. How far unchanged programs differ from day to day is therefore taken from the
sessions themselves, and what that leaves of power is said. Counts have no such trouble: those of the latest session are
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


class Session(Document):
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

    sessions: list[Session] = Field(default_factory=list)


def load_baseline(path: Path) -> Baseline:
    """The document, or an empty one where there is none yet.

    Raises:
        UserError: it cannot be read.
    """
    if not path.exists():
        return Baseline()
    return Baseline.load(path)


def add_sessions(path: Path, sessions: list[Session]) -> None:
    """They join those of the document."""
    known = load_baseline(path).sessions
    Baseline(sessions=[*known, *sessions]).save(path)


def comparable_sessions(baseline: Baseline, now: Session, source: Path) -> list[Session]:
    """Sessions of the same model, workload and device.

    Raises:
        NotComparable: there are sessions of this workload, all of another model, or of other prompts.
    """
    named = [one for one in baseline.sessions if one.workload == now.workload]
    same_prompts = [one for one in named if one.workload_sha256 == now.workload_sha256]
    if named and not same_prompts:
        raise NotComparable(
            f"{source}: {now.workload} had other prompts in all of its {len(named)} sessions; check the same prompts, or begin another baseline"
        )
    same_target = [
        one for one in same_prompts if (one.target.sha256, one.precision) == (now.target.sha256, now.precision)
    ]
    if same_prompts and not same_target:
        raise NotComparable(
            f"{source}: all sessions of {now.workload} decoded {same_prompts[-1].target.id} of other weights or precision; begin another baseline"
        )
    return [one for one in same_target if one.hardware.key == now.hardware.key]


def judge_times(sessions: list[Session], now: Session, design: Design) -> Gate:
    """Whether this session is slower than the others by more than they differ. Without enough of them, or where they
    differ too much, it is only said.
    """
    verdict, summary = _verdict(sessions, now, design)
    return Gate(name=SESSIONS, workload=now.workload, verdict=verdict, summary=summary)


def _verdict(sessions: list[Session], now: Session, design: Design) -> tuple[GateVerdict, str]:
    few = f"{MIN_SESSIONS} are needed to judge by"
    if len(sessions) < 2:
        return "skipped", f"{len(sessions)} sessions on this device before this one; {few}"
    log_times = np.log([one.decode_ms for one in sessions])
    spread = float(log_times.std(ddof=1))
    change = math.log(now.decode_ms) - float(log_times.mean())
    seen = f"{100 * math.expm1(change):+.1f} % decoding time against {len(sessions)} sessions, which differ by {100 * spread:.1f} % (standard deviation)"
    if len(sessions) < MIN_SESSIONS:
        return "skipped", f"{seen}; {few}"
    power = predicted_power(spread, len(sessions), design)
    if power < MIN_POWER:
        return "skipped", (
            f"{seen}: a slowdown of {100 * design.limit:g} % would be found in {100 * power:.0f} % of checks, too few to judge by; use --against"
        )
    distance = (change - math.log1p(design.tolerance)) / _spread_of_next(spread, len(sessions))
    p_within_tolerance = float(t.sf(distance, len(sessions) - 1))
    failed = p_within_tolerance <= design.fail_risk / design.num_workloads
    return "failed" if failed else "passed", f"{seen}; p = {p_within_tolerance:.2g}"


def predicted_power(spread: float, num_sessions: int, design: Design) -> float:
    """The chance that one more session finds a slowdown of the limit, by how far these differ: Student's t of one new
    value.
    """
    degrees = num_sessions - 1
    shift = math.log1p(design.limit) - math.log1p(design.tolerance)
    critical = t.isf(design.fail_risk / design.num_workloads, degrees)
    return float(nct.sf(critical, degrees, shift / _spread_of_next(spread, num_sessions)))


def _spread_of_next(spread: float, num_sessions: int) -> float:
    """Of the difference between one more session and the mean of these; equal ones differ by what a clock
    tells apart.
    """
    return max(spread, 1e-6) * math.sqrt(1 + 1 / num_sessions)
