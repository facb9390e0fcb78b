"""Perplexity of answers under the target and their agreement with plain decoding: the quality that lossy verification
costs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from autotune.documents.execution import EAGER
from autotune.modeling.step import Step
from autotune.modeling.target import Target
from autotune.runtime.ownership import Ownership
from autotune.runtime.token_sampler import TokenSampler, not_finite
from autotune.trees.tree import MAX_STEP


@torch.inference_mode()
def answer_logits(target: Target, inputs: dict[str, Any], tokens: list[int]) -> Tensor:
    """The target's logits at each token of an answer, [tokens, vocabulary], computed in forwards of many tokens.

    Raises:
        UserError: they are not finite.
    """
    with Ownership(target):
        (prompt,) = target.encode(inputs).prompts
        target.reserve(len(prompt) + len(tokens))
        target.use_mode(EAGER)  # these sizes are not captured
        logits = [target.prefill(prompt).logits[None]]
        for begin in range(0, len(tokens) - 1, MAX_STEP):
            part = np.array(tokens[begin : min(begin + MAX_STEP, len(tokens) - 1)])
            logits.append(target.forward(Step.causal(part, target.mask_value)))
            target.cache.advance(len(part))
    rows = torch.cat(logits)
    if (is_bad := ~rows.amax(-1).isfinite()).any():
        raise not_finite(len(prompt) + int(is_bad.byte().argmax()), rows.dtype)
    return rows


class Quality(NamedTuple):
    """An answer as the target sees it."""

    perplexity: float
    """exp of the mean negative log-probability of its tokens (WETAP, eq. 11)."""
    agreement: float | None
    """Share of its tokens that plain decoding emits after the tokens before them; None if it must decide them one by
    one.
    """


def quality(target: Target, inputs: dict[str, Any], tokens: list[int], sampler: TokenSampler | None = None) -> Quality:
    """Perplexity and agreement of an answer to a request with this ``sampler``, by default greedy."""
    logits = answer_logits(target, inputs, tokens)
    logprobs = logits.float().log_softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]
    perplexity = float((-logprobs.mean()).exp())
    sampler = sampler or TokenSampler(device=target.device)
    if sampler.one_by_one:
        return Quality(perplexity, None)
    paths = None
    if sampler.reads_prefix:
        is_before = torch.tensor(np.tri(len(tokens), k=-1, dtype=np.bool_), device=target.device)
        paths = torch.where(is_before, torch.tensor(tokens, device=target.device), logits.shape[-1])
    (prompt,) = target.encode(inputs).prompts
    expected = sampler.tokens(logits, len(prompt) + np.arange(len(tokens)), paths)
    return Quality(perplexity, float((expected == np.array(tokens)).mean()))
