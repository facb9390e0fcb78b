"""Reads the multi-token prediction head of a target's own checkpoint, which transformers ignores when it loads the
target.

Two layouts are published: a decoder layer after the target's last one (``model.layers.61.*`` in DeepSeek-V3, likewise
in GLM-4.5), and ``mtp.*`` (Qwen3-Next, Qwen3.5). Embedding and output head are the target's; copies of them are left
out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from autotune.documents.draft_kinds import MTP_PROMISES
from autotune.drafters.mtp import MtpConfig, MtpNetwork, set_head
from autotune.errors import UserError
from autotune.modeling.loading import MTP_SUFFIX, resolve
from autotune.modeling.target import Target
from autotune.modeling.weight_files import check_whole, load_errors

_AFTER_THE_LAST = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.(.+)$")
_OF_ITS_OWN = re.compile(r"^(?:model\.)?mtp\.(.+)$")
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
            raise UserError(f"{name}: {_why_missing(target, config.num_target_layers)}")
        with load_errors(f"{name}: its experts"):
            tensors = _stack_experts(tensors, network)
        set_head(network, tensors, source=name)
    return network.eval().requires_grad_(False)


def _why_missing(target: Target, num_layers: int) -> str:
    names = f"model.layers.{num_layers}.* or mtp.*"
    for key in MTP_PROMISES:
        if promised := getattr(target.text.config, key, 0) or 0:
            return (
                f"its config promises mtp heads ({key}: {promised}), but its checkpoint has no tensors {names}; give the "
                "published checkpoint, because save_pretrained leaves them out"
            )
    return (
        f"its checkpoint has no mtp head, no tensors {names}; name another draft, or train a head with autotune train"
    )


def own_name(name: str, num_layers: int) -> str | None:
    """The name in ``MtpNetwork`` of a checkpoint's tensor; None if it belongs to no head or a later one, or is
    shared.
    """
    if (match := _AFTER_THE_LAST.match(name)) is not None:
        if int(match[1]) != num_layers:
            return None
        rest = match[2]
    elif (match := _OF_ITS_OWN.match(name)) is not None:
        rest = match[1]
        if (layer := re.match(r"layers\.(\d+)\.(.+)$", rest)) is not None:
            return f"layer.{layer[2]}" if int(layer[1]) == 0 else None
    else:
        return None
    if rest in _SHARED:
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
