"""How far predictions may be off: by the choice of prompts, and by the errors of the cost table.

Errors of the parts of a cost table are taken as independent. Two configurations share most of them, so their ratio is known
better than their speedups: only the difference of their shares of time counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist

from autotune.acceptance.replay import Replay
from autotune.documents.configuration import Configuration
from autotune.search.evaluator import Evaluator
from autotune.trees.limits import Floats

CONFIDENCE = 0.9
DEVIATIONS = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
DECODE = "decode"
DECODING_ERROR = 0.08
"""Relative standard deviation of a measured speedup around the prediction by exact costs of single steps: in decoding, and some
minutes later, the processor's caches and clocks are in another state than in the table (docs/benchmarks.md).
"""


def speedup_interval(
    evaluator: Evaluator, configuration: Configuration, *, other_prompts: bool = False
) -> tuple[float, float]:
    """90 % interval of a predicted speedup on the evaluator's prompts, or on ``other_prompts`` like them."""
    configuration = evaluator.resolve(configuration)
    result = evaluator.replay(configuration)
    shares = {DECODE: -1.0, **_shares(evaluator, configuration, result)}
    variance = DECODING_ERROR**2 + _table_variance(evaluator, shares)
    if other_prompts:
        variance += _prompts_variance(evaluator.ar_ms, result.decode_ms)
    speedup = float(evaluator.ar_ms.sum() / result.decode_ms.sum())
    return _interval(speedup, variance)


def ratio_interval(evaluator: Evaluator, configuration: Configuration, to: Configuration) -> tuple[float, float]:
    """90 % interval of the ratio of two predicted decoding times, on prompts like the evaluator's."""
    configuration, to = evaluator.resolve(configuration), evaluator.resolve(to)
    result, other = evaluator.replay(configuration), evaluator.replay(to)
    shares, others = _shares(evaluator, configuration, result), _shares(evaluator, to, other)
    differences = {part: shares.get(part, 0.0) - others.get(part, 0.0) for part in shares | others}
    variance = _table_variance(evaluator, differences) + _prompts_variance(result.decode_ms, other.decode_ms)
    return _interval(float(result.decode_ms.sum() / other.decode_ms.sum()), variance)


def _interval(ratio: float, variance: float) -> tuple[float, float]:
    half_width = DEVIATIONS * math.sqrt(variance)
    return ratio * math.exp(-half_width), ratio * math.exp(half_width)


def _shares(evaluator: Evaluator, configuration: Configuration, result: Replay) -> dict[str, float]:
    """Share of each part of the cost table in the decoding time of a configuration, by the part's name in the table.

    The draft's forward passes are one part, that of its levels: the first pass of a round is another level.
    """
    reference = evaluator.traces[configuration.draft or "", configuration.subnet].header.draft
    costs, *_ = evaluator.table.costs_around(reference, configuration.subnet)
    parts = {
        "verify": result.verify_ms,
        f"{costs.name}: draft_level": result.draft_ms,
        f"{costs.name}: prefill": result.draft_prefill_ms,
        f"{costs.draft.id}: overhead": result.overhead_ms,
    }
    total_ms = float(result.decode_ms.sum())
    return {name: float(ms.sum()) / total_ms for name, ms in parts.items()}


def _table_variance(evaluator: Evaluator, shares: Mapping[str, float]) -> float:
    """Variance of the logarithm of a time, or of a ratio, with these shares of the parts."""
    errors = evaluator.table.uncertainties
    return sum((share * errors.get(part, 0.0)) ** 2 for part, share in shares.items())


def _prompts_variance(above: Floats, below: Floats) -> float:
    """Variance of the logarithm of a ratio of sums over prompts (Taylor linearization)."""
    count = len(above)
    if count < 2:
        return 0.0
    residuals = above / above.sum() - below / below.sum()
    return float(count / (count - 1) * (residuals**2).sum())
