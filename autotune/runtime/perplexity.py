"""How probable an answer is to the target: what a lossy verification costs in quality."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotune.runtime.target import Target


@torch.inference_mode()
def answer_logprobs(target: Target, inputs: dict[str, Any], tokens: list[int]) -> Tensor:
    """The target's log-probability of each of an answer's tokens, [tokens], after the prompt and the ones before it."""
    count = len(tokens)
    target.reserve(inputs["input_ids"].shape[1] + count)
    target.owner = None
    logits = target.prefill(inputs).logits[None]
    if count > 1:
        length = target.length
        answer = torch.tensor([tokens[:-1]], device=target.device)
        mask = torch.zeros(1, 1, count - 1, length + count - 1, dtype=target.dtype, device=target.device)
        mask[..., length:].masked_fill_(
            torch.ones(count - 1, count - 1, dtype=torch.bool, device=target.device).triu(1),
            torch.finfo(target.dtype).min,
        )
        positions = length + torch.arange(count - 1, device=target.device)[None]
        logits = torch.cat([logits, target.forward(answer, positions, mask)])
    return logits.float().log_softmax(-1)[torch.arange(count), torch.tensor(tokens)]


def perplexity(target: Target, inputs: dict[str, Any], tokens: list[int]) -> float:
    """exp of the mean negative log-probability of the answer's tokens (WETAP, eq. 11)."""
    return float((-answer_logprobs(target, inputs, tokens).mean()).exp())
