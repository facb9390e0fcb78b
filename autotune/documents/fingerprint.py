"""Device fingerprints."""

from __future__ import annotations

import re
from typing import Self

from autotune.files import Document

MOST_DEVICES = 64  # that share a target


class Fingerprint(Document):
    """The properties of a device that determine latency. Measurements are comparable if their ``key`` is equal."""

    name: str
    """Short name, used in commands and file names: ``cpu``, ``h200``; ``4xh200`` for four that share a target."""
    kind: str
    """``cpu`` or ``cuda``."""
    model: str
    """Full name, as the system reports it; of several devices with their number, ``4xNVIDIA H200``."""
    num_cores: int
    """Number of threads that torch uses, or of the GPU's multiprocessors."""
    memory_bytes: int
    """Memory of one device."""
    driver: str = ""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.model}/{self.num_cores}"

    def shared_by(self, num_devices: int) -> Self:
        """The fingerprint of ``num_devices`` such devices, among which a target is divided (tensor parallelism)."""
        return self.model_copy(update={key: cards_name(num_devices, getattr(self, key)) for key in ("name", "model")})


def cards_name(num_devices: int, name: str) -> str:
    """The name of several devices, ``4xh100``; of one, ``h100``."""
    return name if num_devices == 1 else f"{num_devices}x{name}"


def split_cards(cards: str) -> tuple[int, str]:
    """The number of devices and the name of one, of ``4xh100`` or ``h100``."""
    match = re.fullmatch(r"(\d+)x(.+)", cards)
    return (1, cards) if match is None else (int(match[1]), match[2])
