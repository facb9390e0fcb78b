"""Replay of chains as a serving engine runs them. Loads no torch."""

from __future__ import annotations

import dataclasses

from autotune.acceptance.replay import Replay, plain_decode_ms, replay
from autotune.acceptance.trace import Trace
from autotune.cost.table import CostTable
from autotune.documents.decoding_profile import Predicted
from autotune.prediction.evaluator import Evaluator
from autotune.trees.chain import ChainPolicy
from autotune.trees.limits import Floats


def priced_chains(trace: Trace, table: CostTable) -> dict[int, Predicted]:
    """Predictions of every chain that the trace holds and the table prices, by depth, for one request at a time. Every round of a chain
    drafts and verifies the same number of tokens, in this project's runtime as in an engine.

    Raises:
        UserError: the answers are too short to decode.
    """
    (prices,) = Evaluator([trace], table).prices.values()
    if trace.header.visual_input == "placeholders":  # the draft encodes no image
        prefill = prices.draft_prefill.model_copy(update={"image_ms": 0.0})
        prices = dataclasses.replace(prices, draft_prefill=prefill)
    plain_ms = plain_decode_ms(trace, prices)
    return {
        depth: prediction(replay(trace, ChainPolicy(depth=depth), prices), plain_ms, is_estimated=table.estimated)
        for depth in range(1, min(trace.header.bounds.depth, prices.verify_ms.shape[0] - 2) + 1)
    }


def prediction(result: Replay, plain_ms: Floats, *, is_estimated: bool) -> Predicted:
    """The prediction of a replay, with the time of plain decoding by prompt [prompts]."""
    return Predicted(
        speedup=float(plain_ms.sum() / result.decode_ms.sum()),
        ms_per_token=result.ms_per_token,
        tokens_per_round=result.tokens_per_round,
        estimated=is_estimated,
    )
