"""What screening says of a subnet: a record of the ledger."""

from __future__ import annotations

from autotune.documents.configuration import DraftVariant
from autotune.documents.subnet import Subnet
from autotune.files import Document


class ScreenedSubnet(Document):
    """A subnet, and its best chain."""

    draft: str
    subnet: Subnet
    depth: int
    tokens_per_round: float
    ms_per_token: float
    """Predicted."""
    speedup: float
    """Over plain decoding, predicted by the same table."""
    measured_speedup: float | None = None
    """Of real runs with the same chain, where they were asked for."""

    @property
    def variant(self) -> DraftVariant:
        return self.draft, self.subnet

    @property
    def rank(self) -> tuple[float, float, str]:
        """The best first; of equal ones the smaller."""
        return -(self.measured_speedup or self.speedup), sum(self.subnet.head_shares), self.subnet.name
