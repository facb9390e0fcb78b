"""The interface of serving engines, and their settings files."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel

from autotune.documents.decoding_profile import Predicted
from autotune.documents.draft_kinds import KINDS, Served, served_by
from autotune.export.document import BatchPrediction
from autotune.export.engine_replay import EngineReplay, EngineTree
from autotune.export.model_files import Conversion, ModelFiles
from autotune.files import Document, write_bytes
from autotune.trees.chain import ChainPolicy
from autotune.trees.eagle2 import Eagle2Policy

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
    precision: str | None = None
    """Data type of the profile's target, and how its weights are quantized; None: the engine's own choice."""

    @property
    def is_complete_model(self) -> bool:
        """Whether the draft is a Hugging Face model by itself."""
        return KINDS[self.draft_kind].is_complete_model

    @property
    def dtype(self) -> str | None:
        """Data type for the engine's ``--dtype``; left to itself, an engine may run float32 models in 16 bits."""
        return None if self.precision is None else self.precision.partition(",")[0]


@dataclass(frozen=True)
class EngineCandidate:
    """The fastest configuration of one kind that an engine can run."""

    name: str
    """Part of the names of its files: ``chain``, ``tree``."""
    label: str
    tree: EngineTree | None
    """None for speculation that is not a tree policy of this project."""
    predicted: Predicted
    settings: Document
    by_batch: Sequence[BatchPrediction] = ()


class Engine(ABC):
    """Translates trees into one engine's settings: a ``Document`` with the engine's own field names."""

    name: ClassVar[str]
    version: ClassVar[str]
    """The version whose rules these settings were checked against."""
    settings_type: ClassVar[type[Document]]
    settings_file: ClassVar[str] = "{variant}.json"
    """Name of the settings file; the variant is the name of a candidate."""
    lossless: ClassVar[str]
    """Settings that keep the output lossless."""
    notes: ClassVar[Sequence[str]]
    """Limitations of the engine that the user should know."""
    floor_note: ClassVar[str | None] = "the engine has no such setting"
    """Why a chain's ``p_min`` and ``n_min`` are not exported; None if they are."""

    @property
    def served(self) -> dict[str, Served]:
        """The kinds of drafts that the engine serves."""
        return served_by(self.name)

    def method(self, pair: Pair) -> str:
        """The engine's speculation method for a pair."""
        return self.served[pair.draft_kind].method

    def refusal(self, pair: Pair) -> str | None:
        """Why the engine would refuse the pair, by the files of the two models, as far as they are on this machine; or None."""
        return None

    def caveats(self, pair: Pair) -> Sequence[str]:
        """Limitations of the engine with this pair."""
        return ()

    def supports_tree(self, pair: Pair, tree: Eagle2Policy) -> bool:
        """Whether the engine can run this tree; every engine runs chains."""
        return False

    def supports_schedule(self, pair: Pair) -> bool:
        """Whether the chain length may depend on the batch size."""
        return False

    def search(self, pair: Pair, replay: EngineReplay) -> list[EngineCandidate]:
        """The fastest configuration of every kind that the engine can run, in any order."""
        trees = (tree for tree in replay.trees() if self.supports_tree(pair, tree))
        fastest = {"chain": replay.fastest(replay.chains()), "tree": replay.fastest(trees)}
        candidates = []
        for name, priced in fastest.items():
            if priced is None:
                continue
            is_scheduled = isinstance(priced.tree, ChainPolicy) and self.supports_schedule(pair)
            schedule = replay.schedule(priced.tree) if is_scheduled and isinstance(priced.tree, ChainPolicy) else []
            settings = self.settings(pair, priced.tree, schedule)
            candidates.append(
                EngineCandidate(name, priced.tree.label, priced.tree, priced.predicted, settings, schedule)
            )
        return candidates

    def loadable(self, pair: Pair, folder: Path) -> tuple[Pair, Sequence[Conversion]]:
        """The pair with models that the engine can load, and the checkpoints in ``folder`` that have to be written for it.

        Raises:
            UserError: a model cannot be converted.
        """
        return pair, ()

    def companions(self, candidate: EngineCandidate) -> Mapping[str, BaseModel]:
        """Files that the settings of a candidate name, besides its own."""
        return {}

    def preparation(self, pair: Pair, folder: Path) -> Sequence[str]:
        """Commands that make what ``command`` needs."""
        return ()

    @abstractmethod
    def settings(self, pair: Pair, tree: EngineTree, schedule: Sequence[BatchPrediction] = ()) -> Document:
        """The settings of a tree; ``schedule`` is for chains of engines that have one."""

    @abstractmethod
    def command(self, pair: Pair, settings: Document, path: Path) -> str:
        """The command that starts the engine with these settings, which are in ``path``."""


def unequal_vocabularies(pair: Pair, *, with_tokens: bool = False) -> str | None:
    """How the vocabularies of an independent draft and its target differ: in size, or with ``with_tokens`` in the ids of their
    tokens. None if they do not, or are not known.
    """
    target, draft = pair.target_files, pair.draft_files
    if target is None or draft is None or not pair.is_complete_model:
        return None
    if None not in (target.vocab_size, draft.vocab_size) and target.vocab_size != draft.vocab_size:
        return (
            f"the draft's vocabulary has {draft.vocab_size} tokens and the target's has {target.vocab_size}; choose a draft with "
            "the target's vocabulary"
        )
    if with_tokens and None not in (ids := (target.token_ids(), draft.token_ids())) and ids[0] != ids[1]:
        return "the tokenizers give tokens other ids; choose a draft with the target's tokenizer"
    return None


def write_settings(path: Path, settings: BaseModel) -> None:
    """Write settings as JSON, without the fields that are None."""
    write_bytes(path, (json.dumps(settings.model_dump(exclude_none=True), indent=1) + "\n").encode())
