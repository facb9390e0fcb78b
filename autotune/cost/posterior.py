"""The joint fit of a cost table: prices at all sizes from the sizes that were measured, and draws of what they may truly be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autotune.cost.joint_fit import JointFit, Steps, draw
from autotune.cost.surface import Observation, Point, Surface
from autotune.documents.subnet import Subnet
from autotune.trees.limits import Floats

if TYPE_CHECKING:
    from autotune.cost.table import CostTable

TARGET, FIRST, LEVEL = range(3)  # kinds of steps that share a curve over tokens
PLAIN_STEPS, VERIFICATIONS = range(2)  # the target's networks of the fit, and their groups
CONTRADICTION = 3.0  # standard deviations
VOCABULARY_OCTAVES = 4.0  # that change a latency as much as all heads do


class SurfaceSteps(NamedTuple):
    """The sizes of a surface, what was observed at them, and whose steps they are."""

    kind: int
    network: int
    """A number for each network, the same for all of its subnets."""
    member: int
    """A number for each subnet."""
    choice: tuple[float, float]
    sizes: Sequence[tuple[int, int]]
    """(tokens, KV length)"""
    observed: Sequence[Observation | None]
    live: Sequence[Observation | None] = ()
    """As in ``Point``; empty for none."""

    @property
    def steps(self) -> Steps:
        """The steps of all sizes."""
        count = len(self.sizes)
        tokens, lengths = np.array(self.sizes, np.int64).T
        return Steps(
            kind=np.full(count, self.kind),
            group=np.full(count, self.kind * 1000 + self.network),
            member=np.full(count, self.kind * 1000 + self.member),
            tokens=tokens,
            kv_length=lengths,
            choice=np.tile(self.choice, (count, 1)),
            is_live=np.zeros(count, bool),
        )


def choice_of(subnet: Subnet) -> tuple[float, float]:
    """Mean share of heads that is left out, and the octaves by which the vocabulary is smaller, over ``VOCABULARY_OCTAVES``."""
    shares = subnet.head_shares
    return 1 - sum(shares) / len(shares), -math.log2(subnet.vocabulary or 1.0) / VOCABULARY_OCTAVES


class Posterior:
    """The joint fit of parts, of which at least one point is observed."""

    def __init__(self, parts: Sequence[SurfaceSteps]) -> None:
        self._parts = parts
        steps = Steps(*(np.concatenate(fields) for fields in zip(*(part.steps for part in parts), strict=True)))
        self._ends = np.cumsum([len(part.sizes) for part in parts])[:-1]
        observed = _found(o for part in parts for o in part.observed)
        live = _found(o for part in parts for o in part.live or [None] * len(part.sizes))
        self._observed = np.array([row for row, _ in observed], np.int64)
        fitted = steps.select(np.array([row for row, _ in (*observed, *live)], np.int64))
        self._fit = JointFit(
            fitted._replace(is_live=np.arange(len(fitted.tokens)) >= len(observed)),
            np.log([o.ms for _, o in (*observed, *live)]),
            np.array([o.error for _, o in (*observed, *live)]),
        )
        # Prices are those of decoding where decoding was observed; but its times are in plain steps, which it does not move.
        self._steps = steps._replace(is_live=bool(live) & (steps.group != PLAIN_STEPS))

    def log_ms(self) -> list[Floats]:
        """Posterior means of the logarithms of all latencies, by part. A longer KV cache and more heads are never faster."""
        means = np.split(self._fit.mean(self._steps), self._ends)
        networks: dict[tuple[int, int, float], list[int]] = {}
        for number, part in enumerate(self._parts):
            networks.setdefault((part.kind, part.network, part.choice[1]), []).append(number)
            lengths = len({kv_length for _, kv_length in part.sizes})
            means[number] = _increasing(means[number].reshape(-1, lengths), axis=1).reshape(-1)
        for subnets in networks.values():
            subnets.sort(key=lambda number: -self._parts[number].choice[0])
            if len({len(means[number]) for number in subnets}) == 1:
                of_shares = _increasing(np.array([means[number] for number in subnets]), axis=0)
                for number, mean in zip(subnets, of_shares, strict=True):
                    means[number] = mean
        return means

    def deviations(self) -> list[Floats]:
        """Posterior standard deviations of the logarithms of all latencies, by part."""
        return np.split(self._fit.deviations(self._steps), self._ends)

    def contradictions(self) -> list[Floats]:
        """How far observations are from their predictions by all others, as absolute differences of logarithms, by part: where that is
        more than ``CONTRADICTION`` standard deviations; 0 elsewhere.
        """
        errors, expected = self._fit.left_out()
        return np.split(self._by_point(np.abs(errors) * (np.abs(errors) > CONTRADICTION * expected)), self._ends)

    def _by_point(self, values: Floats) -> Floats:
        by_point = np.zeros(len(self._steps.tokens))
        by_point[self._observed] = values[: len(self._observed)]
        return by_point

    def surfaces(self, points: Sequence[Sequence[Point]]) -> list[Surface]:
        """The surface of every part, whose ``points`` get the prices of the fit."""
        left_out = np.split(self._by_point(np.expm1(np.abs(self._fit.left_out()[0]))), self._ends)
        return [
            Surface(
                points=[
                    point.model_copy(update={"fitted_ms": ms})
                    for point, ms in zip(of_part, np.exp(log_ms).tolist(), strict=True)
                ],
                held_out_error=_median(errors[[o is not None for o in part.observed]]),
                uncertainty=float(np.sqrt(np.mean(np.square(deviations)))),
            )
            for of_part, part, log_ms, deviations, errors in zip(
                points, self._parts, self.log_ms(), self.deviations(), left_out, strict=True
            )
        ]

    def draws(self, count: int, seed: int = 0) -> list[Floats]:
        """Draws of true latencies over the prices, [count, points], by part."""
        covariance = self._fit.covariance(self._steps)
        deviations = draw(np.zeros(len(covariance)), covariance, count, seed)
        return np.split(np.exp(deviations), self._ends, axis=1)


def _increasing(values: Floats, axis: int) -> Floats:
    """Values that do not decrease along an axis: the mean of the smallest such values above and the largest below."""
    above = np.maximum.accumulate(values, axis)
    below = np.flip(np.minimum.accumulate(np.flip(values, axis), axis), axis)
    return (above + below) / 2


def _found(observations: Iterable[Observation | None]) -> list[tuple[int, Observation]]:
    """Observations with their numbers."""
    return [(number, found) for number, found in enumerate(observations) if found is not None]


def _median(errors: Floats) -> float | None:
    return float(np.median(errors)) if len(errors) else None


def parts_of(table: CostTable) -> list[SurfaceSteps]:
    """The parts of a table: plain steps, verifications, and the first passes and levels of every draft."""
    networks: dict[str, int] = {}
    parts = [
        _part(TARGET, PLAIN_STEPS, PLAIN_STEPS, Subnet(), table.decode),
        _part(TARGET, VERIFICATIONS, VERIFICATIONS, Subnet(), table.verify),
    ]
    for number, costs in enumerate(table.drafts):
        network = networks.setdefault(costs.draft.sha256 or costs.draft.id, len(networks))
        subnet = Subnet(heads=costs.heads, vocabulary=costs.vocabulary)
        parts += [
            _part(FIRST, network, number, subnet, costs.draft_first),
            _part(LEVEL, network, number, subnet, costs.draft_level),
        ]
    return parts


def _part(kind: int, network: int, member: int, subnet: Subnet, surface: Surface) -> SurfaceSteps:
    points = surface.points
    sizes, observed = [(point.tokens, point.kv_length) for point in points], [point.observed for point in points]
    return SurfaceSteps(kind, network, member, choice_of(subnet), sizes, observed, [point.live for point in points])


def is_fitted(table: CostTable) -> bool:
    """Whether the table's prices are those of a joint fit, as of every measured table."""
    return any(point.observed is not None for point in table.verify.points)


def refitted(table: CostTable) -> CostTable:
    """The table with prices that take all of its observations into account."""
    points = [table.decode.points, table.verify.points]
    points += [surface.points for costs in table.drafts for surface in (costs.draft_first, costs.draft_level)]
    decode, verify, *of_drafts = Posterior(parts_of(table)).surfaces(points)
    drafts = [
        costs.model_copy(update={"draft_first": first, "draft_level": level})
        for costs, first, level in zip(table.drafts, of_drafts[::2], of_drafts[1::2], strict=True)
    ]
    return table.model_copy(update={"decode": decode, "verify": verify, "drafts": drafts})
