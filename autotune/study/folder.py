"""Study folders, and the documents in them that belong to a decoding profile."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np

from autotune.acceptance.trace import Trace, TraceHeader
from autotune.cost.table import CostTable
from autotune.documents.condition import first_match
from autotune.documents.decoding_profile import DecodingProfile
from autotune.errors import UserError
from autotune.files import WORKSPACE
from autotune.study.document import files_by_age, load_study
from autotune.trees.tree import Ints


def likeness_to(profile: DecodingProfile, folder: Path) -> tuple[bool, ...] | None:
    """How surely a folder is that of a profile's search: ``StudyDocument.likeness`` of the closest study document,
    nothing without one; None unless a cost table is of the profile's target, device and precision, and traces of its
    tuning prompts and all of its drafts.
    """
    is_priced = any(
        table.target.is_same(profile.target)
        and table.device.key == profile.hardware.key
        and table.precision == profile.precision
        for table in load_tables(folder)
    )
    weights = {point.draft.id: point.draft.sha256 for point in profile.points if point.draft is not None}
    recorded = {
        header.draft.id
        for header in load_headers(folder).values()
        if header.target.is_same(profile.target)
        and header.workload_sha256 == profile.workload.tune_sha256
        and header.draft.sha256 == weights.get(header.draft.id, header.draft.sha256)
    }
    if not is_priced or not recorded or not weights.keys() <= recorded:
        return None
    document = load_study(folder, profile)
    return () if document is None else document.likeness(profile)


def find_study(profile: DecodingProfile, source: Path) -> Path | None:
    """The study folder of a profile: its file's own folder, or one in ``.autotune`` next to the file or in the working
    directory. Of several that may be, it is the one with the closest study document, then the newest.

    Folders with documents that cannot be read are skipped.
    """
    roots = [source.parent / WORKSPACE, WORKSPACE]
    folders = {path.resolve(): path for root in roots if root.is_dir() for path in root.iterdir() if path.is_dir()}
    if any(source.parent.glob("study*.json")):
        folders[source.parent.resolve()] = source.parent
    found: dict[Path, tuple[bool, ...]] = {}
    for path in sorted(folders.values(), key=lambda path: (-path.stat().st_mtime, path.name)):
        with suppress(UserError):
            if (likeness := likeness_to(profile, path)) is not None:
                found[path] = likeness
    return max(found, key=found.__getitem__, default=None)


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
    return [CostTable.load(path) for path in reversed(files_by_age(folder, "*.cost.json"))]


def load_headers(folder: Path) -> dict[Path, TraceHeader]:
    return {path: TraceHeader.load(path) for path in files_by_age(folder, "traces/*/*.trace.json")}
