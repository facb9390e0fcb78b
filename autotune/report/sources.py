"""What a report is made of: a decoding profile, and what the search behind it left in its study's folder."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.acceptance.trace import Trace, load_trace
from autotune.cost.table import CostTable
from autotune.documents.decoding_profile import DecodingProfile, OperatingPoint
from autotune.errors import UserError
from autotune.files import WORKSPACE, read_lines
from autotune.search.evaluator import Candidate, Evaluator
from autotune.search.tree_search import optuna_storage
from autotune.study.document import LEDGER, PROFILE, RUNS, STUDY, StudyDocument, load_study
from autotune.study.folder import load_headers, load_tables, studies_beside, study_of
from autotune.study.ledger import Ledger, Record
from autotune.study.records import ScreenedSubnet


@dataclass(frozen=True)
class Sources:
    """Documents of one search; what is not there is None or empty."""

    profile: DecodingProfile | None = None
    profile_path: Path | None = None
    folder: Path | None = None
    study: StudyDocument | None = None
    table: CostTable | None = None
    traces: list[Trace] = field(default_factory=list)
    screened: list[ScreenedSubnet] = field(default_factory=list)
    """Every subnet once."""
    candidates: list[Candidate] = field(default_factory=list)
    """Every configuration once, the fastest first."""
    trials: list[Any] = field(default_factory=list)
    """Optuna's, complete ones."""
    runs: list[Record] = field(default_factory=list)
    """Lines of the ledger of real runs."""
    notes: list[str] = field(default_factory=list)
    """What a reader has to know of where all this comes from."""

    @functools.cached_property
    def evaluator(self) -> Evaluator | None:
        """Prices configurations again; None without traces, or without a table that prices their drafts."""
        if self.table is None:
            return None
        priced = [t for t in self.traces if t.num_tokens and self.table.holds(t.header.draft, t.header.subnet)]
        return Evaluator(priced, self.table) if priced else None

    @functools.cached_property
    def kinds(self) -> dict[str, str]:
        """Of the drafts that are known, by their ids: ``star``, ``independent``, ..."""
        points = self.profile.points if self.profile is not None else []
        known = {point.draft.id: point.draft.kind for point in points if point.draft is not None}
        return known | {one.reference.id: one.kind for one in (self.study.drafts if self.study else [])}

    @functools.cached_property
    def drafts(self) -> list[str]:
        """Ids of the drafts, in the order in which the user named them."""
        if self.study is not None:
            return [one.reference.id for one in self.study.drafts]
        priced = [costs.draft.id for costs in self.table.drafts] if self.table is not None else []
        return list(dict.fromkeys([*priced, *(one.draft for one in self.screened)]))

    def trace_of(self, point: OperatingPoint) -> Trace | None:
        """The trace of the point's draft and subnet."""
        for trace in self.traces:
            header = trace.header
            if point.draft is not None and (header.draft.id, header.subnet) == (point.draft.id, point.draft.subnet):
                return trace
        return None

    def prompts_of(self, number: int) -> list[int]:
        """Numbers of the recorded prompts that the profile decodes by its point ``number``. Traces keep no temperature: all
        prompts are taken as greedy.
        """
        assert self.profile is not None
        point = self.profile.points[number]
        trace = self.trace_of(point)
        if trace is None:
            return []
        kinds = zip(trace.prompt_length.tolist(), trace.header.tasks, strict=True)
        return [n for n, (length, task) in enumerate(kinds) if self.profile.point_for(0.0, length, task) is point]


