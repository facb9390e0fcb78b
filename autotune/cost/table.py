"""Cost tables: what a step costs on a device, and the prices that replay reads off them. Plain numpy: searching needs
no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import Field

from autotune.cost.device import Fingerprint
from autotune.errors import UserError
from autotune.files import Document
from autotune.provenance import ModelReference, Provenance
from autotune.subnet import Subnet
from autotune.trees.buckets import round_up
from autotune.trees.tree import Floats

KV_STEP = 16  # tokens: the prices of one KV length serve up to this many more
# Sizes of a table's steps: every small one, because matrix kernels go by blocks and the ninth token may cost more than the
# eight before it; then full trees of 64 and 128 nodes with their root, and the widest level of wetap.
TOKENS = (*range(1, 11), 12, 16, 17, 24, 32, 33, 48, 65, 129)
REACH = 1.5  # how far beyond the longest KV length measured a price may be extended


class Point(Document):
    """Samples of one step: ``tokens`` read behind ``kv_length`` cached ones."""

    tokens: int = Field(ge=1)
    kv_length: int = Field(ge=0)
    samples_ms: list[float] = Field(min_length=1)

    @property
    def latency_ms(self) -> float:
        """The median: a shared machine's interruptions only ever add."""
        return float(np.median(self.samples_ms))


class Surface(Document):
    """Latency over (tokens, KV length): a full grid, linear between its points, and points off the grid that test it."""

    points: list[Point] = Field(min_length=1)
    held_out: list[Point] = Field(default_factory=list)

    def _grid(self) -> tuple[Floats, Floats, Floats]:
        tokens = sorted({point.tokens for point in self.points})
        lengths = sorted({point.kv_length for point in self.points})
        known = {(point.tokens, point.kv_length): point.latency_ms for point in self.points}
        if len(known) != len(tokens) * len(lengths):
            raise UserError(
                f"a cost surface is a full grid; {len(known)} points do not fill {len(tokens)} x {len(lengths)}; profile again"
            )
        latency = np.array([[known[n, m] for m in lengths] for n in tokens])
        return np.array(tokens, np.float64), np.array(lengths, np.float64), latency

    @property
    def max_tokens(self) -> int:
        return max(point.tokens for point in self.points)

    def latency_ms(self, tokens: Floats, kv_length: Floats) -> Floats:
        """Latencies [tokens, kv lengths], linear between grid points; shorter KV than measured costs what the shortest
        does.

        Raises:
            UserError: more tokens, or a much longer KV cache, than were measured.
        """
        grid_tokens, grid_lengths, latency = self._grid()
        if tokens.max() > grid_tokens[-1] or kv_length.max() > REACH * grid_lengths[-1]:
            raise UserError(
                f"the cost table was measured up to {grid_tokens[-1]:.0f} tokens and a KV length of {grid_lengths[-1]:.0f}; "
                f"{tokens.max():.0f} tokens at {kv_length.max():.0f} are asked for; profile a larger grid"
            )
        by_tokens = np.array([np.interp(tokens, grid_tokens, column) for column in latency.T])  # [grid lengths, tokens]
        priced = np.array([np.interp(kv_length, grid_lengths, row) for row in by_tokens.T])
        if len(grid_lengths) > 1:
            slope = (by_tokens[-1] - by_tokens[-2]) / (grid_lengths[-1] - grid_lengths[-2])
            priced += np.maximum(slope, 0.0)[:, None] * np.maximum(kv_length - grid_lengths[-1], 0.0)[None]
        return priced

    @property
    def held_out_errors(self) -> Floats:
        """Relative errors at the held-out points."""
        return np.array(
            [
                self.latency_ms(np.array([p.tokens]), np.array([p.kv_length]))[0, 0] / p.latency_ms - 1.0
                for p in self.held_out
            ]
        )


class PrefillCost(Document):
    """``intercept + per_token * tokens + image``: what reading a prompt costs."""

    intercept_ms: float
    per_token_ms: float
    image_ms: float
    samples: list[tuple[int, int, float]]
    """(tokens, images, ms) as measured."""

    def ms(self, tokens: np.ndarray, has_image: np.ndarray) -> Floats:
        priced: Floats = self.intercept_ms + self.per_token_ms * tokens + self.image_ms * has_image
        return np.maximum(priced, 0.0)


