"""The interface of serving engines, and their settings files."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

import yaml
from pydantic import ValidationError

from autotune.errors import UserError
from autotune.export.document import BatchPrediction
from autotune.export.engine_replay import EngineTree
from autotune.files import Document, describe, read_text, read_yaml, write_bytes
from autotune.trees.eagle2 import Eagle2Policy

S = TypeVar("S", bound=Document)

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


class Engine(ABC):
    """Translates trees into one engine's settings: a ``Document`` with the engine's own field names that refuses what the
    engine would refuse.
    """

    methods: ClassVar[Mapping[str, str]]
    """The engine's speculation method for each draft kind that it serves."""
    settings_type: ClassVar[type[Document]]
    settings_file: ClassVar[str] = "{variant}.json"
    """Name of the settings file; the variant is ``chain`` or ``tree``."""
    has_schedule: ClassVar[bool] = False
    """Whether the chain length may depend on the batch size."""
    lossless: ClassVar[str]
    """Which settings keep the output lossless."""
    notes: ClassVar[Sequence[str]]
    """Limitations of the engine that the user should know."""
    floor_note: ClassVar[str] = "the engine has no such setting"
    """Why a chain's ``p_min`` and ``n_min`` are not exported."""

    def supports_tree(self, pair: Pair, tree: Eagle2Policy) -> bool:
        """Whether the engine can run this tree; every engine runs chains."""
        return False

    @abstractmethod
    def settings(self, pair: Pair, tree: EngineTree, schedule: Sequence[BatchPrediction] = ()) -> Document:
        """The settings of a tree; ``schedule`` is for chains of engines that have one."""

    @abstractmethod
    def command(self, pair: Pair, settings: Document, path: Path) -> str:
        """The command that starts the engine with these settings, which are in ``path``."""


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
