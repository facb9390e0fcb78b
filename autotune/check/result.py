"""The result of a check: one gate per question and workload, and the measurements they are based on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autotune.documents.decoded import Decoded
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance
from autotune.files import Document

GateVerdict = Literal["passed", "warned", "failed", "inconclusive", "skipped"]
LOSSLESS = "lossless"
COUNTS, BASE_COUNTS, REPLAY = "counts", "counts of the base", "counts of the replay"
SPEEDUP, TIME, PROFILE_TIME = "minimum speedup", "time against the base", "time against the profile"


class Gate(Document):
    """The verdict on one question about one workload."""

    name: str
    workload: str
    verdict: GateVerdict
    summary: str
    """The reason, in one line."""
    details: list[str] = Field(default_factory=list)
    """More about single prompts."""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.name} ({self.workload}): {self.summary}"


class Timing(Document):
    """Base and head timed in pairs. A slowdown is the head's time over the base's, minus 1; against the profile, it is
    the change of that ratio.
    """

    base: str
    head: str
    slowdown: float
    """Hodges-Lehmann estimate."""
    ci95: tuple[float, float]
    p_within_tolerance: float
    """p-value under the hypothesis that the head is slower by at most the tolerance."""
    p_beyond_limit: float
    """p-value under the hypothesis that the head is slower by at least the limit."""
    base_ms: list[float]
    """Decoding times of the base in the pairs, in order, in milliseconds."""
    head_ms: list[float]
    margin: float = 0.0
    """Uncertainty of the profile's ratio, which is added to the tolerance and to the limit."""


class WorkloadResult(Document):
    name: str
    sha256: str
    num_prompts: int
    identical_outputs: int
    divergences: list[str]
    """Where lossless outputs first differ from plain decoding, with the target's logit margin there."""
    speedup: float
    ci95: tuple[float, float]
    precision: str
    prompts: list[Decoded]
    plain_ms: list[float]
    timing: Timing | None = None


class CheckResult(Document, kind="check-result", made_by="autotune check"):
    """The result of a check. ``exit_code`` is 0 for passed, 1 for regressed, 3 for inconclusive."""

    provenance: Provenance
    profile: str
    hardware: Fingerprint
    target: ModelReference
    lossless: bool
    """Whether the profile is."""
    against: str | None
    workloads: list[WorkloadResult]
    gates: list[Gate]
    verdict: str
    exit_code: int


def verdict_of(gates: list[Gate], *, inconclusive_fails: bool) -> tuple[str, int]:
    """The overall verdict and exit code: failures first, then inconclusive gates."""
    for verdict, code in (("failed", 1), ("inconclusive", 3 if inconclusive_fails else 0)):
        reasons = [gate.summary for gate in gates if gate.verdict == verdict]
        if reasons:
            return f"{verdict}: {'; '.join(reasons)}", code
    return "passed", 0
