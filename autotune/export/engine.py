"""The interface of serving engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from autotune.documents.draft_kinds import KINDS, Served
from autotune.export.model_files import Conversion, ModelFiles
from autotune.files import Document
from autotune.trees.chain import ChainPolicy

SAMPLING = (
    "at temperature 0 these are the target's own tokens, except for near ties in reduced precision; above 0 the sampled tokens "
    "differ from autotune's, whose noise is keyed by seed and position"
)
"""How a lossless engine's tokens compare with this project's; part of each engine's ``lossless``."""


@dataclass(frozen=True)
class Pair:
    """The models to serve, by the names or folders that the engine is given."""

    target: str
    draft: str
    draft_kind: str
    target_files: ModelFiles | None = None
    """None if the model is not on this machine."""
    draft_files: ModelFiles | None = None
    dtype: str | None = None
    """For the engine's ``--dtype``; None: its own choice, which may be 16 bits for models in float32."""

    @property
    def is_complete_model(self) -> bool:
        """Whether the draft is a Hugging Face model by itself."""
        return KINDS[self.draft_kind].is_complete_model


class Engine(ABC):
    """Translates chains into one engine's settings: a ``Document`` with the engine's own field names."""

    name: ClassVar[str]
    version: ClassVar[str]
    """The version whose rules these settings were checked against."""
    settings_file: ClassVar[str]
    lossless: ClassVar[str]
    """Settings that keep the output lossless."""
    notes: ClassVar[Sequence[str]]
    """Limitations of the engine that the user should know."""
    floor_note: ClassVar[str] = "the engine has no such setting"
    """Why a chain's ``p_min`` and ``n_min`` are not exported."""

    @property
    def served(self) -> dict[str, Served]:
        """The kinds of drafts that the engine serves."""
        return {name: kind.served[self.name] for name, kind in KINDS.items() if self.name in kind.served}

    def refusal(self, pair: Pair) -> str | None:
        """Why the engine would refuse the pair, by the files of the two models, as far as they are on this machine; or None."""
        return None

    def caveats(self, pair: Pair) -> Sequence[str]:
        """Limitations of the engine with this pair."""
        return ()

    def loadable(self, pair: Pair, folder: Path) -> tuple[Pair, Sequence[Conversion]]:
        """The pair with models that the engine can load, and the checkpoints in ``folder`` that have to be written for it.

        Raises:
            UserError: a model cannot be converted.
        """
        return pair, ()

    @abstractmethod
    def settings(self, pair: Pair, chain: ChainPolicy) -> Document:
        """The settings of a chain."""

    @abstractmethod
    def command(self, pair: Pair, settings: Document, path: Path) -> str:
        """The command that starts the engine with these settings, which are in ``path``."""
