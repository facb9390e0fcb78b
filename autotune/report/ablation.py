"""Ablation of the search dimensions by predicted time: each one fixed at its default, and all of them freed one
by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.documents.configuration import Configuration
from autotune.documents.published_defaults import COMPARED_DEFAULTS, PUBLISHED_DEFAULTS
from autotune.report.sources import Sources
from autotune.study.records import ScreenedSubnet

if TYPE_CHECKING:
    import pandas as pd

SCREENING, TREES = "chains (screening)", "trees (replay)"


@dataclass(frozen=True)
class Ablation:
    """The cost of fixing one dimension at its default while all others are free."""

    dimension: str
    default: str
    fixed_ms: float | None
    """Predicted ms per token of the best configuration with the dimension fixed; None if none was tried."""
    free_ms: float
    """Predicted ms per token of the best configuration of the same stage."""
    stage: str

    @property
    def gain(self) -> float | None:
        """Share of decoding time saved by searching this dimension."""
        return None if self.fixed_ms is None else 1 - self.free_ms / self.fixed_ms


def default_subnet(sources: Sources, draft: str) -> tuple[tuple[float, ...], int | None, float]:
    """Default heads, injection layer and share of visual tokens: all heads, the last layer, and the share of the
    draft's published default, or the largest one if that share was not screened.
    """
    subnets = [s.subnet for s in sources.screened if s.draft == draft]
    keeps = {subnet.visual_keep for subnet in subnets}
    kind = sources.kinds.get(draft, "")
    published = PUBLISHED_DEFAULTS[kind].visual_keep if kind in PUBLISHED_DEFAULTS else 1.0
    layers = [subnet.injection_layer for subnet in subnets if subnet.injection_layer is not None]
    heads = max(subnet.head_shares for subnet in subnets)
    return heads, max(layers, default=None), published if published in keeps else max(keeps)


def _screened_at_default(sources: Sources) -> pd.DataFrame:
    """For every screened subnet its predicted ms per token and, by dimension, whether it has the default."""
    import pandas as pd

    defaults = {draft: default_subnet(sources, draft) for draft in {s.draft for s in sources.screened}}
    first = next((draft for draft in sources.drafts if draft in defaults), None)
    rows = []
    for s in sources.screened:
        heads, layer, keep = defaults[s.draft]
        is_default = (s.subnet.visual_keep == keep, s.subnet.head_shares == heads, s.subnet.injection_layer == layer)
        rows.append((s.ms_per_token, *is_default, s.draft == first))
    return pd.DataFrame(rows, columns=["ms_per_token", "visual tokens", "heads", "injection layer", "draft"])


def ablations(sources: Sources) -> list[Ablation]:
    """Every dimension fixed at its default in turn, largest gain first. Dimensions of the subnet are compared by the
    chains of screening, draft and tree by the replayed trees of the surviving subnets.
    """
    results: list[Ablation] = []
    if sources.screened:
        frame = _screened_at_default(sources)
        keeps = {default_subnet(sources, s.draft)[2] for s in sources.screened}
        defaults = {
            "heads": "all heads",
            "injection layer": "the last layer",
            "visual tokens": " or ".join(f"{100 * keep:g} %" for keep in sorted(keeps)),
        }
        for dimension, default in defaults.items():
            fixed = frame.ms_per_token[frame[dimension]]
            if len(fixed) < len(frame):
                best = float(fixed.min()) if len(fixed) else None
                results.append(Ablation(dimension, default, best, float(frame.ms_per_token.min()), SCREENING))
    if sources.candidates:
        free = sources.candidates[0].ms_per_token
        first = sources.drafts[0] if sources.drafts else None
        if len({c.configuration.draft for c in sources.candidates}) > 1 and first is not None:
            best = min((c.ms_per_token for c in sources.candidates if c.configuration.draft == first), default=None)
            results.append(Ablation("draft", first, best, free, TREES))
        if published := _published_trees(sources):
            name, best = min(published.items(), key=lambda item: item[1])
            results.append(Ablation("tree", f"best published default, {name}", best, free, TREES))
    return sorted(results, key=lambda ablation: -(ablation.gain or 0.0))


def _published_trees(sources: Sources) -> dict[str, float]:
    """Predicted ms per token of each compared default tree with the best surviving subnet; only trees that the traces
    cover.
    """
    if (evaluator := sources.evaluator) is None:
        return {}
    fastest_ms: dict[str, float] = {}
    for name, default in COMPARED_DEFAULTS.items():
        configurations = [Configuration(tree=default.tree, draft=d, subnet=s) for d, s in evaluator.traces]
        times = [evaluator.evaluate(c).ms_per_token for c in configurations if evaluator.can_replay(c)]
        if times:
            fastest_ms[name] = min(times)
    return fastest_ms


def cumulative_ablation(sources: Sources) -> dict[str, ScreenedSubnet]:
    """The best screened subnet as the dimensions are freed one by one, by the dimension that was freed last, starting
    from the full draft that the user named first. Steps that add no subnet are left out.
    """
    if not any(s.draft in sources.drafts for s in sources.screened):
        return {}
    is_default = _screened_at_default(sources).drop(columns="ms_per_token")
    steps: dict[str, ScreenedSubnet] = {}
    num_before = 0
    for number, label in enumerate(["full draft", *(f"+ {dimension}" for dimension in is_default)]):
        is_allowed = is_default.iloc[:, number:].all(axis=1)
        allowed = [subnet for subnet, allow in zip(sources.screened, is_allowed, strict=True) if allow]
        if len(allowed) > num_before:
            steps[label] = min(allowed, key=lambda subnet: subnet.ms_per_token)
            num_before = len(allowed)
    return steps
