"""``mtp``: multi-token prediction heads, as they are trained with DeepSeek-V3, GLM-4.5 and Qwen3.5, and new ones.

A head normalizes the embedding of a token and the target's last hidden state before it, projects their concatenation,
and runs one decoder layer of the target's own type; a norm follows, then the target's output head (DeepSeek-V3, arXiv
2412.19437, section 2.2). To draft further tokens the head reads its own states in place of the target's. Of a
checkpoint with several heads the first is used.

transformers ignores the head of a target's own checkpoint when it loads the target. Two layouts are published: a
decoder layer after the target's last one (``model.layers.61.*`` in DeepSeek-V3, likewise in GLM-4.5), and ``mtp.*``
(Qwen3-Next, Qwen3.5). Embedding and output head are the target's; copies of them are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import pad

from autotune.drafters.blocks import WITHIN_BATCH, AttentionContext, BlockCache, KeysValues
from autotune.drafters.network import NetworkConfig, UnrolledNetwork
from autotune.drafters.teacher_batch import TeacherBatch
from autotune.errors import UserError
from autotune.modeling.grouped_attention import attention_of_steps
from autotune.modeling.loading import MTP_SUFFIX, resolve
from autotune.modeling.target import Target
from autotune.modeling.tree_attention import captured_attention
from autotune.modeling.weight_files import check_whole, load_errors, set_weights

RIDGE = 1e-3  # of the regression that a new head begins with, relative to the mean square of its inputs


class MtpConfig(NetworkConfig):
    """Sizes of a head's target. The head's own are those of the target's layers."""

    kind: str = "mtp"


