"""``eagle3``: EAGLE-3 heads, public ones in the authors' format and in that of ``speculators``, and new ones.

A head is one decoder layer whose attention reads the concatenation of embedding and features. Features of committed
tokens are computed by ``fc`` from three layers of the target; those of drafted tokens are the layer's own output. The
vocabulary is a subset of the target's: its token i is the target's token ``i + d2t[i]``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from pydantic import Field, ValidationError
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from autotune.drafters.blocks import WITHIN_BATCH, AttentionContext, BlockCache
from autotune.drafters.draft import LEAST_SHARED
from autotune.drafters.network import NetworkConfig, UnrolledNetwork
from autotune.drafters.teacher_batch import TeacherBatch
from autotune.errors import UserError
from autotune.files import Document, describe, write_bytes
from autotune.modeling.target import Target
from autotune.modeling.weight_files import CONFIG, WEIGHTS, read_tensors, save_tensors, set_weights

LAYER_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_hidden_layers", "vocab_size", "rms_norm_eps", "max_position_embeddings"),
)
"""Fields of ``LlamaConfig`` that a saved head has."""
LAYER_PREFIXES = r"^(midlayer|layers\.0)\."  # of the layer, in EAGLE's and in speculators' format


class Eagle3Config(NetworkConfig):
    """Sizes of an EAGLE-3 head, besides those of its layer."""

    kind: str = "eagle3"
    layers: tuple[int, ...]
    """Layers of the target that are read together; layer i is the input of the target's layer i, counted from 0."""
    state_size: int = Field(ge=1)
    draft_vocabulary_size: int = Field(ge=1)
    norm_before_residual: bool = False
    """Whether the residual stream starts from the normalized features, as in some speculators heads."""

    @property
    def width(self) -> int:
        return self.state_size


@strict
class Eagle3LayerConfig(LlamaConfig):  # type: ignore[misc]
    """The config of a head's layer. ``rope_parameters`` may have the sections of three position axes."""

    ignore_keys_at_rope_validation = frozenset({"mrope_section", "mrope_interleaved"})

    def validate_architecture(self) -> None:
        """Heads may together be wider than the states (SpecForge's for Qwen2.5-VL-32B); other sizes do not fit the
        weights.
        """

    @property
    def axes(self) -> Tensor | None:
        """See ``DraftNetwork``. Sections follow each other (Qwen2.5-VL), or alternate as far as they reach
        (Qwen3-VL).
        """
        if (sections := self.rope_parameters.get("mrope_section")) is None:
            return None
        axes = [axis for axis, number in enumerate(sections) for _ in range(number)]
        if self.rope_parameters.get("mrope_interleaved"):
            axes = [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(len(axes))]
        return torch.tensor(2 * axes)


