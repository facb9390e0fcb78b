"""Self-test of captured steps, by which mode ``auto`` decides."""

from __future__ import annotations

from pydantic import Field

from autotune.files import Document


class CapturedSteps(Document):
    """Captured plain steps and a captured verification of a target against eager ones."""

    num_tokens: int = Field(default=0, ge=0)
    """Logits that were compared; 0 where captured steps do not run."""
    num_near_ties: int = Field(default=0, ge=0)
    """Tokens whose argmax differs."""
    difference: float = Field(default=0.0, ge=0)
    """Largest difference, in standard deviations of the logits."""
    allowed: float = Field(default=0.0, ge=0)
    """Likewise what rounding explains. Where no difference is larger, every other argmax is a near tie."""
    why_eager: str | None = None
    """Reason for which ``auto`` does not capture; None where it does."""
