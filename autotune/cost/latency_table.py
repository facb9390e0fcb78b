"""The table of a cost table's latencies, with the share of the datasheet's limit that they reach."""

from __future__ import annotations

import numpy as np

from autotune.cost.roofline import device_bound_ms, find_limits
from autotune.cost.surface import Surface
from autotune.cost.table import CostTable, ModelShape
from autotune.table import Table, percent

SIZES = (1, 4, 16, 64)
"""Tokens of the forward passes that are shown."""


def middle_kv_length(table: CostTable) -> int:
    """The measured KV length nearest to the middle of the measured range."""
    lengths = sorted({point.kv_length for point in table.verify.points})
    return min(lengths, key=lambda length: abs(length - (lengths[0] + lengths[-1]) / 2))


def latency_table(table: CostTable) -> Table:
    """A row for each kind of forward pass, a column for each number of tokens."""
    shapes = dict.fromkeys(("decode", "verify"), table.target_shape)
    for costs in table.drafts:
        shapes |= {f"{costs.name}: {part}": costs.shape for part in ("draft_first", "draft_level")}
    rows = [
        [
            name,
            *(_latency(table, surface, shapes[name], size) for size in SIZES),
            percent(surface.held_out_error),
            percent(surface.uncertainty),
        ]
        for name, surface in table.surfaces.items()
    ]
    anchors = f" from {table.num_anchors} measured tables" if table.num_anchors else ""
    mark = f" (estimated{anchors})" if table.estimated else ""
    errors = ["leave-one-out error", "uncertainty"]
    return Table(
        f"Cost table, ms, at KV length {middle_kv_length(table)}{mark}",
        ["part", *(f"{size} tok" for size in SIZES), *errors],
        rows,
        details=errors,
        labels={"%": "share of the latency that the datasheet allows"} if any("%" in row[1] for row in rows) else {},
    )


def _latency(table: CostTable, surface: Surface, shape: ModelShape | None, tokens: int) -> str:
    """The latency as replay charges it, and in brackets the reached share of the limit of a device with a datasheet; a
    dash above the largest measured number of tokens.
    """
    if tokens > surface.max_tokens:
        return "-"
    kv_length = middle_kv_length(table)
    ms = float(surface.latency_ms(np.array([tokens], np.float64), np.array([kv_length], np.float64))[0, 0])
    limits = None if table.estimated else find_limits(table.device.name)  # an estimate rests on the limits
    if limits is None or shape is None or not shape.has_forward_pass:
        return f"{ms:.2f}"
    return f"{ms:.2f} ({percent(device_bound_ms(shape, limits, tokens, kv_length) / ms, 0)})"
