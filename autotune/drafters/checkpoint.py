"""Loads and saves trained drafts. A draft is a folder with ``config.json`` and weights, made for one target."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from autotune.documents.draft_kinds import KINDS, TOKEN_DRAFTS, is_eagle3, is_own_draft, refuse_dflash
from autotune.documents.subnet import Subnet
from autotune.drafters.dream import DreamNetwork
from autotune.drafters.eagle3 import Eagle3Network, load_eagle3
from autotune.drafters.feature_draft import FeatureDraft
from autotune.drafters.independent import IndependentDraft
from autotune.drafters.mtp import MtpNetwork, load_own_mtp
from autotune.drafters.network import FREQUENCIES, DraftNetwork, NetworkConfig
from autotune.drafters.specvlm import SpecVlmNetwork
from autotune.drafters.star import StarNetwork
from autotune.drafters.token_draft import TokenDraft
from autotune.errors import UserError
from autotune.files import parse_kind, read_json
from autotune.modeling.gguf import find_gguf
from autotune.modeling.loading import MTP_SUFFIX, load_tokenizer, resolve
from autotune.modeling.sharded import load_draft_model, require_no_shards
from autotune.modeling.target import Target
from autotune.modeling.weight_files import CONFIG, WEIGHTS, load_errors, read_tensors, set_weights

NETWORKS: dict[str, type[DraftNetwork]] = {
    network.kind: network for network in (StarNetwork, DreamNetwork, SpecVlmNetwork, Eagle3Network, MtpNetwork)
}
"""Networks that can be trained, by kind."""
CONFIGS = {kind: network.config_type for kind, network in NETWORKS.items() if network.config_type is not None}
"""Networks whose files have the schema of this project."""

LoadedDraft = IndependentDraft | FeatureDraft | TokenDraft
"""Result of ``load_draft``."""


def load_network(folder: Path, target: Any = None, *, random_weights: bool = False) -> Any:
    """The ``DraftNetwork`` in a draft's folder, of whatever kind its config names. Networks of blocks need no target.

    Raises:
        UserError: a draft of an unknown kind, or for another target.
    """
    path = folder / CONFIG
    content = read_json(path)
    if is_eagle3(content):
        return load_eagle3(folder, content, target)
    content = NetworkConfig.without_schema(content, source=path)
    config: Any = parse_kind(content, CONFIGS, key="kind", what="kind of draft", source=str(path))
    network_type: Any = NETWORKS[config.kind]
    is_small = random_weights or network_type is MtpNetwork  # else its sizes may be damaged
    with torch.device("cpu" if is_small else "meta"):
        network = network_type(config, *([target] if network_type is MtpNetwork else []))
    if random_weights:
        return network.eval().requires_grad_(False)
    tensors = read_tensors(folder, f"a {config.kind} draft")
    frequencies = tensors.pop(FREQUENCIES, None)
    what, advice = f"the {config.kind} draft that config.json describes", "give both files of a draft for this target"
    set_weights(network, tensors, source=folder / WEIGHTS, what=what, advice=advice)
    network.token_frequencies = frequencies
    return network.float().eval().requires_grad_(False)


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
    if name in TOKEN_DRAFTS:
        return _load_whole(name, target, subnet, random_weights=random_weights)
    with load_errors(name):
        if name.endswith(MTP_SUFFIX):
            network: Any = load_own_mtp(name, target, random_weights=random_weights)
        else:
            folder = Path(resolve(name, weights=not random_weights))
            config = {} if folder.is_file() else read_json(folder / CONFIG)
            refuse_dflash(name, config)
            if not (is_own_draft(config) or is_eagle3(config)):
                return _load_whole(name, target, subnet, random_weights=random_weights)
            if is_eagle3(config):  # its sizes are those of its weights
                folder = Path(resolve(name))
            network = load_network(folder, target, random_weights=random_weights)
    require_no_shards(name, network.kind)
    if subnet.head_shares != (1.0, 1.0, 1.0):
        if not isinstance(network, StarNetwork):
            raise UserError(f"{name}: only a star draft has heads to choose; leave heads out")
        network = network.sliced(subnet.head_shares)
    draft = FeatureDraft(network, subnet)
    with load_errors(name):
        draft.attach(target)
        positions = torch.zeros(draft.num_position_axes, 1, dtype=torch.long, device=target.device)
        network.join_axes(network.factors(positions))  # a damaged rotary embedding fails here
    return draft


def _load_whole(name: str, target: Target, subnet: Subnet, *, random_weights: bool) -> LoadedDraft:
    """A draft without subnets: a draft without files, or an independent model."""
    if subnet.network != Subnet().network:
        raise UserError(
            f"{name}: this draft has no subnets; leave heads, injection_layer, operator, vocabulary and weights out"
        )
    if name in TOKEN_DRAFTS:
        require_no_shards(name, name)
        module, _, class_name = (KINDS[name].token_draft or "").partition(":")
        draft: TokenDraft = getattr(importlib.import_module(module), class_name)()
        draft.attach(target)
        return draft
    dtype: Any = None if find_gguf(name) is None else str(target.dtype).removeprefix("torch.")
    model, ranks = load_draft_model(name, target, dtype=dtype, random_weights=random_weights)
    independent = IndependentDraft(model, tokenizer=load_tokenizer(name))
    independent.ranks = ranks
    return independent