class MtpNetwork(UnrolledNetwork):
    """One head, which has layers and rotary embedding of its target.

    Raises:
        UserError: a target whose layers have no norm, or whose cache is not of keys and values.
    """

    kind = "mtp"
    config_type = MtpConfig
    config: MtpConfig

    def __init__(self, config: MtpConfig, target: Target) -> None:
        super().__init__()
        text = target.text
        self.config = config
        self.embedding = self.first_feature = None  # trained on sequences without their first token
        self._is_copy = False
        self.register_buffer("token_ids", None, persistent=False)
        self.layer_config = _layer_config(text.config)
        last, hidden = text.layers[-1], config.hidden_size
        new_norm = next((type(part) for name, part in last.named_children() if "norm" in name), None)
        if new_norm is None:
            raise UserError(
                f"an mtp head has the norms of its target's layers; those of {text.config.model_type} have none; use another draft"
            )
        eps = getattr(self.layer_config, "rms_norm_eps", None) or getattr(self.layer_config, "layer_norm_eps", 1e-6)
        self.enorm, self.hnorm, self.norm = (new_norm(hidden, eps=eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = type(last)(self.layer_config, 0)
        # The target's own rotary embedding, which is no part of the head.
        self._rotary = (getattr(text.module, "rotary_emb", None),)

    @classmethod
    def new(cls, sizes: Mapping[str, Any], target: Target, *, source: str) -> Self:
        """A head whose layer and norm begin as the target's last ones, where it has the same; see ``prepare``."""
        config = MtpConfig(hidden_size=target.text.config.hidden_size, num_target_layers=len(target.text.layers))
        network = cls(config, target)
        nn.init.normal_(network.eh_proj.weight, std=network.eh_proj.in_features**-0.5)
        last = target.text.layers[-1].state_dict()
        own = network.layer.state_dict()
        if target.text.quantization is None and {name: t.shape for name, t in last.items()} == {
            name: t.shape for name, t in own.items()
        }:
            network.layer.load_state_dict(last)
            network._is_copy = True
            final = getattr(target.text.module, "norm", None)
            if type(final) is type(network.norm):
                network.norm.load_state_dict(final.state_dict())
        return network

    @property
    def layers_in_preparation(self) -> tuple[int, ...]:
        return (self.config.num_target_layers - 1,) if self._is_copy else ()

    @torch.no_grad()
    def prepare(self, batches: Iterable[TeacherBatch]) -> None:
        """Begin with the projection of least squares from a token's embedding and the features before it to the input
        of the target's last layer at that token, of which the head's layer is a copy (ridge regression).
        """
        products: Tensor | float = 0.0
        size = self.eh_proj.in_features
        for batch in batches:
            is_loss, (layer,) = batch.loss_mask[:, 1:], self.layers_in_preparation
            features = self.target_features({0: batch.hidden[self.config.num_target_layers][:, :-1][is_loss]})
            inputs = self.normalized_inputs(batch.embeddings[:, 1:][is_loss], features)
            rows = torch.cat([inputs, batch.hidden[layer][:, 1:][is_loss]], -1).double()
            products = products + rows.t() @ rows
        assert isinstance(products, Tensor), "no batches"
        squares = products[:size, :size]
        ridge = RIDGE * squares.diagonal().mean() * torch.eye(size, dtype=squares.dtype, device=squares.device)
        self.eh_proj.weight.copy_(torch.linalg.solve(squares + ridge, products[:size, size:]).t())

    def new_caches(self, capacity: int, *, dtype: torch.dtype, device: torch.device) -> list[BlockCache]:
        num_heads, *sizes = self._cache_sizes
        return [BlockCache(num_heads, max(sizes), capacity, dtype=dtype, device=device)]

    @property
    def _cache_sizes(self) -> tuple[int, int, int]:
        """Heads, and sizes of a key and of a value, as the layer gives them to a cache."""
        found: list[tuple[Tensor, Tensor]] = []

        class Probe:
            def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
                found.append((key, value))
                return key, value

        weight = next(self.norm.parameters())
        with torch.no_grad():
            row, factors = weight.new_zeros(1, 1, len(weight)), self.factors(torch.zeros(1, 1, device=weight.device))
            self._run_layer(row, factors, None, Probe())
        key, value = found[0]
        return key.shape[1], key.shape[-1], value.shape[-1]

    def target_features(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """The target's last hidden states, after its final norm."""
        (states,) = hidden.values()
        return states

    def factors(self, positions: Tensor) -> Tensor:
        """Cosines and sines of the target's rotary embedding, [..., n, 2, rotated size]."""
        (rotary,) = self._rotary
        weight = next(self.norm.parameters())
        if rotary is None:
            return weight.new_zeros(*positions.shape, 2, 0)
        config, options = self.layer_config, {}
        if config.nested_rope_parameter_keys(config.rope_parameters):  # one for each type of layer
            options["layer_type"] = config.layer_types[0]
        cos, sin = rotary(weight, positions.reshape(1, -1), **options)
        return torch.stack([cos, sin], -2).reshape(*positions.shape, 2, -1)

    def fuse(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """The projection of both, normalized."""
        return self.eh_proj(self.normalized_inputs(embeddings, features))  # type: ignore[no-any-return]

    def normalized_inputs(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """Both normalized, [..., 2 * hidden]: the embedding first, as in published checkpoints."""
        parts = [self.enorm(embeddings), self.hnorm(features)]
        if getattr(self.layer_config, "mtp_hidden_states_first", False):
            parts.reverse()
        return torch.cat(parts, -1)

    def forward(
        self, stream: Tensor, features: Tensor, factors: Tensor, context: AttentionContext = WITHIN_BATCH
    ) -> Tensor:
        """The layer's normalized output [batch, n, hidden], input of the target's head and features of the next
        token.
        """
        cache = context.caches[0]
        keys = None if cache is None else _LayerCache(cache, context.begin)
        return self.norm(self._run_layer(stream, factors, context.mask, keys))  # type: ignore[no-any-return]

    def _run_layer(self, stream: Tensor, factors: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        cosines_sines = (factors[..., 0, :], factors[..., 1, :]) if factors.shape[-1] else None
        is_packed = mask is not None and mask.dtype == torch.int64
        with (captured_attention if is_packed else attention_of_steps)(self.layer_config):
            out = self.layer(stream, attention_mask=mask, position_embeddings=cosines_sines, past_key_values=cache)
        return out[0] if isinstance(out, tuple) else out


class _LayerCache:
    """The part of transformers' cache that an attention layer calls, over ours. Keys and values may differ in size, as
    with latent attention; the shorter ones are padded in the cache.
    """

    def __init__(self, cache: KeysValues, begin: int | Tensor) -> None:
        self._cache, self._begin = cache, begin

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values of n tokens, [batch, heads, n, size] each; returns those that the tokens attend to."""
        sizes = key.shape[-1], value.shape[-1]
        both = torch.stack([pad(part, (0, max(sizes) - part.shape[-1])) for part in (key, value)], 2)
        keys, values = self._cache.write(both, self._begin)
        return keys[..., : sizes[0]], values[..., : sizes[1]]


def _layer_config(config: Any) -> Any:
    """The target's text config for one layer with full attention, whose attention takes masks as sdpa does."""
    own = deepcopy(config)
    own.num_hidden_layers = 1
    own._attn_implementation = "sdpa"
    if getattr(own, "layer_types", None) is not None:
        own.layer_types = ["full_attention"]
    if getattr(own, "mlp_layer_types", None) is not None:
        own.mlp_layer_types = own.mlp_layer_types[-1:]
    if hasattr(own, "first_k_dense_replace"):  # heads have experts, as all but the first layers
        own.first_k_dense_replace = 0
    return own


_SHARED = ("embed_tokens.weight", "shared_head.head.weight", "shared_head.weight", "lm_head.weight")
_NAMES = {"shared_head.norm": "norm", "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
_HEAD_PARTS = ("enorm", "hnorm", "eh_proj", "norm")


def load_own_mtp(name: str, target: Target, *, random_weights: bool = False) -> MtpNetwork:
    """Load the first head of a target's checkpoint, which ``name`` gives by its folder or Hugging Face id, followed by
    ``:mtp``.

    Raises:
        UserError: the checkpoint has no head, or a head of other sizes than the target's layers.
    """
    config = MtpConfig(hidden_size=target.text.config.hidden_size, num_target_layers=len(target.text.layers))
    network = MtpNetwork(config, target)
    if not random_weights:
        source = name.removesuffix(MTP_SUFFIX)
        tensors = _read(source, config.num_target_layers)
        if not tensors:
            raise UserError(
                f"{name}: its checkpoint has no mtp head, no tensors model.layers.{config.num_target_layers}.* or mtp.*, which "
                "save_pretrained leaves out; give the published checkpoint, or train a head with autotune train"
            )
        with load_errors(f"{name}: its experts"):
            tensors = _stack_experts(tensors, network)
        what, advice = "an mtp head for this target", "use a head made for this target"
        set_weights(network, tensors, source=name, what=what, advice=advice)
    return network.eval().requires_grad_(False)


def own_name(name: str, num_layers: int) -> str | None:
    """The name in ``MtpNetwork`` of a checkpoint's tensor; None if it belongs to no head or a later one, or is
    shared.
    """
    after_the_last = rf"(language_model\.)?(model\.)?layers\.{num_layers}\."
    match = re.match(rf"(model\.)?({after_the_last}|mtp\.(layers\.0\.)?(?!layers\.))", name)
    if match is None or (rest := name[match.end() :]) in _SHARED:
        return None
    stem, _, kind = rest.rpartition(".")
    stem = _NAMES.get(stem, stem)
    return f"{stem}.{kind}" if stem in _HEAD_PARTS else f"layer.{rest}"


def _read(source: str, num_layers: int) -> dict[str, Tensor]:
    """The head's tensors, by their names in ``MtpNetwork``."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(Path(resolve(source)).glob("*.safetensors")):  # a GGUF file is loaded without its head
        check_whole(path)
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no dict)
                if (own := own_name(name, num_layers)) is not None:
                    tensors[own] = file.get_tensor(name)
    return tensors


def _stack_experts(tensors: Mapping[str, Tensor], network: MtpNetwork) -> dict[str, Any]:
    """Experts that a checkpoint stores one by one, in the stacked tensors of transformers' layers."""
    result = dict(tensors)
    for name in network.state_dict():
        prefix, _, part = name.rpartition(".")
        if name in result or part not in ("gate_up_proj", "down_proj") or not prefix.endswith("experts"):
            continue
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        experts: list[Tensor] = []
        while all(f"{prefix}.{len(experts)}.{one}.weight" in result for one in parts):
            experts.append(torch.cat([result.pop(f"{prefix}.{len(experts)}.{one}.weight") for one in parts]))
        if experts:
            result[name] = torch.stack(experts)
    return result
