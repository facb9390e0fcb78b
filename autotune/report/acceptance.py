"""Acceptance of a profile's drafts by depth and rank: replayed on tuning prompts, and counted in real runs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.documents.configuration import configuration_of
from autotune.errors import reading
from autotune.replay.reference_replay import count_acceptance
from autotune.report.points import condition_label
from autotune.report.sources import Sources
from autotune.study.storage import RUNS
from autotune.trees.acceptance_counts import AcceptanceCounts
from autotune.trees.tree import Ints

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class PointAcceptance:
    number: int
    condition: str
    tables: dict[str, pd.DataFrame]
    """The tables of ``acceptance_table`` by ``depth`` and ``rank``."""
    num_replayed: int
    """Tuning prompts that the point decodes."""
    num_measured: int
    """Held-out prompts of the profile's evidence that the point decoded."""


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


def acceptance(sources: Sources) -> list[PointAcceptance]:
    """The acceptance of every point with a draft that has traces or runs."""
    results: list[PointAcceptance] = []
    for number, point in enumerate(sources.points):
        if point.tree is None:
            continue
        prompts, measured = sources.prompts_of(number), AcceptanceCounts()
        with reading(f"{sources.folder}: a run is damaged", f"remove its line of {RUNS}"):
            runs = evidence_runs(sources, number)
            for run in runs:
                measured.add(AcceptanceCounts.from_json(run["acceptance_counts"]))
        decoded = (sources.rounds_of(number, prompt) for prompt in prompts)
        replayed = count_acceptance(itertools.chain.from_iterable(decoded))
        if prompts or runs:
            tables = {k: acceptance_table(k, replayed=replayed, measured=measured) for k in ("depth", "rank")}
            condition = condition_label(sources.points, number)
            results.append(PointAcceptance(number, condition, tables, len(prompts), len(runs)))
    return results


def evidence_runs(sources: Sources, number: int) -> list[dict[str, Any]]:
    """The runs on held-out prompts that are the profile's evidence and that its point ``number`` decoded."""
    assert sources.profile is not None
    configuration = configuration_of(sources.profile.point)
    if configuration is None:
        return []
    evidence_ms = {prompt.prompt_sha256: prompt.decode_ms for prompt in sources.profile.evidence.prompts}
    runs = {
        run["prompt_sha256"]: run
        for run in sources.runs
        if run.get("arm") == configuration.key
        and run["point"] == number
        and evidence_ms.get(run.get("prompt_sha256", "")) == run["decode_ms"]  # identifies the very run
    }
    return list(runs.values())
