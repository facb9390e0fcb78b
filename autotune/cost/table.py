"""Cost tables: latencies measured on one device, and the prices that replay looks up. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from autotune.cost.request_costs import Overhead, PrefillCost
from autotune.cost.surface import Surface
from autotune.documents.execution import EAGER, STEPS_VERSION, round_up
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.files import Document, content_key, data_root
from autotune.trees.limits import Floats

if TYPE_CHECKING:
    import pandas as pd

KV_STEP = 16  # tokens between two KV lengths of the prices
# Numbers of tokens measured: every small one, because matrix kernels work on blocks and the ninth token may cost more
# than the first eight; then full trees of 64 and 128 nodes with their root, and the widest level of wetap.
TOKENS = (*range(1, 11), 12, 16, 17, 24, 32, 33, 48, 65, 129)
CONTEXTS = (4096, 32_768, 131_072)  # tokens, for which the memory of a target is stated
USABLE_MEMORY = 0.9  # of a card, for weights, keys and values; activations, captured steps and CUDA take the rest
EVERY_ROW = tuple(range(1, 34))
"""Numbers of tokens measured in addition where kernels may change with any of them, as those of quantized products do,
and those of CPUs, on some of which an odd number takes longer than the even one after it.
"""


class ModelShape(Document):
    """The properties of a model that determine its latency."""

    architecture: str = ""
    """Model type, or the kind of a draft that is no model by itself; empty where it was not recorded."""
    num_layers: int
    hidden_size: int
    text_parameters: int
    """Decoder layers and head, which every step reads once."""
    vision_parameters: int
    vision_layers: int = Field(default=0, ge=0)
    """Layers of the vision tower; 0 where they were not counted."""
    kv_bytes_per_token: int
    bytes_per_parameter: int | float
    """Mean over the text parameters; of quantized weights with their scales, and not an integer."""
    layer_kernels: int = Field(default=40, gt=0)
    """Kernels of a layer in a captured step: 24, and eight for each RMSNorm, of which most models have two."""
    crossing_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the KV bytes per token in cross-attention blocks, whose KV length includes pruned tokens
    (``Trace.draft_kv_length``).
    """
    divided_parameters: int = Field(default=0, ge=0)
    """Parameters of the decoder layers that devices divide (tensor parallelism); each holds all others whole. 0 for a
    draft, which runs on one device.
    """
    embedding_parameters: int = Field(default=0, ge=0)
    """Parameters of an embedding that is not the output head."""
    device_numbers: tuple[int, ...] = (1,)
    """Numbers of devices that can divide the layers: divisors of the query heads, and of the key and value heads."""

    def bytes_on_each(self, num_devices: int, kv_length: int) -> float:
        """Bytes of weights, and of keys and values of ``kv_length`` tokens, on each device that shares the model."""
        whole = self.text_parameters - self.divided_parameters + self.vision_parameters + self.embedding_parameters
        return (
            whole * self.bytes_per_parameter
            + (self.divided_parameters * self.bytes_per_parameter + kv_length * self.kv_bytes_per_token) / num_devices
        )

    def cards_needed(self, card: str, memory_bytes: float) -> str:
        """A sentence: how many cards of this memory hold the model, by the length of the context."""
        needed = {
            length: next(
                (n for n in self.device_numbers if self.bytes_on_each(n, length) <= USABLE_MEMORY * memory_bytes),
                "none",
            )
            for length in CONTEXTS
        }
        return f"cards of {card} that hold the target, by tokens of context: " + ", ".join(
            f"{number} with {length:,}" for length, number in needed.items()
        )

    @property
    def has_forward_pass(self) -> bool:
        """False for a draft that needs no model."""
        return self.num_layers > 0


