"""The divergence of a draft's distributions from the target's, which every draft is trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""``divergence``, ``lk_divergence``, or the compiled form of one."""
DivergenceName = Literal["kl", "lk"]
LK_DECAY = 3.0  # LK losses (arXiv 2602.23881), section 4.2: the decay eta of the weight of KL


def divergence(logits: Tensor, teacher_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher || draft) of every token, and 1 where the most probable tokens agree, otherwise 0; [tokens] each, from the
    draft's ``logits`` and the target's log-probabilities in float32, [tokens, vocabulary] each.
    """
    logprobs = logits.float().log_softmax(-1)
    found = functional.kl_div(logprobs, teacher_logprobs, reduction="none", log_target=True).sum(-1)
    return found, (logprobs.argmax(-1) == teacher_logprobs.argmax(-1)).float()


def lk_divergence(logits: Tensor, teacher_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """``divergence`` with the hybrid LK loss (arXiv 2602.23881, section 4.2) in place of KL: w KL + (1 - w) (1 - overlap), where
    overlap = sum min(teacher, draft) is the acceptance rate of speculative sampling, and w = exp(-3 overlap), of the mean
    overlap of all tokens. A small draft then spends less of its capacity on tokens that are hardly ever sampled.
    """
    logprobs = logits.float().log_softmax(-1)
    kl, agrees = divergence(logprobs, teacher_logprobs)
    overlap = torch.minimum(logprobs, teacher_logprobs).exp().sum(-1)
    weight = torch.exp(-LK_DECAY * overlap.detach().mean())
    return weight * kl + (1.0 - weight) * (1.0 - overlap), agrees


def make_divergence(name: DivergenceName = "kl", *, compiled: bool) -> Divergence:
    """The divergence of a name, compiled if asked for: it then keeps no tensor as large as the logits but their gradient."""
    function = {"kl": divergence, "lk": lk_divergence}[name]
    return torch.compile(function, dynamic=True) if compiled else function
