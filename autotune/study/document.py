"""``study.json``, which a search leaves in its study's folder as its stages end: what it was asked, which of the folder's
documents and of the ledger's records are its own, and how its finalists did. A folder, and a ledger more so, may hold those
of other searches: other workloads, other prices.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from autotune.cost.table import ModelShape
from autotune.documents.configuration import Configuration
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance
from autotune.files import Document

STUDY, PROFILE, RUNS, LEDGER = "study.json", "profile.json", "runs.jsonl", "ledger.sqlite"
"""Files of a study's folder."""


class DraftEntry(Document):
    """A draft that took part, in the order in which the user named them."""

    kind: str
    reference: ModelReference
    shape: ModelShape


class Finalist(Document):
    """A configuration that ran for real on tuning prompts."""

    configuration: Configuration
    predicted_speedup: float
    """On the very prompts that it ran."""
    speedup: float
    ci95: tuple[float, float]
    num_runs: int
    is_standing: bool
    """It was not surely slower than the fastest."""

    @property
    def prediction_error(self) -> float:
        """Predicted over measured speedup, minus 1. Not of times: a machine that has become slower since its cost table was
        measured is slower with and without a draft.
        """
        return self.predicted_speedup / self.speedup - 1


class StudyDocument(Document, kind="study", made_by="autotune search"):
    """What a search used and made."""

    provenance: Provenance
    command: str
    """That repeats it."""
    target: ModelReference
    target_shape: ModelShape
    drafts: list[DraftEntry]
    hardware: Fingerprint
    workload: str
    """As the user named it."""
    tune_sha256: str
    space: str
    cost_table: str
    """``CostTable.content_hash``: its file is in the folder."""
    records: dict[str, list[str]] = Field(default_factory=dict)
    """Keys in the ledger, by stage, of the stages that have ended."""
    sampled: str | None = None
    """Name of the Optuna study that shows TPE's trials; None before there are trees."""
    finalists: list[Finalist] = Field(default_factory=list)
    stage_seconds: dict[str, float] = Field(default_factory=dict)
    """How long this run of the search took; what it found done took no time."""


def save_study(folder: Path, study: StudyDocument) -> None:
    """Write it into the study's folder."""
    study.save(folder / STUDY)


def load_study(folder: Path) -> StudyDocument | None:
    """That of a study's folder; None where its search did not come so far.

    Raises:
        UserError: it is there, and cannot be read.
    """
    path = folder / STUDY
    return StudyDocument.load(path) if path.exists() else None
