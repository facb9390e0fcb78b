"""Draws of the decoding times that configurations may truly have, as far as a cost table and its prompts leave them
open.

Every draw takes prices from the posterior of the table's joint fit and weights of the prompts from a Bayesian bootstrap
(Rubin, 1981). All configurations of a draw share both, so that errors which they share cancel in comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autotune.cost.joint_fit import is_fitted, posterior_of
from autotune.cost.surface import Surface
from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration
from autotune.documents.provenance import ModelReference
from autotune.documents.subnet import Subnet
from autotune.replay.replay import FIRST, LEVEL, PLAIN, VERIFICATION
from autotune.trees.limits import Floats

if TYPE_CHECKING:
    from autotune.replay.evaluator import Evaluator

NUM_DRAWS = 256


class PriceFactors(NamedTuple):
    """True prices over those of the table, by draw."""

    steps: Floats
    """[draws, 4, tokens], as ``Replay.step_ms``."""
    overhead: Floats
    prefill: Floats


class PriceDraws:
    """Draws of the prices of a table; of a table without a fit, such as an estimate, all are its own."""

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._rng = np.random.default_rng(0)
        self._draws = posterior_of(table).draws(NUM_DRAWS) if is_fitted(table) else None
        self._overheads = {costs.draft.id: self._lognormal(costs.overhead.uncertainty) for costs in table.drafts}
        self._others = [
            (self._lognormal(costs.prefill.uncertainty), self._lognormal(costs.verify_error)) for costs in table.drafts
        ]

    def _lognormal(self, error: float | None) -> Floats:
        factors: Floats = np.exp((error or 0.0) * self._rng.standard_normal(NUM_DRAWS))
        return factors

    def plain(self) -> Floats:
        """Factors of a plain step."""
        return self._by_tokens(0, self._table.decode, 2)[:, 1]

    def of(self, draft: ModelReference, subnet: Subnet, num_tokens: int) -> PriceFactors:
        """Factors of the prices of a draft, for steps of less than ``num_tokens`` tokens."""
        low, high, weight = self._table.costs_around(draft, subnet)
        costs = low if weight < 0.5 else high
        number = next(number for number, other in enumerate(self._table.drafts) if other is costs)
        prefill, verify = self._others[number]
        steps = np.ones((NUM_DRAWS, 4, num_tokens))
        steps[:, PLAIN] = self.plain()[:, None]
        steps[:, VERIFICATION] = verify[:, None] * self._by_tokens(1, self._table.verify, num_tokens)
        steps[:, FIRST] = self._by_tokens(2 + 2 * number, costs.draft_first, num_tokens)
        steps[:, LEVEL] = self._by_tokens(3 + 2 * number, costs.draft_level, num_tokens)
        return PriceFactors(steps, self._overheads[costs.draft.id], prefill)

    def _by_tokens(self, part: int, surface: Surface, num_tokens: int) -> Floats:
        """Factors [draws, tokens] of a part, means over KV lengths."""
        if self._draws is None:
            return np.ones((NUM_DRAWS, num_tokens))
        tokens = np.array([point.tokens for point in surface.points])
        grid = np.unique(tokens)
        means = np.stack([self._draws[part][:, tokens == n].mean(1) for n in grid])  # [grid, draws]
        weights = np.stack([np.interp(np.arange(num_tokens), grid, row) for row in np.eye(len(grid))])
        factors: Floats = means.T @ weights
        return factors


def time_draws(evaluator: Evaluator, configurations: Sequence[Configuration], *, other_prompts: bool = True) -> Floats:
    """Decoding times in ms over the evaluator's prompts, or over ``other_prompts`` like them, [configurations,
    draws].
    """
    results = evaluator.replay_many(configurations)
    weights = _prompt_weights(len(evaluator.tasks)) if other_prompts else None
    times = []
    for configuration, result in zip(map(evaluator.resolve, configurations), results, strict=True):
        draft = evaluator.traces[configuration.draft or "", configuration.subnet].header.draft
        factors = evaluator.price_draws.of(draft, configuration.subnet, result.step_ms.shape[1])
        ms = np.einsum("ij,kij->k", result.step_ms, factors.steps)
        ms += result.overhead_ms.sum() * factors.overhead + result.draft_prefill_ms.sum() * factors.prefill
        times.append(ms if weights is None else ms * (weights @ result.decode_ms) / result.decode_ms.mean())
    return np.array(times)


def speedup_draws(evaluator: Evaluator, configuration: Configuration, *, other_prompts: bool = False) -> Floats:
    """Speedups over plain decoding, [draws]."""
    plain = evaluator.ar_ms.sum() * evaluator.price_draws.plain()
    if other_prompts:
        plain = plain * (_prompt_weights(len(evaluator.tasks)) @ evaluator.ar_ms) / evaluator.ar_ms.mean()
    speedups: Floats = plain / time_draws(evaluator, [configuration], other_prompts=other_prompts)[0]
    return speedups


def _prompt_weights(num_prompts: int) -> Floats:
    """[draws, prompts]; a single prompt says nothing about others, and keeps its weight."""
    return np.random.default_rng(1).dirichlet(np.ones(num_prompts), NUM_DRAWS)
