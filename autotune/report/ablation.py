"""Ablation of the subnet's dimensions by predicted time: all of them fixed at their defaults, and freed one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.documents.published_defaults import PUBLISHED_DEFAULTS
from autotune.report.sources import Sources
from autotune.study.records import ScreenedSubnet

if TYPE_CHECKING:
    import pandas as pd


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
