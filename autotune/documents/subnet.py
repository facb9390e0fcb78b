"""Subnets of drafts."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Field

from autotune.files import Document

VisualRanking = Literal["text_after_image", "all_queries", "last_query", "even", "random"]
"""How the visual tokens that a draft reads are chosen: by the attention that they receive in the target's last layer,
from the text after the image, from all tokens (STAR, eq. 2), or from the last token of the prompt; evenly spaced; or at
random.
"""
VISUAL_RANKINGS: tuple[VisualRanking, ...] = get_args(VisualRanking)
Operator = Literal["prune", "pool", "convolve", "resample", "text_only"]
"""An operator of SpecVLM's compressor (section 3.4)."""
OPERATORS_WITH_RATIO: tuple[Operator, ...] = ("prune", "pool")
"""Operators without weights, whose ratio can be chosen after the training."""
NUM_BLOCKS: Final = 3
"""Blocks of a supernet."""
Weights = Literal["float8"]
"""Data type of a draft's weights, instead of the target's."""
Share = Annotated[float, Field(gt=0, le=1)]
HeadShares = Share | tuple[Share, Share, Share]
"""Share of heads kept, in all three blocks or in each."""


class Subnet(Document):
    """A choice of attention heads (supernets: ``star``), injection layer, vocabulary and weights (drafts that read the
    target's features), visual tokens (every draft) and the operator that compresses them (``specvlm``).
    """

    heads: HeadShares | None = None
    """None for all heads."""
    visual_keep: float = Field(default=1.0, gt=0, le=1)
    visual_ranking: VisualRanking = "text_after_image"
    injection_layer: int | None = None
    """Index of the target's layer; None for the draft's default, its last."""
    operator: Operator | None = None
    """None for the choice of the draft's gate."""
    operator_ratio: int | None = Field(default=None, ge=1)
    """Visual tokens for each row that ``prune`` or ``pool`` leaves; None for the ratio of the training."""
    vocabulary: float | None = Field(default=None, gt=0, le=1)
    """Share of the target's vocabulary that the draft proposes, its most frequent tokens; None for all that it was
    trained on.
    """
    weights: Weights | None = None
    """Data type of the draft's weights; None for the target's."""

    @property
    def head_shares(self) -> tuple[float, float, float]:
        """The share of heads kept in each block."""
        return self.heads if isinstance(self.heads, tuple) else (self.heads or 1.0,) * NUM_BLOCKS

    @property
    def network(self) -> tuple[Any, ...]:
        """Everything but the choice of visual tokens: subnets with the same value share one loaded network."""
        return self.head_shares, self.injection_layer, self.operator, self.operator_ratio, self.vocabulary, self.weights

    @property
    def priced(self) -> tuple[Any, ...]:
        """The choices that change the cost of a step: shares of heads, vocabulary and weights."""
        return self.head_shares, self.vocabulary, self.weights

    @property
    def of_price(self) -> Subnet:
        """The subnet with these choices alone."""
        return Subnet(heads=self.heads, vocabulary=self.vocabulary, weights=self.weights)

    @property
    def name(self) -> str:
        """Name in file names: ``heads-0.5-layer-9-keep-0.1``, without the draft's defaults."""
        return re.sub("[= /:]", "-", self._described(f"keep={self.visual_keep:g}"))

    @property
    def label(self) -> str:
        """Name in tables: ``heads=0.5 layer=9 keep=0.1``, without the draft's defaults; there may be no image to keep
        all of.
        """
        return self._described("" if self.visual_keep == 1.0 else f"keep={self.visual_keep:g}")

    def _described(self, keep: str) -> str:
        shares = self.head_shares[: None if isinstance(self.heads, tuple) else 1]
        ratio = "" if self.operator_ratio is None else f":{self.operator_ratio}"
        choices = {
            "heads=" + "/".join(f"{share:g}" for share in shares): self.heads is not None,
            f"layer={self.injection_layer}": self.injection_layer is not None,
            keep: keep,
            f"ranking={self.visual_ranking}": self.visual_ranking != "text_after_image",
            f"operator={self.operator}{ratio}": self.operator is not None,
            f"vocabulary={self.vocabulary or 1.0:g}": self.vocabulary is not None,
            f"weights={self.weights}": self.weights is not None,
        }
        return " ".join(text for text, is_chosen in choices.items() if is_chosen)
