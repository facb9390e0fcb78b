"""Where a document comes from: stamped on everything that is written."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform

from autotune.files import Document


class Provenance(Document):
    """Versions and time of the program that wrote a document."""

    autotune: str
    created: str
    python: str
    torch: str
    transformers: str


class ModelReference(Document):
    """A model that a document speaks of: where it was, and the hash of its weights and config."""

    id: str
    sha256: str

    def is_same(self, other: ModelReference) -> bool:
        """Whether both are of the same weights; without a hash the name decides."""
        return self.sha256 == other.sha256 and bool(self.sha256 or self.id == other.id)


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def stamp() -> Provenance:
    """Provenance of what is written now."""
    return Provenance(
        autotune=version_of("autotune"),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        python=platform.python_version(),
        torch=version_of("torch"),
        transformers=version_of("transformers"),
    )
