"""Prices after real decoding: the rounds of measured configurations are observations of the cost table's joint fit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from autotune.cost.joint_fit import is_fitted, refitted
from autotune.cost.request_costs import Overhead, PrefillCost
from autotune.cost.surface import Observation, Point, Surface
from autotune.cost.table import CostTable, DraftCosts
from autotune.documents.configuration import Configuration
from autotune.documents.decoded import Decoded
from autotune.replay.evaluator import Evaluator
from autotune.replay.replay import FIRST, LEVEL, VERIFICATION, Replay
from autotune.trees.limits import Floats

LEAST_ERROR = 0.01  # of a part's time over its price, however many rounds were run
ACROSS_SIZES = 0.02  # further error of a price at one size, whose observation is of rounds of many sizes
Scaled = TypeVar("Scaled", Overhead, PrefillCost)


@dataclass(frozen=True)
class _Ratio:
    """Logarithm of a measured time over the predicted one, both in plain steps, and its standard error."""

    log: float
    error: float


def updated_table(
    evaluator: Evaluator, runs: Mapping[str, tuple[Configuration, Sequence[Decoded]]], plain: Sequence[Decoded]
) -> CostTable:
    """The evaluator's table with what real runs say about its prices; a table that is not measured stays as it is.

    Args:
        runs: configurations with their runs on the evaluator's prompts, in order and over and over, by arm name.
        plain: runs of plain decoding on the same prompts. Times count in multiples of theirs, because a machine that
            has become slower is slower with and without a draft.
    """
    table = evaluator.table
    if not is_fitted(table):
        return table
    live: dict[tuple[int, int], dict[tuple[int, int], list[Observation]]] = defaultdict(lambda: defaultdict(list))
    factors: dict[tuple[int | str, str], list[_Ratio]] = defaultdict(list)
    any_trace = next(iter(evaluator.traces.values()))
    kv_length = float((np.diff(any_trace.answer_start) / 2 + any_trace.prompt_length).mean())
    for configuration, of_arm in runs.values():
        if not of_arm or not evaluator.can_replay(configuration):
            continue
        configuration = evaluator.resolve(configuration)
        result = evaluator.replay(configuration)
        draft = evaluator.traces[configuration.draft or "", configuration.subnet].header.draft
        costs, *_ = table.costs_around(draft, configuration.subnet)
        number = table.drafts.index(costs)
        ratios = _ratios(evaluator, result, of_arm, plain)
        for part, surface, kind, name in (
            (-1, table.verify, VERIFICATION, "verify"),
            (number, costs.draft_first, FIRST, "draft"),
            (number, costs.draft_level, LEVEL, "draft"),
        ):
            if name in ratios and result.step_ms[kind].any():
                point = _nearest(surface, result.step_ms[kind], kv_length)
                error = math.hypot(ratios[name].error, ACROSS_SIZES)
                observation = Observation(ms=point.latency_ms * math.exp(ratios[name].log), error=error)
                live[part, kind][point.tokens, point.kv_length].append(observation)
        for name, ratio in ratios.items():  # overheads are those of all subnets of a draft
            factors[costs.draft.id if name == "overhead" else number, name].append(ratio)
    if not live:
        return table
    mean_verify = _pooled([ratio for (_, name), found in factors.items() if name == "verify" for ratio in found])
    drafts = [
        costs.model_copy(
            update={
                "draft_first": _with_live(costs.draft_first, live[number, FIRST]),
                "draft_level": _with_live(costs.draft_level, live[number, LEVEL]),
                "prefill": _scaled(costs.prefill, factors[number, "prefill"]),
                "overhead": _scaled(costs.overhead, factors[costs.draft.id, "overhead"]),
                **_verify_ratio(costs, factors[number, "verify"], mean_verify),
            }
        )
        for number, costs in enumerate(table.drafts)
    ]
    verify = _with_live(table.verify, live[-1, VERIFICATION])
    return refitted(table.model_copy(update={"verify": verify, "drafts": drafts}))


def _ratios(
    evaluator: Evaluator, result: Replay, runs: Sequence[Decoded], plain: Sequence[Decoded]
) -> dict[str, _Ratio]:
    """Measured over predicted time of every part that both have."""
    order = np.arange(len(runs)) % len(evaluator.tasks)
    plain_ms = np.array([run.decode_ms for run in plain[: len(runs)]])
    verify, draft, prefill, whole = np.array(
        [(run.verify_ms, run.draft_ms, run.draft_prefill_ms, run.decode_ms) for run in runs]
    ).T
    parts = {
        "verify": (verify, result.verify_ms),
        "draft": (draft, result.draft_ms),
        "overhead": (whole - prefill - draft - verify, result.overhead_ms),
        "prefill": (prefill, result.draft_prefill_ms),
    }
    found = {
        name: _ratio(measured, predicted[order], plain_ms, evaluator.ar_ms[order])
        for name, (measured, predicted) in parts.items()
    }
    return {name: ratio for name, ratio in found.items() if ratio is not None}


def _ratio(measured: Floats, predicted: Floats, plain: Floats, plain_predicted: Floats) -> _Ratio | None:
    rows = (measured > 0) & (predicted > 0) & (plain > 0) & (plain_predicted > 0)
    if not rows.any():
        return None
    log = math.log(measured[rows].sum() / predicted[rows].sum() / (plain[rows].sum() / plain_predicted[rows].sum()))
    logs = np.log(measured[rows] / predicted[rows]) - np.log(plain[rows] / plain_predicted[rows])
    count = len(logs)
    spread = float(logs.std(ddof=1)) / count**0.5 if count > 1 else 1.0
    return _Ratio(log, max(LEAST_ERROR, spread))


def _nearest(surface: Surface, ms: Floats, kv_length: float) -> Point:
    """The point next to the mean number of tokens, weighted by time, and to a KV length."""
    tokens = float(np.arange(len(ms)) @ ms / ms.sum())
    return min(surface.points, key=lambda point: (abs(point.tokens - tokens), abs(point.kv_length - kv_length)))


def _with_live(surface: Surface, live: Mapping[tuple[int, int], Sequence[Observation]]) -> Surface:
    def observed(point: Point) -> Point:
        found = live.get((point.tokens, point.kv_length))
        if not found:
            return point
        pooled = _pooled([_Ratio(math.log(o.ms), o.error) for o in found])
        return point.model_copy(update={"live": Observation(ms=math.exp(pooled.log), error=pooled.error)})

    return surface.model_copy(update={"points": [observed(point) for point in surface.points]})


def _pooled(ratios: Sequence[_Ratio]) -> _Ratio:
    """The mean by inverse variance."""
    weights = np.array([1 / ratio.error**2 for ratio in ratios])
    return _Ratio(float(weights @ [ratio.log for ratio in ratios] / weights.sum()), float(weights.sum() ** -0.5))


def _combined(known_error: float, ratio: _Ratio) -> tuple[float, float]:
    """The factor by which something that was known with a relative error changes, and its error afterwards."""
    share = known_error**2 / (known_error**2 + ratio.error**2)
    return math.exp(share * ratio.log), math.sqrt(share) * ratio.error


def _scaled(part: Scaled, ratios: Sequence[_Ratio]) -> Scaled:
    """A cost that was known with its uncertainty, after further observations."""
    if not ratios or not part.uncertainty:
        return part
    factor, error = _combined(part.uncertainty, _pooled(ratios))
    return part.scaled(factor).model_copy(update={"uncertainty": error})


def _verify_ratio(costs: DraftCosts, ratios: Sequence[_Ratio], mean: _Ratio) -> dict[str, float]:
    """The ratio of verifications after a draft to the mean over drafts, of which only the difference to the mean is its
    own.
    """
    if not ratios or not costs.verify_error:
        return {}
    observed = _pooled(ratios)
    factor, error = _combined(costs.verify_error, _Ratio(observed.log - mean.log, observed.error))
    return {"verify_ratio": factor * costs.verify_ratio, "verify_error": error}
