"""The kinds of drafts: what is known of each without loading one. The classes in ``drafters/`` know the rest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftKind:
    """A kind of draft."""

    is_complete_model: bool = False
    """Whether it is a Hugging Face model by itself, which serving engines load as it is."""
    is_target_layer: bool = False
    """Whether it is one layer of the target's type after a projection, which vLLM runs as a head of MiMo."""
    token_draft: str | None = None
    """``module:Class`` of a draft without files, which is loaded by the name of its kind
    (``drafters.token_draft.TokenDraft``).
    """


KINDS: dict[str, DraftKind] = {
    "independent": DraftKind(is_complete_model=True),
    "eagle3": DraftKind(),
    "star": DraftKind(),
    "dream": DraftKind(),
    "specvlm": DraftKind(),
    "mtp": DraftKind(is_target_layer=True),
    "dflash": DraftKind(),
    "retrieval": DraftKind(token_draft="autotune.drafters.retrieval:RetrievalDraft"),
}
TOKEN_DRAFTS = tuple(name for name, kind in KINDS.items() if kind.token_draft is not None)
"""Names of the drafts without files; a folder of such a name is given as ``./retrieval``."""
