"""One joint fit of the latencies of all steps, which gives prices at all sizes from those that were measured, and draws
of what they may truly be: a Gaussian process over the logarithms of the times (Rasmussen and Williams, 2006, algorithm
2.1 and equations 5.10 to 5.12).

Sizes of one network share a curve over tokens, the effect of the KV length, of the shares of heads and vocabulary and
of the weights, and the kernels that a number of tokens needs. So a sample of one subnet tells about the others, a size
that contradicts all of its neighbors is believed only as far as its samples allow, and errors of prices are correlated
as the physics is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autotune.cost.surface import Point, Surface
from autotune.documents.subnet import Subnet
from autotune.trees.limits import Floats, Ints

if TYPE_CHECKING:
    from autotune.cost.table import CostTable

TARGET, FIRST, LEVEL = range(3)  # kinds of steps that share a curve over tokens
PLAIN_STEPS, VERIFICATIONS = range(2)  # the target's networks of the fit, and their groups
CONTRADICTION = 3.0  # standard deviations
VOCABULARY_OCTAVES = 4.0  # that change a latency as much as all heads do
# Standard deviations of the logarithm of a latency, before anything is measured.
NETWORK = 1.0  # of a network's steps of one kind
SHARED_CURVE = 1.0
SHARED_KERNELS = 0.05
CURVE = 0.5  # over tokens, smooth within CURVE_OCTAVES
CURVE_OCTAVES = 2.0
CONTEXT = 0.3  # over KV lengths, smooth within CONTEXT_OCTAVES
CONTEXT_OCTAVES = 3.0
CHOICE = 0.5  # from none to all heads, by a factor of 16 in the vocabulary, or by weights in another data type
KERNELS = 0.03  # of a number of tokens, at every KV length and in every subnet
MEMBER = 0.02  # of one subnet, besides its shares of heads and vocabulary and its weights
LIVE = 0.07  # of decoding against the same steps timed one by one, the same for all networks
NETWORK_LIVE = 0.1  # the same, of one network's steps of one kind
JITTER = 1e-4  # relative error of the most precise observation


STEP = np.dtype(
    [
        ("kind", int),
        ("group", int),  # equal for steps of one network and kind: ``draft_level`` of a draft with all its subnets
        ("member", int),  # equal for steps of one subnet and kind
        ("tokens", int),
        ("kv_length", int),
        ("choice", float, 3),  # ``choice_of`` the subnet
        ("is_live", bool),  # whether the time is that of decoding, not of steps timed one by one
    ]
)
"""Entries of arrays of forward passes."""
Steps = Any
"""A record array of ``STEP``."""


def _prior(a: Steps, b: Steps) -> Floats:
    """Covariances of the logarithms of latencies, whose arrays are broadcast: variances where ``a`` is ``b``."""

    def near(x: Ints, y: Ints, octaves: float) -> Floats:
        distance = np.log2(np.maximum(x, 1)) - np.log2(np.maximum(y, 1))
        return np.exp(-0.5 * np.square(distance / octaves))

    curve = near(a.tokens, b.tokens, CURVE_OCTAVES)
    context = near(a.kv_length, b.kv_length, CONTEXT_OCTAVES)
    choices = (a.choice * b.choice).sum(-1)
    same_kernels, of_decoding = a.tokens == b.tokens, a.is_live & b.is_live
    of_network = (
        NETWORK**2
        + CURVE**2 * curve
        + (1 + curve) / 2 * (CONTEXT**2 * context + CHOICE**2 * choices)
        + KERNELS**2 * same_kernels
    )
    return (
        (a.kind == b.kind) * (SHARED_CURVE**2 * curve + SHARED_KERNELS**2 * same_kernels)
        + (a.group == b.group) * (of_network + NETWORK_LIVE**2 * of_decoding)
        + (a.member == b.member) * (MEMBER**2 * (1 + curve) / 2)
        + LIVE**2 * of_decoding
    )


class SurfaceSteps(NamedTuple):
    """The points of a surface, with what was observed at them, and whose steps they are."""

    kind: int
    network: int
    """A number for each network, the same for all of its subnets."""
    member: int
    """A number for each subnet."""
    subnet: Subnet
    points: Sequence[Point]


def choice_of(subnet: Subnet) -> tuple[float, float, float]:
    """Mean share of heads that is left out, the octaves by which the vocabulary is smaller, over
    ``VOCABULARY_OCTAVES``, and 1 for weights in another data type than the target's.
    """
    shares = subnet.head_shares
    return (
        1 - sum(shares) / len(shares),
        -math.log2(subnet.vocabulary or 1.0) / VOCABULARY_OCTAVES,
        float(subnet.weights is not None),
    )


class Posterior:
    """The joint fit of parts; of every kind, each network has an observed point."""

    def __init__(self, parts: Sequence[SurfaceSteps]) -> None:
        from scipy.linalg import cho_factor, cho_solve

        self._parts = parts
        counts = [len(part.points) for part in parts]
        self._ends = np.cumsum(counts)[:-1]
        points, of_part = [point for part in parts for point in part.points], np.repeat(np.arange(len(parts)), counts)
        kind, network, member = np.array([part[:3] for part in parts])[of_part].T
        sizes = [[point.tokens for point in points], [point.kv_length for point in points]]
        choices = np.array([choice_of(part.subnet) for part in parts])[of_part]
        columns = [kind, 1000 * kind + network, 1000 * kind + member, *sizes, choices, np.zeros(len(points), bool)]
        self._steps: Steps = np.rec.fromarrays([np.array(column) for column in columns], dtype=STEP)
        timed = [(row, point.observed) for row, point in enumerate(points) if point.observed is not None]
        live = [(row, point.live) for row, point in enumerate(points) if point.live is not None]
        rows = np.array([row for row, _ in (*timed, *live)])
        log_ms = np.log([observation.ms for _, observation in (*timed, *live)])
        errors = np.array([observation.error for _, observation in (*timed, *live)])
        self._timed, observed = rows[: len(timed)], self._steps[rows]
        observed.is_live = np.arange(len(rows)) >= len(timed)
        # Prices are those of decoding where decoding was observed; but its times are in plain steps, which it does not
        # move.
        self._steps.is_live = bool(live) & (self._steps.group != PLAIN_STEPS)
        # Algorithm 2.1, around the mean of the observations of each group.
        groups = 1 + int(self._steps.group.max())
        means = np.bincount(observed.group, log_ms, groups) / np.maximum(1, np.bincount(observed.group, None, groups))
        covariance = _prior(observed[:, None], observed) + np.diag(np.maximum(errors, JITTER) ** 2)
        self._inverse: Floats = cho_solve(cho_factor(covariance, lower=True), np.eye(len(rows)))
        self._weights: Floats = self._inverse @ (log_ms - means[observed.group])
        self._across = _prior(self._steps[:, None], observed)
        """[points, observations]"""
        self._mean: Floats = means[self._steps.group] + self._across @ self._weights
        """Means of the logarithms of latencies, [points]."""

    def _covariance(self) -> Floats:
        """Covariance of the logarithms of latencies, [points, points]."""
        return _prior(self._steps[:, None], self._steps) - self._across @ self._inverse @ self._across.T

    def deviations(self) -> list[Floats]:
        """Standard deviations of the logarithms of all latencies, by part."""
        explained = np.einsum("ij,ij->i", self._across @ self._inverse, self._across)
        variances = np.maximum(_prior(self._steps, self._steps) - explained, 0.0)
        return np.split(np.sqrt(variances), self._ends)

    def _left_out(self) -> tuple[Floats, Floats]:
        """Errors of the prediction of every observation from all others, and the standard deviations that they should
        have.
        """
        inverse = np.diag(self._inverse)
        return -self._weights / inverse, np.sqrt(1 / inverse)

    def log_ms(self) -> list[Floats]:
        """Means of the logarithms of all latencies, by part. A longer KV cache and more heads are never faster."""
        means = np.split(self._mean, self._ends)
        networks: dict[tuple[int, int, tuple[float, ...]], list[int]] = defaultdict(list)
        for number, part in sorted(enumerate(self._parts), key=lambda item: -choice_of(item[1].subnet)[0]):
            networks[part.kind, part.network, choice_of(part.subnet)[1:]].append(number)
            lengths = len({point.kv_length for point in part.points})
            means[number] = _increasing(means[number].reshape(-1, lengths), axis=1).reshape(-1)
        for subnets in networks.values():
            of_shares = _increasing(np.array([means[number] for number in subnets]), axis=0)
            for number, mean in zip(subnets, of_shares, strict=True):
                means[number] = mean
        return means

    def contradictions(self) -> list[Floats]:
        """How far observations are from their predictions by all others, as absolute differences of logarithms, by
        part: where that is more than ``CONTRADICTION`` standard deviations; 0 elsewhere.
        """
        errors, expected = self._left_out()
        return self._by_part(np.abs(errors) * (np.abs(errors) > CONTRADICTION * expected))

    def _by_part(self, values: Floats) -> list[Floats]:
        """Values of the observations by part; 0 at points whose steps were not timed one by one."""
        by_point = np.zeros(len(self._mean))
        by_point[self._timed] = values[: len(self._timed)]
        return np.split(by_point, self._ends)

    def surfaces(self) -> list[Surface]:
        """The surface of every part, whose points get the prices of the fit."""
        left_out = self._by_part(np.expm1(np.abs(self._left_out()[0])))
        surfaces = []
        for part, log_ms, deviations, errors in zip(
            self._parts, self.log_ms(), self.deviations(), left_out, strict=True
        ):
            prices = zip(part.points, np.exp(log_ms).tolist(), strict=True)
            of_timed = errors[[point.observed is not None for point in part.points]]
            surfaces.append(
                Surface(
                    points=[point.model_copy(update={"fitted_ms": ms}) for point, ms in prices],
                    held_out_error=float(np.median(of_timed)) if len(of_timed) else None,
                    uncertainty=float(np.sqrt(np.mean(np.square(deviations)))),
                )
            )
        return surfaces

    def draws(self, count: int) -> list[Floats]:
        """Draws of true latencies over the prices, [count, points], by part."""
        logs = np.random.default_rng(0).multivariate_normal(
            np.zeros(len(self._mean)), self._covariance(), count, check_valid="ignore", method="eigh"
        )
        return np.split(np.exp(logs), self._ends, axis=1)


def _increasing(values: Floats, axis: int) -> Floats:
    """Values that do not decrease along an axis: the mean of the smallest such values above and the largest below."""
    above = np.maximum.accumulate(values, axis)
    below = np.flip(np.minimum.accumulate(np.flip(values, axis), axis), axis)
    return (above + below) / 2


def posterior_of(table: CostTable) -> Posterior:
    """The joint fit of a table's parts: plain steps, verifications, and the first passes and levels of every draft."""
    networks: dict[str, int] = {}
    parts = [
        SurfaceSteps(TARGET, PLAIN_STEPS, PLAIN_STEPS, Subnet(), table.decode.points),
        SurfaceSteps(TARGET, VERIFICATIONS, VERIFICATIONS, Subnet(), table.verify.points),
    ]
    for number, costs in enumerate(table.drafts):
        network = networks.setdefault(costs.draft.sha256 or costs.draft.id, len(networks))
        for kind, surface in ((FIRST, costs.draft_first), (LEVEL, costs.draft_level)):
            parts.append(SurfaceSteps(kind, network, number, costs.subnet, surface.points))
    return Posterior(parts)


def is_fitted(table: CostTable) -> bool:
    """Whether the table's prices are those of a joint fit, as of every measured table."""
    return any(point.observed is not None for point in table.verify.points)


def refitted(table: CostTable) -> CostTable:
    """The table with prices that take all of its observations into account."""
    decode, verify, *of_drafts = posterior_of(table).surfaces()
    drafts = [
        costs.model_copy(update={"draft_first": first, "draft_level": level})
        for costs, first, level in zip(table.drafts, of_drafts[::2], of_drafts[1::2], strict=True)
    ]
    return table.model_copy(update={"decode": decode, "verify": verify, "drafts": drafts})
