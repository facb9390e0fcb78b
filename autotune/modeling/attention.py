"""The kernels of scaled dot-product attention that all models of a process may use on a GPU.

cuDNN, which torch prefers on recent GPUs, is left out. It builds a plan for every new shape, and eager decoding meets a new
shape with every token; and it was found to corrupt the output of models with few KV heads (pytorch issue 193893).
"""

from __future__ import annotations

import torch

ATTENTION_BACKENDS = ("flash", "efficient", "math")
"""As torch names them in ``torch.backends.cuda.enable_*_sdp``."""


def choose_attention(device: torch.device | str) -> tuple[str, ...]:
    """Set the attention backends of this process where ``device`` is a GPU; returns them, or nothing for a CPU, which has one.

    Target, drafts, prefills, training and Hugging Face's ``generate`` run in one process and so with the same backends.
    """
    if torch.device(device).type != "cuda":
        return ()
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_math_sdp(True)
    return ATTENTION_BACKENDS
