"""The interface of serving engines, and their settings files."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import yaml
from pydantic import ValidationError

from autotune.errors import UserError
from autotune.export.document import BatchPrediction
from autotune.export.engine_replay import EngineReplay, EngineTree
from autotune.export.model_files import ModelFiles
from autotune.files import Document, describe, read_text, read_yaml, write_bytes
from autotune.trees.chain import ChainPolicy
from autotune.trees.eagle2 import Eagle2Policy

S = TypeVar("S", bound=Document)

SAMPLING = (
    "at temperature 0 these are the target's own tokens, except for near ties in reduced precision; above 0 the sampled tokens "
    "differ from autotune's, whose noise is keyed by seed and position"
)
"""How a lossless engine's tokens compare with this project's; part of each engine's ``lossless``."""


MAX_BATCH = 1024
"""No engine's default for the most requests of a batch is larger; the last entry of a schedule reaches it."""

Vision = Literal["features", "placeholders", "none", "unknown"]
"""What an engine shows an independent draft of an image: its features, the ids of the placeholders alone, nothing (the engine
is exported for text), or something that has not been checked.
"""


@dataclass(frozen=True)
class Pair:
    """The models to serve, by the names or folders that the engine is given."""

    target: str
    draft: str
    draft_kind: str
    target_files: ModelFiles | None = None
    """None if the model is not on this machine."""
    draft_files: ModelFiles | None = None


class Engine(ABC):
    """Translates trees into one engine's settings: a ``Document`` with the engine's own field names that refuses what the
    engine would refuse.
    """

    name: ClassVar[str]
    version: ClassVar[str]
    """The version whose rules these settings were checked against."""
    methods: ClassVar[Mapping[str, str]]
    """The engine's speculation method for each draft kind that it serves."""
    settings_type: type[Document]
    settings_file: ClassVar[str] = "{variant}.json"
    """Name of the settings file; the variant is ``chain`` or ``tree``."""
    vision: ClassVar[Vision]
    has_fixed_shapes: ClassVar[bool] = True
    """Whether every round drafts and verifies the configured number of tokens, whatever the draft proposes."""
    lossless: ClassVar[str]
    """Which settings keep the output lossless."""
    notes: ClassVar[Sequence[str]]
    """Limitations of the engine that the user should know."""
    floor_note: ClassVar[str] = "the engine has no such setting"
    """Why a chain's ``p_min`` and ``n_min`` are not exported."""

    def of_version(self, version: str | None) -> Engine:
        """The engine whose rules are those of a version; None: of the version that was checked.

        Raises:
            UserError: a version that was not checked.
        """
        if version in (None, self.version):
            return self
        raise UserError(
            f"--engine-version {version}: settings of {self.name} were checked against {self.version}; leave the option out, and "
            "read the notes"
        )

    def refusal(self, pair: Pair) -> str | None:
        """Why the engine would refuse the pair, by the configs of the two models, as far as they are on this machine; or None."""
        return None

    def supports_tree(self, pair: Pair, tree: Eagle2Policy) -> bool:
        """Whether the engine can run this tree; every engine runs chains."""
        return False

    def supports_schedule(self, pair: Pair) -> bool:
        """Whether the chain length may depend on the batch size."""
        return False

    def chains(self, replay: EngineReplay) -> Iterator[ChainPolicy]:
        """The chains that the engine can run."""
        return replay.chains()

    def loadable(self, pair: Pair, folder: Path) -> Pair:
        """The pair with models that the engine can load; converted ones are written to ``folder``.

        Raises:
            UserError: a model cannot be converted.
        """
        return pair

    def companions(self, schedule: Sequence[BatchPrediction]) -> Mapping[str, Document]:
        """Further files of a variant by name."""
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


def unequal_vocabularies(pair: Pair) -> str | None:
    """A line that says how the vocabularies of an independent draft and its target differ in size; None if they do not, or
    are not known.
    """
    if pair.target_files is None or pair.draft_files is None or pair.draft_kind != "independent":
        return None
    ours, theirs = pair.target_files.vocab_size, pair.draft_files.vocab_size
    if ours == theirs or ours is None or theirs is None:
        return None
    return f"the draft's vocabulary has {theirs} tokens and the target's has {ours}; choose a draft with the target's vocabulary"


def write_settings(path: Path, settings: Document) -> None:
    """Write settings as JSON or YAML, by the suffix, without the fields that are None."""
    content = settings.model_dump(exclude_none=True)
    text = yaml.safe_dump(content, sort_keys=False) if path.suffix == ".yaml" else json.dumps(content, indent=1) + "\n"
    write_bytes(path, text.encode())


def read_settings(settings_type: type[S], path: Path) -> S:
    """Read and check a settings file.

    Raises:
        UserError: the file breaks one of the engine's rules.
    """
    try:
        if path.suffix == ".yaml":
            return settings_type.model_validate(read_yaml(path))
        return settings_type.model_validate_json(read_text(path))
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error, settings_type)}") from None
