"""Drafts that read the target's features, at work: their cache, and what a round needs of the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.documents.subnet import Subnet
from autotune.drafters.cached_draft import CachedDraft
from autotune.drafters.draft import kept_tokens
from autotune.drafters.network import DraftNetwork, PromptRows
from autotune.errors import UserError
from autotune.modeling.graph_runner import (
    DeviceStep,
    GraphKey,
    GraphRunner,
    Outputs,
    Slots,
    padded_length,
    padded_masks,
)
from autotune.modeling.kv_cache import CachedModel
from autotune.modeling.masks import MaskBuffer, TreeMask
from autotune.modeling.prompt import Prompt
from autotune.modeling.transfer import to_device
from autotune.modeling.tree_model import DEFAULT_CAPACITY
from autotune.trees.tree import MAX_STEP, ROOT, Ints, Tree

if TYPE_CHECKING:
    from autotune.modeling.target import Target


class FeatureCache:
    """Keys and values of all blocks. Only committed tokens count as ``length``: nodes behind them were read with the draft's
    own features, and are read anew with the target's once they are accepted.
    """

    def __init__(self, network: DraftNetwork, capacity: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self.length = 0
        self.blocks = network.new_caches(capacity, dtype=dtype, device=device)

    @property
    def memory_bytes(self) -> int:
        return sum(block.slab.numel() * block.slab.element_size() for block in self.blocks)

    def clear(self) -> None:
        """Forget everything; the memory is kept for the next request."""
        self.length = 0


class FeatureDraft(CachedDraft, CachedModel):
    """Drafts with a network that reads layers of the target (see ``Draft``).

    Each pending token waits beside the target's features of the token before: after a round these are the accepted
    nodes and the new root.

    Args:
        network: whole, or a slice of a supernet.
        heads: share of heads that a slice has kept, in all blocks or in each.
        injection_layer: of the target, to read; None: the network's own choice.
    """

    def __init__(
        self,
        network: DraftNetwork,
        *,
        heads: float | tuple[float, float, float] | None = None,
        injection_layer: int | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.kind = network.config.kind
        self.heads = heads
        self.aux_layers = network.layers_read(injection_layer)
        self.visual_keep = network.config.visual_keep
        self.token_ids = network.token_ids
        self.vocab_size = 0  # the target's, once there is one
        self._pending_features: list[dict[int, Tensor]] = []
        self._target: Any = None
        self._num_condensed = 0  # tokens of the prompt that never entered the cache

    @property
    def subnet(self) -> Subnet:
        """Which part of the draft this is."""
        layer = self.aux_layers[0] if len(self.aux_layers) == 1 else None
        return Subnet(heads=self.heads, visual_keep=self.visual_keep, injection_layer=layer)

    @property
    def num_parameters(self) -> int:
        """Of its own: embedding and head are the target's."""
        return sum(parameter.numel() for parameter in self.network.parameters())

    def attach(self, target: Target) -> None:
        """Take the target's embedding and head; a second time it changes nothing.

        Raises:
            UserError: a target of another size or vocabulary.
        """
        if self._target is target:
            return
        config, text = self.network.config, target.text
        for name, ours, theirs in (
            ("hidden_size", config.hidden_size, text.config.hidden_size),
            ("num_hidden_layers", config.num_target_layers, len(text.layers)),
        ):
            if ours != theirs:
                raise UserError(
                    f"this {self.kind} draft was made for a target with {name} {ours}; this one has {theirs}; "
                    "use a draft made for this target"
                )
        embedding = self.network.embedding
        highest = -1 if self.token_ids is None else int(self.token_ids.max())
        if highest >= target.vocab_size or (embedding is not None and embedding.num_embeddings < target.vocab_size):
            own = highest + 1 if embedding is None else max(highest + 1, embedding.num_embeddings)
            raise UserError(
                f"target and draft must share one vocabulary; the target has {target.vocab_size} tokens, this {self.kind} "
                f"draft knows {own}; use a draft made for this target"
            )
        self._target = target
        self.network.to(target.device, target.dtype)
        self.device, self.dtype = target.device, target.dtype
        self.token_ids = self.network.token_ids  # where the network is now
        self.vocab_size = target.vocab_size
        self._embed = embedding or text.module.get_input_embeddings()
        # Of the root and the tokens read since: what their children read in place of the target's features.
        self._own = torch.zeros(0, config.width, dtype=self.dtype, device=self.device)
        self._allocate(DEFAULT_CAPACITY)

    def _allocate(self, capacity: int) -> None:
        self.cache = FeatureCache(self.network, capacity, dtype=self.dtype, device=self.device)
        self._masks = MaskBuffer({"all": None}, capacity, dtype=self.dtype, device=self.device)
        self._factors = self.network.factors(torch.arange(2 * capacity, device=self.device))
        self._own = torch.zeros(capacity, self._own.shape[1], dtype=self.dtype, device=self.device)

    @property
    def what(self) -> str:
        """For messages."""
        return f"a {self.kind} draft"

    def prompts(self, inputs: dict[str, Any], read: Sequence[Prompt]) -> Sequence[Prompt]:
        """What the target reads."""
        return read

    def prefill(self, prompt: Prompt, visual_scores: Tensor | None, *, capacity: int) -> None:
        """Read the prompt, beside the features that the target has just made of it."""
        self.reserve(max(capacity, len(prompt) + MAX_STEP))
        self._pending, self._pending_features = [], []
        network = self.network
        hidden = {layer: self._target.hidden[layer][: len(prompt)] for layer in self.aux_layers}
        before = network.target_features({layer: states[:-1] for layer, states in hidden.items()})
        first = before.new_zeros(1, before.shape[1]) if network.first_feature is None else network.first_feature[None]
        features = torch.cat([first, before])
        kept = kept_tokens(prompt.is_visual, visual_scores, self.visual_keep)
        if kept is None:
            kept = torch.arange(len(prompt), device=self.device)
        if network.first_feature is None:
            kept = kept[kept > 0]
        stream, features, is_visual = self._embeddings(prompt)[kept], features[kept], prompt.is_visual[kept]
        rows = PromptRows(network.fuse(stream, features), features, kept, is_visual)
        stream, features, positions, _ = network.condense(rows, hidden[self.aux_layers[-1]][-1])
        if len(positions) > 0:
            network(stream[None], features[None], self._factors[positions][None], caches=self.cache.blocks)
        self.cache.length = len(positions)
        self._num_condensed = len(prompt) - len(positions)

    def _embeddings(self, prompt: Prompt) -> Tensor:
        """What the target reads, [n, hidden], its text in the draft's own words where it has any."""
        if prompt.embeddings is None:
            return self._embed(prompt.tokens)  # type: ignore[no-any-return]
        if self.network.embedding is None:
            return prompt.embeddings[0]
        text = self._embed(prompt.tokens.masked_fill(prompt.is_visual, 0))
        return torch.where(prompt.is_visual[:, None], prompt.embeddings[0], text)

    def append(self, token: int) -> None:
        """Tell the draft a committed token; it is read with the next root."""
        self._pending.append(token)
        self._pending_features.append({layer: self._target.hidden[layer][-1:] for layer in self.aux_layers})

    def forward(
        self,
        tokens: NDArray[np.int64],
        offsets: Ints,
        block: TreeMask,
        *,
        num_uncommitted: int = 0,
        parents: Ints | None = None,
        hidden: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """See ``CachedDraft``."""
        network = self.network
        if parents is not None:
            features = network.own_features(_rows(self._own, parents + 1))
        else:
            assert hidden is not None
            features = network.target_features(hidden)
        if len(features) < len(tokens):  # a prepared size is larger
            features = torch.nn.functional.pad(features, (0, 0, 0, len(tokens) - len(features)))
        begin = self.cache.length + num_uncommitted
        rotations = offsets + (self.cache.length + self._num_condensed)
        if self.graph_runner is not None:
            states, logits = self._run_prepared(self.graph_runner, tokens, features, rotations, block, begin)
        else:
            mask: Any = None
            if len(tokens) > 1 or block.any():  # a chain's node sees all before it
                mask = self._masks.write(block, self.cache.length, offsets, np.zeros(block.shape[1], np.int64))
            ids = torch.from_numpy(tokens).to(self.device)
            states, logits = self._states(ids, features, _rows(self._factors, rotations), mask, begin)
        self._own[1 + num_uncommitted : 1 + num_uncommitted + len(tokens)] = states
        return logits

    @property
    def prefix_state(self) -> Ints:
        """The tokens in the cache, and those of the prompt that never entered it."""
        return np.array([self.cache.length, self._num_condensed])

    def read_on_device(
        self, step: DeviceStep, *, parents: Tensor | None = None, hidden: Mapping[int, Tensor] | None = None
    ) -> Tensor:
        """See ``CachedDraft``."""
        network, count = self.network, len(step.tokens)
        begin = len(step.column_offsets) - count
        if parents is not None:
            features = network.own_features(self._own[parents + 1])
        else:
            assert hidden is not None
            features = network.target_features(hidden)
        numbers = torch.stack([step.tokens, step.columns, step.prefix_state[0] + step.prefix_state[1] + step.offsets])
        values = {"numbers": numbers, "features": features, **step.masks({"mask": None}, mask_value=self.mask_value)}
        states, logits = self.run_within(GraphKey(count, step.padded_kv_length), values)
        self._own[1 + begin : 1 + begin + count] = states
        return logits

    def _states(
        self, ids: Tensor, features: Tensor, factors: Tensor, mask: Tensor | None, begin: int | Slots
    ) -> tuple[Tensor, Tensor]:
        """States and logits of n tokens."""
        stream = self.network.fuse(self._embed(ids), features)
        (states,) = self.network(
            stream[None], features[None], factors[None], mask=mask, caches=self.cache.blocks, begin=begin
        )
        return states, self.network.logits(states, self._target.text.logits)

    def _run_prepared(
        self,
        graph_runner: GraphRunner,
        tokens: NDArray[np.int64],
        features: Tensor,
        rotations: Ints,
        block: TreeMask,
        begin: int,
    ) -> Outputs:
        columns = np.arange(begin, begin + len(tokens))
        size = GraphKey(len(tokens), padded_length(begin + len(tokens)))
        offsets = np.zeros(block.shape[1], np.int64)
        masks = padded_masks(
            {"mask": None},
            block,
            self.cache.length,
            offsets,
            offsets,
            padded_kv_length=size.padded_kv_length,
            mask_value=self.mask_value,
        )
        numbers = np.stack([tokens, columns, rotations])
        outputs = graph_runner.run(size, {"numbers": numbers, "features": features, **masks}, self.dtype)
        return tuple(out.clone() for out in outputs)  # those of the buffers are valid until the next forward

    def _prepared_forward(self, inputs: Mapping[str, Tensor]) -> Outputs:
        """See ``CachedModel``. ``numbers`` [3, n] are tokens, columns of the cache, and rows of the rotary factors."""
        ids, columns, rotations = inputs["numbers"]
        slots = Slots(columns, inputs["mask"].shape[-1])
        return self._states(ids, inputs["features"], self._factors[rotations], inputs["mask"], slots)

    def _pending_hidden(self) -> Mapping[int, Tensor]:
        return {layer: torch.cat([one[layer] for one in self._pending_features]) for layer in self.aux_layers}

    def _pending_committed(self, count: int) -> None:
        self._own[0] = self._own[count]
        self.cache.length += count
        self._pending_features = []

    def _pending_committed_on_device(self, count: Tensor) -> None:
        self._own[:1] = self._own[count]

    def end_device_round(self, tree: Tree, path: Ints, next_token: int, hidden: Sequence[Tensor]) -> None:
        """See ``CachedDraft``."""
        self.cache.length += len(self._pending)
        self._pending = [*tree.token[path].tolist(), next_token]
        self._pending_features = [
            {layer: rows[: len(self._pending)] for layer, rows in zip(self.aux_layers, hidden, strict=True)}
        ]

    def commit(self, tree: Tree, path: Ints, next_token: int) -> None:
        """End the round: the accepted nodes and the target's own token after them will be read with the features that the
        target has made of the tokens before them while it verified the tree.
        """
        rows = to_device(np.array([ROOT, *path]), self.device)
        self._pending = [*(int(token) for token in tree.token[path]), next_token]
        self._pending_features = [{layer: self._target.hidden[layer][rows] for layer in self.aux_layers}]


def _rows(table: Tensor, numbers: Ints) -> Tensor:
    """Rows of a table; a single one, as in a chain, without asking the device to gather."""
    if len(numbers) == 1:
        return table.narrow(0, int(numbers[0]), 1)
    return table[to_device(numbers, table.device)]
