"""What the drafts of a profile get accepted, by depth and rank: replayed on tuning prompts, and as real runs counted it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autotune.acceptance.rounds import count_acceptance
from autotune.documents.configuration import configuration_of
from autotune.report.chosen import when_of
from autotune.report.sources import Sources
from autotune.trees.acceptance_counts import AcceptanceCounts


@dataclass(frozen=True)
class Acceptance:
    """Which proposals of one operating point the target took."""

    number: int
    """Of the point."""
    when: str
    replayed: AcceptanceCounts
    """On the tuning prompts that the point decodes."""
    num_replayed: int
    """Prompts."""
    measured: AcceptanceCounts
    """On held-out prompts, by the runs that the profile was judged by."""
    num_measured: int


def acceptance(sources: Sources) -> list[Acceptance]:
    """Of each point that drafts, as far as traces or runs are at hand."""
    found: list[Acceptance] = []
    if sources.profile is None:
        return found
    for number, point in enumerate(sources.profile.points):
        if point.tree is None:
            continue
        trace, prompts = sources.trace_of(point), sources.prompts_of(number)
        replayed = AcceptanceCounts() if trace is None else count_acceptance(trace, point.tree, prompts, point.fallback)
        runs = judged_runs(sources, number)
        measured = AcceptanceCounts()
        for run in runs:
            counts = run.get("acceptance_counts") or run["health"]  # the key of earlier versions
            measured.add(AcceptanceCounts.from_json(counts))
        if prompts or runs:
            found.append(
                Acceptance(number, when_of(sources.profile, number), replayed, len(prompts), measured, len(runs))
            )
    return found


def judged_runs(sources: Sources, number: int) -> list[dict[str, Any]]:
    """The profile's own runs on held-out prompts that its point ``number`` decoded: those whose counts are its evidence."""
    assert sources.profile is not None
    configuration = configuration_of(sources.profile.point)
    if configuration is None:
        return []
    judged = {one.sha256: one for one in sources.profile.evidence.prompts}
    found = {
        run["prompt_sha256"]: run
        for run in sources.runs
        if run.get("arm") == configuration.key
        and run.get("point") == number
        and (evidence := judged.get(run.get("prompt_sha256", ""))) is not None
        and evidence.decode_ms == run["decode_ms"]  # of this very run
    }
    return list(found.values())
