"""What a check found: one gate for each question and workload, and the raw figures behind it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autotune.check.pairs import Pair
from autotune.documents.decoding_profile import PromptEvidence
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance
from autotune.files import Document

GateVerdict = Literal["passed", "warned", "failed", "inconclusive", "skipped"]
LOSSLESS = "lossless"
COUNTS, BASE_COUNTS, SESSION_COUNTS = "counts", "counts of the base", "counts of the latest session"
SPEEDUP, SESSIONS, TIME = "minimum speedup", "time of other sessions", "time against the base"


class Gate(Document):
    """One question, asked of one workload."""

    name: str
    workload: str
    verdict: GateVerdict
    summary: str
    """Why, in one line."""
    details: list[str] = Field(default_factory=list)
    """By prompt, where there is more to say."""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.name} ({self.workload}): {self.summary}"


class Timing(Document):
    """Base against head, pair by pair. Slowdowns are of the head's time over the base's, minus 1."""

    base: str
    head: str
    seed: int
    limit: float
    tolerance: float
    looks: tuple[int, ...]
    slowdown: float
    """Hodges and Lehmann's estimate."""
    ci95: tuple[float, float]
    p_within_tolerance: float
    """How probable such slow pairs, or slower ones, were if the head were slower by the tolerance at most."""
    p_beyond_limit: float
    """How probable such fast pairs, or faster ones, were if it were slower by the limit at least."""
    plain_slowdown: float | None
    """Of plain decoding, which decides nothing: far from 0 it says that more than the draft's part has changed."""
    speedup: float | None
    """Of the head over its own plain decoding, in the pairs that measured both."""
    pairs: list[Pair]


class WorkloadResult(Document):
    """Everything measured on one workload."""

    name: str
    sha256: str
    num_prompts: int
    identical_outputs: int
    divergences: list[str]
    """Where outputs in reduced precision first differ from plain decoding, with the target's margin there."""
    speedup: float
    ci95: tuple[float, float]
    precision: str
    prompts: list[PromptEvidence]
    timing: Timing | None = None


class CheckResult(Document, kind="check-result", made_by="autotune check"):
    """What the check found. ``exit_code`` is 0 passed, 1 regressed, 3 inconclusive."""

    provenance: Provenance
    profile: str
    hardware: Fingerprint
    target: ModelReference
    lossless: bool
    """What the profile promises, of all of its points."""
    against: str | None
    workloads: list[WorkloadResult]
    gates: list[Gate]
    verdict: str
    exit_code: int


def verdict_of(gates: list[Gate], *, inconclusive_fails: bool) -> tuple[str, int]:
    """Of all gates together, in words and as an exit code: what failed comes before what stayed open."""
    for verdict, code in (("failed", 1), ("inconclusive", 3 if inconclusive_fails else 0)):
        found = [gate.summary for gate in gates if gate.verdict == verdict]
        if found:
            return f"{verdict}: {'; '.join(found)}", code
    return "passed", 0