class DraftCosts(Document):
    """Latencies of a draft, or of a subnet with fewer heads, a smaller vocabulary or other weights. Pruned visual
    tokens only shorten the KV cache, and the injection layer does not change latency.

    Forward passes are measured with one KV length for all blocks, as without pruning.
    """

    draft: ModelReference
    subnet: Subnet = Subnet()
    """The choices that change the cost of a step (``Subnet.of_price``)."""
    shape: ModelShape | None = None
    draft_first: Surface
    """The first draft forward of a round, which reads the committed tokens and proposes the root's children. It runs
    after a verification, which has evicted the draft's weights from the processor's caches.
    """
    draft_level: Surface
    """Every other draft forward of a round; it runs after another draft forward."""
    prefill: PrefillCost
    overhead: Overhead
    verify_ratio: float = Field(default=1.0, gt=0)
    """Verification between rounds of this draft, as a multiple of the table's ``verify``, the mean over drafts. A
    draft's weights take the place of the target's in the processor's caches, and the target keeps the outputs of the
    layers that it reads.
    """
    verify_error: float = Field(default=0.0, ge=0)
    """Relative standard error of ``verify_ratio``."""

    @property
    def name(self) -> str:
        """Name in tables: ``digits/star heads-0.5``."""
        return " ".join([self.draft.id, self.subnet.label.replace("=", "-")]).strip()

    def is_of(self, draft: ModelReference, subnet: Subnet) -> bool:
        """Whether they are those of a draft with the heads, vocabulary and weights of a subnet. Without hashes, names
        are compared.
        """
        return self.draft.is_same(draft) and self.subnet.priced == subnet.priced


SizedDraft = tuple[ModelReference, Subnet, ModelShape]
"""A draft, the part of it that drafts, and the sizes of this part."""


