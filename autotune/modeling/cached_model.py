"""A model with a KV cache: its masks, and its forward passes over fixed buffers."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from autotune.documents.execution import COMPILED, EAGER, FIXED, KV_LENGTH_STEP, rounded_capacity
from autotune.machine.device import check_room, free_memory
from autotune.modeling.compiled_layers import CompiledLayers
from autotune.modeling.graph_memory import Outputs
from autotune.modeling.graph_runner import GraphKey, GraphRunner, check_mode
from autotune.modeling.masks import TreeMasks
from autotune.modeling.ranks import Ranks
from autotune.modeling.step import Draw, Evaluated, Layout, Step, padded_columns
from autotune.trees.limits import Ints

MAX_DOUBLED_SHARE = 0.25  # of the free memory: a larger cache grows to what a request needs


class CachedModel(ABC):
    """A model with a KV cache and the masks over it. Both are reallocated when a request needs more capacity."""

    cache: Any
    device: torch.device
    dtype: torch.dtype
    graph_runner: GraphRunner | None = None  # runs forward passes after the prefill; None in mode ``eager``
    least_columns: int = 0
    """Columns that tree masks of captured steps have at least, so that steps after more or fewer uncommitted tokens
    share a capture.
    """
    draw: Draw | None = None
    """How captured steps of a draft draw proposals; None: they take the most probable ones."""
    ranks: Ranks | None = None
    """The processes that hold the model together; None: this one holds it whole."""
    _masks: TreeMasks

    @cached_property
    def _graph_runners(self) -> dict[str, GraphRunner]:
        return {}

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
    def _forward_over_buffers(self, key: GraphKey, integers: Tensor) -> Outputs:
        """The function that ``GraphRunner`` captures: the result for the host, and the logits that it is computed from.
        ``integers`` are a ``PackedStep``.
        """

    def _complete(self, key: GraphKey) -> tuple[GraphKey, list[Tensor]]:
        """The key of a step with what else the result of a subclass depends on, and the memory at its addresses."""
        return key, []

    def forward(self, step: Step, *source: Any) -> Tensor:
        """Logits [n, vocabulary] of n tokens after the prefix and the uncommitted tokens, or [1, vocabulary] of the
        only one that is asked for, which stay valid. Nothing is committed. ``source`` is that of a draft's features.
        """
        evaluated = self.evaluate_step(step, *source)
        return evaluated.logits if evaluated.wait is None else evaluated.logits.clone()

    @abstractmethod
    def evaluate_step(self, *step_and_source: Any) -> Evaluated:
        """``forward``, whose outputs are valid until the next step."""

    def _run_captured(
        self,
        step: Step,
        prefixes: Ints,
        windows: Ints,
        column_offsets: Ints,
        rows: Ints,
        output_layers: tuple[int, ...] = (),
    ) -> Evaluated:
        """Run a step over fixed buffers. ``rows`` are the model's own integers of each token; for the other arguments
        see ``PackedStep.write``.
        """
        assert self.graph_runner is not None
        num_tokens, num_columns = step.tree_mask.shape
        layout = Layout(num_tokens, padded_columns(num_columns, self.least_columns), len(prefixes), len(rows))
        key, reads = self._complete(GraphKey(layout, step.only is not None, output_layers))
        forward = self._latest = self.graph_runner.prepared(key, reads)
        forward.step.write(step, prefixes, windows, column_offsets, self.draw)
        forward.step.rows[:] = rows
        if self.ranks is not None:  # the others have no features
            layout = layout._replace(num_rows=len(rows) - bool(output_layers))
            is_new = not forward.outputs
            moves = self._taken_moves()
            self.ranks.send_step(layout, forward.integers, moves, is_captured=self.mode != FIXED, is_new=is_new)
        self.graph_runner.launch(forward, partial(self._forward_over_buffers, key))
        return Evaluated(forward.outputs[0], forward.wait)

    @abstractmethod
    def _compiled_layers(self) -> CompiledLayers:
        """The layers that mode ``compiled`` compiles, before the first step, because merging moves weights."""

    @property
    def mode(self) -> str:
        """How forward passes after the prefill run: ``eager``, ``cuda-graph`` or ``fixed``."""
        return EAGER if self.graph_runner is None else self.graph_runner.mode

    def use_mode(self, name: str) -> None:
        """Set ``mode``, if it is available on this device. Captures of other modes are kept."""
        if name == EAGER:
            self.graph_runner = None
            return
        if name not in self._graph_runners:
            check_mode(name, self.device, self.num_devices, has_states=self.has_states)
            within = self._compiled_layers().run if name == COMPILED else operator.call
            self._graph_runners[name] = GraphRunner(name, self.device, description=self.description, within=within)
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
        """Empty the cache and give it room for ``num_tokens`` tokens; a ``UserError`` says if there is no memory for
        them.
        """
        if num_tokens > self.cache.capacity:
            self._grow(num_tokens)
        self.cache.clear()

    def _grow(self, num_tokens: int) -> None:
        """Replace cache and captures. Where forward passes are captured, the capacity is doubled if there is room,
        because a request that needs more captures all of them anew.
        """
        capacity = rounded_capacity(num_tokens)
        needs = {"cache": self.kv_bytes_per_token * num_tokens}
        freed = self.cache.memory_bytes
        what, advice = f"a sequence of {num_tokens} tokens", "shorten the prompt, or lower max_new_tokens"
        check_room(self.device, needs, what=what, advice=advice, freed=freed)
        if self.graph_runner is not None:
            doubled = KV_LENGTH_STEP << (capacity // KV_LENGTH_STEP - 1).bit_length()
            if self.kv_bytes_per_token * doubled <= MAX_DOUBLED_SHARE * (free_memory(self.device) + freed):
                capacity = doubled
        self.reallocate(capacity)

    def reallocate(self, capacity: int) -> None:
        """Replace cache and captures, also those of other processes."""
        for runner in self._graph_runners.values():
            runner.reset()
        self.cache.release()  # first, or both would be in memory
        self._allocate(capacity)
        if self.ranks is not None:
            self.ranks.send("reallocate", capacity)

    def _taken_moves(self) -> list[int]:
        """The moves of the cache since the last call."""
        moves, self.cache.moves = self.cache.moves or [], []
        return moves
