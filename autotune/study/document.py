"""``study.json``: what a search was asked for, which documents and ledger records it used, and how its finalists did.

A study folder, and even more so a shared ledger, may hold documents and records of other searches as well: of other
workloads or other cost tables.
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
"""Files in a study folder."""


class StudyDraft(Document):
    kind: str
    reference: ModelReference
    shape: ModelShape


class MeasuredConfiguration(Document):
    """A configuration that was measured on tuning prompts."""

    name: str = ""
    """``finalist 1`` or the name of a published default."""
    configuration: Configuration
    speedup: float
    ci95: tuple[float, float]
    num_runs: int
    is_eliminated: bool
    """Whether it was significantly slower than the fastest arm or, of defaults, than the fastest default."""
    predicted_speedup: float | None = None
    """On the prompts that it was measured on; None where no trace predicts it."""
    interval90: tuple[float, float] | None = None
    """Interval of the prediction."""


class StudyDocument(Document, kind="study", made_by="autotune search"):
    """The inputs and results of a search."""

    provenance: Provenance
    command: str
    """Command line that repeats the search."""
    target: ModelReference
    target_shape: ModelShape
    drafts: list[StudyDraft]
    """In the order of the command line."""
    hardware: Fingerprint
    workload: str
    """``--workload``."""
    tune_sha256: str
    space: str
    cost_table: str
    """``CostTable.content`` of the table in the folder that was used."""
    records: dict[str, list[str]] = Field(default_factory=dict)
    """Keys of ledger records by stage, for the stages that have ended."""
    optuna_study: str | None = None
    """Name of the Optuna study with TPE's trials; None before the tree stage has ended."""
    finalists: list[MeasuredConfiguration] = Field(default_factory=list)
    """Configurations that replay has chosen."""
    defaults: list[MeasuredConfiguration] = Field(default_factory=list)
    """Published defaults that were measured beside them."""
    stage_seconds: dict[str, float] = Field(default_factory=dict)
    """Duration of each stage in the latest run of the search, in which finished work is not repeated."""


def load_study(folder: Path) -> StudyDocument | None:
    """Read ``study.json``; None if the search has not written it yet."""
    path = folder / STUDY
    return StudyDocument.load(path) if path.exists() else None
