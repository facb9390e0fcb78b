"""The attention of captured steps, as the layers of a transformers model call it: their masks are packed
(``step.py``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from autotune.modeling.attention import attention_function
from autotune.modeling.tree_attention import attend

_NAME = "autotune_tree"


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Calls without a packed mask, as from another thread, are those of transformers' ``sdpa``."""
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    scale, softcap, sinks = kwargs.get("scaling"), kwargs.get("softcap"), kwargs.get("s_aux")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return attend(query[0], key[0], value[0], attention_mask[0, 0], scale, softcap or 0.0, sinks)[None], None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def captured_attention(config: Any) -> AbstractContextManager[None]:
    """Within the context, a text model with this config takes packed masks."""
    return attention_function(config, _NAME)
