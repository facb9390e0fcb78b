"""The divergence of a draft's distributions from the target's, which every draft is trained on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""``divergence`` or its compiled form."""


def divergence(logits: Tensor, teacher_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher || draft) of every token, and 1 where the most probable tokens agree, otherwise 0; [tokens] each.

    Args:
        logits: of the draft, [tokens, vocabulary].
        teacher_logprobs: of the target, [tokens, vocabulary], float32.
    """
    logprobs = logits.float().log_softmax(-1)
    found = functional.kl_div(logprobs, teacher_logprobs, reduction="none", log_target=True).sum(-1)
    return found, (logprobs.argmax(-1) == teacher_logprobs.argmax(-1)).float()


def make_divergence(*, compiled: bool) -> Divergence:
    """``divergence``, compiled if asked for: it then keeps no tensor as large as the logits but their gradient."""
    return torch.compile(divergence, dynamic=True) if compiled else divergence
