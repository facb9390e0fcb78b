"""How probable an answer is to the target: what a lossy verification costs in quality."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotune.execution import EAGER
from autotune.modeling.step import Step
from autotune.modeling.target import Target
from autotune.runtime.session import close_session
from autotune.trees.tree import MAX_STEP


@torch.inference_mode()
def answer_logits(target: Target, inputs: dict[str, Any], tokens: list[int]) -> Tensor:
    """The target's logits for each of an answer's tokens, [tokens, vocabulary], after the prompt and the ones before
    it: many tokens a forward.
    """
    (prompt,) = target.encode(inputs).prompts
    target.reserve(len(prompt) + len(tokens))
    close_session(target)
    target.use_mode(EAGER)  # sizes of no round
    logits = [target.prefill(prompt).logits[None]]
    for begin in range(0, len(tokens) - 1, MAX_STEP):
        part = np.array(tokens[begin : min(begin + MAX_STEP, len(tokens) - 1)])
        logits.append(target.forward(Step.causal(part, target.mask_value)))
        target.cache.advance(len(part))
    return torch.cat(logits)


def answer_logprobs(target: Target, inputs: dict[str, Any], tokens: list[int]) -> Tensor:
    """The target's log-probability of each of an answer's tokens, [tokens]."""
    logprobs = answer_logits(target, inputs, tokens).float().log_softmax(-1)
    return logprobs[torch.arange(len(tokens)), torch.tensor(tokens)]


def perplexity(target: Target, inputs: dict[str, Any], tokens: list[int]) -> float:
    """exp of the mean negative log-probability of the answer's tokens (WETAP, eq. 11)."""
    return float((-answer_logprobs(target, inputs, tokens).mean()).exp())
