"""Acceptance of a profile's drafts by depth and rank: replayed on tuning prompts, and counted in real runs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.documents.configuration import configuration_of
from autotune.errors import reading
from autotune.replay.reference_replay import count_acceptance
from autotune.report.sources import Sources
from autotune.study.storage import RUNS
from autotune.trees.acceptance_counts import AcceptanceCounts
from autotune.trees.tree import Ints

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Acceptance:
    tables: dict[str, pd.DataFrame]
    """The tables of ``acceptance_table`` by ``depth`` and ``rank``."""
    num_replayed: int
    """Tuning prompts."""
    num_measured: int
    """Held-out prompts of the profile's evidence."""


def acceptance_table(kind: str, **counts: AcceptanceCounts) -> pd.DataFrame:
    """Columns ``NAME_offered`` and ``NAME_accepted`` for each of ``counts``; rows are depths or ranks from 1, those
    offered anywhere.
    """
    import pandas as pd

    columns: dict[str, Ints] = {}
    for name, count in counts.items():
        table = count.by_depth[1:] if kind == "depth" else count.by_rank
        columns |= {f"{name}_offered": table[:, 0], f"{name}_accepted": table[:, 1]}
    frame = pd.DataFrame(columns)
    frame.index += 1
    return frame[frame.any(axis=1)]


def acceptance(sources: Sources) -> Acceptance | None:
    """The acceptance of the profile's draft; None for plain decoding, and without traces and runs."""
    if sources.profile is None or sources.profile.point.tree is None:
        return None
    num_prompts, measured = len(sources.trace.header.prompts) if sources.trace else 0, AcceptanceCounts()
    with reading(f"{sources.folder}: a run is damaged", f"remove its line of {RUNS}"):
        runs = evidence_runs(sources)
        for run in runs:
            measured.add(AcceptanceCounts.from_json(run["acceptance_counts"]))
    if not num_prompts and not runs:
        return None
    replayed = count_acceptance(itertools.chain.from_iterable(map(sources.rounds_of, range(num_prompts))))
    tables = {kind: acceptance_table(kind, replayed=replayed, measured=measured) for kind in ("depth", "rank")}
    return Acceptance(tables, num_prompts, len(runs))


def evidence_runs(sources: Sources) -> list[dict[str, Any]]:
    """The runs on held-out prompts that are the profile's evidence."""
    assert sources.profile is not None
    configuration = configuration_of(sources.profile.point)
    if configuration is None:
        return []
    evidence_ms = {prompt.prompt_sha256: prompt.decode_ms for prompt in sources.profile.evidence.prompts}
    runs = {
        run["prompt_sha256"]: run
        for run in sources.runs
        if run.get("arm") == configuration.key
        and evidence_ms.get(run.get("prompt_sha256", "")) == run["decode_ms"]  # identifies the very run
    }
    return list(runs.values())
