"""Operations of the screened subnets and their speedups on other devices (STAR, figure 3a and table 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autotune.acceptance.trace import Trace
from autotune.cost.draft_costs import ModelShape
from autotune.cost.roofline import (
    DeviceLimits,
    datasheets,
    first_level_ms,
    later_level_ms,
    load_limits,
    operations,
    step_ms,
)
from autotune.report.points import heads_label
from autotune.report.sources import Sources
from autotune.study.records import ScreenedSubnet

if TYPE_CHECKING:
    import pandas as pd


def round_operations(shape: ModelShape, *, depth: int, tokens_per_round: float, kv_length: float) -> float:
    """Operations of the draft in a round of a chain: a forward pass of the M tokens that the round before emitted, then one of
    a single token for every further level that is not drafted by the first.
    """
    levels = 0.0 if shape.block_tokens else sum(operations(shape, 1, kv_length + level) for level in range(1, depth))
    return operations(shape, tokens_per_round + shape.block_tokens, kv_length) + levels


def estimated_speedup(
    draft: ModelShape,
    target: ModelShape,
    limits: DeviceLimits,
    *,
    depth: int,
    tokens_per_round: float,
    draft_kv_length: float,
    kv_length: float,
) -> float:
    """Speedup of a chain over plain decoding by the roofline of a device, with the host's times as in ``estimate_table``."""
    round_ms = first_level_ms(draft, limits, tokens_per_round, draft_kv_length)
    round_ms += (depth - 1) * later_level_ms(draft, limits, 1, draft_kv_length)
    round_ms += step_ms(target, limits, depth + 1, kv_length) + limits.round_ms * (1 + depth / 8)
    return step_ms(target, limits, 1, kv_length) * tokens_per_round / round_ms


def subnet_flops(sources: Sources) -> pd.DataFrame:
    """A row for every screened subnet and device, the search's own device first.

    Columns: ``draft``, ``heads``, ``layer`` (0 for the draft's default), ``keep``, ``device``, ``estimated``, ``mflops_per_round``, ``mflops_per_token``,
    ``speedup``, and ``is_on_front``: no subnet of the draft has as few operations per token and a higher speedup there. Every
    subnet drafts the chain that was best for it on the search's device. Subnets are left out if the cost table has no
    shape of them, and drafts without a model; KV lengths are means over the recorded prompts, in the middle of their answers.
    """
    import pandas as pd

    rows = []
    table, study = sources.table, sources.study
    target = study.target_shape if study is not None else table.target_shape if table is not None else None
    traces = {trace.header.draft.id: trace for trace in sources.traces}
    if table is not None and target is not None:
        devices = {name: load_limits(name) for name in datasheets() if name != table.device.name}
        for subnet in sources.screened:
            trace, shape = traces.get(subnet.draft), _shape(sources, subnet)
            if trace is None or shape is None or not shape.has_forward_pass:
                continue
            draft_kv, kv = _kv_lengths(trace, subnet.subnet.visual_keep, shape.crossing_share)
            flops = round_operations(
                shape, depth=subnet.depth, tokens_per_round=subnet.tokens_per_round, kv_length=draft_kv
            )
            values = (
                subnet.draft,
                heads_label(subnet.subnet),
                subnet.subnet.injection_layer or 0,
                subnet.subnet.visual_keep,
            )
            counts = (flops / 1e6, flops / 1e6 / subnet.tokens_per_round)
            rows.append((*values, table.device.name, table.estimated, *counts, subnet.speedup))
            for name, limits in devices.items():
                speedup = estimated_speedup(
                    shape,
                    target,
                    limits,
                    depth=subnet.depth,
                    tokens_per_round=subnet.tokens_per_round,
                    draft_kv_length=draft_kv,
                    kv_length=kv,
                )
                rows.append((*values, name, True, *counts, speedup))
    columns = [
        "draft",
        "heads",
        "layer",
        "keep",
        "device",
        "estimated",
        "mflops_per_round",
        "mflops_per_token",
        "speedup",
    ]
    frame = pd.DataFrame(rows, columns=columns)
    frame["is_on_front"] = False
    for _, group in frame.groupby(["draft", "device"]):
        front = on_front(group.mflops_per_token.to_numpy(), group.speedup.to_numpy())
        frame.loc[group.index, "is_on_front"] = front
    return frame


def on_front(costs: NDArray[np.number], gains: NDArray[np.number]) -> NDArray[np.bool_]:
    """Whether no other point has at most the cost and a higher gain, or a lower cost and the same gain."""
    found = np.zeros(len(costs), bool)
    highest = -np.inf
    for index in np.lexsort((-gains, costs)):
        found[index] = gains[index] > highest
        highest = max(highest, gains[index])
    return found


def _shape(sources: Sources, subnet: ScreenedSubnet) -> ModelShape | None:
    assert sources.table is not None
    for costs in sources.table.drafts:
        if costs.draft.id == subnet.draft and costs.is_of(costs.draft, subnet.subnet):
            return costs.shape
    return None


def _kv_lengths(trace: Trace, visual_keep: float, crossing_share: float) -> tuple[float, float]:
    """Mean tokens in the KV caches of a draft that keeps this share of the visual tokens, and of the target. Of a draft's
    keys and values, the ``crossing_share`` is kept for pruned tokens too.
    """
    answers = np.diff(trace.answer_start) / 2
    pruned = (1 - crossing_share) * (1 - visual_keep) * trace.num_visual_tokens
    return float((trace.prompt_length - pruned + answers).mean()), float((trace.prompt_length + answers).mean())
