"""Input of a forward pass over a few tokens after the prefix.

The KV cache holds the committed prefix, then the uncommitted tokens of earlier steps of the round, then the tokens of
this step. A token's *offset* is its position relative to the end of the prefix; siblings in a tree have the same one.

The input of a captured step is one array of integers, which a single copy brings to the device. The host writes it in
place, into pinned memory that belongs to the capture. It holds a header, a *packed mask* for each kind of layer, and
the tokens with the model's own integers of each.

A packed mask of n tokens has n + 1 rows. The first row holds the number of uncommitted tokens and the length of the
prefix. The row of a token holds the first KV slot of the prefix that the token sees, then a bit for each of the columns
after the prefix: the uncommitted tokens, then the n tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.modeling.host import to_host
from autotune.modeling.masks import TreeMask
from autotune.trees.compilation import compiled
from autotune.trees.limits import Ints


class Step(NamedTuple):
    """n tokens to evaluate."""

    tokens: NDArray[np.int64]  # [n]
    offsets: Ints  # [n]
    tree_mask: TreeMask
    """Additive mask over the uncommitted tokens and the n tokens, [n, uncommitted + n]. It leaves out the prefix, which
    is visible as far as a layer's attention window reaches.
    """
    only: int | None = None
    """The only token whose logits are needed, because an output head costs time; None: those of all tokens."""
    is_final: bool = False
    """Whether all tokens will be committed, so that nothing need be kept to take them back."""

    @property
    def num_uncommitted(self) -> int:
        return self.tree_mask.shape[1] - len(self.tokens)

    @classmethod
    def single(cls, token: int) -> Step:
        """One token that will be committed."""
        return cls(np.array([token]), np.zeros(1, np.int64), np.zeros((1, 1), np.float32), is_final=True)

    @classmethod
    def causal(cls, tokens: NDArray[np.int64], mask_value: float) -> Step:
        """Consecutive tokens, without uncommitted ones before them."""
        count = len(tokens)
        return cls(tokens, np.arange(count), np.triu(np.full((count, count), mask_value, np.float32), 1))


NOT_FINITE = -2
"""In place of a token: the score that is the largest of its row, or a number that is none, is not finite."""


def best_tokens(scores: Tensor, logits: Tensor) -> Tensor:
    """The token of the largest score in each row of ``scores`` [n, vocabulary], [n]; ``NOT_FINITE`` where that score
    and the logit of the token are not finite.
    """
    largest, tokens = scores.max(-1)
    is_bad = largest - largest != 0.0
    if scores is not logits:  # a processor may force a token by infinity, or replace what is not finite
        is_bad &= ~logits.gather(-1, tokens[:, None])[:, 0].isfinite()
    return tokens.masked_fill(is_bad, NOT_FINITE)


class Evaluated(NamedTuple):
    """The outcome of a step, valid until the next one."""

    logits: Tensor  # [n or 1, vocabulary]
    wait: Callable[[], Any] | None = None
    """Returns the result of a captured step once it is on the host; None: the step ran eagerly."""

    def greedy_tokens(self) -> Ints:
        """The token of the largest logit in each row, [n]; ``NOT_FINITE`` where logits are not finite."""
        return to_host(best_tokens(self.logits, self.logits)) if self.wait is None else self.wait()


WORD_BITS = 64
LAST, NOISE_ROW, TOP_K, TEMPERATURE, TOP_P, _, HEADER = range(7)
"""Fields of the header: the only token whose logits are needed, and how a draft draws its proposals (``Draw``).
Temperature and top-p are float64.
"""


class Layout(NamedTuple):
    """The sizes of a packed step."""

    num_tokens: int
    num_columns: int
    """Columns of the masks, a multiple of ``WORD_BITS``."""
    num_masks: int
    num_rows: int
    """The model's own integers of each token."""

    @property
    def mask_width(self) -> int:
        """Integers of a token's mask. It is even, as the header is, so that kernels find every mask at 16 bytes."""
        return 2 * (1 + self.num_columns // (2 * WORD_BITS))

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        n = self.num_tokens
        return HEADER, self.num_masks * (1 + n) * self.mask_width, n, self.num_rows * n


class Draw(NamedTuple):
    """How a captured step draws proposals: it computes ``TokenSampler.proposal_scores`` from these."""

    noise: Tensor  # of the target's tokens at some positions, [rows, target's vocabulary]
    row: int  # the children's
    temperature: float
    top_k: int  # the size of the vocabulary: no limit
    top_p: float


def padded_columns(num_columns: int, least: int) -> int:
    """A number of columns of the tree mask, padded to words, doubled until they suffice."""
    padded = max(least, WORD_BITS)
    while padded < num_columns:
        padded *= 2
    return padded


class PackedStep(NamedTuple):
    """Views of the array, of numpy on the host and of torch on the device."""

    header: Any  # [HEADER]
    masks: Any  # [masks, 1 + n, 1 + words]
    tokens: Any  # [n]
    rows: Any  # [rows, n]

    @classmethod
    def of(cls, integers: Any, layout: Layout) -> PackedStep:
        ends = np.cumsum(layout.sizes).tolist()
        header, masks, tokens, rows = (integers[end - size : end] for end, size in zip(ends, layout.sizes, strict=True))
        n = layout.num_tokens
        masks, rows = masks.reshape(layout.num_masks, 1 + n, layout.mask_width), rows.reshape(layout.num_rows, n)
        return cls(header, masks, tokens, rows)

    def write(self, step: Step, prefixes: Ints, windows: Ints, column_offsets: Ints, draw: Draw | None = None) -> None:
        """Write tokens, masks and header, on the host.

        Args:
            prefixes: length of the prefix for each mask.
            windows: attention window for each mask; 0 sees everything.
            column_offsets: offsets of the uncommitted tokens and the n tokens, which masks with a window read.
            draw: how a draft draws its proposals; None: it takes the most probable ones.
        """
        self.tokens[:] = step.tokens
        self.header[LAST] = 0 if step.only is None else step.only
        if draw is not None:
            self.header[NOISE_ROW], self.header[TOP_K] = draw.row, draw.top_k
            self.header[TEMPERATURE : TOP_P + 1].view(np.float64)[:] = draw.temperature, draw.top_p
        _write_masks(self.masks, step.tree_mask, step.offsets, prefixes, windows, column_offsets)

    def slots(self, number: int = 0) -> Tensor:
        """Indices in the KV cache at which the tokens are written after the prefix of a mask, [n]."""
        first = self.masks[number, 0, :2].sum()
        return first + torch.arange(len(self.tokens), device=self.tokens.device)

    def paths(self) -> Tensor:
        """The tokens on the path to each token, [n, n]; columns that it does not see repeat the first token."""
        column = torch.arange(len(self.tokens), device=self.tokens.device)
        words = self.masks[0, 1:, 1:][:, column // WORD_BITS]
        return torch.where((words >> (column % WORD_BITS)) & 1 > 0, self.tokens, self.tokens[:1])


@compiled
def _write_masks(
    masks: Any, tree_mask: TreeMask, offsets: Ints, prefixes: Ints, windows: Ints, column_offsets: Ints
) -> None:
    num_rows, num_columns = tree_mask.shape
    for number in range(len(masks)):
        mask, window = masks[number], windows[number]
        mask[:] = 0
        mask[0, 0], mask[0, 1] = num_columns - num_rows, prefixes[number]
        for row in range(num_rows):
            last_hidden = offsets[row] - window
            if window > 0:
                mask[1 + row, 0] = max(0, prefixes[number] + last_hidden + 1)
            for column in range(num_columns):
                if tree_mask[row, column] == 0.0 and (window == 0 or column_offsets[column] > last_hidden):
                    mask[1 + row, 1 + column // WORD_BITS] |= np.int64(1) << np.int64(column % WORD_BITS)
