"""The fastest configuration of an engine's own space, by replay. Loads no torch.

Engines prepare their shapes: every level drafts as many nodes, and every verification reads as many tokens, as were
configured, whatever a round needs. So trees are priced here: a tree of ours that ends early costs less in our runtime.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.acceptance.replay import plain_decode_ms, replay
from autotune.acceptance.trace import Trace
from autotune.cost.table import CostTable, DensePrices
from autotune.search.evaluator import Evaluator
from autotune.trees.chain import ChainPolicy
from autotune.trees.eagle2 import Eagle2Policy
from autotune.trees.tree import Floats

EngineTree = ChainPolicy | Eagle2Policy
LARGEST_BUDGET = 128


@dataclass(frozen=True)
class Choice:
    """A tree, and what replay says of it."""

    tree: EngineTree
    ms_per_token: float
    tokens_per_round: float
    speedup: float
    """Over plain decoding of as large a batch."""

    @property
    def rank(self) -> tuple[float, int]:
        """Fastest first; of equal ones the smaller tree."""
        return self.ms_per_token, self.tree.max_nodes


@dataclass(frozen=True)
class BatchRange:
    """How many tokens to draft while so many requests, ``end`` included, are decoded together; 0: speculation rests."""

    start: int
    end: int
    draft_tokens: int
    least_speedup: float
    """Of the batch sizes in the range."""


class EngineReplay:
    """Trees as an engine runs them, along a trace."""

    def __init__(self, trace: Trace, table: CostTable, *, prompts: NDArray[np.bool_] | None = None) -> None:
        """``prompts`` [prompts]: those that count; None: all.

        Raises:
            UserError: answers too short to decode.
        """
        (self._prices,) = Evaluator([trace], table).prices.values()
        self.trace = trace
        self.largest_step = self._prices.verify_ms.shape[0] - 1
        """Tokens of the largest forward that is priced."""
        self._prompts = np.ones(trace.num_prompts, bool) if prompts is None else prompts

    def chains(self) -> Iterator[ChainPolicy]:
        """All lengths that the trace holds and the table prices."""
        deepest = min(self.trace.header.bounds.depth, self.largest_step - 1)
        return (ChainPolicy(depth=depth) for depth in range(1, deepest + 1))

    def trees(self) -> Iterator[Eagle2Policy]:
        """EAGLE-2's trees, as wide and deep as the trace holds all of them, in every size up to 16 nodes and in ever fewer
        larger ones; none that is but a chain.
        """
        bounds = self.trace.header.bounds
        for depth in range(2, min(bounds.beam_depth, bounds.depth) + 1):
            for k in range(2, min(bounds.beam, bounds.num_proposals) + 1):
                most = min(Eagle2Policy(depth=depth, k=k).max_grown, LARGEST_BUDGET, self.largest_step - 1)
                for budget in range(depth + 1, most + 1):
                    if budget % max(1, budget // 16) == 0:
                        yield Eagle2Policy(depth=depth, k=k, budget=budget)

    def fastest(self, trees: Iterable[EngineTree]) -> Choice | None:
        """Of one request at a time; None where there is no tree."""
        _ = self.trace.packed  # laid out once, before the threads ask for it
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            return min(pool.map(self.price, trees), key=lambda choice: choice.rank, default=None)

    def price(self, tree: EngineTree, batch: int = 1) -> Choice:
        """A tree's figures, of ``batch`` requests in step (see ``schedule``)."""
        prices = _prepared(self._prices, tree, batch)
        result = replay(self.trace, tree, prices)
        # Levels that our trees end without, and an engine drafts all the same: priced in the middle of each answer.
        middle = (self.trace.draft_prompt_length + result.tokens // 2) // prices.kv_step
        level_ms = prices.draft_ms[-1, np.minimum(middle, prices.draft_ms.shape[1] - 1)] + prices.overhead_level_ms
        idle_ms = level_ms * (result.rounds * tree.max_depth - result.draft_forwards)
        ms, plain_ms, tokens, rounds = (
            float(per_prompt[self._prompts].sum())
            for per_prompt in (
                result.decode_ms + idle_ms,
                plain_decode_ms(self.trace, prices),
                result.tokens,
                result.rounds,
            )
        )
        return Choice(tree, ms / tokens, tokens / rounds, plain_ms / ms)

    def schedule(self, longest: ChainPolicy) -> list[BatchRange]:
        """How long a chain to draft at every batch size, as far as the table reaches; nothing if that is one request.

        ``batch`` requests go in step, so that a verification of k + 1 tokens of each is priced as one forward of ``batch *
        (k + 1)`` tokens, a draft level as one of ``batch``, a plain step as a verification of ``batch`` tokens; what is
        outside the models comes once. Accepted lengths do not depend on the batch. Left out is that every request brings a
        cache of its own to attend to, in plain decoding as in rounds. A larger batch never drafts more than a smaller
        one, so the schedule ends where the last length chosen is priced no more; nothing is extrapolated.
        """
        sizes = [(1, longest.depth, self.price(longest).speedup)]
        while (batch := sizes[-1][0] + 1) * (sizes[-1][1] + 1) <= self.largest_step:
            shorter = [self.price(ChainPolicy(depth=depth), batch) for depth in range(1, sizes[-1][1] + 1)]
            best = min(shorter, key=lambda choice: choice.rank, default=None)
            pays = best is not None and best.speedup > 1.0
            sizes.append((batch, best.tree.max_depth, best.speedup) if best and pays else (batch, 0, 1.0))
        ranges: list[BatchRange] = []
        for batch, depth, speedup in sizes:
            if ranges and ranges[-1].draft_tokens == depth:
                least = min(ranges[-1].least_speedup, speedup)
                ranges[-1] = dataclasses.replace(ranges[-1], end=batch, least_speedup=least)
            else:
                ranges.append(BatchRange(batch, batch, depth, speedup))
        return ranges if len(sizes) > 1 else []


def _prepared(prices: DensePrices, tree: EngineTree, batch: int) -> DensePrices:
    """Prices of an engine that runs ``tree`` with ``batch`` requests in step: by tokens of one request, as before."""
    size, width = tree.max_nodes + 1, tree.max_width

    def always(table: Floats, tokens: int, *, rows: int) -> Floats:
        return np.repeat(table[tokens][None], rows + 1, axis=0)

    prefill = prices.draft_prefill
    return dataclasses.replace(
        prices,
        decode_ms=prices.decode_ms if batch == 1 else prices.verify_ms[batch],
        draft_first_ms=np.ascontiguousarray(prices.draft_first_ms[::batch][: size + 1]),
        draft_ms=always(prices.draft_ms, width * batch, rows=width),
        verify_ms=always(prices.verify_ms, size * batch, rows=size),
        draft_prefill=prefill.model_copy(
            update={name: batch * getattr(prefill, name) for name in ("intercept_ms", "per_token_ms", "image_ms")}
        ),
    )