class CostTable(Document, kind="cost-table", version=3, made_by="autotune measure"):
    """Latencies of a target and its drafts on one device, in the mode that decodes, over (tokens, KV length, subnet).
    The batch size is 1, because the rows of a batch are decoded one after another.
    """

    provenance: Provenance
    device: Fingerprint
    precision: str
    mode: str = "eager"
    capture_sizes: tuple[int, ...] = ()
    """Numbers of tokens that inputs are padded to; empty for no padding."""
    attention_backends: tuple[str, ...] = ()
    """As in a decoding profile."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads after the prefill, the fastest number; None for torch's default."""
    prefill_threads: int | None = Field(default=None, ge=1)
    """CPU threads of prefills, likewise."""
    estimated: bool = False
    """Whether latencies are estimates from a datasheet."""
    num_anchors: int = Field(default=0, ge=0)
    """Number of measured tables of the same device that the estimate is scaled to."""
    disturbed_samples: int = Field(default=0, ge=0)
    """Number of samples during which the device's speed changed, so that scaling by plain steps corrects them in part
    only.
    """
    steps_version: int = 1
    """Number of the work of captured steps (``execution.STEPS_VERSION``)."""
    target: ModelReference
    target_shape: ModelShape | None = None
    decode: Surface
    """A plain step: one token."""
    verify: Surface
    """Verification: root and tree in one forward; the mean over drafts (``DraftCosts.verify_ratio``)."""
    prefill: PrefillCost
    drafts: list[DraftCosts]

    @property
    def parts(self) -> dict[str, Surface | PrefillCost | Overhead]:
        """Everything measured, by name."""
        parts: dict[str, Surface | PrefillCost | Overhead] = {
            "decode": self.decode,
            "verify": self.verify,
            "prefill": self.prefill,
        }
        for costs in self.drafts:
            for name in ("draft_first", "draft_level", "prefill"):
                parts[f"{costs.name}: {name}"] = getattr(costs, name)
            parts[f"{costs.draft.id}: overhead"] = costs.overhead  # the same for all subnets of a draft
        return parts

    @property
    def num_samples(self) -> int:
        """Number of samples of all surfaces."""
        return sum(len(point.samples_ms) for surface in self.surfaces.values() for point in surface.points)

    @property
    def surfaces(self) -> dict[str, Surface]:
        """Surfaces by part: ``decode``, ``verify``, ``digits/star heads-0.5: draft_first``."""
        return {name: part for name, part in self.parts.items() if isinstance(part, Surface)}

    def to_dataframe(self) -> pd.DataFrame:
        """Measured latencies, one row per (part, tokens, kv_length); ``ms`` is the median of the samples."""
        import pandas as pd

        rows = [
            (part, point.tokens, point.kv_length, point.latency_ms)
            for part, surface in self.surfaces.items()
            for point in sorted(surface.measured, key=lambda point: (point.tokens, point.kv_length))
        ]
        return pd.DataFrame(rows, columns=["part", "tokens", "kv_length", "ms"])

    def why_not_of(
        self,
        device: str,
        target: ModelReference,
        shape: ModelShape,
        drafts: Sequence[SizedDraft],
        *,
        precision: str,
        mode: str,
        capture_sizes: tuple[int, ...],
    ) -> str | None:
        """The first property by which the table prices other models than these; None: it prices them. Models of one
        architecture and of the same sizes have the same prices, whatever their weights.

        Args:
            device: its name, as in ``Fingerprint``.
        """
        differs = {
            f"it is of {self.device.name}, not of {device}": self.device.name != device,
            f"it is of {self.precision}, not of {precision}": self.precision != precision,
            f"it is of mode {self.mode}, not of {mode}": self.mode != mode,
            f"it has capture sizes {self.capture_sizes}, not {capture_sizes}": self.capture_sizes != capture_sizes,
            f"its captured steps have version {self.steps_version}, these {STEPS_VERSION}": self.mode != EAGER
            and self.steps_version != STEPS_VERSION,
            f"{self.target.id} has another architecture or other sizes than {target.id}": not self.target.is_same(
                target
            )
            and self.target_shape != shape,
            **{
                f"it has no draft of the kind and sizes of {draft[0].id}": not self._of_sizes(*draft)
                for draft in drafts
            },
        }
        return next((reason for reason, holds in differs.items() if holds), None)

    def _of_sizes(self, draft: ModelReference, subnet: Subnet, shape: ModelShape) -> list[DraftCosts]:
        """The costs of a draft, or of others of the same sizes."""
        of_subnet = [costs for costs in self.drafts if costs.subnet.priced == subnet.priced]
        return [costs for costs in of_subnet if costs.draft.is_same(draft) or costs.shape == shape]

    def for_models(self, target: ModelReference, drafts: Sequence[SizedDraft]) -> CostTable:
        """The same prices for other models, where ``why_not_of`` finds no difference."""
        costs = [self._of_sizes(*draft)[0].model_copy(update={"draft": draft[0]}) for draft in drafts]
        return self.model_copy(update={"target": target, "drafts": costs})

    @property
    def content_hash(self) -> str:
        """Content hash, which ignores the provenance."""
        return content_key(self.model_dump(mode="json", exclude={"provenance"}))

    def holds(self, draft: ModelReference, subnet: Subnet) -> bool:
        """Whether the table has a draft with the heads, vocabulary and weights of a subnet."""
        return any(costs.is_of(draft, subnet) for costs in self.drafts)

    def costs_around(self, draft: ModelReference, subnet: Subnet) -> tuple[DraftCosts, DraftCosts, float]:
        """Two measured costs and the weight of the second, whose weighted mean is the cost of a subnet.

        A subnet with different shares of heads that the table does not hold is interpolated between the nearest subnets
        of its vocabulary and weights with one share in all blocks, at the mean of its own shares: all blocks have the
        same sizes.

        Raises:
            UserError: the table has no costs of the draft around this mean.
        """
        known = [c for c in self.drafts if c.draft.is_same(draft) and c.subnet.priced[1:] == subnet.priced[1:]]
        equal = {costs.subnet.head_shares[0]: costs for costs in known if len(set(costs.subnet.head_shares)) == 1}
        mean = sum(subnet.head_shares) / len(subnet.head_shares)
        below, above = [s for s in equal if s <= mean], [s for s in equal if s >= mean]
        if self.holds(draft, subnet) or len(set(subnet.head_shares)) == 1 or not below or not above:
            costs = self.costs_of(draft, subnet)
            return costs, costs, 0.0
        low, high = max(below), min(above)
        return equal[low], equal[high], (mean - low) / (high - low) if high > low else 0.0

    def costs_of(self, draft: ModelReference, subnet: Subnet | None = None) -> DraftCosts:
        """Latencies of a draft with the heads, vocabulary and weights of a subnet.

        Raises:
            UserError: the table does not have them.
        """
        subnet = subnet or Subnet()
        for costs in self.drafts:
            if costs.is_of(draft, subnet):
                return costs
        known = ", ".join(costs.name for costs in self.drafts)
        wanted = " and ".join(filter(None, ["these weights", subnet.of_price.label]))
        raise UserError(
            f"the cost table has no draft {draft.id!r} with {wanted}; it has: {known}; measure that draft first"
        )

    def prices(
        self, draft: ModelReference, *, max_tokens: int, max_kv_length: int, subnet: Subnet | None = None
    ) -> DensePrices:
        """Prices for replay, for forwards of up to ``max_tokens`` tokens and KV lengths of up to ``max_kv_length``."""
        costs, neighbor, weight = self.costs_around(draft, subnet or Subnet())

        def between(value_of: Callable[[DraftCosts], Any]) -> Any:
            return value_of(costs) if weight == 0.0 else (1 - weight) * value_of(costs) + weight * value_of(neighbor)

        tokens = np.array([round_up(size, self.capture_sizes) for size in range(1, max_tokens + 1)], np.float64)
        middles = np.arange(0, max_kv_length + KV_STEP, KV_STEP, dtype=np.float64) + KV_STEP / 2
        lengths = np.minimum(middles, max(1, max_kv_length))

        no_tokens = ((1, 0), (0, 0))  # cost nothing
        return DensePrices(
            decode_ms=self.decode.latency_ms(np.ones(1), lengths)[0],
            draft_first_ms=np.pad(between(lambda c: c.draft_first.latency_ms(tokens, lengths)), no_tokens),
            draft_level_ms=np.pad(between(lambda c: c.draft_level.latency_ms(tokens, lengths)), no_tokens),
            verify_ms=np.pad(between(attrgetter("verify_ratio")) * self.verify.latency_ms(tokens, lengths), no_tokens),
            kv_step=KV_STEP,
            overhead=costs.overhead,
            draft_prefill=costs.prefill.model_copy(
                update={name: between(attrgetter(f"prefill.{name}")) for name in PrefillCost.names()}
            ),
            crossing_share=0.0 if costs.shape is None else costs.shape.crossing_share,
        )


@dataclass(frozen=True)
class DensePrices:
    """Milliseconds, indexed by (tokens, KV length // kv_step). The first axis begins at 0 tokens, at no cost."""

    decode_ms: Floats
    draft_first_ms: Floats
    draft_level_ms: Floats
    verify_ms: Floats
    kv_step: int
    overhead: Overhead
    draft_prefill: PrefillCost
    crossing_share: float = 0.0
    """As in ``ModelShape``, of the draft."""

    @property
    def of_steps(self) -> tuple[Floats, Floats, Floats, Floats, int]:
        """The prices of forward passes, as the compiled replay takes them."""
        return self.decode_ms, self.draft_first_ms, self.draft_level_ms, self.verify_ms, self.kv_step


def shipped_tables() -> dict[str, list[Path]]:
    """Shipped cost tables, ``profiles/<device>/*.cost.json``, by device name."""
    tables: dict[str, list[Path]] = {}
    for path in sorted((data_root() / "profiles").glob("*/*.cost.json")):
        tables.setdefault(path.parent.name, []).append(path)
    return tables
