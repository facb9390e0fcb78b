"""Forwards over buffers that stay where they are, so that they can be prepared: compiled by torch, or captured as CUDA
graphs.

The eager way, in ``TreeModel`` and ``FeatureDraft``, shows a forward the cache up to its last token. A prepared forward of n
tokens looks up to an *extent*, the next multiple of 256 tokens, and its mask closes what nobody has written; it writes at
columns that it reads from a buffer. So every forward of the same size and extent is the same work on the same memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.errors import UserError
from autotune.execution import MODES
from autotune.modeling.masks import TreeMask
from autotune.trees.tree import Ints

KV_LENGTH_STEP = 256
"""Tokens: capacities, and how far prepared forwards look, are multiples of it."""
WARM_UPS = 2  # runs of a forward before it is captured: libraries set themselves up in the first

Outputs = tuple[Tensor, ...]
Function = Callable[[Mapping[str, Tensor]], Outputs]
"""Reads named buffers; its outputs are tensors alone."""


class Slots(NamedTuple):
    """Where a prepared forward writes in a cache, and how far it looks."""

    columns: Tensor
    """Of each of its tokens, [n]."""
    padded_kv_length: int


class DeviceStep(NamedTuple):
    """n tokens behind the prefix, where even its length is known to the device alone; between them and the prefix there may
    be uncommitted tokens, and all of these are its *columns*.
    """

    prefix_state: Tensor
    """Where the prefix ends: ``CachedModel.prefix_state``."""
    tokens: Tensor
    offsets: Tensor
    """Of the tokens behind the prefix, [n]."""
    tree_mask: Tensor
    """Additive mask behind the prefix, [n, columns]."""
    column_offsets: Tensor
    """Of the columns behind the prefix, those of the tokens last, [columns]."""
    padded_kv_length: int

    @property
    def columns(self) -> Tensor:
        """Of the cache, where the tokens are written, [n]."""
        count, num_columns = len(self.tokens), len(self.column_offsets)
        return self.prefix_state[0] + torch.arange(num_columns - count, num_columns, device=self.tokens.device)

    def masks(self, windows: Mapping[str, int | None], *, mask_value: float) -> dict[str, Tensor]:
        """What ``padded_masks`` gives."""
        num_columns = len(self.column_offsets)
        behind = (
            torch.arange(self.padded_kv_length, device=self.tree_mask.device) - self.prefix_state[0]
        )  # negative in the prefix
        inside = behind.clamp(0, num_columns - 1)
        whole = self.tree_mask[:, inside].masked_fill(behind >= num_columns, mask_value).masked_fill(behind < 0, 0.0)
        masks = {}
        for kind, window in windows.items():
            mask = whole
            if window is not None:
                offsets = torch.where((behind < 0) | (behind >= num_columns), behind, self.column_offsets[inside])
                mask = whole.masked_fill(offsets <= (self.offsets - window)[:, None], mask_value)
            masks[kind] = mask[None, None]
        return masks


class EagerNotice(UserWarning):
    """A forward could not be prepared, and runs eagerly."""


@dataclass(frozen=True)
class GraphKey:
    """Forwards of one size are one prepared forward."""

    tokens: int
    padded_kv_length: int
    output_layers: tuple[int, ...] = ()
    """Layers whose outputs are asked for."""


def check_mode(name: str, device: torch.device) -> str:
    """Refuse what cannot run here.

    Raises:
        UserError: an unknown runner, or CUDA graphs without CUDA.
    """
    if name not in MODES:
        raise UserError(f"runner must be {', '.join(MODES)}; got {name!r}; choose one of these")
    if name == "cuda-graph" and device.type != "cuda":
        raise UserError(f"runner graph needs a CUDA device; the model is on {device}; choose eager, or compile")
    return name


class PreparedForward:
    """One forward of a size. Its outputs are valid until it runs again."""

    def __init__(self, run: Callable[[], Outputs], inputs: Mapping[str, Tensor]) -> None:
        self._run = run
        self.inputs = inputs

    def __call__(self, values: Mapping[str, NDArray[Any] | Tensor]) -> Outputs:
        """Copy the values into the buffers, and run."""
        _fill(self.inputs, values)
        return self._run()


class GraphRunner:
    """The prepared forwards of one model, each made when it is first asked for.

    Args:
        runner: ``fixed``, ``compile`` or ``graph``.
        function: the forward itself.
        device: where the buffers are.
        what: the model, for messages.
    """

    def __init__(self, mode: str, function: Function, device: torch.device, *, what: str) -> None:
        self.mode = check_mode(mode, device)
        self.device = device
        self.what = what
        self.memory_bytes = 0
        """Of buffers, and of what capturing has taken."""
        self.why_eager: str | None = None
        """What kept a forward from being prepared; from then on all run eagerly, over the same buffers."""
        self._function = function
        self._pool: Any = None
        self._made: dict[Hashable, PreparedForward] = {}

    def __len__(self) -> int:
        return len(self._made)

    def forget(self) -> None:
        """The memory that forwards were prepared for is another one now."""
        self._made.clear()
        self._pool, self.memory_bytes = None, 0

    def run(self, size: Hashable, values: Mapping[str, NDArray[Any] | Tensor], dtype: torch.dtype) -> Outputs:
        """One forward. Numbers of the host become ``dtype``, or stay integers; tensors are what they are."""
        if size not in self._made:
            self._made[size] = self._prepare(values, dtype)
        return self._made[size](values)

    def _prepare(self, values: Mapping[str, NDArray[Any] | Tensor], dtype: torch.dtype) -> PreparedForward:
        before = self._allocated()
        inputs = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                wanted = value.dtype
            else:
                wanted = dtype if np.issubdtype(value.dtype, np.floating) else torch.long
            inputs[name] = torch.empty(value.shape, dtype=wanted, device=self.device)
        _fill(inputs, values)  # what is run to prepare it must be sound
        run = self._prepared(inputs)
        own = sum(tensor.numel() * tensor.element_size() for tensor in inputs.values())
        self.memory_bytes += max(own, self._allocated() - before)
        return PreparedForward(run, inputs)

    def _prepared(self, inputs: Mapping[str, Tensor]) -> Callable[[], Outputs]:
        function = self._function
        if self.why_eager is None and self.mode != "fixed":
            try:
                return self._captured(inputs) if self.mode == "cuda-graph" else self._compile(inputs)
            except Exception as error:
                lines = str(error).strip().splitlines()
                self.why_eager = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
                warnings.warn(
                    f"{self.what} cannot be prepared by runner {self.mode} ({self.why_eager}); its forwards run eagerly",
                    EagerNotice,
                    stacklevel=2,
                )
        return lambda: function(inputs)

    def _compile(self, inputs: Mapping[str, Tensor]) -> Callable[[], Outputs]:
        """Compiled for this size alone, now and not in the first round that is timed."""
        compiled = torch.compile(_own_code(self._function), dynamic=False)
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            compiled(inputs)
        return lambda: compiled(inputs)

    def _captured(self, inputs: Mapping[str, Tensor]) -> Callable[[], Outputs]:
        """Captured on a stream of its own, into one pool of memory for all sizes."""
        function, here = self._function, torch.cuda.current_stream(self.device)
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                function(inputs)
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = function(inputs)
        self._pool = self._pool or graph.pool()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay

    def _allocated(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0


def _own_code(function: Function) -> Function:
    """The same function behind code of its own. Torch keeps what it compiles beside the code that was called, searches it
    from the start at every call, and stops compiling after a few (``recompile_limit``), without a word.
    """

    def run(inputs: Mapping[str, Tensor]) -> Outputs:
        return function(inputs)

    return FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)


def _fill(inputs: Mapping[str, Tensor], values: Mapping[str, NDArray[Any] | Tensor]) -> None:
    for name, value in values.items():
        # Without waiting: what the host hands over is staged before the call returns.
        inputs[name].copy_(torch.from_numpy(value) if isinstance(value, np.ndarray) else value, non_blocking=True)


def padded_length(num_tokens: int) -> int:
    """How far a prepared forward looks that ends behind so many tokens."""
    return -(-num_tokens // KV_LENGTH_STEP) * KV_LENGTH_STEP


def padded_masks(
    windows: Mapping[str, int | None],
    tree_mask: TreeMask,
    prefix: int,
    row_offsets: Ints,
    column_offsets: Ints,
    *,
    padded_kv_length: int,
    mask_value: float,
) -> dict[str, NDArray[np.float32]]:
    """Additive masks [1, 1, rows, extent] by type of layer: the prefix is open as far as a layer's window reaches, then comes
    ``tree_mask`` [rows, columns], and the rest is closed.
    """
    rows, columns = tree_mask.shape
    whole = np.full((1, 1, rows, padded_kv_length), mask_value, np.float32)
    whole[..., :prefix] = 0.0
    whole[..., prefix : prefix + columns] = tree_mask
    masks = {}
    for kind, window in windows.items():
        masks[kind] = whole
        if window is not None and prefix + int(row_offsets.max()) >= window:
            offsets = np.arange(-prefix, padded_kv_length - prefix)
            offsets[prefix : prefix + columns] = column_offsets
            masks[kind] = np.where(offsets <= (row_offsets - window)[:, None], np.float32(mask_value), whole)
    return masks
