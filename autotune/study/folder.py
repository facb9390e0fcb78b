"""Study folders, and the documents in them that belong to a decoding profile."""

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
    """Documents in a folder that have a profile's target, device, precision, drafts and tuning prompts."""

    path: Path
    tables: list[CostTable]
    """Newest first."""
    headers: dict[Path, TraceHeader]
    """Headers of the traces by file, newest last."""
    is_complete: bool
    """Whether all drafts of the profile have traces, so that this may be the folder of its own search."""


def find_study(profile: DecodingProfile, folder: Path) -> StudyFolder | None:
    """The documents in a folder that belong to a profile; None without a cost table or without traces."""
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


def find_studies(profile: DecodingProfile, source: Path) -> list[StudyFolder]:
    """Studies of a profile in ``.autotune`` next to its file and in the working directory, newest first.

    Folders with documents that cannot be read are skipped.
    """
    roots = [source.parent / WORKSPACE, WORKSPACE]
    folders = {path.resolve(): path for root in roots if root.is_dir() for path in root.iterdir() if path.is_dir()}
    studies = []
    for path in sorted(folders.values(), key=lambda path: (-path.stat().st_mtime, path.name)):
        with suppress(UserError):
            studies.append(find_study(profile, path))
    return [study for study in studies if study is not None]


def points_of_prompts(profile: DecodingProfile, trace: Trace) -> Ints:
    """Index of the operating point that decodes each tuning prompt greedily, [prompts]."""
    conditions = [point.when for point in profile.points]
    return np.array(
        [
            first_match(
                conditions,
                temperature=0.0,
                prompt_tokens=int(trace.prompt_length[p]),
                has_image=bool(trace.num_visual_tokens[p] > 0),
                workload=task,
            )
            for p, task in enumerate(trace.header.tasks)
        ]
    )


def load_tables(folder: Path) -> list[CostTable]:
    return [CostTable.load(path) for path in reversed(_by_age(folder, "*.cost.json"))]


def load_headers(folder: Path) -> dict[Path, TraceHeader]:
    return {path: TraceHeader.load(path) for path in _by_age(folder, "traces/*/*.trace.json")}


def _by_age(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern), key=lambda path: (path.stat().st_mtime, path.name))
