"""``study-KEY.json``: what a search was asked for, which documents and ledger records it used, and how its finalists
did.

A study folder, and even more so a shared ledger, may hold documents and records of other searches as well: of other
workloads or other cost tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from autotune.cost.table import ModelShape
from autotune.documents.configuration import Configuration
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance
from autotune.errors import UserError
from autotune.files import WORKSPACE, Document
from autotune.table import Table, percent, times, with_interval

if TYPE_CHECKING:
    from autotune.documents.decoding_profile import DecodingProfile


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


def finalists_table(measured: Sequence[MeasuredConfiguration]) -> Table:
    """Predicted and measured speedups of finalists and published defaults on tuning prompts."""
    rows = [
        [
            arm.name,
            with_interval(arm.predicted_speedup, arm.interval90)
            if arm.predicted_speedup and arm.interval90
            else times(arm.predicted_speedup),
            with_interval(arm.speedup, arm.ci95),
            percent(arm.predicted_speedup / arm.speedup - 1) if arm.predicted_speedup else "-",
            f"{arm.num_runs}{', eliminated' if arm.is_eliminated else ''}",
        ]
        for arm in measured
    ]
    return Table(
        "Finalists and published defaults on tuning prompts",
        ["configuration", "predicted, 90 %", "measured, 95 %", "error", "runs"],
        rows,
        details=["error"],
        labels={arm.name: arm.configuration.label for arm in measured},
    )


class StudyDocument(Document, kind="study", made_by="autotune search"):
    """The inputs and results of a search."""

    provenance: Provenance
    profile: str = ""
    """Content hash of the profile; empty before the search has ended."""
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
    """``CostTable.content_hash`` of the table in the folder that was used."""
    traces: list[str] = Field(default_factory=list)
    """Files of the traces that were replayed, in the folder; empty before they are recorded."""
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

    def tables(self) -> list[Table]:
        """Finalists and published defaults on tuning prompts; without rows before they have run."""
        return [finalists_table([*self.finalists, *self.defaults])]

    def may_be_of(self, profile: DecodingProfile) -> bool:
        """Whether the search had the profile's target, device and tuning prompts, and its draft."""
        searched = self.target.sha256, self.hardware.key, self.tune_sha256
        drafts = {(draft.reference.id, draft.reference.sha256) for draft in self.drafts}
        draft = profile.point.draft
        known = profile.target.sha256, profile.hardware.key, profile.workload.tune_sha256
        return searched == known and (draft is None or (draft.id, draft.sha256) in drafts)

    def likeness(self, profile: DecodingProfile) -> tuple[bool, bool]:
        """Sort key of the documents that may be of a profile, the greatest for its own."""
        is_same = self.provenance.settings_key == profile.provenance.settings_key
        return self.profile == profile.content_hash, is_same


def files_by_age(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder that match a pattern, newest last."""
    return sorted(folder.glob(pattern), key=lambda path: (path.stat().st_mtime, path.name))


def load_study(folder: Path, profile: DecodingProfile | None = None) -> StudyDocument | None:
    """The newest study document of a folder, or the one of a profile's search; None if there is none.

    A profile that was edited, or is of an earlier run of the same search, has the newest one of its settings.
    """
    studies = [StudyDocument.load(path) for path in reversed(files_by_age(folder, "study*.json"))]
    if profile is None:
        return next(iter(studies), None)
    candidates = [study for study in studies if study.may_be_of(profile)]
    return max(candidates, key=lambda study: study.likeness(profile), default=None)


def newest_profile(folder: Path) -> Path | None:
    """The profile of the newest search in a folder; None before that search has ended."""
    newest = [*files_by_age(folder, "profile*.json"), *files_by_age(folder, "study*.json")][-1:]
    profiles = (path.with_name(path.name.replace("study", "profile", 1)) for path in newest)
    return next((path for path in profiles if path.exists()), None)


def find_study(profile: DecodingProfile, source: Path) -> Path | None:
    """The study folder of a profile: its file's own folder, or one in ``.autotune`` next to the file or in the working
    directory. Of several that may be, it is the one with the closest study document, then the newest.

    Folders with documents that cannot be read are skipped.
    """
    folders = {
        path.resolve(): path
        for root in (source.parent / WORKSPACE, WORKSPACE)
        if root.is_dir()
        for path in root.iterdir()
        if path.is_dir()
    }
    if any(source.parent.glob("study*.json")):
        folders[source.parent.resolve()] = source.parent
    likeness_of: dict[Path, tuple[bool, bool]] = {}
    for path in sorted(folders.values(), key=lambda path: (-path.stat().st_mtime, path.name)):
        with suppress(UserError):
            if (document := load_study(path, profile)) is not None:
                likeness_of[path] = document.likeness(profile)
    return max(likeness_of, key=likeness_of.__getitem__, default=None)
