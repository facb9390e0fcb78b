"""Perplexity of answers under the target, which measures the quality that lossy verification costs."""

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
    """The target's logits at each token of an answer, [tokens, vocabulary], computed in forwards of many tokens."""
    (prompt,) = target.encode(inputs).prompts
    target.reserve(len(prompt) + len(tokens))
    close_session(target)
    target.use_mode(EAGER)  # these sizes are not captured
    logits = [target.prefill(prompt).logits[None]]
    for begin in range(0, len(tokens) - 1, MAX_STEP):
        part = np.array(tokens[begin : min(begin + MAX_STEP, len(tokens) - 1)])
        logits.append(target.forward(Step.causal(part, target.mask_value)))
        target.cache.advance(len(part))
    return torch.cat(logits)


def answer_logprobs(target: Target, inputs: dict[str, Any], tokens: list[int]) -> Tensor:
    """The target's log-probabilities of an answer's tokens, [tokens]."""
    logprobs = answer_logits(target, inputs, tokens).float().log_softmax(-1)
    return logprobs[torch.arange(len(tokens)), torch.tensor(tokens)]


def perplexity(target: Target, inputs: dict[str, Any], tokens: list[int]) -> float:
    """exp of the mean negative log-probability of an answer's tokens (WETAP, eq. 11)."""
    return float((-answer_logprobs(target, inputs, tokens).mean()).exp())
