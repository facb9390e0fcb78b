"""How much the last layer of the target attended to each visual token in the prefill, without making the model eager.

transformers dispatches attention by a name in the text config. For the length of one prefill that name is ours: every
layer still runs the kernel it had, and the last one also reports the attention of the text queries. Only those rows are
computed: [text queries, keys], never the full matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from autotune.runtime.text_model import TextModel

_NAME = "autotune_visual_attention"


@dataclass
class VisualAttention:
    """Filled by the prefill inside ``capture_visual_attention``: mean attention to each visual token, [visual tokens]."""

    is_visual: Tensor  # bool [prompt tokens]
    scores: Tensor | None = None


def _scores(
    query: Tensor, key: Tensor, scaling: float, softcap: float | None, window: int | None, is_visual: Tensor
) -> Tensor:
    """Mean over heads and text queries of the attention to each visual token (STAR, eq. 2).

    query [1, heads, n, d], key [1, kv heads, n, d]. Queries before the last visual token see only some of them, so
    those after it are asked. What is behind a query's ``window`` gets nothing of it.
    """
    places = is_visual.nonzero().squeeze(1)
    first = int(places[-1]) + 1
    if first >= query.shape[2]:
        first = query.shape[2] - 1  # the image ends the prompt: ask its last token
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = (query[0, :, first:] @ key[0].transpose(1, 2)).float() * scaling  # [heads, text queries, n]
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    rows = torch.arange(first, query.shape[2], device=query.device)[:, None]
    columns = torch.arange(key.shape[2], device=query.device)
    is_hidden = columns > rows if window is None else (columns > rows) | (columns <= rows - window)
    return logits.masked_fill(is_hidden, float("-inf")).softmax(-1).mean((0, 1))[places]


@contextmanager
def capture_visual_attention(text: TextModel, is_visual: Tensor) -> Iterator[VisualAttention]:
    """Inside, a forward of the whole prompt (batch of one, empty cache) fills the yielded object's ``scores``."""
    text_config, last_attention = text.config, text.layers[-1].self_attn
    window = text.windows[text.layer_types[-1]]
    inner_name = text_config._attn_implementation
    captured = VisualAttention(is_visual)
    inner = ALL_ATTENTION_FUNCTIONS.get(inner_name)

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if module is last_attention:
            scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
            captured.scores = _scores(query, key, scaling, kwargs.get("softcap"), window, is_visual)
        if inner is None:  # "eager" is a function of the model's own file, not in the table
            return _eager_of(module)(module, query, key, value, mask, **kwargs)
        return inner(module, query, key, value, mask, **kwargs)  # type: ignore[no-any-return]

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS[inner_name])
    text_config._attn_implementation = _NAME
    try:
        yield captured
    finally:
        text_config._attn_implementation = inner_name


def _eager_of(module: nn.Module) -> Any:
    import sys

    return sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