def find_sources(given: Path, *, study: Path | None = None, storage: str | None = None) -> Sources:
    """What there is of a profile, or of a study's folder. A profile's study is looked for beside it unless it is named.

    Raises:
        UserError: neither a profile nor a study, a study of something else, or a document that cannot be read.
    """
    if given.is_dir():
        if study is not None:
            raise UserError(f"--study {study}: {given} is a study already; give a profile, or leave --study out")
        if not any(given.glob("*.cost.json")) and not (given / STUDY).exists():
            raise UserError(
                f"{given}: a study's folder holds a cost table and {STUDY}; this one has neither; give a folder of {WORKSPACE}/, or a profile"
            )
        path = given / PROFILE
        return _with_study(
            DecodingProfile.load(path) if path.exists() else None, path if path.exists() else None, given, storage
        )
    profile = DecodingProfile.load(given)
    if study is not None:
        if not study.is_dir():
            raise UserError(
                f"--study {study}: no such folder; give the one that autotune search named, in {WORKSPACE}/"
            )
        if not ((own := study_of(profile, study)) and own.holds_all):
            raise UserError(
                f"--study {study}: its documents are of another target, device or workload than {given}; give that profile's own study"
            )
        return _with_study(profile, given, study, storage)
    own = next((one for one in studies_beside(profile, given) if one.holds_all), None)
    return _with_study(profile, given, own.path, storage) if own else Sources(profile=profile, profile_path=given)


def _with_study(profile: DecodingProfile | None, path: Path | None, folder: Path, storage: str | None) -> Sources:
    notes = []
    study = load_study(folder)
    if study is None:
        notes.append(
            f"The study has no {STUDY}, which says which records are of one search, so none are shown. "
            "The same autotune search leaves one, and makes nothing anew."
        )
    elif profile is not None and study.tune_sha256 != profile.workload.tune_sha256:
        notes.append(f"The study's {STUDY} is of another search, over another workload: its records are not shown.")
        study = None
    # Headers of another workload are left from an earlier search.
    headers = load_headers(folder)
    wanted = study.tune_sha256 if study else profile.workload.tune_sha256 if profile else None
    if wanted is None and headers:
        wanted = [*headers.values()][-1].workload_sha256
    traces = [load_trace(trace) for trace, header in headers.items() if header.workload_sha256 == wanted]
    ledger = Ledger(storage) if storage is not None else None
    if ledger is None and (folder / LEDGER).exists():
        ledger = Ledger(folder / LEDGER)
    screened = _screened(_records(ledger, study, "subnets"))
    candidates = _candidates(_records(ledger, study, "trees"))
    if study is not None and study.records.get("trees") and not candidates:
        notes.append("The study's records are not in its folder: if workers shared a database, name it by --storage.")
    return Sources(
        profile=profile,
        profile_path=path,
        folder=folder,
        study=study,
        table=_table(folder, study, profile),
        traces=traces,
        screened=screened,
        candidates=candidates,
        trials=_trials(ledger, study),
        runs=read_lines(folder / RUNS),
        notes=notes,
    )


def _table(folder: Path, study: StudyDocument | None, profile: DecodingProfile | None) -> CostTable | None:
    """The one that the search used; where nothing says which, the newest of the profile's device."""
    tables = load_tables(folder)
    if study is not None:
        tables = [table for table in tables if table.content == study.cost_table]
    elif profile is not None:
        tables = [table for table in tables if table.device.key == profile.hardware.key]
    return tables[0] if tables else None


def _records(ledger: Ledger | None, study: StudyDocument | None, stage: str) -> list[Record]:
    """Of one stage of the search."""
    if ledger is None or study is None:
        return []
    return list(ledger.records(study.records.get(stage, [])).values())


def _screened(records: list[Record]) -> list[ScreenedSubnet]:
    """Every subnet once, by its last record: one that was measured comes after its prediction."""
    found = [ScreenedSubnet.model_validate(record, strict=False) for record in records]
    return list({one.variant: one for one in found}.values())


def _candidates(records: list[Record]) -> list[Candidate]:
    """Every configuration once, the fastest first."""
    found = [Candidate.model_validate(one, strict=False) for record in records for one in record.get("fastest", ())]
    return sorted({one.key: one for one in found}.values(), key=lambda one: one.rank)


def _trials(ledger: Ledger | None, study: StudyDocument | None) -> list[Any]:
    """What TPE drew, as Optuna keeps it."""
    import optuna

    if ledger is None or study is None or study.sampled is None:
        return []
    if isinstance(ledger.storage, Path) and not ledger.storage.with_suffix(".optuna").exists():
        return []
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        found = optuna.load_study(study_name=study.sampled, storage=optuna_storage(ledger.storage))
    except KeyError:  # nothing was drawn
        return []
    return found.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE])
