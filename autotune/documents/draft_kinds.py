"""The kinds of drafts: what is known of each without loading one. The classes in ``drafters/`` know the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ImageInput = Literal["features", "placeholders", "text"]
"""The form in which an engine shows an image to a draft, as far as it is known: as this project's runtime does, or as the
ids of the placeholders, read as text. ``text``: it shows something else, or nobody has checked; the draft is exported for
prompts without images.
"""


@dataclass(frozen=True)
class Served:
    """How an engine serves a kind of draft."""

    method: str
    """The engine's name of the speculation method."""
    images: ImageInput = "features"


@dataclass(frozen=True)
class DraftKind:
    """A kind of draft."""

    served: Mapping[str, Served] = field(default_factory=dict)
    """By the name of an engine; engines that are missing cannot serve the kind."""
    is_complete_model: bool = False
    """Whether it is a Hugging Face model by itself, which serving engines load as it is."""
    is_checked: bool = True
    """Whether settings of engines that serve the kind were checked; without a check none are exported."""
    has_files: bool = True
    """False for a draft that is loaded by the name of its kind."""


KINDS: dict[str, DraftKind] = {
    "independent": DraftKind(
        {
            "vllm": Served("draft_model", "placeholders"),
            "sglang": Served("STANDALONE", "text"),
            "llama.cpp": Served("draft-simple", "text"),
            "transformers": Served("assistant_model", "placeholders"),
        },
        is_complete_model=True,
    ),
    "eagle3": DraftKind(
        {"vllm": Served("eagle3"), "sglang": Served("EAGLE3"), "llama.cpp": Served("draft-eagle3", "text")}
    ),
    "star": DraftKind(),
    "dream": DraftKind(),
    "specvlm": DraftKind(),
    "mtp": DraftKind(),
    "dflash": DraftKind(),
    "gemma4_assistant": DraftKind(is_checked=False),
    "retrieval": DraftKind(has_files=False),
}
TOKEN_DRAFTS = tuple(name for name, kind in KINDS.items() if not kind.has_files)
"""Names of the drafts without files; a folder of such a name is given as ``./retrieval``."""


def served_by(engine: str) -> dict[str, Served]:
    """The kinds of drafts that an engine serves."""
    return {name: kind.served[engine] for name, kind in KINDS.items() if engine in kind.served}
