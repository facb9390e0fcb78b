"""A model with a KV cache: its masks, and its forward passes over fixed buffers."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotune.device import check_room, free_memory
from autotune.execution import EAGER, has_flex_attention
from autotune.modeling.flex_attention import TREE_MASK, Mask, block_masks, mask_inputs
from autotune.modeling.graph_memory import Outputs
from autotune.modeling.graph_runner import (
    GraphKey,
    GraphRunner,
    check_mode,
    padded_length,
    padded_lengths,
    rounded_capacity,
)
from autotune.modeling.masks import MaskBuffer, TreeMask, padded_masks
from autotune.modeling.step import DeviceStep, Step
from autotune.trees.limits import Ints

MAX_DOUBLED_SHARE = 0.25  # of the free memory: a larger cache grows to what a request needs


class CachedModel(ABC):
    """A model with a KV cache and the masks over it. Both are reallocated when a request needs more capacity."""

    cache: Any
    device: torch.device
    dtype: torch.dtype
    graph_runner: GraphRunner | None = None  # runs forward passes after the prefill; None in mode ``eager``
    takes_block_masks: bool = True
    """Whether forward passes take block masks in modes with ``-flex``; others keep their additive masks."""
    _masks: MaskBuffer

    @cached_property
    def _graph_runners(self) -> dict[str, GraphRunner]:
        return {}

    @cached_property
    def readers(self) -> weakref.WeakSet[GraphRunner]:
        """Graph runners whose captures refer to the memory of this cache."""
        return weakref.WeakSet()

    @property
    def position_axes(self) -> tuple[int, ...]:
        """Numbers of position axes that prompts may have."""
        return (1,)

    @property
    def num_devices(self) -> int:
        """Number of devices that the model is spread over."""
        return 1

    @property
    def has_states(self) -> bool:
        """Whether layers keep recurrent or convolution states, which follow one path."""
        return False

    @abstractmethod
    def _allocate(self, capacity: int) -> None:
        """Allocate a cache and masks for ``capacity`` tokens."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The model, for messages."""

    @property
    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers."""

    @abstractmethod
    def _forward_over_buffers(self, inputs: Mapping[str, Tensor]) -> Outputs:
        """The function that ``GraphRunner`` compiles or captures. Input ``integers`` [2 + axes, n] holds tokens, KV slots and
        positions.
        """

    @property
    @abstractmethod
    def prefix_state(self) -> Ints:
        """Numbers that locate the end of the prefix; the first one is the number of committed tokens."""

    def _run_captured(
        self,
        step: Step,
        positions: Ints,
        column_offsets: Ints,
        output_layers: tuple[int, ...] = (),
        further_masks: Mapping[str, TreeMask] | None = None,
        **values: Tensor | TreeMask,
    ) -> Outputs:
        """Run a step through the graph runner.

        Args:
            positions: [axes, n].
            column_offsets: offsets of the uncommitted tokens and the n tokens.
            output_layers: as in ``GraphKey``.
            further_masks: beside those of the layer types, padded as well.
            values: further inputs of ``_forward_over_buffers``.
        """
        assert self.graph_runner is not None
        begin = self.cache.length + step.num_uncommitted
        end = begin + len(step.tokens)
        key = GraphKey(len(step.tokens), output_layers, len(positions))
        masks = self._padded_masks(step, column_offsets, end) | dict(further_masks or {})
        integers = np.vstack([step.tokens, np.arange(begin, end), positions])
        inputs = {"integers": integers, **values, **masks}
        padded = self._padded_inputs(masks)
        outputs = self.graph_runner.run(self._forward_over_buffers, key, inputs, self.dtype, padded=padded)
        return tuple(output.clone() for output in outputs)  # the buffers are valid only until the next forward pass

    def _run_on_device(
        self,
        step: DeviceStep,
        positions: Tensor,
        output_layers: tuple[int, ...] = (),
        further_masks: Mapping[str, Tensor] | None = None,
        **values: Tensor,
    ) -> Outputs:
        """Run a step inside a larger function that is compiled or captured as a whole, the forward pass with it."""
        assert self.graph_runner is not None
        integers = torch.cat([torch.stack([step.tokens, step.kv_slots]), positions])
        windows, mask_value = self._masks.windows, self.mask_value
        if self.has_block_masks:
            tree = step.tree_mask, step.prefix_state[0], step.offsets, step.column_offsets
            masks = mask_inputs(windows, *tree, mask_value=mask_value)
        else:
            masks = step.masks(windows, mask_value=mask_value)
        masks |= further_masks or {}
        inputs = {"integers": integers, **values, **masks}
        if not self.graph_runner.is_fixed:
            return self._forward_over_buffers(inputs)
        key = GraphKey(len(step.tokens), output_layers, len(positions))
        padded = self._padded_inputs(masks)
        return self.graph_runner.run(self._forward_over_buffers, key, inputs, self.dtype, padded=padded)

    def _padded_masks(self, step: Step, column_offsets: Ints, num_tokens: int) -> dict[str, Any]:
        """The inputs of ``_forward_over_buffers`` from which ``_layer_masks`` makes masks, up to ``num_tokens`` cached tokens."""
        windows, prefix, mask_value = self._masks.windows, self.cache.length, self.mask_value
        if self.has_block_masks:
            tree_mask, *rest = map(torch.from_numpy, (step.tree_mask, np.array(prefix), step.offsets, column_offsets))
            return mask_inputs(windows, tree_mask.to(self.dtype), *rest, mask_value=mask_value)
        return padded_masks(
            windows,
            step.tree_mask,
            prefix,
            step.offsets,
            column_offsets,
            padded_kv_length=self.padded_length(num_tokens),
            mask_value=mask_value,
        )

    def _padded_inputs(self, masks: Collection[str]) -> Collection[str]:
        """Names of the masks whose last dimension is padded."""
        return (TREE_MASK,) if self.has_block_masks else masks

    def _layer_masks(self, inputs: Mapping[str, Tensor], slots: Tensor) -> Mapping[str, Mask]:
        """Masks by layer type of tokens that are written at ``slots``, within ``_forward_over_buffers``."""
        if self.has_block_masks:
            return block_masks(inputs, slots, self._masks.windows, capacity=self.cache.capacity)
        return {layer_type: inputs[layer_type] for layer_type in self._masks.windows}

    @property
    def has_block_masks(self) -> bool:
        """Whether forward passes read the KV length from a buffer (``flex_attention.py``)."""
        return self.takes_block_masks and has_flex_attention(self.mode)

    def padded_length(self, num_tokens: int) -> int:
        """KV length of forward passes over ``num_tokens`` cached tokens: with block masks that of the whole cache, of which they read
        a part.
        """
        return int(self.cache.capacity) if self.has_block_masks else padded_length(num_tokens, self.cache.capacity)

    @property
    def padded_lengths(self) -> list[int]:
        """All padded KV lengths, ascending."""
        return [self.cache.capacity] if self.has_block_masks else padded_lengths(self.cache.capacity)

    @property
    def mode(self) -> str:
        """How forward passes after the prefill run (``autotune.execution.MODES``)."""
        return EAGER if self.graph_runner is None else self.graph_runner.mode

    def check_mode(self, name: str) -> str:
        """See ``graph_runner.check_mode``."""
        return check_mode(name, self.device, self.num_devices, has_states=self.has_states)

    def use_mode(self, name: str) -> None:
        """Set ``mode``. Captures of other modes are kept.

        Raises:
            UserError: a mode that is unknown or not available on this device.
        """
        if name == EAGER:
            self.graph_runner = None
            return
        if name not in self._graph_runners:
            self.check_mode(name)
            runner = self._graph_runners[name] = GraphRunner(name, self.device, description=self.description)
            self.readers.add(runner)
        self.graph_runner = self._graph_runners[name]

    def __del__(self) -> None:
        # A cache and its layers refer to each other, so that its memory would wait for the cycle collector.
        if (cache := getattr(self, "cache", None)) is not None:
            cache.release()

    @property
    def length(self) -> int:
        """Committed tokens in the cache."""
        return int(self.cache.length)

    @property
    def mask_value(self) -> float:
        """The mask's value for hidden tokens."""
        return self._masks.mask_value

    def reserve(self, num_tokens: int) -> None:
        """Empty the cache and give it room for ``num_tokens`` tokens.

        Raises:
            UserError: not enough memory.
        """
        if num_tokens > self.cache.capacity:
            self._grow(num_tokens)
        self.cache.clear()

    def _grow(self, num_tokens: int) -> None:
        """Replace cache and captures. Where forward passes are captured, the capacity is doubled if there is room, because
        a request that needs more captures all of them anew.
        """
        capacity = rounded_capacity(num_tokens)
        needs = {"cache": self.kv_bytes_per_token * num_tokens}
        freed = self.cache.memory_bytes
        what, advice = f"a sequence of {num_tokens} tokens", "shorten the prompt, or lower max_new_tokens"
        check_room(self.device, needs, what=what, advice=advice, freed=freed)
        if self.graph_runner is not None:
            doubled = padded_length(num_tokens, 2 * capacity)
            if self.kv_bytes_per_token * doubled <= MAX_DOUBLED_SHARE * (free_memory(self.device) + freed):
                capacity = doubled
        for runner in self.readers:
            runner.reset()
        self.cache.release()  # first, or both would be in memory
        self._allocate(capacity)
