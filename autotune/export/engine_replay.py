"""Replay of chains as a serving engine runs them, and the fastest one. Loads no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.acceptance.replay import Replay, plain_decode_ms, replay
from autotune.acceptance.trace import Trace
from autotune.cost.table import CostTable
from autotune.documents.decoding_profile import Predicted
from autotune.errors import UserError
from autotune.prediction.evaluator import Evaluator
from autotune.trees.chain import ChainPolicy
from autotune.trees.limits import Floats


@dataclass(frozen=True)
class PricedChain:
    chain: ChainPolicy
    predicted: Predicted
    """The speedup is over plain decoding of an equal batch."""

    @property
    def rank(self) -> tuple[float, int]:
        """Fastest first; ties go to the shorter chain."""
        return self.predicted.ms_per_token, self.chain.depth


class EngineReplay:
    """Replays chains at the prices of a cost table: every round of a chain drafts and verifies the same number of tokens, in this
    project's runtime as in an engine.
    """

    def __init__(self, trace: Trace, table: CostTable, *, draft_tokens: int | None = None) -> None:
        """
        Args:
            draft_tokens: the length of the only chain of the space; None: all.

        Raises:
            UserError: the answers are too short to decode, or the trace holds no chain of ``draft_tokens``.
        """
        (self.prices,) = Evaluator([trace], table).prices.values()
        if trace.header.visual_input == "placeholders":  # the draft encodes no image
            prefill = self.prices.draft_prefill.model_copy(update={"image_ms": 0.0})
            self.prices = dataclasses.replace(self.prices, draft_prefill=prefill)
        self.trace = trace
        self.is_estimated = table.estimated
        self.draft_tokens = draft_tokens
        if draft_tokens is not None and not any(self.chains()):
            raise UserError(
                f"--draft-tokens {draft_tokens}: the trace of {trace.header.draft.id} and the cost table hold chains of 1 to "
                f"{self._max_depth} tokens; give one of them"
            )

    @property
    def _max_depth(self) -> int:
        """Longest chain that the trace holds and the table prices."""
        return min(self.trace.header.bounds.depth, self.prices.verify_ms.shape[0] - 2)

    def chains(self) -> Iterator[ChainPolicy]:
        """Every length that the trace holds and the table prices, or the length ``draft_tokens`` alone."""
        depths = range(1, self._max_depth + 1)
        return (ChainPolicy(depth=depth) for depth in depths if self.draft_tokens in (None, depth))

    def fastest(self) -> PricedChain:
        """The fastest chain for one request at a time."""
        return min(map(self.price, self.chains()), key=lambda priced: priced.rank)

    def price(self, chain: ChainPolicy) -> PricedChain:
        """Replay a chain for one request at a time."""
        result = replay(self.trace, chain, self.prices)
        return PricedChain(
            chain, prediction(result, plain_decode_ms(self.trace, self.prices), is_estimated=self.is_estimated)
        )


def prediction(result: Replay, plain_ms: Floats, *, is_estimated: bool) -> Predicted:
    """The prediction of a replay, with the time of plain decoding by prompt [prompts]."""
    return Predicted(
        speedup=float(plain_ms.sum() / result.decode_ms.sum()),
        ms_per_token=result.ms_per_token,
        tokens_per_round=result.tokens_per_round,
        estimated=is_estimated,
    )
