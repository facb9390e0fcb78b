"""The tuning prompts, split into those that choose trees and those that confirm the choice, and intervals of predictions on them.

Predictions may be off by the choice of prompts, and by the errors of the cost table. Errors of the parts of a cost table are taken as
independent. Two configurations share most of them, so their ratio is known better than their speedups: only the difference of their
shares of time counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from autotune.acceptance.replay import Replay
from autotune.documents.configuration import Configuration
from autotune.prediction.evaluator import Evaluator
from autotune.search.thresholds import CONFIDENCE, CONFIRMING, DECODING_ERROR, MIN_CONFIRMING, MIN_SPLIT
from autotune.trees.tree import Floats
from autotune.workloads.workload import Workload

DEVIATIONS = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
DECODE = "decode"


@dataclass(frozen=True)
class TuningPrompts:
    """The tuning prompts, and their split: trees are chosen on some of them, and the choice is confirmed on the others.

    The fastest of thousands of configurations on some prompts is partly the fastest by chance (the winner's curse). Prompts
    that did not take part in the choice predict its speed without this bias.
    """

    workload: Workload
    full: Evaluator
    """The evaluator of all prompts."""
    choosing: Evaluator
    confirming: Evaluator
    confirming_workload: Workload
    """The prompts of ``confirming``, in its order."""

    @classmethod
    def of(cls, workload: Workload, evaluator: Evaluator) -> TuningPrompts:
        """Split the prompts of an evaluator."""
        if len(workload.prompts) < MIN_SPLIT:
            return cls(workload, evaluator, evaluator, evaluator, workload)
        is_confirming = confirms(evaluator.tasks)
        chosen = np.flatnonzero(is_confirming)
        prompts = tuple(workload.prompts[number] for number in chosen)
        return cls(
            workload,
            evaluator,
            evaluator.select(np.flatnonzero(~is_confirming)),
            evaluator.select(chosen),
            Workload(workload.name, workload.split, prompts),
        )


def confirms(tasks: Sequence[str]) -> NDArray[np.bool_]:
    """Whether each prompt is a confirming one, [prompts]: every third of each task, and of the tasks with fewer prompts; every
    second where thirds are fewer than ``MIN_CONFIRMING``.
    """
    seen: Counter[str] = Counter()
    step = CONFIRMING if len(tasks) >= CONFIRMING * MIN_CONFIRMING else 2
    rare = {task for task, count in Counter(tasks).items() if count < step}
    flags = []
    for task in tasks:
        name = "" if task in rare else task
        flags.append(seen[name] % step == step - 1)
        seen[name] += 1
    return np.array(flags)


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
    return _interval_around(speedup, variance)


def ratio_interval(evaluator: Evaluator, configuration: Configuration, to: Configuration) -> tuple[float, float]:
    """90 % interval of the ratio of two predicted decoding times, on prompts like the evaluator's."""
    configuration, to = evaluator.resolve(configuration), evaluator.resolve(to)
    result, to_result = evaluator.replay(configuration), evaluator.replay(to)
    shares, to_shares = _shares(evaluator, configuration, result), _shares(evaluator, to, to_result)
    differences = {part: shares.get(part, 0.0) - to_shares.get(part, 0.0) for part in shares | to_shares}
    variance = _table_variance(evaluator, differences) + _prompts_variance(result.decode_ms, to_result.decode_ms)
    return _interval_around(float(result.decode_ms.sum() / to_result.decode_ms.sum()), variance)


def _interval_around(ratio: float, variance: float) -> tuple[float, float]:
    half_width = DEVIATIONS * math.sqrt(variance)
    return ratio * math.exp(-half_width), ratio * math.exp(half_width)


def _shares(evaluator: Evaluator, configuration: Configuration, result: Replay) -> dict[str, float]:
    """Share of each part of the cost table in the decoding time of a configuration, by the part's name in the table.

    The draft's forward passes are one part, the part of its levels: the first pass of a round is another level.
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
