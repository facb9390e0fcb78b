"""Prices by a cost table of the trees whose policies need them."""

from __future__ import annotations

import functools

import numpy as np

from autotune.cost.table import DensePrices
from autotune.documents.configuration import Tree
from autotune.replay.calibration import calibrate
from autotune.replay.trace import Trace
from autotune.trees.policy import POLICIES, parse_policy
from autotune.trees.priced import Calibration, TreePrices

NUM_CONTEXTS = 4  # context lengths at which trees are priced
DIGITS = 4  # of a price


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
        prices = tree_prices(self._trace, self._prices, width=policy.max_width, nodes=policy.max_nodes)
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
