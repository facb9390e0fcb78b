"""One joint fit of the latencies of all steps: a Gaussian process over the logarithms of the times (Rasmussen and Williams,
2006, algorithm 2.1 and equations 5.10 to 5.12).

Sizes of one network share a curve over tokens, the effect of the KV length and of the shares of heads and vocabulary, and the
kernels that a number of tokens needs. So a sample of one subnet tells about the others, a size that contradicts all of its
neighbors is believed only as far as its samples allow, and errors of prices are correlated as the physics is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.trees.limits import Floats, Ints

# Standard deviations of the logarithm of a latency, before anything is measured.
LEVEL = 1.0  # of a network's steps of one kind
SHARED_CURVE = 1.0
SHARED_KERNELS = 0.05
CURVE = 0.5  # over tokens, smooth within CURVE_OCTAVES
CURVE_OCTAVES = 2.0
CONTEXT = 0.3  # over KV lengths, smooth within CONTEXT_OCTAVES
CONTEXT_OCTAVES = 3.0
CHOICE = 0.5  # from none to all heads, or by a factor of 16 in the vocabulary
KERNELS = 0.03  # of a number of tokens, at every KV length and in every subnet
MEMBER = 0.02  # of one subnet, besides its shares of heads and vocabulary
LIVE = 0.07  # of decoding against the same steps timed one by one, the same for all networks
NETWORK_LIVE = 0.1  # the same, of one network's steps of one kind
JITTER = 1e-4  # relative error of the most precise observation


class Steps(NamedTuple):
    """Sizes of forward passes, an entry for each."""

    kind: Ints
    """Equal for plain steps and verifications, a draft's first forward passes, and its levels."""
    group: Ints
    """Equal for steps of one network and kind: ``verify``, ``draft_level`` of a draft with all of its subnets."""
    member: Ints
    """Equal for steps of one subnet and kind."""
    tokens: Ints
    kv_length: Ints
    choice: Floats
    """[steps, 2]: shares of heads and binary logarithm of the vocabulary's share, over 4."""
    is_live: NDArray[np.bool_]
    """Whether the time is that of decoding, not of steps timed one by one."""

    def select(self, rows: NDArray[np.bool_] | Ints) -> Steps:
        """Some of the steps."""
        kind, group, member, tokens, kv_length, choice, is_live = self
        return Steps(kind[rows], group[rows], member[rows], tokens[rows], kv_length[rows], choice[rows], is_live[rows])


def _prior(a: Steps, b: Steps) -> Floats:
    """Covariance of the logarithms of two sets of latencies, [a, b]."""

    def near(x: Ints, y: Ints, octaves: float) -> Floats:
        distance = np.log2(np.maximum(x, 1))[:, None] - np.log2(np.maximum(y, 1))[None]
        smooth: Floats = np.exp(-0.5 * np.square(distance / octaves))
        return smooth

    curve = near(a.tokens, b.tokens, CURVE_OCTAVES)
    context = near(a.kv_length, b.kv_length, CONTEXT_OCTAVES)
    choices = a.choice @ b.choice.T
    of_network = (
        LEVEL**2
        + CURVE**2 * curve
        + (1 + curve) / 2 * (CONTEXT**2 * context + CHOICE**2 * choices)
        + KERNELS**2 * (a.tokens[:, None] == b.tokens)
    )
    of_subnet = MEMBER**2 * (1 + curve) / 2
    of_kind = SHARED_CURVE**2 * curve + SHARED_KERNELS**2 * (a.tokens[:, None] == b.tokens)
    of_decoding = a.is_live[:, None] & b.is_live
    covariance: Floats = (
        (a.kind[:, None] == b.kind) * of_kind
        + (a.group[:, None] == b.group) * (of_network + NETWORK_LIVE**2 * of_decoding)
        + (a.member[:, None] == b.member) * of_subnet
        + LIVE**2 * of_decoding
    )
    return covariance


class JointFit:
    """The posterior of the logarithms of latencies, given observations.

    Args:
        steps: the observed sizes; a size may be observed more than once.
        log_ms: logarithms of the observed latencies.
        errors: their relative standard errors.
    """

    def __init__(self, steps: Steps, log_ms: Floats, errors: Floats) -> None:
        from scipy.linalg import cho_factor

        self.steps = steps
        self._groups, of_step = np.unique(steps.group, return_inverse=True)
        self._means = np.bincount(of_step, log_ms) / np.bincount(of_step)
        noise = np.square(np.maximum(errors, JITTER))
        self._factor = cho_factor(_prior(steps, steps) + np.diag(noise), lower=True)
        self._weights = self._solve(log_ms - self._means[of_step])

    def _solve(self, right: Floats) -> Floats:
        from scipy.linalg import cho_solve

        solution: Floats = cho_solve(self._factor, right)
        return solution

    def mean(self, at: Steps) -> Floats:
        """Posterior means of log latencies."""
        means: Floats = self._prior_mean(at) + _prior(at, self.steps) @ self._weights
        return means

    def _prior_mean(self, at: Steps) -> Floats:
        """The mean of the observations of each step's group; of a group without any, the mean over groups."""
        nearest = np.minimum(np.searchsorted(self._groups, at.group), len(self._groups) - 1)
        means: Floats = np.where(self._groups[nearest] == at.group, self._means[nearest], self._means.mean())
        return means

    def covariance(self, at: Steps) -> Floats:
        """Posterior covariance of log latencies."""
        across = _prior(at, self.steps)
        covariance: Floats = _prior(at, at) - across @ self._solve(across.T)
        return covariance

    def deviations(self, at: Steps) -> Floats:
        """Posterior standard deviations of log latencies."""
        across = _prior(at, self.steps)
        own = (
            SHARED_CURVE**2
            + SHARED_KERNELS**2
            + LEVEL**2
            + CURVE**2
            + CONTEXT**2
            + CHOICE**2 * np.square(at.choice).sum(1)
            + KERNELS**2
            + MEMBER**2
        )
        explained = np.einsum("ij,ji->i", across, self._solve(across.T))
        return np.sqrt(np.maximum(own + (LIVE**2 + NETWORK_LIVE**2) * at.is_live - explained, 0.0))

    def left_out(self) -> tuple[Floats, Floats]:
        """Errors of the prediction of every observation from all others, and the standard deviations that they should have."""
        inverse = np.diag(self._solve(np.eye(len(self._weights))))
        return -self._weights / inverse, np.sqrt(1 / inverse)


def draw(mean: Floats, covariance: Floats, count: int, seed: int) -> Floats:
    """``count`` draws of a normal distribution, [count, ...]."""
    values, vectors = np.linalg.eigh(covariance)
    scale = vectors * np.sqrt(np.maximum(values, 0.0))
    normal = np.random.default_rng(seed).standard_normal((count, len(mean)))
    draws: Floats = mean + normal @ scale.T
    return draws
