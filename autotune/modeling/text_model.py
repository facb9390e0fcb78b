"""The decoder stack of any Hugging Face model and its properties, derived from config and modules, so that no model
family needs code of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from autotune.errors import UserError
from autotune.modeling.quantization import quantization_of

# tests/runtime/test_families.py shows that these decode the same tokens as ``generate``, test_hybrids.py those with
# states.
_KNOWN_HYBRID_TYPES = ("qwen3_next", "lfm2", "granitemoehybrid", "falcon_h1")
_KNOWN_TEXT_ONLY_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma4_text"),
    *(*_KNOWN_HYBRID_TYPES, "qwen3_5_text"),
)
_KNOWN_PARTS = (
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
    *("qwen3_5_moe_text", "gemma4_unified_text"),
)
KNOWN_TEXT_TYPES = (*_KNOWN_TEXT_ONLY_TYPES, *_KNOWN_PARTS)
_KNOWN_QWEN_VL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_KNOWN_LLAVA_TYPES = ("llava", "llava_next", "llava_onevision")
KNOWN_VISION_TYPES = (
    *(*_KNOWN_LLAVA_TYPES, *_KNOWN_QWEN_VL_TYPES, "idefics3", "smolvlm", "mistral3"),
    *("gemma3", "gemma4", "gemma4_unified"),
)
_ATTENDING_TYPES = ("full_attention", "sliding_attention", "hybrid")  # hybrid: full attention beside a state
STATE_TYPES = ("linear_attention", "conv", "hybrid")
"""Layers with a recurrent or convolution state, which cannot drop tokens."""
_CACHELESS_TYPES = ("moe", "mlp")
_LAYER_TYPES = frozenset((*_ATTENDING_TYPES, *STATE_TYPES, *_CACHELESS_TYPES))
_NO_LIMIT = (0.0, math.inf)  # of the time steps of Mamba-2
# Kernels that take an additive mask. Others take sequence lengths only and would ignore a tree mask.
MASKED_ATTENTION = ("sdpa", "eager")
# Rotary frequencies that depend on the sequence length: all nodes of a tree would get those of its deepest node.
_ROPE_BY_LENGTH = ("dynamic", "longrope")
_CONTEXT_NAMES = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)

KVShape = tuple[int, int]
"""Number of KV heads, and head size."""


@dataclass(frozen=True)
class TextModel:
    """A model's decoder stack and output head. The model is not changed."""

    module: Any
    head: Any
    config: Any
    layers: tuple[nn.Module, ...]
    layer_types: tuple[str, ...]
    windows: dict[str, int | None]  # attention window by layer type, in tokens; None sees everything
    max_context: int  # maximum sequence length, in tokens
    is_text_only: bool  # whether this is the whole model, not a part of a VLM
    logit_scale: float
    logit_cap: float | None
    device: torch.device  # device of the embedding, where inputs go
    quantization: str | None = None  # method and variant (``quantization_of``)

    @property
    def layer_windows(self) -> list[int | None]:
        """Attention window of each layer; None too for layers without attention."""
        return [self.windows.get(layer_type) for layer_type in self.layer_types]

    @property
    def attending_layers(self) -> tuple[int, ...]:
        """Layers with attention, in order."""
        return tuple(n for n, layer_type in enumerate(self.layer_types) if layer_type in _ATTENDING_TYPES)

    @cached_property
    def mixers(self) -> dict[int, nn.Module]:
        """By layer with a recurrent or convolution state, the module that updates it."""
        return {
            n: _mixer(self.config, self.layers[n]) for n, name in enumerate(self.layer_types) if name in STATE_TYPES
        }

    @property
    def has_states(self) -> bool:
        """Whether layers keep recurrent or convolution states, so that chains can be verified, but no trees."""
        return not set(STATE_TYPES).isdisjoint(self.layer_types)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype  # type: ignore[no-any-return]

    @property
    def precision(self) -> str:
        """Data type of the states, and how the weights are quantized: ``bfloat16`` or ``bfloat16, gptq 4-bit``."""
        dtype = str(self.dtype).removeprefix("torch.")
        return dtype if self.quantization is None else f"{dtype}, {self.quantization}"

    @property
    def is_exact(self) -> bool:
        """Whether forward passes of other sizes choose the same tokens. Quantized products round more than those of
        float32, and may run another kernel for another number of rows.
        """
        return self.precision == "float32"

    @property
    def is_tested(self) -> bool:
        return self.config.model_type in KNOWN_TEXT_TYPES

    @property
    def has_grouped_queries(self) -> bool:
        """Whether several query heads share one KV head."""
        return any(heads != self.config.num_attention_heads for heads, _ in filter(None, self.kv_shapes))

    @property
    def takes_packed_masks(self) -> bool:
        """Whether the layers call an attention function by its name, so that captured steps can give them their own."""
        return bool(self.module._supports_attention_backend)

    @property
    def num_devices(self) -> int:
        """Number of devices that the model is spread over."""
        return len({self.device, *map(device_of, self.layers), device_of(self.head)})

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return int(2 * sum(heads * size for heads, size in filter(None, self.kv_shapes)) * self.dtype.itemsize)

    @cached_property
    def kv_shapes(self) -> list[KVShape | None]:
        """Number of KV heads and head size of each layer; None for layers that cache nothing, or read the keys and
        values of an earlier layer (Gemma 4).
        """
        num_reading = getattr(self.config, "num_kv_shared_layers", None) or 0
        shapes: list[KVShape | None] = [None] * len(self.layers)
        for number in self.attending_layers:
            if number < len(self.layers) - num_reading:
                config = self.config.per_layer_config[number]
                heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
                size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
                shapes[number] = heads, size
        return shapes

    @property
    def device_numbers(self) -> tuple[int, ...]:
        """Numbers of devices that can divide the layers: divisors of query heads, and of key and value heads."""
        heads = {self.config.num_attention_heads, *(heads for heads, _ in filter(None, self.kv_shapes))}
        return tuple(n for n in range(1, min(heads) + 1) if all(number % n == 0 for number in heads))

    @property
    def has_plain_head(self) -> bool:
        """Whether the rows of the output head can be copied."""
        return type(self.head) is nn.Linear and not hasattr(self.head.weight, "__tensor_flatten__")

    def with_vocabulary(self, token_ids: Tensor) -> TextModel:
        """The model with an output head for some tokens of its vocabulary [n], which is a copy of the head's rows. Only
        a plain linear head has these.
        """
        if not self.has_plain_head:
            kind = type(self.head).__name__ if self.quantization is None else f"quantized with {self.quantization}"
            raise UserError(
                f"only a plain linear output head can be cut to a smaller vocabulary; this one is {kind}; leave vocabulary out"
            )
        weight, bias = self.head.weight, self.head.bias
        head = nn.Linear(
            weight.shape[1], len(token_ids), bias=bias is not None, device=weight.device, dtype=weight.dtype
        )
        head.weight.data = weight.detach()[token_ids]
        if bias is not None:
            head.bias.data = bias.detach()[token_ids]
        return replace(self, head=head.requires_grad_(False))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocabulary] of final hidden states [n, hidden], scaled and soft-capped according to the config, on
        the embedding's device.
        """
        logits = self.head(hidden).to(self.device)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_cap is not None:
            logits = torch.tanh(logits / self.logit_cap) * self.logit_cap
        return logits  # type: ignore[no-any-return]


def text_model_of(model: Any) -> TextModel:
    """Find the text model of a text model or VLM.

    Raises:
        UserError: an unsupported VLM, or a text model with layers or attention kernels that do not support trees.
    """
    config = model.config.get_text_config()
    is_text_only = config is model.config
    if not is_text_only and model.config.model_type not in KNOWN_VISION_TYPES:
        raise UserError(
            f"models of type {model.config.model_type!r} cannot be decoded with trees yet; known: "
            f"{', '.join(KNOWN_VISION_TYPES)}; text only: {', '.join(_KNOWN_TEXT_ONLY_TYPES)}; use one of these"
        )
    if config._attn_implementation not in MASKED_ATTENTION:
        raise UserError(
            f"trees need attention that takes a mask: {' or '.join(MASKED_ATTENTION)}; the model runs {config._attn_implementation!r}; "
            "load it with attn_implementation='sdpa'"
        )
    layer_types = _layer_types(config)
    module = model.get_decoder()
    layers = _layers(module, config.num_hidden_layers)
    if layers is None:
        raise undecodable(config, f"no list of its {config.num_hidden_layers} layers was found")
    is_gemma4 = str(model.config.model_type).startswith("gemma4")
    attending = {"full_attention" if name == "hybrid" else name for name in layer_types if name in _ATTENDING_TYPES}
    return TextModel(
        module=module,
        head=model.get_output_embeddings(),
        config=config,
        layers=layers,
        layer_types=layer_types,
        windows={
            name: int(config.sliding_window) if name == "sliding_attention" else None for name in sorted(attending)
        },
        max_context=_max_context(config),
        is_text_only=is_text_only,
        # The head of a VLM class neither scales nor caps, even if its text config says so.
        logit_scale=_logit_scale(config) if is_text_only else 1.0,
        # Gemma 4's does cap.
        logit_cap=getattr(config, "final_logit_softcapping", None) if is_text_only or is_gemma4 else None,
        device=device_of(module.get_input_embeddings()),
        quantization=quantization_of(model.config),
    )


def device_of(module: nn.Module) -> torch.device:
    """Device on which a module computes: its accelerate hook's execution device, or else the device of its weights."""
    for part in module.modules():
        device = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next(module.parameters()).device


