"""Device fingerprints."""

from __future__ import annotations

import re

from pydantic import Field

from autotune.files import Document

MOST_DEVICES = 64  # of one kind that share a target


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
    """Memory of one device."""
    driver: str = ""
    num_devices: int = Field(default=1, ge=1)
    """Number of such devices among which the target's weights are divided (tensor parallelism)."""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.title}/{self.num_cores}"

    @property
    def title(self) -> str:
        """The full name with the number of devices: ``NVIDIA H200``, ``4 x NVIDIA H200``."""
        return self.model if self.num_devices == 1 else f"{self.num_devices} x {self.model}"

    @property
    def cards(self) -> str:
        """The devices as ``--gpu`` takes them: ``h200``, ``4xh200``."""
        return cards_name(self.num_devices, self.name)


def cards_name(num_devices: int, name: str) -> str:
    """``4xh100`` for four devices; the name alone for one."""
    return name if num_devices == 1 else f"{num_devices}x{name}"


def split_cards(cards: str) -> tuple[int, str]:
    """The number of devices and their name in ``4xh100``; one in ``h100``. The inverse of ``cards_name``."""
    match = re.fullmatch(r"(\d+)x(.+)", cards)
    return (1, cards) if match is None else (int(match[1]), match[2])
