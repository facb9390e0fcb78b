"""``independent``: any smaller Hugging Face model with the target's vocabulary, with or without sight. Training-free.

Visual tokens that the target's last layer attended to least never enter the draft's cache (SAGE section 5.1; STAR eq.
2).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.drafters.draft import Proposals
from autotune.runtime.kv_cache import SlabCache
from autotune.runtime.masks import MaskBuffer
from autotune.runtime.target import DEFAULT_CAPACITY, text_model_of
from autotune.trees.buckets import round_up
from autotune.trees.tree import ROOT, Ints, Tree, write_frontier_mask


class IndependentDraft:
    """A draft with its own KV cache. A round is: ``propose`` level by level, then ``commit``.

    The cache holds the committed prefix, then the nodes evaluated this round in order of evaluation. Committed tokens
    that the draft has not read yet (the new root; before it perhaps an accepted leaf) are ``pending`` and read
    together, when the root's proposals are asked for.
    """

    kind = "independent"

    def __init__(self, model: Any, *, visual_keep: float = 1.0) -> None:
        self.model = model.eval()
        self.visual_keep = visual_keep
        self.text_model = text_model_of(model)
        self.head = model.get_output_embeddings()
        self.config = model.config.get_text_config()
        self.vocab_size: int = self.config.vocab_size
        self.image_token_id: int | None = getattr(model.config, "image_token_id", None)
        self.device: torch.device = self.text_model.device
        self._num_pruned = 0
        self._pending: list[int] = []
        self.buckets: tuple[int, ...] = ()
        """Sizes that forwards are rounded up to; none: every size as it is."""
        self._num_evaluated = 0
        self._make_buffers(DEFAULT_CAPACITY)

    def _make_buffers(self, capacity: int) -> None:
        self.cache = SlabCache(self.config.num_hidden_layers, capacity)
        self._masks = MaskBuffer(capacity, dtype=self.text_model.dtype, device=self.device)

    def reserve(self, num_tokens: int) -> None:
        """Empty the cache and make sure that it holds that many tokens."""
        if num_tokens > self.cache.capacity:
            self._make_buffers(-(-num_tokens // 256) * 256)
        self.cache.clear()
        self.begin_round()

    def begin_round(self) -> None:
        """Forget the nodes read in the round before."""
        self._num_evaluated = 0

    @property
    def length(self) -> int:
        """Committed tokens in the cache; pruned visual tokens are not among them."""
        return self.cache.length

    def num_kept(self, num_visual_tokens: int) -> int:
        """Visual tokens that enter the cache."""
        return max(1, round(self.visual_keep * num_visual_tokens)) if num_visual_tokens else 0

    def prefill(self, inputs: dict[str, Any], visual_scores: Tensor | None, *, capacity: int) -> None:
        """Read the prompt. ``visual_scores`` [visual tokens] ranks them; it may be None where all are kept.

        ``capacity`` counts the tokens that the request can reach, the prompt and the trees included.
        """
        self.reserve(capacity)
        self._pending = []
        input_ids = inputs["input_ids"]
        keep_off = ("attention_mask", "past_key_values", "use_cache", "logits_to_keep", "position_ids")
        extra = {key: value for key, value in inputs.items() if key not in keep_off}
        is_visual = input_ids[0] == (-1 if self.image_token_id is None else self.image_token_id)
        if (
            visual_scores is None
            or self.image_token_id is None
            or self.num_kept(len(visual_scores)) == len(visual_scores)
        ):
            kept = torch.arange(input_ids.shape[1], device=self.device)
        else:
            best = visual_scores.topk(self.num_kept(len(visual_scores))).indices
            is_kept = ~is_visual
            is_kept[is_visual.nonzero().squeeze(1)[best]] = True
            kept = is_kept.nonzero().squeeze(1)
        self._num_pruned = input_ids.shape[1] - len(kept)

        def prune(
            _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            # Between the vision tower and the first text layer: tokens pruned here cost nothing from now on, and the
            # others keep their positions.
            kwargs["inputs_embeds"] = kwargs["inputs_embeds"][:, kept]
            kwargs["position_ids"] = kept[None]
            kwargs["attention_mask"] = torch.ones(1, len(kept), dtype=torch.long, device=self.device)
            return args, kwargs

        hook = self.text_model.register_forward_pre_hook(prune, with_kwargs=True) if self._num_pruned else None
        try:
            self.model(**extra, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        finally:
            if hook is not None:
                hook.remove()
        self.cache.advance(len(kept))

    def append(self, token: int) -> None:
        """Tell the draft a committed token; it is read with the next root."""
        self._pending.append(token)

    @property
    def num_pending(self) -> int:
        """Tokens that asking for the root's proposals will read."""
        return len(self._pending)

    def propose(self, tree: Tree, frontier: Ints, num_proposals: int) -> Proposals:
        """The most probable children of the frontier's nodes, all of one level. The root's come first in every round."""
        if frontier[0] == ROOT:
            count = len(self._pending)
            size = round_up(count, self.buckets)
            tokens = np.zeros(size, np.int64)
            tokens[:count] = self._pending
            block = np.triu(np.full((size, size), self._masks.closed, np.float32), 1)
            positions = np.minimum(np.arange(size), count - 1) + self.cache.length + self._num_pruned
            logits = self.forward(tokens, positions, block)[count - 1 : count]
            self.cache.advance(count)
            self._pending = []
            self.begin_round()
        else:
            count, begin = len(frontier), self._num_evaluated
            size = round_up(count, self.buckets)
            tree.slot[frontier] = np.arange(begin, begin + count)
            block = np.empty((size, begin + size), np.float32)
            write_frontier_mask(tree, frontier, block, begin + size, self._masks.closed)
            tokens = np.zeros(size, np.int64)
            tokens[:count] = np.maximum(tree.token[frontier], 0)
            # The prefix ends with the root, so a child of the root stands right behind it. All are of one depth.
            positions = np.full(size, tree.depth[frontier[0]] - 1 + self.cache.length + self._num_pruned)
            logits = self.forward(tokens, positions, block, num_uncommitted=begin)[:count]
            self._num_evaluated = begin + count
        return top_proposals(logits, num_proposals)

    def forward(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        block: NDArray[np.float32],
        *,
        num_uncommitted: int = 0,
    ) -> Tensor:
        """Logits [n, vocabulary] of n tokens behind the prefix and ``num_uncommitted`` tokens written earlier this
        round.

        ``block`` [n, num_uncommitted + n] is the additive mask behind the prefix, which all may see. Nothing is
        committed.
        """
        mask = self._masks.write(block, self.cache.length) if block.shape[1] > 1 else None
        self.cache.length += num_uncommitted  # write behind them
        try:
            hidden = self.text_model(
                input_ids=torch.from_numpy(tokens)[None].to(self.device),
                position_ids=torch.from_numpy(positions)[None].to(self.device),
                attention_mask=mask,
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state
        finally:
            self.cache.length -= num_uncommitted
        return self.head(hidden[0])  # type: ignore[no-any-return]

    def commit(self, tree: Tree, path: Ints, next_token: int) -> None:
        """End the round: the accepted nodes and the target's own token after them are committed, everything else is
        forgotten.
        """
        # Only nodes that were expanded have been read: all of the path but perhaps its last node.
        places = [int(place) for place in tree.slot[path] if place >= 0]
        self.cache.keep(places)
        self._pending = [int(tree.token[node]) for node in path[len(places) :]] + [next_token]


def top_proposals(logits: Tensor, num_proposals: int) -> Proposals:
    """The best tokens of each row and their log-probabilities in float32."""
    logits = logits.float()
    top = logits.topk(num_proposals)
    logprobs = top.values - logits.logsumexp(-1, keepdim=True)
    return top.indices.int().cpu().numpy(), logprobs.cpu().numpy()
