"""Writes the ``speculation_profile.json`` of real runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.acceptance.speculation_profile import METHODS, Counted, build
from autotune.documents.decoding_profile import DecodingProfile
from autotune.errors import UserError
from autotune.evaluation.runs import Run
from autotune.trees.acceptance_counts import AcceptanceCounts
from autotune.trees.chain import ChainPolicy


def profile_of_runs(
    runs: Sequence[Run], counts: AcceptanceCounts, profile: DecodingProfile, *, kind: str, workload: str
) -> dict[str, Any]:
    """The acceptance that runs of a decoding profile measured, by position in the accepted path of a tree; plain steps are left out.

    Args:
        counts: of all runs.
        kind: of the draft.

    Raises:
        UserError: a lossy point, several drafts, or no round that drafted.
    """
    points = [point for point in profile.points if point.draft is not None and point.tree is not None]
    drafts = {point.draft.id for point in points if point.draft is not None}
    if len(drafts) != 1 or not all(point.lossless for point in points):
        raise UserError(
            f"a speculation profile is of one draft and of lossless verification; this profile has {len(drafts)} drafts and "
            f"{sum(not point.lossless for point in points)} lossy points; bench another profile"
        )
    offered = counts.by_depth[:, :, 0].sum(0).nonzero()[0]
    return build(
        [Counted(run.task or "", drafted_lengths(run)) for run in runs],
        num_speculative_tokens=int(offered.max(initial=1)),
        method=METHODS.get(kind, kind),
        draft=drafts.pop(),
        target=profile.target.id,
        conditions={"dataset": workload, "num_requests": len(runs), "device": profile.hardware.name},
        is_chain=all(isinstance(point.tree, ChainPolicy) for point in points),
    )


def drafted_lengths(run: Run) -> list[int]:
    """The accepted lengths of the rounds that drafted: plain steps are zeros."""
    zeros = sum(length == 0 for length in run.accepted_lengths) - (run.plain_steps or 0)
    return [*(length for length in run.accepted_lengths if length > 0), *[0] * zeros]
