"""``gemma4_assistant``: the assistants that are published with Gemma 4, text-only and unified.

An assistant is a small Gemma 4 without keys and values of its own: its layers attend to those of the target's last layer of the
same type. It reads the target's embedding of a token beside the target's last hidden state before it; after a drafted token its
own output takes the place of that state. All tokens of a round have the position of the root and see what the target has
cached before it, so that nodes of a tree do not see each other, and a level is a batch of independent rows
(``SinglePositionMultiTokenCandidateGenerator`` in transformers drafts the same chains).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from autotune.cost.draft_costs import ModelShape
from autotune.device import check_room
from autotune.drafters.borrowed_cache import BorrowedCache
from autotune.drafters.cached_draft import CachedDraft, pad_rows, table_rows
from autotune.drafters.draft import FeatureSource, check_vocabulary
from autotune.errors import UserError
from autotune.execution import rounded_capacity
from autotune.modeling.graph_memory import Outputs
from autotune.modeling.graph_runner import GraphKey
from autotune.modeling.grouped_attention import attention_of_steps
from autotune.modeling.loading import GEMMA4_ASSISTANT
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.quantization import weight_bytes
from autotune.modeling.step import Step
from autotune.modeling.text_model import MASKED_ATTENTION
from autotune.modeling.transfer import to_device
from autotune.modeling.tree_model import DEFAULT_CAPACITY
from autotune.trees.limits import MAX_STEP
from autotune.trees.tree import ROOT, Ints, Tree

if TYPE_CHECKING:
    from autotune.modeling.target import Target

TARGET_TYPES = ("gemma4_text", "gemma4_unified_text")
ROWS_AT_ONCE = 16
"""Rows whose logits of ordered embeddings are computed together: each gathers rows of the output head for itself."""


class Gemma4AssistantDraft(CachedDraft):
    """Drafts with an assistant (see ``Draft``). Of the pending tokens only the root is read, because nothing is cached.

    Pruning visual tokens has no effect, as the keys are the target's. ``model`` is a Hugging Face model of a type
    ``gemma4_assistant`` or ``gemma4_unified_assistant``, on any device.
    """

    kind = GEMMA4_ASSISTANT
    sees_images = False  # it has no visual tokens to choose
    reads_target_cache = True
    max_pending = 1  # the root

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = self.standalone_model = model.eval().requires_grad_(False)
        self.dtype: torch.dtype = model.dtype
        self.config = model.config.get_text_config()
        self.vocab_size: int = self.config.vocab_size
        self._target: Any = None

    @property
    def description(self) -> str:
        return f"a {self.kind} draft"

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.model)

    @property
    def shape(self) -> ModelShape:
        """See ``Draft``. Every layer reads the keys and values of its type in the target's cache."""
        shapes = [self.cache.shapes[layer_type] for layer_type in self.config.layer_types]
        return ModelShape(
            num_layers=self.config.num_hidden_layers,
            hidden_size=self.config.hidden_size,
            text_parameters=self.step_parameters,
            vision_parameters=0,
            kv_bytes_per_token=2 * sum(heads * size for heads, size in shapes) * self.dtype.itemsize,
            bytes_per_parameter=self.dtype.itemsize,
        )

    @property
    def step_parameters(self) -> int:
        """Parameters that a forward pass of one token reads, without the target's embedding."""
        head, width = self.model.lm_head.weight.numel(), self.config.hidden_size
        if self.model.masked_embedding is None:
            return self.num_parameters
        config = self.model.config
        selected = config.centroid_intermediate_top_k * (self.vocab_size // config.num_centroids)
        return self.num_parameters - head + selected * width

    @property
    def kv_bytes_per_token(self) -> int:
        return 0  # nothing is cached

    @property
    def mask_value(self) -> float:
        return float(torch.finfo(self.dtype).min)

    def attach(self, target: Target) -> None:
        """See ``Draft``. The draft uses the target's embedding, and keys and values.

        Raises:
            UserError: not a Gemma 4 target, or one of other sizes, another vocabulary or another precision.
        """
        if self._target is target:
            return
        cache = self._checked_cache(target)
        self._target = target
        self.device, self.target_vocab_size = target.device, target.vocab_size
        self.model.to(target.device)
        self.aux_layers = (len(target.text.layers),)
        self._embed = target.text.module.get_input_embeddings()
        self._hidden = torch.zeros(0, self.model.config.backbone_hidden_size, dtype=self.dtype, device=self.device)
        self.cache = cache
        self._allocate(DEFAULT_CAPACITY)

    def _checked_cache(self, target: Target) -> BorrowedCache:
        text, config = target.text, self.config
        if text.config.model_type not in TARGET_TYPES:
            raise UserError(
                f"a {self.kind} draft attends to the keys and values of a Gemma 4 target; this target is of type "
                f"{text.config.model_type}; use another draft"
            )
        if config._attn_implementation not in MASKED_ATTENTION:
            raise UserError(
                f"an assistant needs attention that takes a mask: {' or '.join(MASKED_ATTENTION)}; it runs "
                f"{config._attn_implementation!r}; load it with attn_implementation='sdpa'"
            )
        cache = BorrowedCache(target, config.layer_types)
        differences = [("hidden_size", self.model.config.backbone_hidden_size, text.config.hidden_size)]
        for number, layer_type in enumerate(config.layer_types):
            ours = config.per_layer_config[number]
            heads, size = cache.shapes[layer_type]
            differences.append((f"{layer_type} KV heads", ours.num_key_value_heads, heads))
            differences.append((f"{layer_type} head size", ours.head_dim, size))
        for name, for_ours, theirs in differences:
            if for_ours != theirs:
                raise UserError(
                    f"this {self.kind} draft was made for a target with {name} {for_ours}; this one has {theirs}; use a draft "
                    "made for this target"
                )
        check_vocabulary(target, self.vocab_size)
        if self.dtype != target.dtype:
            raise UserError(
                f"an assistant reads the target's states as they are, so both have one precision; the target's is "
                f"{target.dtype}, the assistant's {self.dtype}; load it with dtype={target.dtype}"
            )
        return cache

    def use_mode(self, name: str) -> None:
        super().use_mode(name)
        if self.graph_runner is not None:  # its captures refer to the memory of the target's cache
            self._target.dependent_graphs.add(self.graph_runner)

    def _allocate(self, capacity: int) -> None:
        """Make room for the states of ``capacity`` tokens of one round."""
        width = self._hidden.shape[1]
        # Of the root and the tokens evaluated since: the state that a child reads, and what the token sees of the target.
        self._hidden = torch.zeros(1 + capacity, width, dtype=self.dtype, device=self.device)
        self._num_visible = np.zeros(1 + capacity, np.int64)

    def reserve(self, num_tokens: int) -> None:
        """Forget the request, and make room for the states of ``num_tokens`` tokens.

        Raises:
            UserError: not enough memory.
        """
        if num_tokens >= len(self._hidden):
            capacity = rounded_capacity(num_tokens)
            needs = {"states": capacity * self._hidden.shape[1] * self.dtype.itemsize}
            what, advice = f"a tree of {num_tokens} tokens", "draft smaller trees"
            check_room(self.device, needs, what=what, advice=advice)
            for runner in self.dependent_graphs:
                runner.reset()
            self._allocate(capacity)
        self.cache.clear()
        self.begin_round()

    def prefill(self, prompt: EncodedPrompt, visual_scores: Tensor | None, *, capacity: int) -> None:
        """See ``Draft``. The target must have prefilled the same prompt just before."""
        self.reserve(max(capacity - len(prompt), MAX_STEP))
        self._pending = []
        self.cache.length = len(prompt)

    def _append(self, token: int) -> None:
        self._set_root(token, len(self._pending), self._target.hidden[self.aux_layers[0]][-1:])

    def commit(self, tree: Tree, path: Ints, next_token: int) -> None:
        last = int(path[-1]) if len(path) else ROOT
        hidden = self._target.hidden[self.aux_layers[0]]
        self._set_root(next_token, len(self._pending) + len(path), hidden[last : last + 1])

    def _set_root(self, token: int, num_tokens: int, hidden: Tensor) -> None:
        """Make ``token`` the root, ``num_tokens`` after those counted so far. ``hidden`` is the target's state before it, [1, hidden]."""
        self.cache.length += num_tokens
        self._pending, self._root_hidden = [token], hidden

    def prepare_step(self, kv_length: int, *, num_pending: int = 0, num_pruned: int = 0) -> None:
        super().prepare_step(kv_length, num_pending=min(num_pending, 1))
        self._num_visible[:] = kv_length
        self._root_hidden = self._hidden.new_zeros(len(self._pending), self._hidden.shape[1])

    def _pending_hidden(self) -> Mapping[int, Tensor]:
        return {self.aux_layers[0]: self._root_hidden}

    def _commit_pending(self, count: int) -> None:
        self._hidden[0], self._num_visible[0] = self._hidden[count], self._num_visible[count]
        self.cache.length += count

    def forward(self, step: Step, source: FeatureSource) -> Tensor:
        """See ``CachedDraft``. Committed tokens see what the target has cached before them, drafted ones what their parents see;
        the mask of the step is that of drafts with a cache.
        """
        count, first = len(step.tokens), step.num_uncommitted
        if isinstance(source, Mapping):
            num_visible = self.cache.length + step.offsets
        else:
            num_visible = self._num_visible[np.asarray(source) + 1]
            num_visible = np.pad(num_visible, (0, count - len(num_visible)), mode="edge")
        if self.graph_runner is not None:
            own, logits = self._run_over_buffers(step.tokens, num_visible, source)
            logits = logits[step.first_logits :]
        else:
            hidden = pad_rows(self._features(source), count)
            states = self._states(to_device(step.tokens, self.device), hidden, *self._visible(num_visible))
            own, logits = self.model.post_projection(states), self._logits(states[step.first_logits :])
        rows = slice(1 + first, 1 + first + count)
        self._hidden[rows], self._num_visible[rows] = own, num_visible
        return logits

    def _features(self, source: FeatureSource) -> Tensor:
        """States [n, hidden] that tokens are read with."""
        if isinstance(source, Mapping):
            return source[self.aux_layers[0]]
        return table_rows(self._hidden, source + 1)

    def _run_over_buffers(self, tokens: Ints, num_visible: Ints, source: FeatureSource) -> Outputs:
        assert self.graph_runner is not None
        read = np.zeros_like(tokens)
        if not isinstance(source, Mapping):
            read[: len(source)] = source + 1
        integers = to_device(np.stack([tokens, num_visible, read]), self.device)
        if isinstance(source, Mapping):
            hidden = pad_rows(self._features(source), len(tokens))
        else:
            hidden = self._hidden[integers[2]]
        key = GraphKey(len(tokens), (self.padded_length(int(num_visible.max())),))
        inputs = {"integers": integers, "hidden": hidden}
        outputs = self.graph_runner.run(functools.partial(self._forward_over_buffers, key), key, inputs)
        return tuple(output.clone() for output in outputs)  # the buffers are valid only until the next forward pass

    def _forward_over_buffers(self, key: GraphKey, inputs: Mapping[str, Tensor]) -> Outputs:
        ids, num_visible, _ = inputs["integers"]
        (length,) = key.kv_lengths
        columns = torch.arange(length, device=self.device)
        keys_values = {name: self.cache.keys_values(name, 0, length) for name in self.cache.shapes}
        masks = {name: self._mask(columns, num_visible, self._reach(name)) for name in self.cache.shapes}
        states = self._states(ids, inputs["hidden"], num_visible, keys_values, masks)
        return self.model.post_projection(states), self._logits(states)

    def _visible(self, num_visible: Ints) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]], dict[str, Tensor | None]]:
        """Positions of the tokens, and by layer type the keys and values of the target and the mask over them."""
        least, most, count = int(num_visible.min()), int(num_visible.max()), len(num_visible)
        positions = to_device(num_visible, self.device)
        keys_values: dict[str, tuple[Tensor, Tensor]] = {}
        masks: dict[str, Tensor | None] = {}
        for name in self.cache.shapes:
            reach = self._reach(name)
            begin = 0 if reach is None else max(0, least - reach)
            keys_values[name] = self.cache.keys_values(name, begin, most)
            if count == 1:
                masks[name] = None
            elif least == most:  # a level sees one slice of the cache
                masks[name] = torch.zeros(1, dtype=self.dtype, device=self.device).expand(1, 1, count, most - begin)
            else:
                masks[name] = self._mask(torch.arange(begin, most, device=self.device), positions, reach)
        return positions, keys_values, masks

    def _reach(self, layer_type: str) -> int | None:
        """How many tokens before the root a layer sees; None for all. transformers' mask over another model's keys counts a
        window from the last of them, which it includes.
        """
        return self.config.sliding_window + 1 if layer_type == "sliding_attention" else None

    def _mask(self, columns: Tensor, num_visible: Tensor, reach: int | None) -> Tensor:
        """Additive mask [1, 1, n, columns] of tokens that see ``num_visible`` [n] tokens of the target, as far as they reach."""
        is_hidden = columns >= num_visible[:, None]
        if reach is not None:
            is_hidden = is_hidden | (columns < num_visible[:, None] - reach)
        mask = torch.zeros(is_hidden.shape, dtype=self.dtype, device=columns.device)
        return mask.masked_fill(is_hidden, self.mask_value)[None, None]

    def _states(
        self,
        ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        keys_values: Mapping[str, tuple[Tensor, Tensor]],
        masks: Mapping[str, Tensor | None],
    ) -> Tensor:
        """Outputs of the assistant's last layer for n tokens, [n, assistant's hidden size]."""
        rows = self.model.pre_projection(torch.cat([self._embed(ids), hidden], -1))
        with attention_of_steps(self.config):
            out = self.model.model(
                inputs_embeds=rows[None],
                attention_mask=dict(masks),
                position_ids=positions[None],
                shared_kv_states=dict(keys_values),
                use_cache=False,
                logits_to_keep=None,  # no number: transformers would cut the embeddings of every layer, which are missing
            )
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    def _logits(self, states: Tensor) -> Tensor:
        """Logits [n, vocabulary]. Of ordered embeddings, those of the tokens of the best centroids; the others have -inf, where
        transformers has a value that depends on the other rows of the batch.
        """
        if (embedder := self.model.masked_embedding) is None:
            return self.model.lm_head(states)  # type: ignore[no-any-return]
        tokens_of = embedder.token_ordering.view(embedder.num_centroids, -1)
        parts = []
        for part in states.split(ROWS_AT_ONCE):
            best = embedder.centroids(part).topk(embedder.centroid_intermediate_top_k).indices
            tokens = tokens_of[best].flatten(1)  # [n, selected]
            logits = (self.model.lm_head.weight[tokens] @ part[..., None]).squeeze(-1)
            parts.append(logits.new_full((len(part), self.vocab_size), -torch.inf).scatter(1, tokens, logits))
        return torch.cat(parts)
