"""Latency of steps by the number of tokens, with the datasheet's limit where there is one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.cost.roofline import DatasheetLimits, device_bound_ms, find_limits
from autotune.cost.surface import Surface
from autotune.cost.table import CostTable, ModelShape
from autotune.study.document import StudyDocument


@dataclass(frozen=True)
class CostCurve:
    part: str
    is_draft: bool
    kv_length: int
    surface: Surface
    limits: DatasheetLimits | None
    shape: ModelShape | None
    """Both are needed for the roofline, and either may be missing."""

    @property
    def tokens(self) -> list[int]:
        return sorted({point.tokens for point in self.surface.points})

    def ms(self, tokens: int) -> float | None:
        """Latency as replay charges it; None above the largest measured number of tokens."""
        if tokens > self.surface.max_tokens:
            return None
        size = np.array([tokens], np.float64), np.array([self.kv_length], np.float64)
        return float(self.surface.latency_ms(*size)[0, 0])

    def limit_ms(self, tokens: int) -> float | None:
        """The least latency that the datasheet allows."""
        if self.limits is None or self.shape is None or not self.shape.has_forward_pass:
            return None
        return device_bound_ms(self.shape, self.limits, tokens, self.kv_length)

    def share_of_limit(self, tokens: int) -> float | None:
        ms, limit = self.ms(tokens), self.limit_ms(tokens)
        return None if ms is None or limit is None else limit / ms


def middle_kv_length(table: CostTable) -> int:
    """The measured KV length nearest to the middle of the measured range."""
    lengths = sorted({point.kv_length for point in table.verify.points})
    return min(lengths, key=lambda length: abs(length - (lengths[0] + lengths[-1]) / 2))


def cost_curves(table: CostTable, study: StudyDocument | None) -> list[CostCurve]:
    """Curves of the target's steps, and of the first and the other draft levels of every draft."""
    limits = None if table.estimated else find_limits(table.device.name)  # an estimated table rests on the limits
    kv_length = middle_kv_length(table)
    shapes = {entry.reference.sha256: entry.shape for entry in (study.drafts if study else [])}
    target = study.target_shape if study else None
    parts: list[tuple[str, bool, Surface, ModelShape | None]] = [
        ("target, plain step", False, table.decode, target),
        ("target, verification", False, table.verify, target),
    ]
    for costs in table.drafts:
        shape = shapes.get(costs.draft.sha256) if costs.heads is None else None  # the shape is of the full draft
        parts.append((f"{costs.name}, first level", True, costs.draft_first, shape))
        parts.append((f"{costs.name}, other levels", True, costs.draft_level, shape))
    return [CostCurve(part, is_draft, kv_length, surface, limits, shape) for part, is_draft, surface, shape in parts]
