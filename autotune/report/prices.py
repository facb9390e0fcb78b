"""What a step costs, as curves over its tokens, and the datasheet's limit beside them where there is one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.cost.roofline import DeviceLimits, datasheets, load_limits, step_ms
from autotune.cost.surface import Surface
from autotune.cost.table import CostTable, ModelShape
from autotune.study.document import StudyDocument

SIZES = (1, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Curve:
    """Of one part, at one KV length."""

    part: str
    is_draft: bool
    kv_length: int
    surface: Surface
    limits: DeviceLimits | None
    shape: ModelShape | None
    """With the datasheet's limits it makes the roofline; either may be missing."""

    @property
    def tokens(self) -> list[int]:
        """Those that were measured."""
        return sorted({point.tokens for point in self.surface.points})

    def ms(self, tokens: int) -> float | None:
        """Latency, as replay is charged; None beyond what was measured, and between the sizes of a part that has one."""
        if tokens > self.surface.max_tokens:
            return None
        at = np.array([tokens], np.float64), np.array([self.kv_length], np.float64)
        return float(self.surface.latency_ms(*at)[0, 0])

    def limit_ms(self, tokens: int) -> float | None:
        """What the datasheet promises."""
        if self.limits is None or self.shape is None:
            return None
        return step_ms(self.shape, self.limits, tokens, self.kv_length)

    def share_of_limit(self, tokens: int) -> float | None:
        """Of the speed that the datasheet allows, what was reached."""
        ms, limit = self.ms(tokens), self.limit_ms(tokens)
        return None if ms is None or limit is None else limit / ms


def limits_of(table: CostTable) -> DeviceLimits | None:
    """The datasheet of the table's device."""
    return load_limits(table.device.name) if table.device.name in datasheets() else None


def middle_kv_length(table: CostTable) -> int:
    """The measured KV length nearest to the middle of them."""
    lengths = sorted({point.kv_length for point in table.verify.points})
    return min(lengths, key=lambda length: abs(length - (lengths[0] + lengths[-1]) / 2))


def curves(table: CostTable, study: StudyDocument | None) -> list[Curve]:
    """The target's steps, then of every draft the first and every other level."""
    limits = None if table.estimated else limits_of(table)  # an estimate is the limit itself
    kv_length = middle_kv_length(table)
    of_draft = {one.reference.sha256: one.shape for one in (study.drafts if study else [])}

    def curve(part: str, surface: Surface, shape: ModelShape | None, *, is_draft: bool) -> Curve:
        return Curve(part, is_draft, kv_length, surface, limits, shape)

    target = study.target_shape if study else None
    found = [
        curve("target, plain step", table.decode, target, is_draft=False),
        curve("target, verification", table.verify, target, is_draft=False),
    ]
    for costs in table.drafts:
        shape = of_draft.get(costs.draft.sha256) if costs.heads is None else None  # of the whole draft
        found.append(curve(f"{costs.name}, first level", costs.draft_first, shape, is_draft=True))
        found.append(curve(f"{costs.name}, other levels", costs.draft_level, shape, is_draft=True))
    return found
