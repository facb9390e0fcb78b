"""Cost tables: what a step costs on a device, and the prices that replay reads off them. Plain numpy: searching needs
no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from autotune.cost.surface import Surface
from autotune.documents.decoding_profile import rename_execution
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.execution import round_up
from autotune.files import Document, content_key, data_root, rename_keys
from autotune.trees.limits import Floats

REWEIGHTED = 5  # times a fit is done anew, with the weights that it implies
KV_STEP = 16  # tokens: the prices of one KV length serve up to this many more
# Sizes of a table's steps: every small one, because matrix kernels go by blocks and the ninth token may cost more than the
# eight before it; then full trees of 64 and 128 nodes with their root, and the widest level of wetap.
TOKENS = (*range(1, 11), 12, 16, 17, 24, 32, 33, 48, 65, 129)


class PrefillCost(Document):
    """``intercept + per_token * tokens + image``: what reading a prompt costs."""

    intercept_ms: float
    per_token_ms: float
    image_ms: float
    samples: list[tuple[int, int, float]]
    """(tokens, images, ms) as measured."""
    held_out_error: float | None = None
    """The median relative error at sizes left out of the fit, one after the other; None where there are too few."""

    def ms(self, tokens: np.ndarray, has_image: np.ndarray) -> Floats:
        priced: Floats = self.intercept_ms + self.per_token_ms * tokens + self.image_ms * has_image
        return np.maximum(priced, 0.0)


def fit_prefill(samples: list[tuple[int, int, float]]) -> PrefillCost:
    """Fitted to the medians of (tokens, images, ms)."""
    by_size: dict[tuple[int, int], list[float]] = {}
    for num_tokens, num_images, sample in samples:
        by_size.setdefault((num_tokens, num_images), []).append(sample)
    sizes = np.array([(1, *size) for size in by_size], np.float64)
    (intercept, per_token, image), error = _fit(sizes, np.array([np.median(found) for found in by_size.values()]))
    return PrefillCost(
        intercept_ms=intercept, per_token_ms=per_token, image_ms=image, samples=samples, held_out_error=error
    )


class Overhead(Document):
    """Time of a round outside the two models, as real decoding showed it: growing the tree, masks, acceptance,
    compaction.
    """

    round_ms: float = Field(ge=0)
    level_ms: float = Field(ge=0)
    """For every draft forward."""
    node_ms: float = Field(default=0.0, ge=0)
    """For every verified node."""
    samples: list[tuple[int, int, int, float]] = Field(default_factory=list)
    """(rounds, draft forwards, verified nodes, ms) of each run."""
    held_out_error: float | None = None
    """The median relative error of runs left out of the fit, one after the other; None where there is but one."""


def fit_overhead(samples: list[tuple[int, int, int, float]]) -> Overhead:
    """Fitted to (rounds, draft forwards, verified nodes, ms)."""
    if not samples:  # every answer ended with its first token
        return Overhead(round_ms=0.0, level_ms=0.0)
    counts = np.array([row[:3] for row in samples], np.float64)
    (per_round, per_level, per_node), error = _fit(counts, np.maximum([row[3] for row in samples], 1e-6))
    return Overhead(round_ms=per_round, level_ms=per_level, node_ms=per_node, samples=samples, held_out_error=error)


def _fit(counts: Floats, ms: Floats) -> tuple[list[float], float | None]:
    """What each of the counted things costs, by non-negative least squares of errors relative to the cost; and the median
    relative error of rows left out of the fit, one after the other.
    """
    from scipy.optimize import nnls

    def fit(chosen: np.ndarray) -> Floats:
        # Relative to what is predicted: relative to what was measured, a slow run would count for less than a fast one.
        weight = 1.0 / ms
        for _ in range(REWEIGHTED):
            found: Floats = nnls(counts[chosen] * weight[chosen, None], ms[chosen] * weight[chosen])[0]
            weight = 1.0 / np.maximum(counts @ found, 1e-9)
        return found

    errors = []
    for number in range(len(ms)):
        others = np.arange(len(ms)) != number
        # A row that alone tells of something, the only prompt without an image say, cannot be predicted by the others.
        if np.linalg.matrix_rank(counts[others]) == np.linalg.matrix_rank(counts):
            errors.append(abs(float(counts[number] @ fit(others)) / float(ms[number]) - 1))
    return fit(np.ones(len(ms), bool)).tolist(), float(np.median(errors)) if errors else None


class ModelShape(Document):
    """What the latency of a model depends on."""

    num_layers: int
    hidden_size: int
    text_parameters: int
    """Read once for every step: the decoder layers and the head."""
    vision_parameters: int
    kv_bytes_per_token: int
    bytes_per_parameter: int


class DraftCosts(Document):
    """What one draft costs, or one subnet of it. Visual tokens and the injection layer do not change a step: a KV length
    is a point of its surfaces.
    """

    draft: ModelReference
    heads: float | tuple[float, float, float] | None = None
    """Share of heads kept, in all blocks or in each; None: all."""
    num_parameters: int | None = None
    """Of its own: what it shares with the target is left out."""
    kv_bytes_per_token: int | None = None
    shape: ModelShape | None = None
    draft_first: Surface
    """The first draft forward of a round, which reads the committed tokens and proposes the root's children: it comes
    behind a verification, which has pushed the draft's weights out of the caches.
    """
    draft_level: Surface
    """Every other draft level: it comes behind a draft forward."""
    prefill: PrefillCost
    overhead: Overhead

    @property
    def name(self) -> str:
        """For people: ``digits/star heads-0.5``."""
        heads = "" if self.heads is None else f" {Subnet(heads=self.heads).name.removesuffix('-keep-1')}"
        return self.draft.id + heads

    def speaks_of(self, draft: ModelReference, subnet: Subnet) -> bool:
        """Whether these are the weights, and the heads that a subnet keeps. Without a hash the name decides."""
        return self.draft.is_same(draft) and Subnet(heads=self.heads).head_shares == subnet.head_shares


def _add_nodes(content: dict[str, Any]) -> None:
    """Version 3 kept the verified nodes of the overhead's runs apart from their other counts."""
    for draft in content["drafts"]:
        overhead = draft["overhead"]
        runs = zip(
            overhead.get("samples", []), overhead.pop("nodes", []), strict=False
        )  # the first tables had no nodes
        overhead["samples"] = [[rounds, levels, nodes, ms] for (rounds, levels, ms), nodes in runs]


