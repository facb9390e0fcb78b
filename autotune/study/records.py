"""Ledger records of the subnet stage."""

from __future__ import annotations

from autotune.documents.configuration import DraftVariant
from autotune.documents.subnet import Subnet
from autotune.files import Document


class ScreenedSubnet(Document):
    """A subnet with its best chain. Speeds are predicted from trace and cost table."""

    draft: str
    subnet: Subnet
    depth: int
    tokens_per_round: float
    ms_per_token: float
    speedup: float
    """Over plain decoding."""
    measured_speedup: float | None = None
    """Measured in real runs with the same chain; None if they were not requested."""

    @property
    def variant(self) -> DraftVariant:
        return self.draft, self.subnet

    @property
    def rank(self) -> tuple[float, float, str]:
        """Sort key: the fastest first, the smaller of equally fast subnets."""
        return -(self.measured_speedup or self.speedup), sum(self.subnet.head_shares), self.subnet.name
