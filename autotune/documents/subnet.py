"""Subnets of drafts."""

from __future__ import annotations

from pydantic import Field

from autotune.files import Document


class Subnet(Document):
    """A choice of attention heads (supernets: ``star``), injection layer (drafts that read the target's features) and visual
    tokens (every draft).
    """

    heads: float | tuple[float, float, float] | None = None
    """Share of heads kept, for all three blocks or for each; None for all heads."""
    visual_keep: float = Field(default=1.0, gt=0, le=1)
    injection_layer: int | None = None
    """Index of the target's layer; None for the draft's default, its last."""

    @property
    def head_shares(self) -> tuple[float, float, float]:
        """The share of heads kept in each block."""
        return self.heads if isinstance(self.heads, tuple) else (self.heads or 1.0,) * 3

    @property
    def name(self) -> str:
        """Name in file names: ``heads-0.5-layer-9-keep-0.1``, without the draft's defaults."""
        return self.label.replace("=", "-").replace(" ", "-").replace("/", "-")

    @property
    def label(self) -> str:
        """Name in tables: ``heads=0.5 layer=9 keep=0.1``, without the draft's defaults."""
        shares = self.heads if isinstance(self.heads, tuple) else () if self.heads is None else (self.heads,)
        heads = ["heads=" + "/".join(f"{share:g}" for share in shares)] if shares else []
        layer = [] if self.injection_layer is None else [f"layer={self.injection_layer}"]
        return " ".join([*heads, *layer, f"keep={self.visual_keep:g}"])
