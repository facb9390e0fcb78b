"""What a step costs, as curves over its tokens, and the datasheet's limit beside them where there is one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.cost.roofline import DeviceLimits, ModelShape, datasheets, load_limits, step_ms
from autotune.cost.surface import Surface
from autotune.cost.table import CostTable
from autotune.search.study_document import StudyDocument

SIZES = (1, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Curve:
    """Of one part, at one KV length."""

    part: str
    is_draft: bool
    tokens: list[int]
    ms: list[float]
    limit_ms: list[float] | None
    """What the datasheet promises; None without one, or where the model's shape is not known."""
    model: str
    held_out_error: float | None

    def at(self, size: int) -> float | None:
        """Latency at a number of tokens, if it is one of the curve's."""
        return dict(zip(self.tokens, self.ms, strict=True)).get(size)

    def share_of_limit(self, size: int) -> float | None:
        """Of the speed that the datasheet allows, what was reached; None where either is not known."""
        ms = self.at(size)
        if ms is None or self.limit_ms is None:
            return None
        return self.limit_ms[self.tokens.index(size)] / ms


def limits_of(table: CostTable) -> DeviceLimits | None:
    """The datasheet of the table's device."""
    return load_limits(table.device.name) if table.device.name in datasheets() else None


def middle_kv_length(table: CostTable) -> int:
    """The measured KV length nearest to the middle of them."""
    lengths = sorted({point.kv_length for point in table.verify.points})
    return min(lengths, key=lambda length: abs(length - (lengths[0] + lengths[-1]) / 2))


def curves(table: CostTable, study: StudyDocument | None) -> list[Curve]:
    """The target's steps, then of every draft the first and every other level."""
    limits = limits_of(table)
    kv_length = middle_kv_length(table)
    of_draft = {one.reference.sha256: one.shape for one in (study.drafts if study else [])}

    def curve(part: str, surface: Surface, shape: ModelShape | None, *, is_draft: bool) -> Curve:
        tokens = sorted({point.tokens for point in surface.points})
        ms = surface.latency_ms(np.array(tokens, np.float64), np.array([kv_length], np.float64))[:, 0]
        limit = None
        if limits is not None and shape is not None and not table.estimated:
            limit = [step_ms(shape, limits, n, kv_length) for n in tokens]
        return Curve(part, is_draft, tokens, ms.tolist(), limit, surface.model, surface.held_out_error)

    target = study.target_shape if study else None
    found = [
        curve("target, plain step", table.decode, target, is_draft=False),
        curve("target, verification", table.verify, target, is_draft=False),
    ]
    for costs in table.drafts:
        shape = of_draft.get(costs.draft.sha256) if costs.heads is None else None  # of the whole draft
        found.append(curve(f"{costs.name}, first level", costs.commit, shape, is_draft=True))
        found.append(curve(f"{costs.name}, other levels", costs.propose, shape, is_draft=True))
    return found
