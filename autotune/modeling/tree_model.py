"""Runs a Hugging Face text model over a KV cache that it owns: a prefill, then forward passes of a few tokens after the
prefix. The target and independent drafts are such models.

The outputs of a target's layers that a draft has yet to read lie at fixed addresses, so that captured steps of the
target write them and captured steps of the draft read them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotune.cost.table import ModelShape
from autotune.documents.execution import EAGER
from autotune.documents.subnet import VisualRanking
from autotune.errors import UserError
from autotune.modeling.attention import choose_attention
from autotune.modeling.cached_model import CachedModel
from autotune.modeling.compiled_layers import CompiledLayers
from autotune.modeling.graph_memory import Outputs
from autotune.modeling.graph_runner import GraphKey
from autotune.modeling.grouped_attention import attention_of_steps
from autotune.modeling.host import select, to_device
from autotune.modeling.kv_cache import new_cache
from autotune.modeling.masks import LayerMasks, TreeMasks, by_layer_type
from autotune.modeling.prompt import Encoded, EncodedPrompt, encode
from autotune.modeling.quantization import unquantized, weight_bytes
from autotune.modeling.step import LAST, Evaluated, Layout, PackedStep, Step, best_tokens, padded_columns
from autotune.modeling.text_model import TextModel, layer_plan, text_model_of
from autotune.modeling.tree_attention import additive_mask, captured_attention
from autotune.modeling.vision_timing import vision_layers, vision_parts
from autotune.trees.limits import MAX_STEP, Ints

DEFAULT_CAPACITY = 1024  # tokens; the cache grows when a request needs more
PREFILL_CHUNK = 1024  # tokens of a prompt that are read at once


class TreeModel(CachedModel):
    """A Hugging Face model that can run a tree. The model's weights, config and classes are not changed."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.text = text_model_of(model)
        self.device: torch.device = self.text.device
        choose_attention(self.device)
        self.dtype: torch.dtype = self.text.dtype
        self.vocab_size: int = self.text.vocab_size
        self.output_layers: tuple[int, ...] = ()
        """Layers whose outputs are kept in ``hidden``: 0 is the embedding, the number of layers the final norm."""
        self.hidden: dict[int, Tensor] = {}
        """Outputs of ``output_layers`` in the last prefill or eager step, [n, hidden size] each."""
        self.features = FeatureRows(self.text.config.hidden_size, dtype=self.dtype, device=self.device)
        """The rows of ``hidden`` that a draft has yet to read."""
        self._has_mrope = hasattr(getattr(model, "model", None), "get_rope_index")
        self._num_pruned = 0  # tokens of the prompt that were dropped before the first layer
        self._rope_delta = np.zeros(1, np.int64)  # position minus index in the sequence, after an image (M-RoPE)
        self._allocate(DEFAULT_CAPACITY)

    def use_text(self, text: TextModel) -> None:
        """Take another view of the same text model, with other windows; the cache is emptied."""
        self.text = text
        self.reallocate(DEFAULT_CAPACITY)

    def _allocate(self, capacity: int) -> None:
        text = self.text
        self.cache = new_cache(text, capacity)
        self._masks = TreeMasks(text.windows, dtype=self.dtype, device=self.device)
        self._column_offsets = np.zeros(capacity, np.int64)  # of the uncommitted tokens

    @property
    def description(self) -> str:
        return f"a model of type {self.text.config.model_type}"

    @property
    def num_devices(self) -> int:
        return self.text.num_devices

    @property
    def shape(self) -> ModelShape:
        """Sizes, for estimates of latency."""
        text, config, full = self.text, self.text.config, unquantized(self.model)
        layers = [parameter for layer in text_model_of(full).layers for parameter in layer.parameters()]
        text_parameters = sum(parameter.numel() for parameter in layers) + config.hidden_size * config.vocab_size
        head, embedding = text_model_of(full).head.weight, full.get_input_embeddings().weight
        num_divided = 0 if text.has_states or text.quantization is not None else divided_parameters(full)
        num_bytes: int | float = self.dtype.itemsize
        if text.quantization is not None:
            num_bytes = sum(map(weight_bytes, (*text.layers, text.head))) / text_parameters
        return ModelShape(
            architecture=config.model_type,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            text_parameters=text_parameters,
            vision_parameters=sum(p.numel() for part in vision_parts(full) for p in part.parameters()),
            vision_layers=vision_layers(full),
            kv_bytes_per_token=text.kv_bytes_per_token,
            bytes_per_parameter=num_bytes,
            embedding_parameters=0 if embedding is head else embedding.numel(),
            divided_parameters=num_divided,
            device_numbers=text.device_numbers if num_divided > 0 else (1,),
            layer_kernels=24 + 8 * sum("RMSNorm" in type(module).__name__ for module in text.layers[0].modules()),
        )

    @property
    def has_states(self) -> bool:
        return self.text.has_states

    @property
    def kv_bytes_per_token(self) -> int:
        return self.text.kv_bytes_per_token // (1 if self.ranks is None else self.ranks.size)

    def reserve(self, num_tokens: int) -> None:
        super().reserve(num_tokens)
        self._num_pruned, self._rope_delta = 0, np.zeros(1, np.int64)

    def set_length(self, length: int) -> None:
        """Pretend that ``length`` tokens are cached, so that a step after them can be prepared."""
        self.cache.length = length
        self._num_pruned, self._rope_delta = 0, np.zeros(1, np.int64)

    def encode(self, inputs: dict[str, Any]) -> Encoded:
        """Run a batch from the processor through embedding and vision tower (see ``prompt.encode``)."""
        return encode(self.model, self.text, inputs)

    def prefill_prompt(
        self,
        prompt: EncodedPrompt,
        *,
        full_prompt: EncodedPrompt | None = None,
        in_one_pass: bool = False,
        rankings: Sequence[VisualRanking] = (),
    ) -> Tensor:
        """Run a prompt through all layers into the empty cache; returns the logits after its last token, [vocabulary].

        Long prompts are read in chunks of ``PREFILL_CHUNK`` tokens, so that the memory of activations does not grow
        with the prompt, unless a prompt has a mask or other inputs of its layers, or the model has recurrent states.

        Args:
            full_prompt: the prompt before tokens were pruned. Later tokens take the positions after it.
            in_one_pass: do not read in chunks.
            rankings: of its visual tokens, to which the other processes of the target contribute.
        """
        if self.ranks is not None:
            self.cache.clear()
            self._taken_moves()  # of a request that has ended
            self.ranks.send("prefill", prompt, rankings)
        full_prompt = full_prompt or prompt
        in_one_pass = in_one_pass or prompt.mask is not None or bool(prompt.extra) or self.has_states
        if in_one_pass or len(prompt) <= PREFILL_CHUNK:
            last = self._read(prompt)
        else:
            hidden = []
            for chunk in prompt.chunks(PREFILL_CHUNK):
                last = self._read(chunk)
                hidden.append(self.hidden)
            self.hidden = {layer: torch.cat([states[layer] for states in hidden]) for layer in self.output_layers}
        self._num_pruned = len(full_prompt) - len(prompt)
        self._rope_delta = full_prompt.rope_delta
        if self.output_layers:
            self.features.release()
            self.features.write({layer: states[-1:] for layer, states in self.hidden.items()})
        return self._logits(last)[0]

    def _read(self, prompt: EncodedPrompt) -> Tensor:
        """Append a prompt, or a part of one, to the cache; returns the final hidden state of its last token, [1,
        hidden].
        """
        name, tokens = (
            ("inputs_embeds", prompt.embeddings)
            if prompt.embeddings is not None
            else ("input_ids", prompt.tokens[None])
        )
        hidden = self._run(**{name: tokens}, position_ids=prompt.positions, attention_mask=prompt.mask, **prompt.extra)
        self.cache.advance(len(prompt))
        return hidden[-1:]

    def step(self, token: int) -> Tensor:
        """Decode one token without a tree and commit it; returns the logits after it, [vocabulary]."""
        logits = self.forward(Step.single(token))
        self.cache.advance(1)
        return logits[0]

    @torch.inference_mode()
    def single_steps(
        self,
        prompt: EncodedPrompt,
        num_tokens: int,
        *,
        mode: str = EAGER,
        tokens: Sequence[int] = (),
        then: Step | None = None,
    ) -> tuple[list[int], Tensor]:
        """Tokens of a greedy answer by single steps, past its end too, and the logits at each, [tokens, vocabulary].

        Args:
            mode: of the steps.
            tokens: are read in place of the greedy ones.
            then: is evaluated after all tokens but the last, where its root is; its logits follow the others.
        """
        before, self.output_layers = self.mode, ()
        self.use_mode(mode)
        try:
            self.reserve(len(prompt) + num_tokens + (0 if then is None else len(then.tokens)))
            answer, logits = list(tokens), [self.prefill_prompt(prompt)]
            for number in range(num_tokens):
                if number > 0:
                    logits.append(self.step(answer[number - 1]))
                if not tokens:
                    answer.append(int(logits[-1].argmax()))
            return answer, torch.cat([torch.stack(logits), *([] if then is None else [self.forward(then)])])
        finally:
            self.use_mode(before)

    def evaluate_step(self, step: Step) -> Evaluated:
        """Logits of n tokens after the prefix and the uncommitted tokens. Nothing is committed."""
        # Nodes past the maximum context are never emitted. Their positions are clamped, because they must not stretch
        # rotary embeddings that depend on the largest position, nor index learned ones that do not exist.
        prefix = self.cache.length + self._num_pruned
        positions = prefix + np.minimum(step.offsets, self.text.max_context - 1 - prefix) + self._rope_delta[:, None]
        column_offsets = self._column_offsets[: step.tree_mask.shape[1]]
        column_offsets[step.num_uncommitted :] = step.offsets
        if self.graph_runner is not None:
            num_axes = 3 if self._has_mrope else 1  # text has three equal ones, to share the captures of images
            rows = np.empty((num_axes + bool(self.output_layers), len(step.tokens)), np.int64)
            rows[:num_axes] = positions
            if self.output_layers:
                rows[num_axes] = self.features.next_pass(self.output_layers, len(step.tokens))
            return self._run_captured(step, *self._prefixes_and_windows(), column_offsets, rows, self.output_layers)
        # A single token directly after the prefix needs no mask.
        mask = None
        if len(column_offsets) > 1:
            mask = self._masks.write(step.tree_mask, self.cache.length, step.offsets, column_offsets)
        # Only these passes have a mask.
        with (
            attention_of_steps(self.text.config) if self.text.has_grouped_queries else nullcontext(),
            self.cache.forward_pass(step.num_uncommitted, is_final=step.is_final),
        ):
            if self.ranks is not None:
                self._send_eager(step, column_offsets, positions)
            final = self._run_step(to_device(step.tokens, self.device), to_device(positions, self.device), mask)
        if self.output_layers:
            self.features.write(self.hidden)
        return Evaluated(self._logits(final if step.only is None else final[step.only : step.only + 1]))

    def _prefixes_and_windows(self) -> tuple[Ints, Ints]:
        """Length of the prefix and attention window for each mask."""
        windows = np.array([window or 0 for window in self._masks.windows.values()])
        return np.full(len(windows), self.cache.length), windows

    def _send_eager(self, step: Step, column_offsets: Ints, positions: Ints) -> None:
        """Let the other processes run an eager step, which they do over its packed form."""
        assert self.ranks is not None
        num_columns = padded_columns(step.tree_mask.shape[1], 0)
        layout = Layout(len(step.tokens), num_columns, len(self._masks.windows), len(positions))
        integers = np.zeros(sum(layout.sizes), np.int64)
        packed = PackedStep.of(integers, layout)
        packed.write(step, *self._prefixes_and_windows(), column_offsets)
        packed.rows[:] = positions
        self.ranks.send_step(layout, integers, self._taken_moves())

    def _compiled_layers(self) -> CompiledLayers:
        if self.ranks is not None:
            raise UserError("mode compiled merges weights, which several processes hold in parts; choose eager")
        return CompiledLayers.of(self.text)

    def paths(self, step: Step) -> Tensor:
        """The tokens on the path to each token of the latest step, which has no uncommitted tokens, [n, n]. Columns
        that a token does not see repeat the first one. A captured step is on the device already.
        """
        if self.graph_runner is not None:
            return PackedStep.of(self._latest.on_device, self._latest.layout).paths()
        return to_device(np.where(step.tree_mask == 0.0, step.tokens, step.tokens[0]), self.device)

    def _forward_over_buffers(self, key: GraphKey, integers: Tensor) -> Outputs:
        step = PackedStep.of(integers, key.layout)
        masks = dict(zip(self._masks.windows, step.masks[:, None, None], strict=True))
        if not self.text.takes_packed_masks:
            masks = {
                name: additive_mask(mask[0, 0], self.cache.capacity, mask_value=self.mask_value, dtype=self.dtype)
                for name, mask in masks.items()
            }
        positions = step.rows[:-1] if key.output_layers else step.rows
        self.cache.slots = step.slots()
        try:
            with captured_attention(self.text.config) if self.text.takes_packed_masks else nullcontext():
                final = self._run_step(step.tokens, positions, by_layer_type(masks))
        finally:
            self.cache.slots = None
        for layer in key.output_layers:
            self.features.layers[layer].index_copy_(0, step.rows[-1], self.hidden[layer])
        logits = self._logits(final.index_select(0, step.header[LAST : LAST + 1]) if key.is_pending else final)
        return self._result(key, step, logits), logits

    def _logits(self, final: Tensor) -> Tensor:
        """Logits [n, vocabulary] of final hidden states [n, hidden]; only rank 0 reads them."""
        if self.ranks is not None and self.ranks.rank > 0:
            return final[:, :1]
        return self.text.logits(final)

    def _result(self, key: GraphKey, step: PackedStep, logits: Tensor) -> Tensor:
        """The result that a captured step copies to the host: of the target, the greedy token after each token, [n]."""
        return best_tokens(logits, logits)

    def _run_step(self, tokens: Tensor, positions: Tensor, mask: LayerMasks | None) -> Tensor:
        """Final hidden states of tokens [n] at positions [axes, n]."""
        positions = positions if len(positions) == 1 else positions[:, None]
        return self._run(input_ids=tokens[None], position_ids=positions, attention_mask=mask)

    def _run(self, **inputs: Any) -> Tensor:
        """Final hidden states [n, hidden size]."""
        if self.output_layers:
            inputs["output_hidden_states"] = list(self.output_layers)
        out = self.text.module(**inputs, past_key_values=self.cache, use_cache=True)
        if self.output_layers:
            # Of a model that is spread over devices, to where the drafts read them.
            self.hidden = {layer: out.hidden_states[layer][0].to(self.device) for layer in self.output_layers}
        return out.last_hidden_state[0]  # type: ignore[no-any-return]


