"""A text model at work: its cache and masks, a prefill, and forwards of a few tokens behind what is cached. Target and
independent draft run through it alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.modeling.graph_runner import (
    DeviceStep,
    GraphKey,
    GraphRunner,
    Outputs,
    Slots,
    padded_length,
    padded_masks,
)
from autotune.modeling.kv_cache import CachedModel, SlabCache
from autotune.modeling.masks import MaskBuffer, TreeMask
from autotune.modeling.prompt import Encoded, Prompt, encode
from autotune.modeling.text_model import device_of, text_model_of
from autotune.trees.tree import Ints

DEFAULT_CAPACITY = 1024  # tokens; the cache grows when a request needs more


class TreeModel(CachedModel):
    """Runs a Hugging Face model's text model behind its own forward, whose code merges images and text. The model's
    weights, config and classes are untouched.

    The cache holds the committed prefix, then ``num_uncommitted`` tokens of this round. A token's *place* counts from
    the end of the prefix.

    Raises:
        UserError: a model that trees cannot decode: see ``text_model_of``.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.text = text_model_of(model)
        self.device: torch.device = self.text.device
        self.dtype: torch.dtype = self.text.dtype
        self.vocab_size: int = self.text.vocab_size
        self.output_layers: tuple[int, ...] = ()
        """Layers whose output is kept in ``hidden``: 0 is the embedding, the number of layers the final norm's."""
        self.hidden: dict[int, Tensor] = {}
        """Of the last forward or prefill, [n, hidden size] of each watched layer."""
        self._num_pruned = 0  # tokens of the prompt that were dropped before the first layer
        self._shift = np.zeros(1, np.int64)  # of positions against places in the sequence, behind an image (M-RoPE)
        self._allocate(DEFAULT_CAPACITY)

    def _allocate(self, capacity: int) -> None:
        text = self.text
        self.cache = SlabCache(text.layer_windows, [device_of(layer) for layer in text.layers], capacity)
        self._masks = MaskBuffer(text.windows, capacity, dtype=self.dtype, device=self.device)
        self._columns = np.zeros(capacity, np.int64)  # places of the uncommitted tokens

    @property
    def what(self) -> str:
        """For messages."""
        return f"a model of type {self.text.config.model_type}"

    @property
    def kv_bytes_per_token(self) -> int:
        """What a token takes in the cache."""
        return self.text.kv_bytes_per_token

    def reserve(self, num_tokens: int) -> None:
        """Empty the cache and make sure that it holds that many tokens."""
        super().reserve(num_tokens)
        self._num_pruned, self._shift = 0, np.zeros(1, np.int64)

    def encode(self, inputs: dict[str, Any]) -> Encoded:
        """The rows of a batch, as the processor made it, through embedding and vision tower.

        Raises:
            UserError: images without image tokens or the reverse.
        """
        return encode(self.model, self.text, inputs)

    def read(self, prompt: Prompt, *, whole: Prompt | None = None) -> Tensor:
        """Run a prompt through all layers into the empty cache; returns the logits after its last token, [vocabulary].

        ``whole`` is the prompt from which tokens were dropped: what follows stands behind it.
        """
        whole = whole or prompt
        given = (
            {"input_ids": prompt.tokens[None]} if prompt.embeddings is None else {"inputs_embeds": prompt.embeddings}
        )
        hidden = self._run(**given, position_ids=prompt.positions, attention_mask=prompt.mask, **prompt.extra)
        self.cache.advance(len(prompt))
        self._num_pruned = len(whole) - len(prompt)
        self._shift = whole.shift
        return self.text.logits(hidden[-1:])[0]

    def forward(
        self, tokens: NDArray[np.int64], offsets: Ints, tree_mask: TreeMask, *, num_uncommitted: int = 0
    ) -> Tensor:
        """Logits [n, vocabulary] of n tokens behind the prefix and ``num_uncommitted`` tokens written earlier this
        round.

        ``tree_mask`` [n, num_uncommitted + n] is the additive mask behind the prefix, which all may see as far as their
        window reaches. Nothing is committed.
        """
        columns = self._columns[: num_uncommitted + len(tokens)]
        columns[num_uncommitted:] = offsets
        # Nodes behind the end of the context are never emitted. They must not stretch rotary embeddings that depend on
        # the largest position, nor look learned ones up that do not exist.
        before = self.cache.length + self._num_pruned
        positions = before + np.minimum(offsets, self.text.max_context - 1 - before) + self._shift[:, None]
        if self.graph_runner is not None:
            return self._run_prepared(self.graph_runner, tokens, positions, offsets, tree_mask, columns)
        # A single token right behind the prefix needs none.
        mask = self._masks.write(tree_mask, self.cache.length, offsets, columns) if len(columns) > 1 else None
        self.cache.num_uncommitted = num_uncommitted
        try:
            hidden = self._run(
                input_ids=torch.from_numpy(tokens)[None].to(self.device),
                position_ids=torch.from_numpy(positions if len(positions) == 1 else positions[:, None]).to(self.device),
                attention_mask=mask,
            )
        finally:
            self.cache.num_uncommitted = 0
        return self.text.logits(hidden)

    def _run_prepared(
        self,
        graph_runner: GraphRunner,
        tokens: NDArray[np.int64],
        positions: Ints,
        offsets: Ints,
        tree_mask: TreeMask,
        columns: Ints,
    ) -> Tensor:
        end = self.cache.length + len(columns)
        size = GraphKey(len(tokens), padded_length(end), self.output_layers)
        masks = padded_masks(
            self.text.windows,
            tree_mask,
            self.cache.length,
            offsets,
            columns,
            padded_kv_length=size.padded_kv_length,
            mask_value=self.mask_value,
        )
        numbers = np.concatenate([tokens[None], np.arange(end - len(tokens), end)[None], positions])
        # Whoever keeps logits or features keeps them for longer than the buffers do.
        logits, *hidden = (out.clone() for out in graph_runner.run(size, {"numbers": numbers, **masks}, self.dtype))
        self.hidden = dict(zip(self.output_layers, hidden, strict=True))
        return logits

    @property
    def prefix_state(self) -> Ints:
        """The tokens in the cache, those dropped before it, and the shift of positions on each axis."""
        return np.concatenate([[self.cache.length, self._num_pruned], self._shift])

    def forward_on_device(self, step: DeviceStep) -> Tensor:
        """``forward`` as a part of prepared work."""
        before = step.prefix_state[0] + step.prefix_state[1]
        positions = (
            before + torch.minimum(step.offsets, self.text.max_context - 1 - before) + step.prefix_state[2:, None]
        )
        numbers = torch.cat([torch.stack([step.tokens, step.columns]), positions])
        masks = step.masks(self.text.windows, mask_value=self.mask_value)
        size = GraphKey(len(step.tokens), step.padded_kv_length, self.output_layers)
        logits, *hidden = self.run_within(size, {"numbers": numbers, **masks})
        self.hidden = dict(zip(self.output_layers, hidden, strict=True))
        return logits

    def _prepared_forward(self, inputs: Mapping[str, Tensor]) -> Outputs:
        """See ``CachedModel``. ``numbers`` [2 + axes, n] are tokens, columns of the cache, and positions."""
        numbers = inputs["numbers"]
        masks = {kind: inputs[kind] for kind in self.text.windows}
        mask = next(iter(masks.values()))
        positions = numbers[2:]
        self.cache.slots = Slots(numbers[1], mask.shape[-1])
        try:
            hidden = self._run(
                input_ids=numbers[:1],
                position_ids=positions if len(positions) == 1 else positions[:, None],
                attention_mask=masks if len(masks) > 1 else mask,
            )
        finally:
            self.cache.slots = None
        return self.text.logits(hidden), *(self.hidden[layer] for layer in self.output_layers)

    def _run(self, **inputs: Any) -> Tensor:
        """Final hidden states [n, hidden size]."""
        if self.output_layers:
            inputs["output_hidden_states"] = list(self.output_layers)
        out = self.text.module(**inputs, past_key_values=self.cache, use_cache=True)
        if self.output_layers:
            self.hidden = {layer: out.hidden_states[layer][0] for layer in self.output_layers}
        return out.last_hidden_state[0]  # type: ignore[no-any-return]


def causal_tree_mask(count: int, mask_value: float) -> TreeMask:
    """Each of ``count`` tokens in a row sees those before it and itself."""
    return np.triu(np.full((count, count), mask_value, np.float32), 1)
