"""The loss of a stage of training, as recipes set it."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from autotune.documents.subnet import Subnet
from autotune.files import Document

DistillationRule = Literal["none", "entropy", "entropy-and-change"]


class LossSettings(Document):
    """The loss of a stage of training. Each kind of draft reads the settings that it has."""

    subnets: Literal["full", "random"] = "full"
    """The full network, or for ``star`` a random subnet at every step (the second phase of its training)."""
    whole_share: float = Field(default=0.0, ge=0, le=1)
    """With random subnets: share of the steps that train the full network instead."""
    subnet: Subnet | None = None
    """Train only this subnet of ``star``."""
    logit_weight: float | None = Field(default=None, ge=0)
    """Weight of the KL divergence from the target's distributions. None: that of the draft's paper."""
    feature_weight: float | None = Field(default=None, ge=0)
    """Weight of the SmoothL1 loss between the draft's states and the target's last features. None: that of the draft's
    paper.
    """
    unrolled_steps: int = Field(default=6, ge=1)
    """Training of ``eagle3`` and ``mtp``: number of tokens that are drafted at every position, one from the next."""
    gate_examples: int = Field(default=1, ge=1)
    """``specvlm`` with a selecting gate: examples of each batch on which the losses of all operators train it."""
    gate_cost: float = Field(default=0.01, ge=0)
    """Cost of an operator that leaves all visual rows, as a share of the mean loss of the operators."""
    gate_entropy: float = Field(default=0.02, ge=0)
    """Weight of the entropy of the gate's shares at the first step; it falls linearly to zero over the stage."""
    distillation: DistillationRule | Annotated[int, Field(ge=1)] = "none"
    """The target layer that the first block imitates: the one of least attention entropy (DREAM, section 3.2), the
    one of least entropy plus change of entropy (STAR, section 3.2), or always the layer of this number (from 1).
    """
    distillation_weight: float = Field(default=0.2, ge=0)

    def at(self, share: float) -> Self:
        """The settings after this share of the stage's steps."""
        return self.model_copy(update={"gate_entropy": (1 - share) * self.gate_entropy})
