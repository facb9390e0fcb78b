"""Loads and saves block-diffusion drafts, in three published forms.

* The authors' (``architectures: [DFlashDraftModel]``, with ``dflash_config``): SGLang and vLLM read it, and ``autotune
  train`` writes it.
* That of ``speculators`` (``speculators_model_type: dflash``).
* That of transformers, the assistants that ``generate`` runs with ``speculation_type="dflash"``.

Layer ids name layers whose outputs are read in the first and the last form; in that of ``speculators`` they count
hidden states, of which the first is the embedding, as vLLM reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor
from transformers import Qwen3Config

from autotune.drafters.dflash import DFlashConfig, DFlashNetwork
from autotune.drafters.network import set_weights
from autotune.drafters.trainable import CONFIG, WEIGHTS, read_tensors
from autotune.errors import UserError
from autotune.files import describe
from autotune.modeling.target import Target

ARCHITECTURE = "DFlashDraftModel"
LAYER_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_hidden_layers", "rms_norm_eps", "max_position_embeddings"),
)
"""Fields of ``Qwen3Config`` that every form has."""
OPTIONAL_FIELDS = ("vocab_size", "rope_parameters", "rope_theta", "rope_scaling", "attention_bias", "hidden_act")
NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
"""Names of transformers' form that are others in the authors'."""
OF_TARGET = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight", "t2d", "rotary_emb.inv_freq")
"""Tensors of some checkpoints that are the target's own, or follow from others."""
UNSUPPORTED = {
    "projector_type": ("domino", "a Domino head"),
    "sample_from_anchor": (True, "blocks whose first token is drafted too"),
    "shift_label": (True, "blocks whose labels are shifted"),
}
"""Settings of ``speculators``, and their values that make another kind of draft."""


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` describes a block-diffusion draft, in one of the three forms."""
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == "dflash")
    if "dflash_config" in config or ARCHITECTURE in (config.get("architectures") or ()):
        return True
    return all(key in config for key in ("block_size", "mask_token_id", "target_layer_ids"))


def load_dflash(
    folder: Path, content: Mapping[str, Any], target: Target, *, random_weights: bool = False
) -> DFlashNetwork:
    """Load the draft in a folder with the ``config.json`` ``content``, or make one with random weights.

    Raises:
        UserError: a form or setting that is not supported, missing or other tensors than the config promises, or a
            draft for another target.
    """
    path = folder / CONFIG
    hidden_size, num_layers, vocab_size = target.text.config.hidden_size, len(target.text.layers), target.vocab_size
    config, layer = _configs(path, content, num_layers=num_layers)
    if config.hidden_size != hidden_size or not all(0 <= number <= num_layers for number in config.layers):
        raise UserError(
            f"{folder}: made for a target of width {config.hidden_size} of which it reads the layers "
            f"{', '.join(map(str, config.layers))}; this one has width {hidden_size} and {num_layers} layers; use a draft made "
            "for this target"
        )
    if config.mask_token >= vocab_size:
        raise UserError(
            f"{path}: its mask token {config.mask_token} is none of the target's {vocab_size} tokens; use a draft made for this "
            "target"
        )
    if random_weights:
        return DFlashNetwork(config, layer).eval().requires_grad_(False)
    tensors = _tensors(folder)
    if (own := tensors.get("lm_head.weight")) is not None and "d2t" not in tensors:
        if len(own) < vocab_size:
            raise UserError(
                f"{folder / WEIGHTS}: its output head has {len(own)} of the target's {vocab_size} tokens and no d2t that tells "
                "which; give the draft's own folder"
            )
        del tensors["lm_head.weight"]  # a copy of the target's
    vocabulary = len(tensors["d2t"]) if "d2t" in tensors else None
    network = DFlashNetwork(config, layer, draft_vocabulary_size=vocabulary)
    what = "the DFlash draft that config.json describes"
    set_weights(network, tensors, source=folder / WEIGHTS, what=what, advice="give both files of one draft")
    return network.eval().requires_grad_(False)


def _configs(path: Path, content: Mapping[str, Any], *, num_layers: int) -> tuple[DFlashConfig, Qwen3Config]:
    """The sizes of a draft and of its layers, from a config of any form."""
    for key, (value, kind) in UNSUPPORTED.items():
        if content.get(key) == value:
            raise UserError(f"{path}: {kind} ({key}: {value}) cannot be run; use a plain DFlash draft")
    layers = content.get("transformer_layer_config", content)
    own: dict[str, Any] = {**content, **(content.get("dflash_config") or {})}
    # Hidden states are counted from the embedding, the outputs of layers from the first layer.
    ids, shift = ("aux_hidden_state_layer_ids", 0) if "speculators_model_type" in content else ("target_layer_ids", 1)
    missing = [name for name in LAYER_FIELDS if layers.get(name) is None]
    missing += [name for name in (ids, "block_size", "mask_token_id") if own.get(name) is None]
    if missing:
        raise UserError(
            f"{path}: a DFlash draft's config has {missing[0]}; this one has not; give the config.json that the draft was "
            "published with"
        )
    sizes = {name: layers[name] for name in (*LAYER_FIELDS, *OPTIONAL_FIELDS) if layers.get(name) is not None}
    types = layers.get("layer_types") or ["full_attention"] * sizes["num_hidden_layers"]
    if "sliding_attention" in types and not _sees_ahead(content):
        raise UserError(
            f"{path}: its sliding layers do not let a block's tokens see those after them, and such layers cannot be run; use a "
            "draft with full attention"
        )
    try:
        config = DFlashConfig(
            hidden_size=layers["hidden_size"],
            num_target_layers=own.get("num_target_layers") or num_layers,
            layers=tuple(number + shift for number in own[ids]),
            block_size=own["block_size"],
            mask_token=own["mask_token_id"],
        )
        window = {"use_sliding_window": True, "sliding_window": layers.get("sliding_window")}
        return config, Qwen3Config(**sizes, layer_types=types, **(window if "sliding_attention" in types else {}))
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error, DFlashConfig)}") from None


def _sees_ahead(content: Mapping[str, Any]) -> bool:
    """Whether sliding layers are bidirectional: in transformers' form, and elsewhere if the config says so."""
    if "speculators_model_type" in content:
        return bool(content.get("sliding_window_non_causal", False))
    return "dflash_config" not in content or content.get("is_causal") is False


def _tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by their names in ``DFlashNetwork``."""
    named = {name.removeprefix("model."): tensor for name, tensor in read_tensors(folder, "a DFlash draft").items()}
    return {NAMES.get(name, name): tensor for name, tensor in named.items() if name not in OF_TARGET}
