"""Trained drafts on disk: a folder with ``config.json`` and weights, for one target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from autotune.drafters.dream import DreamConfig, DreamNetwork
from autotune.drafters.feature_draft import FeatureDraft
from autotune.drafters.independent import IndependentDraft
from autotune.drafters.star import StarConfig, StarNetwork
from autotune.errors import UserError
from autotune.files import check_schema, parse_kind, read_json, write_document
from autotune.models import load_model, load_tokenizer, resolve
from autotune.runtime.target import Target

CONFIG, WEIGHTS = "config.json", "model.safetensors"
CONFIGS: dict[str, type[DreamConfig]] = {"dream": DreamConfig, "star": StarConfig}
NETWORKS: dict[str, type[DreamNetwork]] = {"dream": DreamNetwork, "star": StarNetwork}


def new_network(kind: str, sizes: dict[str, Any], target: Target, *, source: str) -> DreamNetwork:
    """A network for a target, with random weights.

    Raises:
        UserError: unknown or impossible sizes.
    """
    text = target.text.config
    of_target = {"hidden_size": text.hidden_size, "num_target_layers": text.num_hidden_layers}
    config = parse_kind({**of_target, **sizes, "kind": kind}, CONFIGS, key="kind", what="kind of draft", source=source)
    return NETWORKS[kind](config)


def save_draft(network: DreamNetwork, folder: Path) -> None:
    """Weights in bfloat16, half the bytes; they load and run in the target's precision."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in network.state_dict().items()}
    save_file(tensors, folder / WEIGHTS)
    write_document(folder / CONFIG, "draft", network.config)


def is_draft(folder: Path) -> bool:
    """Whether a folder holds a draft of ours, and not a Hugging Face model."""
    path = folder / CONFIG
    return path.exists() and str(read_json(path).get("schema", "")).startswith("autotune.draft/")


def load_network(folder: Path, target: Target) -> DreamNetwork:
    """The network of a draft, in the target's precision and on its device.

    Raises:
        UserError: a draft of an unknown kind, or one made for a target of other sizes.
    """
    path = folder / CONFIG
    content = check_schema("draft", read_json(path), source=path)
    config = parse_kind(content, CONFIGS, key="kind", what="kind of draft", source=str(path))
    text = target.text.config
    for name, ours, theirs in (
        ("hidden_size", config.hidden_size, text.hidden_size),
        ("num_target_layers", config.num_target_layers, text.num_hidden_layers),
    ):
        if ours != theirs:
            raise UserError(f"{path}: made for a target with {name} {ours}; this one has {theirs}; use its own target")
    network = NETWORKS[config.kind](config)
    network.load_state_dict(load_file(folder / WEIGHTS))
    return network.to(target.device, target.dtype).eval().requires_grad_(False)


def load_draft(
    name: str,
    target: Target,
    *,
    heads: float | tuple[float, float, float] | None = None,
    injection_layer: int | None = None,
) -> IndependentDraft | FeatureDraft:
    """A draft by name: a folder of ours, or any Hugging Face model, which then drafts independently.

    Args:
        heads: share of heads to keep, in all blocks or in each; of ``star``.
        injection_layer: of the target, to read; of drafts that read features.

    Raises:
        UserError: no such draft, one for another target, or a subnet that it does not have.
    """
    folder = Path(resolve(name))
    if not is_draft(folder):
        if heads is not None or injection_layer is not None:
            raise UserError(f"{name}: an independent draft has no subnets; leave heads and injection_layer out")
        return IndependentDraft(load_model(name, device=str(target.device)), tokenizer=load_tokenizer(name))
    network = load_network(folder, target)
    if heads is not None and heads != 1.0:
        if not isinstance(network, StarNetwork):
            raise UserError(f"{name}: only a star draft has heads to choose; leave heads out")
        network = network.sliced(heads if isinstance(heads, tuple) else (heads,) * 3)
    draft = FeatureDraft(network, injection_layer=injection_layer)
    draft.attach(target)
    return draft
