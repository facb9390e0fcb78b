"""The documents behind a report: a decoding profile, and the documents in the folder of its study."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.cost.table import CostTable
from autotune.documents.configuration import configuration_of
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.deployment import RUNTIME
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference
from autotune.errors import UserError
from autotune.files import WORKSPACE, read_lines
from autotune.modeling.hub import profile_file
from autotune.replay.evaluator import Candidate
from autotune.replay.reference_replay import ReplayedRound, rounds
from autotune.replay.trace import Trace, load_trace
from autotune.study.document import StudyDocument, files_by_age, find_study, load_study, newest_profile
from autotune.study.records import ScreenedSubnet, screened_in
from autotune.study.storage import LEDGER, RUNS, study_folder

ELSEWHERE = "The study's records are not in its folder: if workers shared a database, give its URL with --storage."


@dataclass(frozen=True)
class Sources:
    """Documents of one search; missing ones are None or empty."""

    profile: DecodingProfile | None = None
    profile_path: Path | None = None
    folder: Path | None = None
    study: StudyDocument | None = None
    table: CostTable | None = None
    traces: list[Trace] = field(default_factory=list)
    screened: list[ScreenedSubnet] = field(default_factory=list)
    """Each subnet once."""
    candidates: list[Candidate] = field(default_factory=list)
    """Each configuration once, fastest first."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_of_engine(self) -> bool:
        """Whether an engine decodes, whose evidence is all in the profile."""
        return self.profile is not None and self.profile.backend != RUNTIME

    @property
    def target(self) -> ModelReference | None:
        document = self.profile or self.study or self.table
        return None if document is None else document.target

    @property
    def hardware(self) -> Fingerprint | None:
        document = self.profile or self.study
        return document.hardware if document else self.table.device if self.table else None

    @functools.cached_property
    def drafts(self) -> list[tuple[ModelReference, str]]:
        """Each draft of the search, in the order in which the user named them, or of the profile, with its kind."""
        if self.study is not None:
            return [(entry.reference, entry.kind) for entry in self.study.drafts]
        draft = self.profile.point.draft if self.profile else None
        return [] if draft is None else [(ModelReference(id=draft.id, sha256=draft.sha256), draft.kind)]

    @functools.cached_property
    def evidence_runs(self) -> list[dict[str, Any]]:
        """The runs on held-out prompts that are the profile's evidence."""
        configuration = configuration_of(self.profile.point) if self.profile else None
        if self.profile is None or configuration is None:
            return []
        evidence_ms = {prompt.prompt_sha256: prompt.decode_ms for prompt in self.profile.evidence.prompts}
        runs = {
            run["prompt_sha256"]: run
            for run in self.runs
            if run.get("arm") == configuration.key
            and evidence_ms.get(run.get("prompt_sha256", "")) == run["decode_ms"]  # identifies the very run
        }
        return list(runs.values())

    @functools.cached_property
    def trace(self) -> Trace | None:
        """The trace of the profile's draft; None for plain decoding, and where it was not recorded."""
        draft = self.profile.point.draft if self.profile else None
        wanted = None if draft is None else (draft.id, draft.subnet)
        return next((trace for trace in self.traces if (trace.header.draft.id, trace.header.subnet) == wanted), None)

    def rounds_of(self, prompt: int) -> list[ReplayedRound]:
        """The rounds in which the profile, which has a tree and a trace, decodes a recorded prompt greedily."""
        assert self.profile is not None and self.profile.point.tree is not None and self.trace is not None
        return list(rounds(self.trace, prompt, self.profile.point.tree, self.profile.point.fallback))


def find_sources(given: Path, *, study: str | None = None, storage: str | None = None) -> Sources:
    """Find the documents of a profile, or of a study folder. A profile's study is searched next to it unless given, by
    its name or path.

    Raises:
        UserError: ``given`` is neither a profile nor a study, the study belongs to another profile, or a document
            cannot be read.
    """
    if given.is_dir() and study is not None:
        raise UserError(f"--study {study}: {given} is a study folder itself; give a profile, or leave --study out")
    given = profile_file(given)
    path = newest_profile(given) if given.is_dir() else given
    alone = Sources() if path is None else Sources(profile=DecodingProfile.load(path), profile_path=path)
    if alone.is_of_engine:
        return alone
    folder: Path | None = given
    if study is not None:
        folder = study_folder(study, given.parent / WORKSPACE, WORKSPACE)
    elif alone.profile is not None and not given.is_dir():
        folder = find_study(alone.profile, given)
    if folder is None:
        return alone
    document = load_study(folder, None if given.is_dir() else alone.profile)
    if document is None:
        raise UserError(
            f"{folder}: no study of {given} is in this folder; give one in {WORKSPACE}/ of the same target, device and "
            "workload"
        )
    return _read_study(alone, folder, document, storage)


def _read_study(alone: Sources, folder: Path, study: StudyDocument, storage: str | None) -> Sources:
    """A profile's sources with the documents of its study."""
    subnets: list[ScreenedSubnet] = []
    candidates: list[Candidate] = []
    if storage is not None or (folder / LEDGER).exists():
        from autotune.study.ledger import Ledger

        ledger = Ledger(folder / LEDGER if storage is None else storage, must_exist=True)
        with ledger.reading():
            subnets = [
                subnet
                for record in ledger.records(study.records.get("subnets", [])).values()
                for subnet in screened_in(record)
            ]
            candidates = [
                Candidate.model_validate(content, strict=False)
                for record in ledger.records(study.records.get("trees", [])).values()
                for content in record.get("fastest", ())
            ]
    return replace(
        alone,
        folder=folder,
        study=study,
        table=next(
            (
                table
                for table in map(CostTable.load, files_by_age(folder, "*.cost.json"))
                if table.content_hash == study.cost_table
            ),
            None,
        ),
        traces=[load_trace(folder / name) for name in study.traces if (folder / name).exists()],
        screened=list({s.variant: s for s in subnets}.values()),
        candidates=sorted({c.key: c for c in candidates}.values(), key=lambda c: c.rank),
        runs=read_lines(folder / RUNS),
        notes=[ELSEWHERE] if study.records.get("trees") and not candidates else [],
    )