def fit_prefill(samples: list[tuple[int, int, float]]) -> PrefillCost:
    """Least squares over (tokens, images, ms)."""
    tokens, images, ms = (np.array(column, np.float64) for column in zip(*samples, strict=True))
    design = np.stack([np.ones_like(tokens), tokens, images], axis=1)
    intercept, per_token, image = np.linalg.lstsq(design, ms, rcond=None)[0]
    return PrefillCost(
        intercept_ms=float(intercept), per_token_ms=float(per_token), image_ms=float(image), samples=samples
    )


class Overhead(Document):
    """Time of a round outside the two models, as real decoding showed it: growing the tree, masks, acceptance,
    compaction.
    """

    round_ms: float = Field(ge=0)
    level_ms: float = Field(ge=0)
    """For every draft forward."""


class DraftCosts(Document):
    """What one draft costs, or one subnet of it. Visual tokens and the injection layer do not change a step: a KV length
    is a point of its surfaces.
    """

    draft: ModelReference
    heads: float | tuple[float, float, float] | None = None
    """Share of heads kept, in all blocks or in each; None: all."""
    num_parameters: int | None = None
    """Of its own: what it shares with the target is left out."""
    cache_bytes_per_token: int | None = None
    commit: Surface
    """The first draft forward of a round, which reads the committed tokens and proposes the root's children: it comes
    behind a verification, which has pushed the draft's weights out of the caches.
    """
    propose: Surface
    """Every other draft level: it comes behind a draft forward."""
    prefill: PrefillCost
    overhead: Overhead

    def speaks_of(self, draft: ModelReference, subnet: Subnet) -> bool:
        """Whether these are the weights, and the heads that a subnet keeps. Without a hash the name decides."""
        is_draft = self.draft.sha256 == draft.sha256 and (draft.sha256 or self.draft.id == draft.id)
        return bool(is_draft) and Subnet(heads=self.heads).head_shares == subnet.head_shares


class CostTable(Document):
    """Measured latencies of a target and its drafts on one device, through the runner that decodes."""

    provenance: Provenance
    device: Fingerprint
    precision: str
    runner: str = "eager"
    buckets: tuple[int, ...] = ()
    """Sizes that the runner rounds its forwards up to; none: every size as it is."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of steps, the best number found; prefills use all. None: as many as torch uses."""
    estimated: bool = False
    target: ModelReference
    decode: Surface
    """One token at a time: plain decoding."""
    verify: Surface
    """Root and tree in one forward."""
    prefill: PrefillCost
    drafts: list[DraftCosts]

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
        tokens = np.array([round_up(size, self.buckets) for size in range(1, max_tokens + 1)], np.float64)
        lengths = np.arange(0, max_kv_length + KV_STEP, KV_STEP, dtype=np.float64) + KV_STEP / 2
        free = np.zeros((1, len(lengths)))
        return DensePrices(
            decode_ms=self.decode.latency_ms(np.ones(1), lengths)[0],
            commit_ms=np.concatenate([free, costs.commit.latency_ms(tokens, lengths)]),
            draft_ms=np.concatenate([free, costs.propose.latency_ms(tokens, lengths)]),
            verify_ms=np.concatenate([free, self.verify.latency_ms(tokens, lengths)]),
            kv_step=KV_STEP,
            overhead_round_ms=costs.overhead.round_ms,
            overhead_level_ms=costs.overhead.level_ms,
            draft_prefill=costs.prefill,
        )


@dataclass(frozen=True)
class DensePrices:
    """Milliseconds by (tokens, KV length // kv_step); the first axis starts at 0 tokens, which are free."""

    decode_ms: Floats
    commit_ms: Floats
    draft_ms: Floats
    verify_ms: Floats
    kv_step: int
    overhead_round_ms: float
    overhead_level_ms: float
    draft_prefill: PrefillCost
