"""Prices by a cost table: of the largest rounds and of drafts, which a user may limit, and of the trees whose policies need
them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autotune.acceptance.calibration import calibrate
from autotune.acceptance.trace import Trace
from autotune.cost.draft_costs import DraftCosts
from autotune.cost.table import CostTable, DensePrices
from autotune.documents.configuration import Tree
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.trees.limits import MAX_LEVEL_STEP
from autotune.trees.policy import POLICIES, Policy, parse_policy
from autotune.trees.priced import Calibration, TreePrices

NUM_CONTEXTS = 4  # context lengths at which trees are priced
DIGITS = 4  # of a price
SMALLEST = parse_policy({"policy": "chain", "depth": 1})


class TreePricing:
    """Prices and calibration of one draft variant, each made when it is first needed."""

    def __init__(self, trace: Trace, prices: DensePrices) -> None:
        self._trace, self._prices = trace, prices

    @functools.cached_property
    def calibration(self) -> Calibration:
        """The draft's calibration on all prompts of the trace."""
        return calibrate(self._trace)

    def complete(self, tree: Tree) -> Tree:
        """A tree with the prices and the calibration that its policy needs, where it has none; any other tree as it is."""
        if "prices" in tree or not POLICIES[tree["policy"]].needs_prices:
            return tree
        policy = parse_policy(tree)
        prices = tree_prices(self._trace, self._prices, width=policy.max_width, nodes=policy.max_nodes)
        return {**tree, "prices": prices.model_dump(), "calibration": self.calibration.model_dump()}


def tree_prices(trace: Trace, prices: DensePrices, *, width: int, nodes: int) -> TreePrices:
    """Prices of levels of up to ``width`` nodes and verifications of up to ``nodes`` draft nodes, with the time outside the
    models, at ``NUM_CONTEXTS`` context lengths of the trace.

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
    level_ms = prices.draft_level_ms[widths][:, draft].T + prices.overhead_level_ms * (widths > 0)
    verify_ms = prices.verify_ms[sizes + 1][:, target].T + prices.overhead_node_ms * sizes
    return TreePrices(
        contexts=tuple(contexts.tolist()),
        level=tuple(map(tuple, np.round(level_ms / step_ms, DIGITS).tolist())),
        verify=tuple(map(tuple, np.round(verify_ms / step_ms, DIGITS).tolist())),
    )


@dataclass(frozen=True)
class Constraints:
    """Limits that a configuration must keep."""

    max_round_ms: float | None = None
    """Latency of the largest round that a policy can make: every level as wide, and the tree as large, as possible."""
    max_draft_mib: float | None = None
    """Memory of the draft: its own weights, and its KV cache at the longest prompt and answer with the largest tree."""

    def check(self, round_ms: Iterable[float], draft_mib: Iterable[float | None]) -> None:
        """Check that the limits are not below the shortest rounds and the smallest drafts.

        Raises:
            UserError: names the limit and the least value possible.
        """
        if (limit := self.max_round_ms) is not None and (least := min(round_ms)) > limit:
            raise UserError(
                f"--max-round-ms {limit:g} excludes every tree: a round with one draft token takes {least:.2f} ms; give more"
            )
        if (limit := self.max_draft_mib) is not None:
            sizes = [size for size in draft_mib if size is not None]
            if sizes and min(sizes) > limit:
                raise UserError(
                    f"--max-draft-mib {limit:g} excludes every draft: the smallest takes {min(sizes):.1f} MiB; "
                    "give more, or name a smaller draft"
                )

    def check_table(self, table: CostTable) -> None:
        """``check`` the limits at empty KV caches, before anything is recorded."""
        prices = (
            table.prices(costs.draft, max_tokens=2, max_kv_length=0, subnet=Subnet(heads=costs.heads))
            for costs in table.drafts
        )
        self.check(
            (largest_round_ms(of_draft, SMALLEST) for of_draft in prices),
            (memory_mib(costs, table.precision, 0) for costs in table.drafts),
        )


def largest_round_ms(prices: DensePrices, policy: Policy) -> float:
    """Latency of the largest round that a policy can make, at the longest KV length that is priced."""
    levels = policy.max_depth
    num_full, rest = divmod(policy.max_width, MAX_LEVEL_STEP)
    longest = prices.draft_level_ms[:, -1]
    level_ms = num_full * longest[min(MAX_LEVEL_STEP, len(longest) - 1)] + longest[min(rest, len(longest) - 1)]
    draft_ms = prices.draft_first_ms[1, -1] + (levels - 1) * level_ms
    overhead_ms = (
        prices.overhead_round_ms + levels * prices.overhead_level_ms + policy.max_nodes * prices.overhead_node_ms
    )
    return float(draft_ms + prices.verify_ms[policy.max_nodes + 1, -1] + overhead_ms)


def memory_mib(costs: DraftCosts, precision: str, num_tokens: int) -> float | None:
    """MiB of a draft's own weights and of its KV cache for ``num_tokens``; None where the cost table has no sizes."""
    if costs.num_parameters is None or costs.kv_bytes_per_token is None:
        return None
    width: float = {"float32": 4, "float64": 8}.get(precision.partition(",")[0], 2)
    if costs.shape is not None:
        width = costs.shape.bytes_per_parameter
    return (costs.num_parameters * width + costs.kv_bytes_per_token * num_tokens) / 2**20