class Eagle3Network(UnrolledNetwork):
    """The head, with the parameter names of its checkpoint except ``layer``.

    The buffer ``d2t`` holds the offsets of its vocabulary.
    """

    kind = "eagle3"
    config_type = None
    config: Eagle3Config

    def __init__(self, config: Eagle3Config, layer: Eagle3LayerConfig, *, has_embedding: bool, fc_bias: bool) -> None:
        super().__init__()
        self.config, self.axes = config, layer.axes
        hidden = config.state_size
        self.fc = nn.Linear(len(config.layers) * config.hidden_size, hidden, bias=fc_bias)
        self.layer = Eagle3Layer(layer, norm_before_residual=config.norm_before_residual)
        self.norm = LlamaRMSNorm(hidden, eps=layer.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocabulary_size, bias=False)
        self.layer_config = layer
        self.embed_tokens = nn.Embedding(layer.vocab_size, hidden) if has_embedding else None
        self.d2t: Tensor = nn.Buffer(torch.zeros(config.draft_vocabulary_size, dtype=torch.long))
        self.first_feature = None  # trained on sequences without their first token

    @property
    def embedding(self) -> nn.Embedding | None:  # type: ignore[override]
        """The checkpoint's embedding, if it has one."""
        return self.embed_tokens

    @property
    def token_ids(self) -> Tensor:  # type: ignore[override]
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @classmethod
    def new(cls, sizes: Mapping[str, Any], target: Target, *, source: str) -> Self:
        """A head over the target's whole vocabulary, until ``keep_tokens``, with a copy of its output head, which must
        not be quantized. It has three position axes if the target has them, with sections in the same proportions.
        """
        try:
            given = Eagle3Sizes.model_validate_json(json.dumps(sizes))
        except ValidationError as error:
            raise UserError(f"{source}: draft: {describe(error, Eagle3Sizes)}") from None
        text, num_layers = target.text.config, len(target.text.layers)
        layers = given.layers or layers_for(num_layers)
        is_ascending = list(layers) == sorted({*layers} & {*range(num_layers + 1)})
        if len(layers) != 3 or not is_ascending:
            raise UserError(
                f"{source}: an eagle3 head reads three different layers of the target in ascending order, of 0 to {num_layers}, "
                f"as serving engines collect them; got {list(layers)}; name such layers in draft"
            )
        if not target.text.has_plain_head:
            kind = target.text.quantization or f"of type {type(target.text.head).__name__}"
            raise UserError(
                f"{source}: an eagle3 head begins with a copy of the target's output head, which here is quantized with {kind}; "
                "train on the target without quantization"
            )
        theirs, rope = getattr(text, "rope_parameters", None) or {}, {"rope_type": "default"}
        if len(sections := theirs.get("mrope_section") or ()) == 3:
            ends = np.cumsum([0, *sections]) / sum(sections) * (given.head_size // 2)
            rope |= {"mrope_section": np.diff(ends.round().astype(int)).tolist()}
            rope |= {"mrope_interleaved": theirs.get("mrope_interleaved", False)}
        layer = Eagle3LayerConfig(
            hidden_size=text.hidden_size,
            intermediate_size=given.mlp_size,
            num_attention_heads=given.num_heads,
            num_key_value_heads=given.num_kv_heads or given.num_heads,
            head_dim=given.head_size,
            num_hidden_layers=1,
            vocab_size=target.vocab_size,
            max_position_embeddings=text.max_position_embeddings,
            rope_parameters=rope,
        )
        config = Eagle3Config(
            hidden_size=text.hidden_size,
            num_target_layers=num_layers,
            state_size=text.hidden_size,
            layers=layers,
            draft_vocabulary_size=target.vocab_size,
        )
        network = cls(config, layer, has_embedding=False, fc_bias=False)
        with torch.no_grad():
            network.lm_head.weight.copy_(target.model.get_output_embeddings().weight[: target.vocab_size])
        return network

    def keep_tokens(self, token_ids: Tensor, head_rows: Tensor) -> None:
        number, hidden = head_rows.shape
        self.lm_head = nn.Linear(hidden, number, bias=False, device=head_rows.device)
        with torch.no_grad():
            self.lm_head.weight.copy_(head_rows)
        self.d2t = token_ids - torch.arange(len(token_ids), device=token_ids.device)
        self.config = self.config.model_copy(update={"draft_vocabulary_size": len(token_ids)})

    def finish(self, batches: Iterable[TeacherBatch]) -> None:
        """Nothing is counted: the vocabulary is that of the head's own output layer."""

    def save(self, folder: Path) -> None:
        """Write the head in EAGLE's format, with weights in bfloat16."""
        tensors = {re.sub(r"^layer\.", "midlayer.", name): tensor for name, tensor in self.saved_tensors().items()}
        if self.config.draft_vocabulary_size == self.layer_config.vocab_size:
            del tensors["d2t"]  # vLLM has no offsets for the target's own vocabulary, and refuses them
        save_tensors(folder / WEIGHTS, tensors)
        rope = dict(self.layer_config.rope_parameters)
        content = {
            "architectures": ["LlamaForCausalLMEagle3"],  # by which vLLM chooses its class
            "model_type": "llama",
            "rope_theta": rope.pop("rope_theta"),
            "rope_scaling": rope if len(rope) > 1 else None,
            **{name: getattr(self.layer_config, name) for name in LAYER_FIELDS},
            "draft_vocab_size": self.config.draft_vocabulary_size,
            "eagle_aux_hidden_state_layer_ids": list(self.config.layers),
        }
        write_bytes(folder / CONFIG, (json.dumps(content, indent=2) + "\n").encode())

    @property
    def layers_in_training(self) -> tuple[int, ...]:
        return self.config.layers

    def layers_read(self, injection_layer: int | None) -> tuple[int, ...]:
        layers = self.config.layers
        if injection_layer is not None and (injection_layer,) != layers:
            raise UserError(
                f"this {self.config.kind} draft reads the layers {', '.join(map(str, layers))} together; "
                f"got injection_layer {injection_layer}; leave it out"
            )
        return layers

    def target_features(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """The concatenated layers, projected to the head's width."""
        return self.fc(torch.cat([hidden[layer] for layer in self.config.layers], -1))  # type: ignore[no-any-return]

    def factors(self, positions: Tensor) -> Tensor:
        """Cosines and sines, [..., n, 2, head size]. No buffer holds the angles, because they are float32 in every
        precision. Types that depend on the length (``dynamic``, ``longrope``) are as for short sequences.
        """
        rotary = LlamaRotaryEmbedding(self.layer_config).to(positions.device)
        angles = positions[..., None].float() * rotary.inv_freq
        factors = torch.stack([angles.cos(), angles.sin()], -2) * rotary.attention_scaling
        return torch.cat([factors, factors], -1).to(self.norm.weight.dtype)

    def new_caches(self, capacity: int, *, dtype: torch.dtype, device: torch.device) -> list[BlockCache]:
        num_heads, head_size = self.layer_config.num_key_value_heads, self.layer.self_attn.head_dim
        return [BlockCache(num_heads, head_size, capacity, dtype=dtype, device=device)]

    def forward(
        self, stream: Tensor, features: Tensor, factors: Tensor, context: AttentionContext = WITHIN_BATCH
    ) -> Tensor:
        """The layer's output [batch, n, state size] for embeddings ``stream`` and ``features``."""
        return self.layer(stream, features, factors, context)  # type: ignore[no-any-return]

    def logits(self, states: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits over the head's own vocabulary."""
        return self.lm_head(self.norm(states))  # type: ignore[no-any-return]


class Eagle3Layer(LlamaDecoderLayer):  # type: ignore[misc]
    """A Llama layer whose attention reads the concatenation of embedding and features, each normalized."""

    def __init__(self, config: Eagle3LayerConfig, *, norm_before_residual: bool) -> None:
        super().__init__(config, layer_idx=0)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, width, bias=config.attention_bias))

    def forward(self, embeddings: Tensor, features: Tensor, factors: Tensor, context: AttentionContext) -> Tensor:
        normed, attention = self.hidden_norm(features), self.self_attn
        rows = torch.cat([self.input_layernorm(embeddings), normed], -1)
        query, key, value = (
            project(rows).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, factors[..., 0, :], factors[..., 1, :])
        if (cache := context.caches[0]) is not None:
            key, value = cache.write(torch.stack([key, value], 2), context.begin)
        residual = normed if self.norm_before_residual else features
        stream = residual + attention.o_proj(context.attend(query, key, value).flatten(2))
        return stream + self.mlp(self.post_attention_layernorm(stream))  # type: ignore[no-any-return]


class Eagle3Sizes(Document):
    """Sizes of a new head's layer."""

    num_heads: int = Field(ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    """None: ``num_heads``."""
    head_size: int = Field(ge=2, multiple_of=2)
    mlp_size: int = Field(ge=1)
    layers: tuple[int, ...] = ()
    """Layers of the target that are read, counted as in ``Eagle3Config``; empty: the published choice."""


def published_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers of the target that EAGLE-3 reads: a low, a middle and a high one."""
    return (2, num_layers // 2, num_layers - 3)


def layers_for(num_layers: int) -> tuple[int, int, int]:
    """Layers that a new head reads: the published ones where these are different and ascend, otherwise the first, a
    middle and the last but one.
    """
    low, middle, high = published_layers(num_layers)
    return (low, middle, high) if low < middle < high else (1, num_layers // 2, num_layers - 1)


def _layer_config(content: Mapping[str, Any], *, source: Path) -> Eagle3LayerConfig:
    """The config of a head's layer, with its rotary embedding in any published form."""
    fields = {name: value for name, value in content.items() if value is not None}
    rope = {**fields.pop("rope_scaling", {}), **fields.pop("rope_parameters", {})}
    older_name = rope.pop("type", "default")
    kind = rope.setdefault("rope_type", older_name)
    if kind not in (known := ("default", "mrope", *ROPE_INIT_FUNCTIONS)):
        raise UserError(f"{source}: rope types are {', '.join(known)}; got {kind!r}; correct it, or use another head")
    if kind == "mrope":
        rope = {"mrope_section": [], **rope, "rope_type": "default"}
    try:
        return Eagle3LayerConfig(**fields, rope_parameters=rope)
    except (KeyError, StrictDataclassError) as error:
        raise UserError(f"{source}: {(error.__cause__ or error).args[0]}; correct it, or use another head") from None


def load_eagle3(folder: Path, content: Mapping[str, Any], target: Target) -> Eagle3Network:
    """Load the head in a folder with the ``config.json`` ``content``.

    Raises:
        UserError: no safetensors file, tensors of another kind of model, a head for another target, or a rotary
            embedding that is not known.
    """
    hidden_size, num_layers = target.text.config.hidden_size, len(target.text.layers)
    named = read_tensors(folder, "an EAGLE-3 head").items()
    tensors = {re.sub(LAYER_PREFIXES, "layer.", name): tensor for name, tensor in named if name != "t2d"}
    layer = _layer_config(content.get("transformer_layer_config", content), source=folder / CONFIG)
    if missing := {"fc.weight", "lm_head.weight", "norm.weight"} - tensors.keys():
        raise UserError(
            f"{folder / WEIGHTS}: an EAGLE-3 head has the tensor {sorted(missing)[0]}; this file has "
            f"{', '.join(sorted(tensors)[:4])}, ...; give the head's own folder"
        )
    if "d2t" not in tensors and len(tensors["lm_head.weight"]) >= LEAST_SHARED * target.vocab_size:
        # The target's vocabulary, perhaps padded otherwise.
        tensors["lm_head.weight"] = tensors["lm_head.weight"][: target.vocab_size]
        tensors["d2t"] = torch.zeros(len(tensors["lm_head.weight"]), dtype=torch.long)
    name = "eagle_aux_hidden_state_layer_ids"
    outputs = (content.get("eagle_config") or {}).get(name) or ()  # counted by the layers' outputs, as in SGLang
    layers = tuple(content.get(name) or [number + 1 for number in outputs] or published_layers(num_layers))
    num_features = tensors["fc.weight"].shape[1]
    if num_features != len(layers) * hidden_size or not all(0 <= number <= num_layers for number in layers):
        raise UserError(
            f"{folder}: made for a target of which it reads {num_features} numbers a token; the layers "
            f"{', '.join(map(str, layers))} of this one have {len(layers)} x {hidden_size}; use a head made for this target"
        )
    network = Eagle3Network(
        Eagle3Config(
            hidden_size=hidden_size,
            num_target_layers=num_layers,
            state_size=layer.hidden_size,
            layers=layers,
            draft_vocabulary_size=len(tensors["lm_head.weight"]),
            norm_before_residual=bool(content.get("norm_before_residual", False)),
        ),
        layer,
        has_embedding="embed_tokens.weight" in tensors,
        fc_bias="fc.bias" in tensors,
    )
    what = "the EAGLE-3 head that config.json describes"
    set_weights(network, tensors, source=folder / WEIGHTS, what=what, advice="give both files of one head")
    if network.embed_tokens is None and layer.hidden_size != hidden_size:
        raise UserError(
            f"{folder}: a head of width {layer.hidden_size} for a target of width {hidden_size} needs embed_tokens; "
            "give a checkpoint that has them"
        )
    return network.eval().requires_grad_(False)
