"""Drafts with a KV cache: rounds of ``propose``, level by level, over the committed prefix and the nodes behind it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from autotune.documents.subnet import Subnet
from autotune.drafters.draft import Proposals, top_proposals
from autotune.execution import round_up
from autotune.modeling.graph_runner import DeviceStep
from autotune.modeling.kv_cache import CachedModel
from autotune.modeling.masks import TreeMask
from autotune.modeling.transfer import rows_to_host, to_device
from autotune.modeling.tree_model import causal_tree_mask
from autotune.trees.tree import ROOT, Ints, Tree, write_frontier_mask


class CachedDraft(CachedModel):
    """The cache holds the committed prefix, then the nodes evaluated this round in order of evaluation: a node's *slot*.

    Committed tokens that have not been read yet are ``pending``: the new root, and before it the accepted tokens whose
    nodes were not read, or not with all that is known of them now. They are read together, when the root's proposals
    are asked for.
    """

    visual_keep: float = 1.0
    aux_layers: tuple[int, ...] = ()
    capture_sizes: tuple[int, ...] = ()
    """Sizes that forwards are rounded up to; none: every size as it is."""
    token_ids: Tensor | None = None
    """The target's name of each token of a smaller vocabulary."""

    def __init__(self) -> None:
        self._pending: list[int] = []
        self._num_evaluated = 0

    @abstractmethod
    def forward(
        self,
        tokens: NDArray[np.int64],
        offsets: Ints,
        tree_mask: TreeMask,
        *,
        num_uncommitted: int = 0,
        parents: Ints | None = None,
        hidden: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Logits [n, vocabulary] of n tokens behind the prefix and ``num_uncommitted`` tokens read since.

        Args:
            places: of the tokens behind the prefix.
            block: additive mask [n, num_uncommitted + n] behind the prefix.
            parents: of nodes: which of the uncommitted tokens each follows; -1: the last of the prefix. None for tokens
                that the target has said.
            hidden: of tokens that the target has said: what each of the layers in ``aux_layers`` had made of the token before
                them, [n, hidden].
        """

    @abstractmethod
    def _pending_hidden(self) -> Mapping[int, Tensor] | None:
        """``hidden`` of the pending tokens."""

    @abstractmethod
    def _pending_committed(self, count: int) -> None:
        """The pending tokens, read just now, belong to the prefix."""

    @abstractmethod
    def read_on_device(
        self, step: DeviceStep, *, parents: Tensor | None = None, hidden: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        """``forward`` as a part of prepared work."""

    @abstractmethod
    def end_device_round(self, tree: Tree, path: Ints, next_token: int, hidden: Sequence[Tensor]) -> None:
        """What is left of ``commit`` when the device has done its part: ``hidden`` are the layers in ``aux_layers`` of the root and
        the accepted nodes.
        """

    def compact_on_device(self, prefix_state: Tensor, slots: Tensor) -> None:
        """The device's part of ``commit``: the columns ``slots`` behind ``prefix_state`` are those of the accepted nodes."""

    def _pending_committed_on_device(self, count: Tensor) -> None:
        """``_pending_committed`` of ``count`` [1] tokens, but for counting them."""

    @property
    def subnet(self) -> Subnet:
        """Which part of the draft this is."""
        return Subnet(visual_keep=self.visual_keep)

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Of its own: what it shares with the target is left out."""

    @property
    def kv_bytes_per_token(self) -> int:
        """What a token takes in the cache, once something has been read."""
        return int(self.cache.memory_bytes // self.cache.capacity)

    @property
    def num_pending(self) -> int:
        """Tokens that asking for the root's proposals will read."""
        return len(self._pending)

    def reserve(self, num_tokens: int) -> None:
        """Empty the cache and make sure that it holds that many tokens."""
        super().reserve(num_tokens)
        self.begin_round()

    def begin_round(self) -> None:
        """Forget the nodes read in the round before."""
        self._num_evaluated = 0

    def propose(self, tree: Tree, frontier: Ints, num_proposals: int) -> Proposals:
        """The most probable children of the frontier's nodes, all of one level. The root's come first in every round."""
        if frontier[0] == ROOT:
            count = len(self._pending)
            size = round_up(count, self.capture_sizes)
            tokens = np.zeros(size, np.int64)
            tokens[:count] = self._pending
            offsets = np.minimum(np.arange(size), count - 1)
            tree_mask, hidden = causal_tree_mask(size, self.mask_value), self._pending_hidden()
            logits = self.forward(tokens, offsets, tree_mask, hidden=hidden)[count - 1 : count]
            self._pending_committed(count)
            self._pending = []
            self.begin_round()
        else:
            count, begin = len(frontier), self._num_evaluated
            size = round_up(count, self.capture_sizes)
            tree.kv_slot[frontier] = np.arange(begin, begin + count)
            tree_mask = np.empty((size, begin + size), np.float32)
            write_frontier_mask(tree, frontier, tree_mask, begin + size, self.mask_value)
            tokens = np.zeros(size, np.int64)
            tokens[:count] = np.maximum(tree.token[frontier], 0)
            # The prefix ends with the root, so a child of the root stands right behind it. All are of one depth.
            offsets = np.full(size, tree.depth[frontier[0]] - 1)
            parents = tree.kv_slot[tree.parent[frontier]]  # the root has no slot: -1
            logits = self.forward(tokens, offsets, tree_mask, num_uncommitted=begin, parents=parents)[:count]
            self._num_evaluated = begin + count
        return self.best(logits, num_proposals)

    def pending_inputs(self) -> dict[str, Tensor]:
        """What ``propose_on_device`` reads of the pending tokens: their number, then they, filled up to a prepared size."""
        count = len(self._pending)
        size = round_up(count, self.capture_sizes)
        numbers = np.zeros(1 + size, np.int64)
        numbers[0], numbers[1 : 1 + count] = count, self._pending
        hidden = self._pending_hidden() or {}
        return {
            "pending": to_device(numbers, self.device),
            **{f"hidden.{layer}": pad(states, (0, 0, 0, size - count)) for layer, states in hidden.items()},
        }

    def propose_on_device(self, prefix_state: Tensor, inputs: Mapping[str, Tensor], *, padded_kv_length: int) -> Tensor:
        """Read the pending tokens; returns the logits after the last of them, the root, [1, vocabulary]."""
        count, tokens = inputs["pending"][:1], inputs["pending"][1:]
        offsets = torch.minimum(torch.arange(len(tokens), device=tokens.device), count - 1)
        tree_mask = torch.full(
            (len(tokens), len(tokens)), self.mask_value, dtype=self.dtype, device=tokens.device
        ).triu(1)
        hidden = {layer: inputs[f"hidden.{layer}"] for layer in self.aux_layers}
        logits = self.read_on_device(
            DeviceStep(prefix_state, tokens, offsets, tree_mask, offsets, padded_kv_length), hidden=hidden
        )
        self._pending_committed_on_device(count)
        return logits[count - 1]

    def best_on_device(self, logits: Tensor, num_proposals: int) -> tuple[Tensor, Tensor]:
        """``best``, left on the device."""
        tokens, logprobs = top_proposals(logits, num_proposals)
        return tokens if self.token_ids is None else self.token_ids[tokens], logprobs

    def best(self, logits: Tensor, num_proposals: int) -> Proposals:
        """The best tokens of each row, as the target calls them, and their log-probabilities in float32."""
        return rows_to_host(*self.best_on_device(logits, num_proposals))