NUM_ROWS = 2 * MAX_STEP


def divided_parameters(model: Any) -> int:
    """Number of parameters that the processes of a target divide: projections of attention and MLP (``layer_plan``)."""
    # colwise, rowwise, and what derives from them
    divided = {name for name, style in layer_plan(model).items() if "wise" in style}
    parameters = [(re.sub(r"\.\d+(?=\.)", ".*", name), parameter) for name, parameter in model.named_parameters()]
    return sum(parameter.numel() for name, parameter in parameters if divided & {name, name.rpartition(".")[0]})


class FeatureRows:
    """Rows of each layer, [``NUM_ROWS``, hidden]. A forward pass of n tokens writes ``begin`` and the n - 1 rows after
    it. A draft holds the rows that it will read; later passes write after them, until it releases all.
    """

    def __init__(self, hidden_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.layers: dict[int, Tensor] = {}
        self.begin = 0
        self._end = 0  # of the latest forward pass
        self._held = 0  # rows before this one are held
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device

    def next_pass(self, layers: Sequence[int], num_tokens: int) -> Ints:
        """The rows of a forward pass of n tokens, [n]. Layers that are new are allocated."""
        for layer in layers:
            if layer not in self.layers:
                self.layers[layer] = torch.zeros(NUM_ROWS, self._hidden_size, dtype=self._dtype, device=self._device)
        self.begin, self._end = self._held, self._held + num_tokens
        return np.arange(self.begin, self._end)

    def write(self, hidden: Mapping[int, Tensor]) -> None:
        """Write the rows of a forward pass of n tokens, [n, hidden] for each layer."""
        rows = self.next_pass([*hidden], len(next(iter(hidden.values()))))
        for layer, states in hidden.items():
            self.layers[layer][rows[0] : rows[-1] + 1] = states

    @property
    def is_full(self) -> bool:
        """Whether the draft must read what it holds before it can hold rows of the latest pass."""
        return self._end > NUM_ROWS - MAX_STEP

    def hold(self, tokens: Ints) -> list[int]:
        """Hold the rows of tokens of the latest forward pass, which are ascending; returns their numbers."""
        rows = self.begin + tokens
        if self.is_full:  # nothing else is held
            for states in self.layers.values():
                states[: len(rows)] = select(states, rows, 0)
            rows = np.arange(len(rows))
        self._held = int(rows[-1]) + 1
        return rows.tolist()

    def release(self) -> None:
        """The rows were read."""
        self._held = 0
