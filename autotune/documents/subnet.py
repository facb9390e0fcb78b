"""Which part of a draft decodes."""

from __future__ import annotations

from pydantic import Field

from autotune.files import Document


class Subnet(Document):
    """One configuration of a draft. Heads are chosen in a supernet (``star``), the injection layer in drafts that read the
    target's features, visual tokens in every draft.
    """

    heads: float | tuple[float, float, float] | None = None
    """Share of heads kept, in all blocks or in each; None: all."""
    visual_keep: float = Field(default=1.0, gt=0, le=1)
    injection_layer: int | None = None
    """Of the target; None: the draft's own choice, its last."""

    @property
    def head_shares(self) -> tuple[float, float, float]:
        """Of each block."""
        return self.heads if isinstance(self.heads, tuple) else (self.heads or 1.0,) * 3

    @property
    def name(self) -> str:
        """Names files of it: ``heads-0.5-layer-9-keep-0.1``; what is left to the draft is left out."""
        return self.label.replace("=", "-").replace(" ", "-").replace("/", "-")

    @property
    def label(self) -> str:
        """For people: ``heads=0.5 layer=9 keep=0.1``; what is left to the draft is left out."""
        shares = self.heads if isinstance(self.heads, tuple) else () if self.heads is None else (self.heads,)
        heads = ["heads=" + "/".join(f"{share:g}" for share in shares)] if shares else []
        layer = [] if self.injection_layer is None else [f"layer={self.injection_layer}"]
        return " ".join([*heads, *layer, f"keep={self.visual_keep:g}"])
