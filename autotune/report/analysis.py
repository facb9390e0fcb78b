"""Tables from a study's records: Pareto front, fastest trees by size, grids of subnets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.replay.evaluator import Candidate
from autotune.report.points import heads_label
from autotune.study.records import ScreenedSubnet

if TYPE_CHECKING:
    import pandas as pd


def pareto_front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates that no other one beats in both predicted time and nodes per round, smallest trees first."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.nodes_per_round, *c.rank)):
        if not front or candidate.ms_per_token < front[-1].ms_per_token:
            front.append(candidate)
    return front


@dataclass(frozen=True)
class SubnetGrid:
    """Predicted speedups of a draft's subnets with one injection layer, each by its fastest ranking of visual
    tokens.
    """

    draft: str
    layer: int | None
    speedups: pd.DataFrame
    """Rows are shares of heads, columns shares of visual tokens; NaN where a subnet was not screened."""


def subnet_grids(screened: Iterable[ScreenedSubnet]) -> list[SubnetGrid]:
    """A grid for every draft and injection layer, in order."""
    import pandas as pd

    frame = pd.DataFrame(
        [
            (s.draft, s.subnet.injection_layer or -1, heads_label(s.subnet), s.subnet.visual_keep, s.speedup)
            for s in sorted(screened, key=lambda s: s.subnet.head_shares, reverse=True)
        ],
        columns=["draft", "layer", "heads", "keep", "speedup"],
    )
    keeps = sorted(frame.keep.unique())
    grids = []
    for _, group in frame.groupby(["draft", "layer"]):
        speedups = group.pivot_table(index="heads", columns="keep", values="speedup", aggfunc="max")
        layer = int(group.layer.iloc[0])
        speedups = speedups.reindex(index=group.heads.unique(), columns=keeps)
        grids.append(SubnetGrid(group.draft.iloc[0], layer if layer > 0 else None, speedups))
    return grids
