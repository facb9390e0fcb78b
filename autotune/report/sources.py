"""The documents behind a report: a decoding profile, and the documents in the folder of its study."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.cost.table import CostTable
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.deployment import RUNTIME
from autotune.errors import UserError
from autotune.files import WORKSPACE, read_lines
from autotune.replay.evaluator import Candidate, Evaluator
from autotune.replay.reference_replay import ReplayedRound, rounds
from autotune.replay.trace import Trace, load_trace
from autotune.study.document import StudyDocument, files_by_age, load_study, newest_profile
from autotune.study.folder import find_study
from autotune.study.ledger import Ledger, Record
from autotune.study.records import ScreenedSubnet, screened_in
from autotune.study.storage import LEDGER, RUNS, STUDY, study_folder


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
    runs: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @functools.cached_property
    def evaluator(self) -> Evaluator | None:
        """Replays configurations; None without traces whose drafts the cost table prices."""
        if self.table is None:
            return None
        priced = [t for t in self.traces if t.num_tokens and self.table.holds(t.header.draft, t.header.subnet)]
        return Evaluator(priced, self.table) if priced else None

    @property
    def is_of_engine(self) -> bool:
        """Whether an engine decodes, whose evidence is all in the profile."""
        return self.profile is not None and self.profile.backend != RUNTIME

    @functools.cached_property
    def kinds(self) -> dict[str, str]:
        """Kinds of the known drafts by id: ``star``, ``independent``, ..."""
        draft = self.profile.point.draft if self.profile else None
        chosen = {} if draft is None else {draft.id: draft.kind}
        return chosen | {entry.reference.id: entry.kind for entry in (self.study.drafts if self.study else [])}

    @functools.cached_property
    def drafts(self) -> list[str]:
        """Ids of the drafts, in the order in which the user named them."""
        return [] if self.study is None else [entry.reference.id for entry in self.study.drafts]

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
    if given.is_dir():
        if study is not None:
            raise UserError(f"--study {study}: {given} is a study folder itself; give a profile, or leave --study out")
        path = newest_profile(given)
        alone = Sources() if path is None else Sources(profile=DecodingProfile.load(path), profile_path=path)
        if alone.is_of_engine:
            return alone
        if (newest := load_study(given)) is None:
            raise UserError(f"{given}: a study folder holds {STUDY}; give a folder of {WORKSPACE}/, or a profile")
        return _read_study(alone, given, newest, storage)
    profile = DecodingProfile.load(given)
    alone = Sources(profile=profile, profile_path=given)
    if alone.is_of_engine:
        return alone
    folder = find_study(profile, given) if study is None else study_folder(study, given.parent / WORKSPACE, WORKSPACE)
    if folder is None:
        return alone
    if not folder.is_dir():
        raise UserError(f"--study {study}: no such folder; give the one in {WORKSPACE}/ that autotune search named")
    if (own := load_study(folder, profile)) is None:
        raise UserError(
            f"--study {study}: its documents belong to another target, device or workload than {given}; give that profile's "
            "own study"
        )
    return _read_study(alone, folder, own, storage)


def _read_study(alone: Sources, folder: Path, study: StudyDocument, storage: str | None) -> Sources:
    """A profile's sources with the documents of its study."""
    has_ledger = storage is not None or (folder / LEDGER).exists()
    ledger = Ledger(folder / LEDGER if storage is None else storage, must_exist=True) if has_ledger else None
    with ledger.reading() if ledger is not None else nullcontext():
        subnets = [subnet for record in _records(ledger, study, "subnets") for subnet in screened_in(record)]
        candidates = [
            Candidate.model_validate(content, strict=False)
            for record in _records(ledger, study, "trees")
            for content in record.get("fastest", ())
        ]
    notes = []
    if study.records.get("trees") and not candidates:
        notes.append(
            "The study's records are not in its folder: if workers shared a database, give its URL with --storage."
        )
    tables = [
        table
        for table in map(CostTable.load, files_by_age(folder, "*.cost.json"))
        if table.content_hash == study.cost_table
    ]
    return replace(
        alone,
        folder=folder,
        study=study,
        table=tables[0] if tables else None,
        traces=[load_trace(folder / name) for name in study.traces if (folder / name).exists()],
        screened=list({s.variant: s for s in subnets}.values()),
        candidates=sorted({c.key: c for c in candidates}.values(), key=lambda c: c.rank),
        runs=read_lines(folder / RUNS),
        notes=notes,
    )


def _records(ledger: Ledger | None, study: StudyDocument, stage: str) -> list[Record]:
    return [] if ledger is None else list(ledger.records(study.records.get(stage, [])).values())
