"""Folders of studies, found again from the profile that a search wrote: what of their documents speaks of it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autotune.acceptance.trace import Trace, TraceHeader
from autotune.cost.table import CostTable
from autotune.documents.condition import first_match
from autotune.documents.decoding_profile import DecodingProfile
from autotune.errors import UserError
from autotune.files import WORKSPACE
from autotune.trees.tree import Ints


@dataclass(frozen=True)
class StudyFolder:
    """Of a folder, the documents of a profile's target, device, precision, drafts and tuning prompts; the newest tables
    first, the newest traces last.
    """

    path: Path
    tables: list[CostTable]
    headers: dict[Path, TraceHeader]
    """Of traces, by file."""
    holds_all: bool
    """Every draft of the profile was recorded: these may be the documents of its own search."""


def study_of(profile: DecodingProfile, folder: Path) -> StudyFolder | None:
    """What a folder holds of a profile; None: no cost table, or no traces.

    Raises:
        UserError: one of its documents cannot be read.
    """
    tables = [
        table
        for table in load_tables(folder)
        if table.target.is_same(profile.target)
        and table.device.key == profile.hardware.key
        and table.precision == profile.precision
    ]
    if not tables:
        return None
    weights = {point.draft.id: point.draft.sha256 for point in profile.points if point.draft is not None}
    headers = {
        path: header
        for path, header in load_headers(folder).items()
        if header.target.is_same(profile.target)
        and header.workload_sha256 == profile.workload.tune_sha256
        and header.draft.sha256 == weights.get(header.draft.id, header.draft.sha256)
    }
    recorded = {header.draft.id for header in headers.values()}
    return StudyFolder(folder, tables, headers, weights.keys() <= recorded) if headers else None


def studies_beside(profile: DecodingProfile, source: Path) -> list[StudyFolder]:
    """Those in ``.autotune`` beside the profile and here, the newest first; studies that cannot be read, older ones say,
    are passed over.
    """
    roots = [source.parent / WORKSPACE, WORKSPACE]
    beside = {path.resolve(): path for root in roots if root.is_dir() for path in root.iterdir() if path.is_dir()}
    found = []
    for path in sorted(beside.values(), key=lambda path: (-path.stat().st_mtime, path.name)):
        with suppress(UserError):
            found.append(study_of(profile, path))
    return [study for study in found if study is not None]


def points_of_prompts(profile: DecodingProfile, trace: Trace) -> Ints:
    """Number of the operating point that decodes each tuning prompt greedily, [prompts]."""
    conditions = [point.when for point in profile.points]
    prompts = zip(trace.prompt_length.tolist(), trace.header.tasks, strict=True)
    return np.array([first_match(conditions, temperature=0.0, prompt_tokens=n, workload=task) for n, task in prompts])


def load_tables(folder: Path) -> list[CostTable]:
    """Of a study, the newest first."""
    return [CostTable.load(path) for path in reversed(_by_age(folder, "*.cost.json"))]


def load_headers(folder: Path) -> dict[Path, TraceHeader]:
    """Of a study's traces, the newest last."""
    paths = _by_age(folder, "traces/*/*.trace.json")
    return {path: TraceHeader.load(path) for path in paths}


def _by_age(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern), key=lambda path: (path.stat().st_mtime, path.name))
