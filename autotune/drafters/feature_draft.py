"""Drafts that read the target's features, at work: their cache, and rounds of ``propose`` and ``commit``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.drafters.blocks import BlockCache
from autotune.drafters.draft import Proposals, kept_tokens, top_proposals
from autotune.drafters.dream import DreamNetwork
from autotune.errors import UserError
from autotune.runtime.masks import Block, MaskBuffer
from autotune.runtime.prompt import Prompt
from autotune.runtime.text_runner import DEFAULT_CAPACITY, causal_block
from autotune.trees.buckets import round_up
from autotune.trees.tree import MAX_STEP, ROOT, Ints, Tree, write_frontier_mask

if TYPE_CHECKING:
    from autotune.runtime.target import Target


class FeatureCache:
    """Keys and values of all blocks. Only committed tokens count as ``length``: nodes behind them were read with the draft's
    own features, and are read anew with the target's once they are accepted.
    """

    def __init__(self, network: DreamNetwork, capacity: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self.length = 0
        size = network.config.head_size
        self.blocks = [
            BlockCache(block.num_heads, size, capacity, dtype=dtype, device=device) for block in network.blocks
        ]

    @property
    def memory_bytes(self) -> int:
        return sum(block.slab.numel() * block.slab.element_size() for block in self.blocks)


class FeatureDraft:
    """Drafts with a network that reads one layer of the target (see ``Draft``).

    ``pending`` are committed tokens that it has not read yet, each beside the target's feature of the token before: after
    a round these are the accepted nodes and the new root.
    """

    def __init__(self, network: DreamNetwork, *, injection_layer: int | None = None) -> None:
        layers = network.config.injection_layers
        layer = layers[-1] if injection_layer is None else injection_layer
        if layer not in layers:
            raise UserError(
                f"{network.config.kind} reads the output of one of the target's layers {', '.join(map(str, layers))}; "
                f"got injection_layer {layer}; choose one of them"
            )
        self.network = network
        self.kind = network.config.kind
        self.layer = layer
        self.reads: tuple[int, ...] = (layer,)
        self.visual_keep = network.config.visual_keep
        self.buckets: tuple[int, ...] = ()
        self.vocab_size = 0  # the target's, once there is one
        self._pending: list[int] = []
        self._pending_features: list[Tensor] = []
        self._num_evaluated = 0
        self._num_dropped = 0  # tokens of the prompt that never entered the cache

    def attach(self, target: Target) -> None:
        """Take the target's embedding and head.

        Raises:
            UserError: a target of another size.
        """
        config, text = self.network.config, target.text
        if (config.hidden_size, config.num_target_layers) != (text.config.hidden_size, len(text.layers)):
            raise UserError(
                f"this {self.kind} draft was made for a target of {config.num_target_layers} layers x {config.hidden_size}; "
                f"this one has {len(text.layers)} x {text.config.hidden_size}; use its own target"
            )
        self._target = target
        self.network.to(target.device, target.dtype)
        self.device, self.dtype = target.device, target.dtype
        self.vocab_size = target.vocab_size
        self._embed = text.module.get_input_embeddings()
        self.states = torch.zeros(1, config.hidden_size, dtype=self.dtype, device=self.device)
        # Of the root and the nodes read this round: what their children read in place of the target's features.
        self._own = torch.zeros(0, config.hidden_size, dtype=self.dtype, device=self.device)
        self._allocate(DEFAULT_CAPACITY)

    def _allocate(self, capacity: int) -> None:
        self.cache = FeatureCache(self.network, capacity, dtype=self.dtype, device=self.device)
        self._masks = MaskBuffer({"all": None}, capacity, dtype=self.dtype, device=self.device)
        self._factors = self.network.factors(torch.arange(2 * capacity, device=self.device))
        if len(self._own) < capacity:
            self._own = torch.zeros(capacity, self._own.shape[1], dtype=self.dtype, device=self.device)

    @property
    def length(self) -> int:
        """Committed tokens in the cache."""
        return self.cache.length

    @property
    def closed(self) -> float:
        """What a mask adds where a token must not look."""
        return self._masks.closed

    def reserve(self, num_tokens: int) -> None:
        """Empty the cache and make sure that it holds that many tokens."""
        if num_tokens > self.cache.capacity:
            self._allocate(-(-num_tokens // 256) * 256)
        self.cache.length = 0
        self._num_dropped = 0
        self.begin_round()

    def begin_round(self) -> None:
        """Forget the nodes read in the round before."""
        self._num_evaluated = 0

    def prompts(self, inputs: dict[str, Any], read: Sequence[Prompt]) -> Sequence[Prompt]:
        """What the target reads."""
        return read

    def prefill(self, prompt: Prompt, visual_scores: Tensor | None, *, capacity: int) -> None:
        """Read the prompt, beside the features that the target has just made of it."""
        self.reserve(max(capacity, len(prompt) + MAX_STEP))
        self._pending, self._pending_features = [], []
        hidden = self._target.hidden[self.layer]
        embeddings = self._embed(prompt.tokens) if prompt.embeddings is None else prompt.embeddings[0]
        before = self.network.target_features(hidden[: len(prompt) - 1], self.layer)
        features = torch.cat([self.network.first_feature[None], before])
        places = torch.arange(len(prompt), device=self.device)
        kept = kept_tokens(prompt, visual_scores, self.visual_keep)
        if kept is not None:
            embeddings, features, places = embeddings[kept], features[kept], places[kept]
        factors = self._factors[places][None]
        count = len(places)
        mask = torch.full((count, count), self.closed, dtype=self.dtype, device=self.device).triu(1)[None, None]
        self.network(embeddings[None], features[None], factors, mask=mask, caches=self.cache.blocks, begin=0)
        self.cache.length = count
        self._num_dropped = len(prompt) - count

    def append(self, token: int) -> None:
        """Tell the draft a committed token; it is read with the next root."""
        self._pending.append(token)
        self._pending_features.append(self._target.hidden[self.layer][-1:])

    def forward(
        self,
        tokens: NDArray[np.int64],
        places: Ints,
        block: Block,
        *,
        num_uncommitted: int = 0,
        features: Tensor,
    ) -> Tensor:
        """Logits [n, vocabulary] of n tokens behind the prefix and ``num_uncommitted`` others of this round; ``states`` [n,
        hidden] are then the draft's own.

        Args:
            features: as the network's ``target_features`` or ``own_features`` gave them, [n, hidden].
        """
        begin = self.cache.length + num_uncommitted
        mask = None
        if block.shape[1] > 1:
            mask = self._masks.write(block, self.cache.length, places, np.zeros(block.shape[1], np.int64))
        factors = self._factors[torch.from_numpy(places + self.cache.length + self._num_dropped).to(self.device)]
        embeddings = self._embed(torch.from_numpy(tokens).to(self.device))
        self.states = self.network(
            embeddings[None], features[None], factors[None], mask=mask, caches=self.cache.blocks, begin=begin
        )[0]
        return self._target.text.logits(self.states)

    def target_features(self, hidden: Tensor) -> Tensor:
        """Of true tokens: what the target's layer has made of the tokens before them, [n, hidden]."""
        return self.network.target_features(hidden, self.layer)

    def own_features(self, states: Tensor) -> Tensor:
        """Of nodes: what the draft itself has made of their parents, [n, hidden]."""
        return self.network.own_features(states)

    def propose(self, tree: Tree, frontier: Ints, num_proposals: int) -> Proposals:
        """The most probable children of the frontier's nodes, all of one level. The root's come first in every round."""
        if frontier[0] == ROOT:
            count = len(self._pending)
            size = round_up(count, self.buckets)
            tokens = np.zeros(size, np.int64)
            tokens[:count] = self._pending
            places = np.minimum(np.arange(size), count - 1)
            hidden = torch.cat(self._pending_features)
            features = self.target_features(_filled(hidden, size))
            logits = self.forward(tokens, places, causal_block(size, self.closed), features=features)[count - 1 : count]
            self._own[0] = self.states[count - 1]
            self.cache.length += count
            self._pending, self._pending_features = [], []
            self.begin_round()
        else:
            count, begin = len(frontier), self._num_evaluated
            size = round_up(count, self.buckets)
            tree.slot[frontier] = np.arange(begin, begin + count)
            block = np.empty((size, begin + size), np.float32)
            write_frontier_mask(tree, frontier, block, begin + size, self.closed)
            tokens = np.zeros(size, np.int64)
            tokens[:count] = np.maximum(tree.token[frontier], 0)
            # The prefix ends with the root, so a child of the root stands right behind it. All are of one depth.
            places = np.full(size, tree.depth[frontier[0]] - 1)
            parents = torch.from_numpy(tree.slot[tree.parent[frontier]] + 1).to(self.device)  # the root has no slot: -1
            features = self.own_features(_filled(self._own[parents], size))
            logits = self.forward(tokens, places, block, num_uncommitted=begin, features=features)[:count]
            self._own[1 + begin : 1 + begin + count] = self.states[:count]
            self._num_evaluated = begin + count
        return top_proposals(logits, num_proposals)

    def commit(self, tree: Tree, path: Ints, next_token: int) -> None:
        """End the round: the accepted nodes and the target's own token after them will be read with the features that the
        target has made of the tokens before them while it verified the tree.
        """
        rows = torch.tensor([ROOT, *path.tolist()], device=self.device)
        self._pending = [*(int(token) for token in tree.token[path]), next_token]
        self._pending_features = [self._target.hidden[self.layer][rows]]


def _filled(rows: Tensor, size: int) -> Tensor:
    """Zeros behind, where a prepared size is larger."""
    return rows if len(rows) == size else torch.nn.functional.pad(rows, (0, 0, 0, size - len(rows)))
