"""Parts of a cost table: the shape of a model, and the latencies of a draft. Without torch."""

from __future__ import annotations

from pydantic import Field

from autotune.cost.request_costs import Overhead, PrefillCost
from autotune.cost.surface import Surface
from autotune.documents.provenance import ModelReference
from autotune.documents.subnet import Subnet
from autotune.files import Document


class ModelShape(Document):
    """The properties of a model that determine its latency."""

    num_layers: int
    hidden_size: int
    text_parameters: int
    """Decoder layers and head, which every step reads once."""
    vision_parameters: int
    kv_bytes_per_token: int
    bytes_per_parameter: int | float
    """Mean over the text parameters; of quantized weights with their scales, and not an integer."""
    layer_kernels: int = Field(default=40, gt=0)
    """Kernels of a layer in a captured step: 24, and eight for each RMSNorm, of which most models have two."""
    crossing_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the KV bytes per token in cross-attention blocks, whose KV length includes pruned tokens (``Trace.draft_kv_length``)."""
    block_tokens: int = Field(default=0, ge=0)
    """Tokens that a draft's first forward pass of a round evaluates besides the committed ones, so that all levels are drafted by
    it; 0: every level is a forward pass.
    """

    @property
    def has_forward_pass(self) -> bool:
        """False for a draft that needs no model."""
        return self.num_layers > 0


class DraftCosts(Document):
    """Latencies of a draft, or of a subnet with fewer heads or a smaller vocabulary. Pruned visual tokens only shorten the KV cache, and the
    injection layer does not change latency.

    Forward passes are measured with one KV length for all blocks, as without pruning.
    """

    draft: ModelReference
    heads: float | tuple[float, float, float] | None = None
    """Share of heads kept, for all blocks or for each; None for all heads."""
    vocabulary: float | None = None
    """Share of the target's vocabulary that the draft proposes; None for all of it."""
    num_parameters: int | None = None
    """Excludes parameters shared with the target."""
    kv_bytes_per_token: int | None = None
    shape: ModelShape | None = None
    draft_first: Surface
    """The first draft forward of a round, which reads the committed tokens and proposes the root's children. It runs after
    a verification, which has evicted the draft's weights from the processor's caches.
    """
    draft_level: Surface
    """Every other draft forward of a round; it runs after another draft forward."""
    prefill: PrefillCost
    overhead: Overhead
    verify_ratio: float = Field(default=1.0, gt=0)
    """Verification between rounds of this draft, as a multiple of the table's ``verify``, the mean over drafts. A draft's weights
    take the place of the target's in the processor's caches, and the target keeps the outputs of the layers that it reads.
    """
    verify_error: float = Field(default=0.0, ge=0)
    """Relative standard error of ``verify_ratio``."""

    @property
    def name(self) -> str:
        """Name in tables: ``digits/star heads-0.5``."""
        choices = Subnet(heads=self.heads, vocabulary=self.vocabulary).label.split()
        return " ".join([self.draft.id, *(choice.replace("=", "-") for choice in choices if choice != "keep=1")])

    @property
    def head_share(self) -> float | None:
        """The share of heads, if it is the same in all blocks."""
        shares = set(Subnet(heads=self.heads).head_shares)
        return shares.pop() if len(shares) == 1 else None

    def is_of(self, draft: ModelReference, subnet: Subnet) -> bool:
        """Whether these are the latencies of a draft with the heads and vocabulary of a subnet. Without hashes, names are
        compared.
        """
        heads, vocabulary = Subnet(heads=self.heads).head_shares, self.vocabulary
        return self.draft.is_same(draft) and (heads, vocabulary) == (subnet.head_shares, subnet.vocabulary)


def choices_of(costs: DraftCosts | Subnet) -> list[str]:
    """The choices that change the cost of a step, where they are not the draft's own."""
    choices = {"heads": costs.heads, "vocabulary": costs.vocabulary}
    return [f"{name} {value}" for name, value in choices.items() if value is not None]
