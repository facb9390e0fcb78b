"""The attention of a model: the function that its layers call, and the kernels that all models of a process may use on
a GPU.

cuDNN, which torch prefers on recent GPUs, is left out. It builds a plan for every new shape, and eager decoding meets a
new shape with every token; and it was found to corrupt the output of models with few KV heads (pytorch issue 193893).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

ATTENTION_BACKENDS = ("flash", "efficient", "math")
"""As torch names them in ``torch.backends.cuda.enable_*_sdp``."""


def choose_attention(device: torch.device | str) -> tuple[str, ...]:
    """Set the attention backends of this process where ``device`` is a GPU; returns them, or nothing for a CPU, which
    has one.

    Target, drafts, prefills, training and Hugging Face's ``generate`` run in one process and so with the same backends.
    """
    if torch.device(device).type != "cuda":
        return ()
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_math_sdp(True)
    return ATTENTION_BACKENDS


@contextmanager
def attention_function(config: Any, name: str) -> Iterator[None]:
    """Within the context, a text model with this config calls the attention that transformers knows by ``name``."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before
