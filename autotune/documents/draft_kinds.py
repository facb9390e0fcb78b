"""The kinds of drafts: what is known of each without loading one. The classes in ``drafters/`` know the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.documents.subnet import VisualInput


@dataclass(frozen=True)
class Served:
    """How an engine serves a kind of draft."""

    method: str
    """The engine's name of the speculation method."""
    images: VisualInput = "features"
    """How it shows images to the draft."""


@dataclass(frozen=True)
class DraftKind:
    """A kind of draft."""

    served: Mapping[str, Served] = field(default_factory=dict)
    """By the name of an engine; engines that are missing cannot serve the kind."""
    is_complete_model: bool = False
    """Whether it is a Hugging Face model by itself, which serving engines load as it is."""
    is_target_layer: bool = False
    """Whether it is one layer of the target's type after a projection, which vLLM runs as a head of MiMo."""
    token_draft: str | None = None
    """``module:Class`` of a draft without files, which is loaded by the name of its kind
    (``drafters.token_draft.TokenDraft``).
    """


KINDS: dict[str, DraftKind] = {
    "independent": DraftKind({"vllm": Served("draft_model", "placeholders")}, is_complete_model=True),
    "eagle3": DraftKind({"vllm": Served("eagle3")}),
    "star": DraftKind(),
    "dream": DraftKind(),
    "specvlm": DraftKind(),
    "mtp": DraftKind(is_target_layer=True),
    "dflash": DraftKind(),
    "retrieval": DraftKind(token_draft="autotune.drafters.retrieval:RetrievalDraft"),
}
TOKEN_DRAFTS = tuple(name for name, kind in KINDS.items() if kind.token_draft is not None)
"""Names of the drafts without files; a folder of such a name is given as ``./retrieval``."""
