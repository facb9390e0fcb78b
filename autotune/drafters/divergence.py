"""The divergence of a draft's distributions from the target's, which every draft is trained on."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""``divergence``, or its compiled form."""


def divergence(logits: Tensor, teacher_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher || draft) of every token, and 1 where the most probable tokens agree, otherwise 0; [tokens] each, from the
    draft's ``logits`` and the target's log-probabilities in float32, [tokens, vocabulary] each.
    """
    logprobs = logits.float().log_softmax(-1)
    found = functional.kl_div(logprobs, teacher_logprobs, reduction="none", log_target=True).sum(-1)
    return found, (logprobs.argmax(-1) == teacher_logprobs.argmax(-1)).float()