def _mixer(config: Any, layer: nn.Module) -> nn.Module:
    """The part of a layer that convolves the tokens: it knows its layer's index, by which it finds its state in the
    cache.
    """
    found = [
        part
        for part in layer.modules()
        if hasattr(part, "layer_idx") and any(isinstance(child, nn.Conv1d) for child in part.children())
    ]
    if len(found) != 1:
        raise undecodable(config, f"{len(found)} modules of a layer with a state have a convolution, not one")
    (mixer,) = found
    if tuple(getattr(mixer, "time_step_limit", None) or _NO_LIMIT) != _NO_LIMIT:
        raise undecodable(config, "its time steps are limited in passes over several tokens, but not in single steps")
    return mixer


def _layers(module: nn.Module, number: int) -> tuple[nn.Module, ...] | None:
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList) and len(child) == number]
    return tuple(lists[0]) if len(lists) == 1 else None


def _layer_types(config: Any) -> tuple[str, ...]:
    """Layer types by transformers' rule: a list in the config, or else one type for all layers."""
    types = getattr(config, "layer_types", None)
    if types is None:
        layer_type = "sliding_attention" if getattr(config, "sliding_window", None) is not None else "full_attention"
        layer_type = "chunked_attention" if getattr(config, "attention_chunk_size", None) is not None else layer_type
        types = [layer_type] * config.num_hidden_layers
    for layer_type in types:
        if layer_type not in _LAYER_TYPES:
            raise undecodable(config, f"it has layers of type {layer_type!r}, whose cache cannot drop rejected tokens")
    if set(_ATTENDING_TYPES).isdisjoint(types):
        raise undecodable(
            config, f"it has no attention, only layers of type {' and '.join(map(repr, sorted(set(types))))}"
        )
    # "vision" concerns visual tokens alone, whose mask comes with the prompt.
    is_bidirectional = getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision")
    if is_bidirectional or not getattr(config, "is_causal", True):
        raise undecodable(config, "its tokens see later tokens")
    return tuple(types)


