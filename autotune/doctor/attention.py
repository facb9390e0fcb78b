"""The kernels that torch picks for the attention of a model, seen in its own forward passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from autotune.doctor.diagnosis import AttentionUse
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.step import Step
from autotune.modeling.target import Target


class _Observer(TorchFunctionMode):
    """Counts calls of scaled dot-product attention in one kind of forward pass, and lets them run."""

    def __init__(self, forward: str) -> None:
        super().__init__()
        self.forward = forward
        self.uses: Counter[AttentionUse] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            backend = SDPBackend(torch._fused_sdp_choice(*args, **kwargs)).name.lower()
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            use = AttentionUse(
                forward=self.forward,
                backend=backend,
                query=tuple(args[0].shape),
                key=tuple(args[1].shape),
                has_mask=mask is not None,
                num_layers=1,
            )
            self.uses[use] += 1
        return func(*args, **kwargs)


@torch.inference_mode()
def attention_uses(target: Target, prompt: EncodedPrompt, num_tokens: int) -> tuple[AttentionUse, ...]:
    """The kernels of a prefill, a plain step, and a verification of ``num_tokens`` tokens; empty if the model attends
    by code of its own.
    """
    target.reserve(len(prompt) + 1 + num_tokens)
    tokens = np.resize(prompt.tokens.cpu().numpy(), num_tokens)
    forwards: dict[str, Callable[[], Any]] = {
        "prefill": lambda: target.prefill(prompt),
        "plain step": lambda: target.step(int(tokens[0])),
        "verification": lambda: target.forward(Step.causal(tokens, target.mask_value)),
    }
    uses: list[AttentionUse] = []
    for name, run in forwards.items():
        with _Observer(name) as observer:
            run()
        uses += [use.model_copy(update={"num_layers": count}) for use, count in observer.uses.items()]
    return tuple(uses)
