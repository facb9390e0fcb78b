"""The decoder stack of any Hugging Face model, and what the decoding loop must know of it: all derived from its config
and modules, so that no family needs code of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autotune.errors import UserError

# Decoded token by token like ``generate`` by tests/runtime/test_families.py.
KNOWN_TEXT_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
)
KNOWN_VISION_TYPES = (
    "llava",
    "llava_next",
    "llava_onevision",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "idefics3",
    "smolvlm",
    "mistral3",
    "gemma3",
)
_WINDOW_OF_LAYER_TYPE = {"full_attention": None, "sliding_attention": "sliding_window"}
# Kernels that take an additive mask. The others read lengths only and would ignore a tree's mask.
_ATTENTION = ("sdpa", "eager")
# Rotary frequencies that change with the length of the sequence: a tree, whose tokens stand at several lengths, would
# get those of its deepest one.
_ROPE_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True)
class TextModel:
    """A model's decoder stack and output head. Nothing of the model is changed."""

    module: Any
    head: Any
    config: Any
    layers: tuple[nn.Module, ...]
    layer_types: tuple[str, ...]
    windows: dict[str, int | None]
    """Attention window by type of layer, in tokens; None sees everything."""
    max_context: int
    """Tokens that a sequence may have."""
    is_alone: bool
    """Whether the model is nothing else."""
    logit_scale: float
    logit_cap: float | None
    device: torch.device
    """Where embeddings are looked up, so where inputs go."""

    @property
    def layer_windows(self) -> list[int | None]:
        """Of each layer."""
        return [self.windows[kind] for kind in self.layer_types]

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype  # type: ignore[no-any-return]

    @property
    def is_known(self) -> bool:
        return self.config.model_type in KNOWN_TEXT_TYPES

    @property
    def kv_bytes_per_token(self) -> int:
        """Of keys and values in all layers."""
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * len(self.layers) * heads * head_size * self.dtype.itemsize)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocabulary] of final hidden states [n, hidden], scaled and soft-capped as the config says."""
        logits = self.head(hidden)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_cap is not None:
            logits = torch.tanh(logits / self.logit_cap) * self.logit_cap
        return logits  # type: ignore[no-any-return]


def text_model_of(model: Any) -> TextModel:
    """The text model inside a text model or VLM.

    Raises:
        UserError: a VLM that is not known, or a text model with layers or kernels that trees cannot pass through.
    """
    config = model.config.get_text_config()
    is_alone = config is model.config
    if not is_alone and model.config.model_type not in KNOWN_VISION_TYPES:
        raise UserError(
            f"models of type {model.config.model_type!r} cannot be decoded with trees yet; known: "
            f"{', '.join(KNOWN_VISION_TYPES)}; text alone: {', '.join(KNOWN_TEXT_TYPES[:5])}; use one of these"
        )
    if config._attn_implementation not in _ATTENTION:
        raise UserError(
            f"trees need attention that takes a mask: {' or '.join(_ATTENTION)}; the model runs {config._attn_implementation!r}; "
            "load it with attn_implementation='sdpa'"
        )
    layer_types = _layer_types(config)
    module = model.get_decoder()
    layers = _layers(module, config.num_hidden_layers)
    if layers is None:
        raise _refusal(config, f"no list of its {config.num_hidden_layers} layers was found")
    return TextModel(
        module=module,
        head=model.get_output_embeddings(),
        config=config,
        layers=layers,
        layer_types=layer_types,
        windows={kind: _window(config, kind) for kind in sorted(set(layer_types))},
        max_context=_max_context(config),
        is_alone=is_alone,
        # The head of a VLM's class neither scales nor caps, whatever its text config says.
        logit_scale=_logit_scale(config) if is_alone else 1.0,
        logit_cap=getattr(config, "final_logit_softcapping", None) if is_alone else None,  # Gemma
        device=device_of(module.get_input_embeddings()),
    )


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: where its hook brings its inputs, if accelerate placed it, or where its weights are."""
    for part in module.modules():
        placed = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
        if placed is not None:
            return torch.device(placed)
    return next(module.parameters()).device


def _layers(module: nn.Module, number: int) -> tuple[nn.Module, ...] | None:
    found = [child for child in module.children() if isinstance(child, nn.ModuleList) and len(child) == number]
    return tuple(found[0]) if len(found) == 1 else None


def _layer_types(config: Any) -> tuple[str, ...]:
    """By transformers' rule: a list in the config, or else one type for all."""
    types = getattr(config, "layer_types", None)
    if types is None:
        kind = "sliding_attention" if getattr(config, "sliding_window", None) is not None else "full_attention"
        kind = "chunked_attention" if getattr(config, "attention_chunk_size", None) is not None else kind
        types = [kind] * config.num_hidden_layers
    for kind in types:
        if kind not in _WINDOW_OF_LAYER_TYPE:
            raise _refusal(config, f"it has layers of type {kind!r}, whose cache cannot drop rejected tokens")
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        raise _refusal(config, "its tokens see those after them")
    return tuple(types)


def _window(config: Any, kind: str) -> int | None:
    name = _WINDOW_OF_LAYER_TYPE[kind]
    return None if name is None else int(getattr(config, name))


def _logit_scale(config: Any) -> float:
    """Cohere's multiplies, Granite's divides."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


def _max_context(config: Any) -> int:
    longest = getattr(config, "max_position_embeddings", None) or 2**31
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if parameters.get("rope_type") in _ROPE_BY_LENGTH:
            holder = parameters if "original_max_position_embeddings" in parameters else config.to_dict()
            longest = min(longest, int(holder.get("original_max_position_embeddings") or longest))
    return int(longest)


def _refusal(config: Any, reason: str) -> UserError:
    return UserError(
        f"text models of type {config.model_type!r} cannot be decoded with trees: {reason}; known: "
        f"{', '.join(KNOWN_TEXT_TYPES)}; use one of these"
    )