def _rename_parts(content: dict[str, Any]) -> None:
    """Version 4 used other names for the parts of a draft and for how forwards run."""
    rename_execution(content)
    for draft in content["drafts"]:
        names = {"commit": "draft_first", "propose": "draft_level", "cache_bytes_per_token": "kv_bytes_per_token"}
        rename_keys(draft, names)


class CostTable(
    Document,
    kind="cost-table",
    version=5,
    made_by="autotune profile",
    migrations={2: lambda content: None, 3: _add_nodes, 4: _rename_parts},  # version 3 added keys that have defaults
):
    """Measured latencies of a target and its drafts on one device, through the runner that decodes: over (tokens, KV length,
    subnet of the draft). Steps are of batch 1, for rows of a batch are decoded one after the other.
    """

    provenance: Provenance
    device: Fingerprint
    precision: str
    mode: str = "eager"
    capture_sizes: tuple[int, ...] = ()
    """Sizes that the runner rounds its forwards up to; none: every size as it is."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of steps, the best number found; prefills use all. None: as many as torch uses."""
    estimated: bool = False
    num_anchors: int = Field(default=0, ge=0)
    """Measured tables of the device that an estimate goes by."""
    remeasured_samples: int = Field(default=0, ge=0)
    """Thrown away because the device ran at another speed than usual around them, and measured again."""
    drifted_samples: int = Field(default=0, ge=0)
    """Kept although it did so, because time or patience had run out."""
    target: ModelReference
    target_shape: ModelShape | None = None
    decode: Surface
    """One token at a time: plain decoding."""
    verify: Surface
    """Root and tree in one forward."""
    prefill: PrefillCost
    drafts: list[DraftCosts]

    @property
    def held_out_errors(self) -> dict[str, float]:
        """The median relative error of every part that has one, by name: ``verify``, ``digits/star heads-0.5: draft_first``."""
        parts: dict[str, Surface | PrefillCost | Overhead] = {
            "decode": self.decode,
            "verify": self.verify,
            "prefill": self.prefill,
        }
        for costs in self.drafts:
            for name in ("draft_first", "draft_level", "prefill"):
                parts[f"{costs.name}: {name}"] = getattr(costs, name)
            parts[f"{costs.draft.id}: overhead"] = costs.overhead  # one for all of its subnets
        return {name: part.held_out_error for name, part in parts.items() if part.held_out_error is not None}

    @property
    def num_samples(self) -> int:
        """Of steps."""
        surfaces = [
            self.decode,
            self.verify,
            *(s for costs in self.drafts for s in (costs.draft_first, costs.draft_level)),
        ]
        return sum(surface.num_samples for surface in surfaces)

    def check_speaks_of(self, target: ModelReference, device: Fingerprint, precision: str, *, source: str) -> None:
        """Refuse a table of something else. Without a hash the target's name decides. ``source``: what to call the table.

        Raises:
            UserError: another target, another device, or another precision.
        """
        profile = "delete that table, or run autotune profile for what is here"
        if not self.target.is_same(target):
            raise UserError(
                f"{source}: a cost table prices the model that it was measured with; this one speaks of {self.target.id!r} "
                f"({self.target.sha256[:8] or 'no hash'}), not of {target.id!r} ({target.sha256[:8] or 'no hash'}); {profile}"
            )
        if self.device.key != device.key:
            raise UserError(
                f"{source}: a cost table prices the device that it was measured on; this one speaks of {self.device.key!r}, "
                f"not of {device.key!r}; {profile}"
            )
        if self.precision != precision:
            raise UserError(
                f"{source}: a cost table prices one precision; this one speaks of {self.precision}, not of {precision}; {profile}"
            )

    @property
    def content(self) -> str:
        """Content hash of all that it says: equal tables have equal ones, whenever they were made."""
        return content_key(self.model_dump(mode="json", exclude={"provenance"}))

    def holds(self, draft: ModelReference, subnet: Subnet) -> bool:
        """Whether it prices a draft with the heads that a subnet keeps."""
        return any(costs.speaks_of(draft, subnet) for costs in self.drafts)

    def costs_of(self, draft: ModelReference, subnet: Subnet | None = None) -> DraftCosts:
        """The part of one draft, with the heads that a subnet keeps.

        Raises:
            UserError: the table does not hold it.
        """
        subnet = subnet or Subnet()
        for costs in self.drafts:
            if costs.speaks_of(draft, subnet):
                return costs
        known = ", ".join(
            costs.draft.id + ("" if costs.heads is None else f" (heads {costs.heads})") for costs in self.drafts
        )
        heads = "" if subnet.heads is None else f" and heads {subnet.heads}"
        raise UserError(
            f"the cost table has no draft {draft.id!r} with these weights{heads}; it has: {known}; profile that draft first"
        )

    def prices(
        self, draft: ModelReference, *, max_tokens: int, max_kv_length: int, subnet: Subnet | None = None
    ) -> DensePrices:
        """The prices that replay looks up, for steps up to ``max_tokens`` and caches up to ``max_kv_length``."""
        costs = self.costs_of(draft, subnet)
        tokens = np.array([round_up(size, self.capture_sizes) for size in range(1, max_tokens + 1)], np.float64)
        lengths = np.arange(0, max_kv_length + KV_STEP, KV_STEP, dtype=np.float64) + KV_STEP / 2
        free = np.zeros((1, len(lengths)))
        return DensePrices(
            decode_ms=self.decode.latency_ms(np.ones(1), lengths)[0],
            draft_first_ms=np.concatenate([free, costs.draft_first.latency_ms(tokens, lengths)]),
            draft_ms=np.concatenate([free, costs.draft_level.latency_ms(tokens, lengths)]),
            verify_ms=np.concatenate([free, self.verify.latency_ms(tokens, lengths)]),
            kv_step=KV_STEP,
            overhead_round_ms=costs.overhead.round_ms,
            overhead_level_ms=costs.overhead.level_ms,
            overhead_node_ms=costs.overhead.node_ms,
            draft_prefill=costs.prefill,
        )


@dataclass(frozen=True)
class DensePrices:
    """Milliseconds by (tokens, KV length // kv_step); the first axis starts at 0 tokens, which are free."""

    decode_ms: Floats
    draft_first_ms: Floats
    draft_ms: Floats
    verify_ms: Floats
    kv_step: int
    overhead_round_ms: float
    overhead_level_ms: float
    overhead_node_ms: float
    draft_prefill: PrefillCost


def shipped_tables() -> dict[str, list[Path]]:
    """Cost tables in ``profiles/<device>/``, by device name."""
    tables: dict[str, list[Path]] = {}
    for path in sorted((data_root() / "profiles").glob("*/*.cost.json")):
        tables.setdefault(path.parent.name, []).append(path)
    return tables
