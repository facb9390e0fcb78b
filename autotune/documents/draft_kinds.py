"""The kinds of drafts: what is known of each without loading one. The classes in ``drafters/`` know the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import UserError


@dataclass(frozen=True)
class DraftKind:
    """A kind of draft."""

    is_model: bool = False
    """Whether it is a complete model, as transformers' ``generate`` takes one for its ``assistant_model``."""
    is_target_layer: bool = False
    """Whether it is one layer of the target's type after a projection, which vLLM runs as a head of MiMo."""
    is_trained: bool = False
    """Whether ``autotune train`` makes one."""
    is_unrolled: bool = False
    """Whether it is trained by unrolling its drafting: it has no subnets, and imitates no features."""
    token_draft: str | None = None
    """``module:Class`` of a draft without files, which is loaded by the name of its kind
    (``drafters.token_draft.TokenDraft``).
    """


KINDS: dict[str, DraftKind] = {
    "independent": DraftKind(is_model=True),
    "eagle3": DraftKind(is_trained=True, is_unrolled=True),
    "star": DraftKind(is_trained=True),
    "dream": DraftKind(is_trained=True),
    "specvlm": DraftKind(is_trained=True),
    "mtp": DraftKind(is_target_layer=True, is_trained=True, is_unrolled=True),
    "dflash": DraftKind(),  # refused: see ``refuse_dflash``
    "retrieval": DraftKind(token_draft="autotune.drafters.retrieval:RetrievalDraft"),
}
TRAINED = tuple(name for name, kind in KINDS.items() if kind.is_trained)
WHOLE_MODELS = tuple(name for name, kind in KINDS.items() if kind.is_model)
TOKEN_DRAFTS = tuple(name for name, kind in KINDS.items() if kind.token_draft is not None)
"""Names of the drafts without files; a folder of such a name is given as ``./retrieval``."""

MTP_PROMISES = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of a target's config that give the number of multi-token prediction heads in its checkpoint."""


def is_own_draft(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` describes a draft that ``autotune train`` wrote."""
    return str(config.get("schema", "")).startswith("autotune.draft/")


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` describes an EAGLE-3 head, in EAGLE's format or in that of ``speculators``."""
    if "speculators_model_type" in config:
        return config["speculators_model_type"] == "eagle3"
    return "draft_vocab_size" in config


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` describes a block-diffusion draft (DFlash) in the form of its authors, of
    ``speculators``, or of transformers' assistants.
    """
    is_named = "DFlash" in str(config.get("architectures")) or config.get("speculators_model_type") == "dflash"
    has_blocks = config.keys() >= {"block_size", "mask_token_id", "target_layer_ids"}
    return is_named or has_blocks or "dflash_config" in config


def refuse_dflash(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a block-diffusion draft (DFlash), which serving engines alone run.

    Args:
        name: the model, as the user gave it.
        config: content of its ``config.json``.

    Raises:
        UserError: it is one, see ``is_dflash``.
    """
    if is_dflash(config):
        raise UserError(
            f"{name}: drafts of kind dflash propose whole blocks, and are neither run nor exported; give a draft of another kind, or use vLLM's "
            f"""own --speculative-config '{{"method": "dflash", "model": "{name}", "num_speculative_tokens": N}}'"""
        )
