"""Device fingerprints."""

from __future__ import annotations

from autotune.files import Document


class Fingerprint(Document):
    """The properties of a device that determine latency. Measurements are comparable if their ``key`` is equal."""

    name: str
    """Short name, used in commands and file names: ``cpu``, ``h200``."""
    kind: str
    """``cpu`` or ``cuda``."""
    model: str
    """Full name, as the system reports it."""
    num_cores: int
    """Number of threads that torch uses, or of the GPU's multiprocessors."""
    memory_bytes: int
    driver: str = ""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.model}/{self.num_cores}"
