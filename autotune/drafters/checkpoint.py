"""Loads and saves trained drafts. A draft is a folder with ``config.json`` and weights, made for one target."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from autotune.documents.draft_kinds import KINDS, TOKEN_DRAFTS, is_eagle3, is_own_draft, refuse_dflash
from autotune.documents.subnet import Subnet
from autotune.drafters.block_network import BlocksConfig, BlocksNetwork
from autotune.drafters.dream import DreamNetwork
from autotune.drafters.eagle3 import Eagle3Network, load_eagle3
from autotune.drafters.feature_draft import FeatureDraft
from autotune.drafters.independent import IndependentDraft
from autotune.drafters.mtp import MtpNetwork, load_mtp, load_own_mtp
from autotune.drafters.network import FREQUENCIES, DraftNetwork, NetworkConfig
from autotune.drafters.specvlm import SpecVlmNetwork
from autotune.drafters.star import StarNetwork
from autotune.drafters.token_draft import TokenDraft
from autotune.errors import UserError
from autotune.files import parse_kind, read_json
from autotune.modeling.gguf import find_gguf
from autotune.modeling.loading import MTP_SUFFIX, load_model, load_tokenizer, resolve
from autotune.modeling.target import Target
from autotune.modeling.weight_files import CONFIG, WEIGHTS, check_finite, load_errors, read_tensors, set_weights

NETWORKS: dict[str, type[DraftNetwork]] = {
    network.kind: network for network in (StarNetwork, DreamNetwork, SpecVlmNetwork, Eagle3Network, MtpNetwork)
}
"""Networks that can be trained, by kind."""
CONFIGS = {kind: network.config_type for kind, network in NETWORKS.items() if network.config_type is not None}
"""Networks whose files have the schema of this project."""

ModelDraft = IndependentDraft | FeatureDraft
"""Drafts that run a model."""
LoadedDraft = ModelDraft | TokenDraft
"""Result of ``load_draft``."""
GEMMA4_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")


def read_config(name: str, *, random_weights: bool = False) -> tuple[Path, dict[str, Any]] | None:
    """The folder of a draft or Hugging Face model and its ``config.json``; None for a GGUF file.

    Raises:
        UserError: no such model.
    """
    folder = Path(resolve(name, weights=not random_weights))
    return None if folder.is_file() else (folder, read_json(folder / CONFIG))


def load_network(folder: Path, *, random_weights: bool = False) -> BlocksNetwork:
    """Load the network of a draft that ``DraftNetwork.save`` wrote, or make one of its config with random weights.

    Raises:
        UserError: a draft of an unknown kind.
    """
    path = folder / CONFIG
    content = NetworkConfig.without_schema(read_json(path), source=path)
    config = parse_kind(content, CONFIGS, key="kind", what="kind of draft", source=str(path))
    network_type = NETWORKS[config.kind]
    assert issubclass(network_type, BlocksNetwork) and isinstance(config, BlocksConfig)
    if random_weights:
        return network_type(config).eval().requires_grad_(False)
    tensors = read_tensors(folder, f"a {config.kind} draft")
    frequencies = tensors.pop(FREQUENCIES, None)
    with torch.device("meta"):
        empty = network_type(config)
    what = f"the {config.kind} draft that config.json describes"
    set_weights(empty, tensors, source=folder / WEIGHTS, what=what, advice="give both files of one draft")
    network = network_type(config)
    network.load_state_dict(tensors)
    network.token_frequencies = frequencies
    return network.eval().requires_grad_(False)


def load_draft(name: str, target: Target, subnet: Subnet | None = None, *, random_weights: bool = False) -> LoadedDraft:
    """Load a draft by name: a folder from ``DraftNetwork.save``, an EAGLE-3 head, any other Hugging Face model,
    which drafts independently, a model followed by ``:mtp`` for the multi-token prediction head of its checkpoint, or
    ``retrieval``.

    Args:
        subnet: heads, injection layer, vocabulary, weights and operator of the compressor to use. Its share of visual
            tokens applies later, prompt by prompt.
        random_weights: as in ``load_model``; EAGLE-3 heads keep their weights, which alone have their sizes.

    Raises:
        UserError: an unknown or a dflash draft, a draft for another target, a subnet that it does not have, or a GPU
            that does not multiply the data type of the weights.
    """
    subnet = subnet or Subnet()
    if name.endswith(MTP_SUFFIX):
        with load_errors(name):
            network: DraftNetwork = load_own_mtp(name, target, random_weights=random_weights)
    else:
        with load_errors(name):
            folder, config = (None if name in TOKEN_DRAFTS else read_config(name, random_weights=random_weights)) or (
                Path(),
                {},
            )
            refuse_dflash(name, config)
            if is_eagle3(config):  # its sizes are those of its weights
                folder = Path(resolve(name))
        if not (is_own_draft(config) or is_eagle3(config)):
            return _load_whole(name, target, subnet, config.get("model_type"), random_weights=random_weights)
        with load_errors(name):
            network = load_feature_network(folder, target, random_weights=random_weights)
    if (frequencies := network.token_frequencies) is not None:
        check_finite({FREQUENCIES: frequencies}, source=name)
        if len(frequencies) != target.vocab_size:
            raise UserError(
                f"{name}: {FREQUENCIES} are of {len(frequencies)} tokens, and the target has {target.vocab_size}; restore its weights"
            )
    if subnet.head_shares != (1.0, 1.0, 1.0):
        if not isinstance(network, StarNetwork):
            raise UserError(f"{name}: only a star draft has heads to choose; leave heads out")
        network = network.sliced(subnet.head_shares)
    draft = FeatureDraft(network, subnet)
    with load_errors(name):
        draft.attach(target)
        network.factors(torch.zeros(1, dtype=torch.long, device=target.device))  # a damaged rotary embedding fails here
    return draft


def _load_whole(
    name: str, target: Target, subnet: Subnet, model_type: str | None, *, random_weights: bool
) -> LoadedDraft:
    """A draft without subnets: a draft without files, or an independent model."""
    if model_type in GEMMA4_ASSISTANTS:
        raise UserError(
            f"{name}: drafts of type {model_type} attend to the target's keys and values, which is not supported; "
            "give a smaller model with the target's vocabulary, or an EAGLE-3 head"
        )
    if subnet.network != Subnet().network:
        kind = name if name in TOKEN_DRAFTS else IndependentDraft.kind
        article = "an" if kind == IndependentDraft.kind else "a"
        raise UserError(
            f"{name}: {article} {kind} draft has no subnets; leave heads, injection_layer, operator, vocabulary and weights out"
        )
    if name in TOKEN_DRAFTS:
        module, _, class_name = (KINDS[name].token_draft or "").partition(":")
        draft: TokenDraft = getattr(importlib.import_module(module), class_name)()
        draft.attach(target)
        return draft
    dtype: Any = None if find_gguf(name) is None else str(target.dtype).removeprefix("torch.")
    model = load_model(name, device=str(target.device), dtype=dtype, random_weights=random_weights)
    return IndependentDraft(model, tokenizer=load_tokenizer(name))


def load_feature_network(folder: Path, target: Target, *, random_weights: bool = False) -> DraftNetwork:
    """The network in a draft's folder, of whatever kind its config names."""
    content = read_json(folder / CONFIG)
    if is_eagle3(content):
        return load_eagle3(folder, content, target)
    if content.get("kind") == MtpNetwork.kind:
        return load_mtp(folder, target, random_weights=random_weights)
    return load_network(folder, random_weights=random_weights)
