"""Hybrid families: tiny random models of the real classes, some layers of which keep a recurrent or convolution state.

They are families as in ``tests/families.py``, but decode chains only (``tests/runtime/test_hybrids.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import transformers as hf
from transformers import PreTrainedModel

from tests.families import QWEN3_ROPE, QWEN3_VISION, QWEN3_VL_PROCESSOR, Family, _qwen, _qwen_vl, _text

GATED_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,  # two share a key head
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}
MAMBA2 = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2, "mamba_n_groups": 1},
    "mamba_chunk_size": 8,  # tokens; a chain may span several
}


def _alternating(num_layers: int, types: Sequence[str] = ("linear_attention", "full_attention")) -> list[str]:
    """Layer types; a draft of two layers has both."""
    return [types[index % 2] for index in range(num_layers)]


def _qwen3_next(num_layers: int) -> PreTrainedModel:
    options = {"head_dim": 16, "layer_types": _alternating(num_layers), **GATED_DELTA_NET, **EXPERTS}
    return hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**_text(num_layers, **options)))


def _qwen3_5_text(num_layers: int, **options: Any) -> dict[str, Any]:
    sizes = {"head_dim": 32, "layer_types": _alternating(num_layers), **GATED_DELTA_NET}
    # A quarter of a head is rotated.
    return _text(num_layers, **sizes, rope_parameters={**QWEN3_ROPE, "partial_rotary_factor": 0.5}, **options)


def _qwen3_5_causal(num_layers: int) -> PreTrainedModel:
    return hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**_qwen3_5_text(num_layers)))


def _qwen3_5(model: Any, config: Any, num_layers: int, **options: Any) -> PreTrainedModel:
    vision = {name: value for name, value in QWEN3_VISION.items() if name != "deepstack_visual_indexes"}
    return _qwen_vl(model, config, _qwen3_5_text(num_layers, **options), vision, tied=False)


def _lfm2(num_layers: int) -> PreTrainedModel:
    options = {"layer_types": _alternating(num_layers, ("conv", "full_attention")), "tie_word_embeddings": False}
    return hf.Lfm2ForCausalLM(hf.Lfm2Config(**_text(num_layers, **options)))


def _granite4(num_layers: int) -> PreTrainedModel:
    options = {
        "layer_types": _alternating(num_layers),
        "shared_intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "logits_scaling": 0.5,
        "embedding_multiplier": 1.5,
        "tie_word_embeddings": False,
    }
    return hf.GraniteMoeHybridForCausalLM(hf.GraniteMoeHybridConfig(**_text(num_layers, **MAMBA2, **options)))


def _falcon_h1(num_layers: int) -> PreTrainedModel:
    """A state and attention in every layer."""
    options = {"head_dim": 8, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5, "tie_word_embeddings": False}
    return hf.FalconH1ForCausalLM(hf.FalconH1Config(**_text(num_layers, **MAMBA2, **options)))


_ALL = (
    Family("qwen3_next", _qwen3_next),
    Family("qwen3_5_text", _qwen3_5_causal),
    _qwen("qwen3_5", partial(_qwen3_5, hf.Qwen3_5ForConditionalGeneration, hf.Qwen3_5Config), QWEN3_VL_PROCESSOR),
    _qwen(
        "qwen3_5_moe",
        partial(_qwen3_5, hf.Qwen3_5MoeForConditionalGeneration, hf.Qwen3_5MoeConfig, **EXPERTS),
        QWEN3_VL_PROCESSOR,
    ),
    Family("lfm2", _lfm2),
    Family("granite4", _granite4),
    Family("falcon_h1", _falcon_h1),
)
HYBRIDS: dict[str, Family] = {family.name: family for family in _ALL}
