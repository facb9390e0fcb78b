"""A device, as documents name it."""

from __future__ import annotations

from autotune.files import Document


class Fingerprint(Document):
    """A device by everything that decides its speed. Two documents are comparable if ``key`` is equal."""

    name: str
    """Short, for people and file names: ``cpu``, ``h200``."""
    kind: str
    """``cpu`` or ``cuda``."""
    model: str
    """As the system names it."""
    num_cores: int
    """Threads that torch uses, or the GPU's multiprocessors."""
    memory_bytes: int
    driver: str = ""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.model}/{self.num_cores}"