def _logit_scale(config: Any) -> float:
    """Factor of the logits: the configs of Cohere and Falcon-H1 multiply, Granite's divides."""
    factors = (getattr(config, name, None) or 1.0 for name in ("logit_scale", "lm_head_multiplier"))
    return math.prod(factors) / float(getattr(config, "logits_scaling", None) or 1.0)


def _max_context(config: Any) -> int:
    """The longest sequence, as vLLM derives it. Configs state it before or after the scaling of rotary embeddings."""
    stated = [value for name in _CONTEXT_NAMES if (value := getattr(config, name, None))]
    longest = getattr(config, "model_max_length", None) or min(stated, default=2**31)
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in nested or [rope]:
        rope_type, original = parameters.get("rope_type"), parameters.get("original_max_position_embeddings")
        if rope_type in _ROPE_BY_LENGTH:
            longest = min(longest, original or getattr(config, "original_max_position_embeddings", None) or longest)
        # Llama 3.2 states 131,072 tokens, and a factor by which it would have twice as many. A factor of one layer type
        # (Gemma 3) belongs to a context that is stated in full.
        elif (rope_type == "llama3" and longest > (original or 0)) or (nested and not original):
            continue
        else:
            longest = max(longest, (parameters.get("factor") or 1.0) * (original or longest))
    return int(longest)


def undecodable(config: Any, reason: str) -> UserError:
    """The refusal of a text model, for a reason."""
    return UserError(
        f"text models of type {config.model_type!r} cannot be decoded with trees: {reason}; known: "
        f"{', '.join(KNOWN_TEXT_TYPES)}; use one of these"
    )


def layer_plan(model: Any) -> dict[str, str]:
    """The part of transformers' plan of tensor parallelism that is used: how modules of the decoder layers are divided
    among devices, by module; empty for a model without a plan. Embeddings, vision tower and output head stay whole,
    because drafts read them on one device.
    """
    plan = getattr(model, "tp_plan", None) or {}
    return {module: style for module, style in plan.items() if ".layers." in f".{module}"}
