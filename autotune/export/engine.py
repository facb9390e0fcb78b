"""What an export asks of an engine, and its files on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

import yaml
from pydantic import ValidationError

from autotune.errors import UserError
from autotune.export.choose import BatchRange, EngineTree
from autotune.files import Document, describe, read_text, read_yaml, write_bytes
from autotune.trees.eagle2 import Eagle2Policy

S = TypeVar("S", bound=Document)


@dataclass(frozen=True)
class Pair:
    """What is served, by the names that the engine is given."""

    target: str
    draft: str
    kind: str
    """Of the draft."""


class Engine(Protocol):
    """Turns trees into settings. Its settings are a ``Document`` with the engine's own field names, and refuse what the
    engine would refuse.
    """

    methods: ClassVar[Mapping[str, str]]
    """What it calls each kind of draft that it serves."""
    has_schedule: ClassVar[bool]
    """Whether chains can be as long as the batch size asks for."""
    settings_kind: ClassVar[type[Document]]
    lossless: ClassVar[str]
    """Which of its settings keep the output the target's own."""
    notes: ClassVar[Sequence[str]]
    """What else to know before trusting it."""

    def grows(self, pair: Pair, tree: Eagle2Policy) -> bool:
        """Whether it can run such a tree; chains it can."""

    def settings(self, pair: Pair, tree: EngineTree, schedule: Sequence[BatchRange]) -> Document:
        """``schedule`` is empty for trees, and where ``has_schedule`` is not."""

    def file_name(self, variant: str) -> str:
        """``variant`` is ``chain`` or ``tree``."""

    def command(self, pair: Pair, settings: Document, path: Path) -> str:
        """Starts the engine with these settings, which lie in ``path``."""


def write_settings(path: Path, settings: Document) -> None:
    """As JSON or YAML, by the name; what is left to the engine is left out."""
    content = settings.model_dump(exclude_none=True)
    text = yaml.safe_dump(content, sort_keys=False) if path.suffix == ".yaml" else json.dumps(content, indent=1) + "\n"
    write_bytes(path, text.encode())


def read_settings(kind: type[S], path: Path) -> S:
    """Settings on disk.

    Raises:
        UserError: they break one of the engine's rules.
    """
    try:
        if path.suffix == ".yaml":
            return kind.model_validate(read_yaml(path))
        return kind.model_validate_json(read_text(path))
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error, kind)}") from None
