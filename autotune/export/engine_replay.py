"""Replay of trees as a serving engine runs them, and the fastest tree within an engine's space. Loads no torch.

Engines prepare fixed shapes: every level drafts, and every verification reads, the configured number of tokens, whatever a
round needs. Replay here charges for those shapes, so a tree that ends early costs more than in this project's runtime.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from autotune.acceptance.replay import plain_decode_ms, replay
from autotune.acceptance.trace import Trace
from autotune.cost.table import CostTable, DensePrices
from autotune.documents.decoding_profile import Predicted
from autotune.errors import UserError
from autotune.export.document import BatchPrediction
from autotune.export.engine_prices import EnginePrices
from autotune.prediction.evaluator import Evaluator
from autotune.trees.base import TreePolicy
from autotune.trees.chain import ChainPolicy
from autotune.trees.eagle2 import Eagle2Policy
from autotune.trees.tree import Floats

MAX_BUDGET = 128


@dataclass(frozen=True)
class PricedTree:
    tree: TreePolicy
    predicted: Predicted
    """The speedup is over plain decoding of an equal batch."""

    @property
    def rank(self) -> tuple[float, int]:
        """Fastest first; ties go to the smaller tree."""
        return self.predicted.ms_per_token, self.tree.max_nodes


class EngineReplay:
    prices_batches: ClassVar[bool] = False
    """Whether batches of several requests were measured."""

    def __init__(
        self,
        trace: Trace,
        table: CostTable,
        *,
        prompts: NDArray[np.bool_] | None = None,
        draft_tokens: int | None = None,
    ) -> None:
        """
        Args:
            prompts: [prompts], selects those that count; None: all.
            draft_tokens: the length of the only chain of the space, in which there are no trees and no schedule; None: all.

        Raises:
            UserError: the answers are too short to decode, or the trace holds no chain of ``draft_tokens``.
        """
        (self.prices,) = Evaluator([trace], table).prices.values()
        if trace.header.visual_input == "placeholders":  # the draft encodes no image
            prefill = self.prices.draft_prefill.model_copy(update={"image_ms": 0.0})
            self.prices = dataclasses.replace(self.prices, draft_prefill=prefill)
        self.trace = trace
        self.is_estimated = table.estimated
        self.max_tokens = self.prices.verify_ms.shape[0] - 1
        """Tokens of the largest forward pass that the table prices."""
        self.prompts = np.ones(trace.num_prompts, bool) if prompts is None else prompts
        self.draft_tokens = draft_tokens
        if draft_tokens is not None and not any(self.chains()):
            raise UserError(
                f"--draft-tokens {draft_tokens}: the trace of {trace.header.draft.id} and the cost table hold chains of 1 to "
                f"{self._max_depth} tokens; give one of them"
            )

    @property
    def _max_depth(self) -> int:
        """Longest chain that the trace holds and the table prices."""
        return min(self.trace.header.bounds.depth, self.max_tokens - 1)

    def _is_priced(self, batch: int, draft_tokens: int) -> bool:
        return batch * (draft_tokens + 1) <= self.max_tokens

    def chains(self) -> Iterator[ChainPolicy]:
        """Every length that the trace holds and the table prices, or the length ``draft_tokens`` alone."""
        depths = range(1, self._max_depth + 1)
        return (ChainPolicy(depth=depth) for depth in depths if self.draft_tokens in (None, depth))

    def trees(self) -> Iterator[Eagle2Policy]:
        """EAGLE-2 trees that the trace holds in full. Every budget up to 16 nodes is tried, larger ones in growing steps;
        trees that are chains are left out.
        """
        bounds = self.trace.header.bounds
        if self.draft_tokens is not None:
            return
        for depth in range(2, min(bounds.beam_depth, bounds.depth) + 1):
            for k in range(2, min(bounds.beam, bounds.num_proposals) + 1):
                max_budget = min(Eagle2Policy(depth=depth, k=k).max_grown, MAX_BUDGET, self.max_tokens - 1)
                for budget in range(depth + 1, max_budget + 1):
                    if budget % max(1, budget // 16) == 0:
                        yield Eagle2Policy(depth=depth, k=k, budget=budget)

    def fastest(self, trees: Iterable[TreePolicy]) -> PricedTree | None:
        """The fastest tree for one request at a time; None without trees."""
        _ = self.trace.packed  # computed once, before the threads need it
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            return min(pool.map(self.price, trees), key=lambda priced: priced.rank, default=None)

    def price(self, tree: TreePolicy, batch: int = 1) -> PricedTree:
        """Replay a tree with ``batch`` requests in lockstep (see ``schedule``)."""
        prices = _fixed_shape_prices(self.prices, tree, batch)
        result = replay(self.trace, tree, prices)
        # An engine drafts the levels that our trees skip too; they are priced at the middle of each answer.
        middle = (self.trace.draft_kv_length(prices.crossing_share) + result.tokens // 2) // prices.kv_step
        level_ms = (
            prices.draft_level_ms[-1, np.minimum(middle, prices.draft_level_ms.shape[1] - 1)] + prices.overhead_level_ms
        )
        skipped_ms = level_ms * (result.rounds * tree.max_depth - result.draft_forwards)
        per_prompt = (plain_decode_ms(self.trace, prices), result.decode_ms + skipped_ms, result.tokens, result.rounds)
        return PricedTree(tree, predicted_on(self.prompts, *per_prompt, is_estimated=self.is_estimated))

    def schedule(self, longest: int) -> list[BatchPrediction]:
        """The best chain length up to ``longest`` for every batch size that the table prices; empty if it prices one
        request only, or with ``draft_tokens``.

        ``batch`` requests run in lockstep: a verification of k + 1 tokens each is priced as one forward pass of ``batch *
        (k + 1)`` tokens, a draft level as one of ``batch`` tokens, a plain step as a verification of ``batch`` tokens;
        overhead outside the models counts once. Accepted lengths do not depend on the batch. The KV cache that every
        further request reads is not priced, neither in plain decoding nor in rounds. A larger batch never drafts more
        tokens than a smaller one (with measured prices: than one request); the schedule ends where the table no longer
        prices the last length, without extrapolation.
        """
        if self.draft_tokens is not None:
            return []
        sizes = [(1, longest, self.price(ChainPolicy(depth=longest)).predicted.speedup)]
        while self._is_priced(batch := sizes[-1][0] + 1, sizes[-1][1]):
            lengths = range(1, (longest if self.prices_batches else sizes[-1][1]) + 1)
            priced = [self.price(ChainPolicy(depth=depth), batch) for depth in lengths]
            best = min(priced, key=lambda choice: choice.rank, default=None)
            if best is None or best.predicted.speedup <= 1.0:
                sizes.append((batch, 0, 1.0))
            else:
                sizes.append((batch, best.tree.max_depth, best.predicted.speedup))
        if len(sizes) == 1:
            return []
        ranges = []
        for draft_tokens, group in itertools.groupby(sizes, key=lambda size: size[1]):
            batches, _, speedups = zip(*group, strict=True)
            ranges.append(
                BatchPrediction(
                    start=batches[0],
                    end=batches[-1],
                    draft_tokens=draft_tokens,
                    least_speedup=min(speedups),
                    estimated=self.is_estimated or (batches[-1] > 1 and not self.prices_batches),
                )
            )
        return ranges


class MeasuredReplay(EngineReplay):
    """Replays chains at the prices that were measured in the engine. Only they count; the table prices nothing.

    A round of a batch costs what the engine's time was for it, with the requests that shared its steps, and a draft what it adds
    to a prefill.
    """

    prices_batches = True

    def __init__(
        self,
        trace: Trace,
        table: CostTable,
        measured: EnginePrices,
        *,
        prompts: NDArray[np.bool_] | None = None,
        draft_tokens: int | None = None,
    ) -> None:
        self.measured = measured
        super().__init__(trace, table, prompts=prompts, draft_tokens=draft_tokens)
        self.is_estimated = False
        self._counts: dict[int, tuple[int, int]] = {}

    @property
    def _max_depth(self) -> int:
        return min(super()._max_depth, self.measured.draft_lengths[-1])

    def _is_priced(self, batch: int, draft_tokens: int) -> bool:
        return batch <= self.measured.batch_sizes[-1]

    def trees(self) -> Iterator[Eagle2Policy]:
        """None: only chains were measured."""
        return iter(())

    def gains(self) -> dict[int, PricedTree]:
        """The fastest chain at each measured number of requests at which it is faster than plain decoding."""
        fastest = {
            size: min((self.price(chain, size) for chain in self.chains()), key=lambda priced: priced.rank)
            for size in self.measured.batch_sizes
        }
        return {size: priced for size, priced in fastest.items() if priced.predicted.speedup > 1.0}

    def price(self, tree: TreePolicy, batch: int = 1) -> PricedTree:
        depth = tree.max_depth
        if depth not in self._counts:
            result = replay(self.trace, tree, self.prices)
            self._counts[depth] = int(result.tokens[self.prompts].sum()), int(result.rounds[self.prompts].sum())
        tokens, rounds = self._counts[depth]
        prefill_ms = self.measured.draft_prefill_ms(batch) * int(self.prompts.sum())
        ms = rounds * self.measured.round_ms(batch, depth) + prefill_ms
        predicted = Predicted(
            speedup=tokens * self.measured.round_ms(batch, 0) / ms,
            ms_per_token=ms / tokens,
            tokens_per_round=tokens / rounds,
        )
        return PricedTree(tree, predicted)


def predicted_on(prompts: NDArray[np.bool_], *per_prompt: NDArray[Any], is_estimated: bool) -> Predicted:
    """The prediction on the selected ``prompts`` [prompts], by the time of plain decoding, the time, the tokens and the
    rounds of every prompt, arrays [prompts].
    """
    plain_ms, ms, tokens, rounds = (float(values[prompts].sum()) for values in per_prompt)
    return Predicted(
        speedup=plain_ms / ms, ms_per_token=ms / tokens, tokens_per_round=tokens / rounds, estimated=is_estimated
    )


def _fixed_shape_prices(prices: DensePrices, tree: TreePolicy, batch: int) -> DensePrices:
    """Prices of an engine that runs ``tree`` with ``batch`` requests in lockstep, indexed by the tokens of one request."""
    size, width = tree.max_nodes + 1, tree.max_width

    def fixed(table: Floats, tokens: int, *, rows: int) -> Floats:
        return np.repeat(table[tokens][None], rows + 1, axis=0)

    prefill = prices.draft_prefill
    return dataclasses.replace(
        prices,
        decode_ms=prices.decode_ms if batch == 1 else prices.verify_ms[batch],
        draft_first_ms=np.ascontiguousarray(prices.draft_first_ms[::batch][: size + 1]),
        draft_level_ms=fixed(prices.draft_level_ms, width * batch, rows=width),
        verify_ms=fixed(prices.verify_ms, size * batch, rows=size),
        draft_prefill=prefill.model_copy(
            update={name: batch * getattr(prefill, name) for name in ("intercept_ms", "per_token_ms", "image_ms")}
        ),
    )
