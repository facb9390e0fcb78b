"""Provenance: the program and the models that a document comes from."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from pathlib import Path

from autotune.documents.contention import Contention
from autotune.errors import UserError
from autotune.files import Document


class Provenance(Document):
    """Software versions and time of writing."""

    autotune: str
    created: str
    python: str
    torch: str
    transformers: str
    contention: Contention | None = None
    """Contention during the measurement; None for documents that hold no timings."""
    settings_key: str = ""
    """Hash of the settings of a search or of ``autotune measure``: no other command replaces its result."""

    def changes(self, now: Provenance) -> str:
        """Libraries that had other versions, ``torch 2.12 -> 2.13``; empty for none."""
        pairs = [(name, getattr(self, name), getattr(now, name)) for name in ("torch", "transformers")]
        return ", ".join(f"{name} {before} -> {after}" for name, before, after in pairs if before != after)


class ModelReference(Document):
    """A model: its name or folder, and the hash of its weights and config."""

    id: str
    sha256: str

    def is_same(self, other: ModelReference) -> bool:
        """Whether both have the same weights. Without hashes, names are compared."""
        return self.sha256 == other.sha256 and bool(self.sha256 or self.id == other.id)


def beside(source: Path, name: str) -> str:
    """The path of a model that lies in the folder of the file ``source``, and not in this one; its name for others."""
    model, suffix, part = name.partition(":")
    path = source.parent / model
    return name if Path(model).exists() or not path.exists() else f"{path}{suffix}{part}"


def workload_beside(profile: Path, name: str) -> str:
    """The file of a profile's own workload, beside the profile or in this folder; its name, if that is of no file.

    Raises:
        UserError: the file is in neither folder.
    """
    files = [path for path in (profile.parent / name, Path(name)) if path.is_file()]
    if not files and Path(name).suffix:
        raise UserError(
            f"{profile}: the prompts that it was tuned on, {name}, are neither beside it nor in this folder; give --workload FILE"
        )
    return str(files[0]) if files else name


DISTRIBUTION = "autotune-speculative"
"""Name of this distribution; ``autotune`` on the package index is another project."""


def version_of(package: str) -> str:
    """The installed version of a distribution; ``unknown`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def stamp(contention: Contention | None = None, settings_key: str = "") -> Provenance:
    """Provenance of a document written now, with the contention during its measurement and the key of its settings."""
    return Provenance(
        autotune=version_of(DISTRIBUTION),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        python=platform.python_version(),
        torch=version_of("torch"),
        transformers=version_of("transformers"),
        contention=contention,
        settings_key=settings_key,
    )
