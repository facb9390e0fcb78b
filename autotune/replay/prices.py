"""Prices by a cost table: of the trees whose policies need them, and draws of what prices may truly be."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from autotune.cost.joint_fit import is_fitted, posterior_of
from autotune.cost.surface import Surface
from autotune.cost.table import CostTable, DensePrices
from autotune.documents.configuration import Tree
from autotune.documents.provenance import ModelReference
from autotune.documents.subnet import Subnet
from autotune.replay.calibration import calibrate
from autotune.replay.replay import FIRST, LEVEL, PLAIN, VERIFICATION
from autotune.replay.trace import Trace
from autotune.trees.limits import Floats
from autotune.trees.policy import POLICIES, parse_policy
from autotune.trees.priced import Calibration, TreePrices

NUM_CONTEXTS = 4  # context lengths at which trees are priced
DIGITS = 4  # of a price
NUM_DRAWS = 256


class TreePricing:
    """Prices and calibration of one draft variant, each made when it is first needed."""

    def __init__(self, trace: Trace, prices: DensePrices) -> None:
        self._trace, self._prices = trace, prices

    @functools.cached_property
    def calibration(self) -> Calibration:
        """The draft's calibration on all prompts of the trace."""
        return calibrate(self._trace)

    def complete(self, tree: Tree) -> Tree:
        """A tree with the prices and the calibration that its policy needs, where it has none; any other tree
        as it is.
        """
        if "prices" in tree or not POLICIES[tree["policy"]].needs_prices:
            return tree
        policy = parse_policy(tree)
        prices = tree_prices(self._trace, self._prices, width=policy.size.width, nodes=policy.size.nodes)
        return {**tree, "prices": prices.model_dump(), "calibration": self.calibration.model_dump()}


def tree_prices(trace: Trace, prices: DensePrices, *, width: int, nodes: int) -> TreePrices:
    """Prices of levels of up to ``width`` nodes and verifications of up to ``nodes`` draft nodes, with the time outside
    the models, at ``NUM_CONTEXTS`` context lengths of the trace.

    A draft is priced at the KV length that it has at a context length on average over the trace's prompts.
    """
    shortest = int(trace.prompt_length.min())
    longest = int((trace.prompt_length + np.diff(trace.answer_start)).max())
    contexts = np.unique(np.linspace(shortest, longest, NUM_CONTEXTS).astype(np.int64))
    num_pruned = round(float((trace.prompt_length - trace.draft_kv_length(prices.crossing_share)).mean()))
    last = len(prices.decode_ms) - 1
    target = np.minimum(contexts // prices.kv_step, last)
    draft = np.clip((contexts - num_pruned) // prices.kv_step, 0, last)
    step_ms = prices.decode_ms[target][:, None]
    widths, sizes = np.arange(width + 1), np.arange(nodes + 1)
    level_ms = prices.draft_level_ms[widths][:, draft].T + prices.overhead.level_ms * (widths > 0)
    verify_ms = prices.verify_ms[sizes + 1][:, target].T + prices.overhead.node_ms * sizes
    return TreePrices(
        contexts=tuple(contexts.tolist()),
        level=tuple(map(tuple, np.round(level_ms / step_ms, DIGITS).tolist())),
        verify=tuple(map(tuple, np.round(verify_ms / step_ms, DIGITS).tolist())),
    )


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
