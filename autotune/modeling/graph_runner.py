"""Forward passes over fixed buffers, captured as CUDA graphs.

An eager forward pass shows attention the KV cache up to its last token, so its shapes change with every token. A CUDA
graph needs the same shapes at the same addresses each time. A forward pass of n tokens therefore

* reads its input from one array of integers that is allocated once (``step.py``),
* reads the lengths of prefix and tree from this array, also in attention (``tree_attention.py``),
* writes keys and values at cache indices (*KV slots*) that it computes from them.

All forward passes with the same n then share one ``CapturedForward``, whatever the length of the context.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autotune.documents.execution import AUTO, CAPTURED, CUDA_GRAPH, EAGER, FIXED, MODES
from autotune.errors import UserError, first_line
from autotune.modeling.graph_memory import CapturedForward, Function, Outputs, Run, graph_memory
from autotune.modeling.step import Layout


class GraphKey(NamedTuple):
    """Forward passes with equal keys share one capture."""

    layout: Layout
    is_pending: bool = False
    """Whether a draft reads committed tokens, and needs the logits of one alone."""
    output_layers: tuple[int, ...] = ()
    num_proposals: int = 0
    """Proposals of each token of a draft."""
    addresses: tuple[int, ...] = ()
    """Memory outside of the model that the step reads."""


class EagerNotice(UserWarning):
    """A forward pass could not be captured and runs eagerly."""


class GraphRunner:
    """The prepared forward passes of one function, each prepared on first use. It holds no reference to the function,
    so that models and their memory are freed as soon as they are dropped.

    Args:
        mode: any but ``eager``.
        description: of the model, for messages.
        within: runs what is captured (``CompiledLayers.run``).
    """

    def __init__(
        self, mode: str, device: torch.device, *, description: str, within: Callable[[Run], Outputs] = operator.call
    ) -> None:
        self.mode = check_mode(mode, device)
        self.device = device
        self.description = description
        self._within = within
        self.why_eager: str | None = None
        """The error of the first failed capture. After it, all forward passes run eagerly over the same buffers."""
        self._captured: dict[Hashable, CapturedForward] = {}

    def __len__(self) -> int:
        return sum(not forward.is_dropped for forward in self._captured.values())

    def reset(self) -> None:
        """Drop all captures, because the memory that they refer to is reallocated."""
        graph_memory(self.device).drop(self._captured.values())
        self._captured.clear()

    def forget(self, key: GraphKey) -> None:
        """Drop the capture of a key, if there is one."""
        if (forward := self._captured.pop(key, None)) is not None:
            graph_memory(self.device).drop([forward])

    def prepared(self, key: GraphKey, reads: Sequence[Tensor] = ()) -> CapturedForward:
        """The forward pass with this key, whose input may be written. ``reads``: the memory at ``key.addresses``."""
        forward = self._captured.get(key)
        if forward is None or forward.is_dropped:
            forward = self._captured[key] = CapturedForward(key.layout, self.device, reads)
        forward.release_input()
        return forward

    def launch(self, forward: CapturedForward, function: Function) -> None:
        """Run a prepared forward pass, which is captured if needed. Its outputs are overwritten when another forward
        pass of the device runs (``CapturedForward``).
        """
        is_new, memory = not forward.outputs, graph_memory(self.device)
        if is_new and not self.runs_eagerly:
            try:
                run = functools.partial(self._within, functools.partial(forward.run, function))
                forward.graph, forward.outputs = memory.capture(run)
            except Exception as error:
                self.why_eager = first_line(error)
                warnings.warn(
                    f"{self.description} cannot run in mode {self.mode} ({self.why_eager}); it runs eagerly",
                    EagerNotice,
                    stacklevel=2,
                )
        forward.launch(function)
        if is_new:
            memory.keep(forward)

    @property
    def runs_eagerly(self) -> bool:
        return self.mode == FIXED or self.why_eager is not None


def check_mode(name: str, device: torch.device, num_devices: int = 1, *, has_states: bool = False) -> str:
    """Return the mode if it is available on this device; of ``auto``, ``cuda-graph`` for a model on one CUDA device,
    else ``eager``. Whether captured steps are right there is tested by ``runtime.preparation.decoding_mode``.

    Args:
        num_devices: over which the model is spread.
        has_states: it keeps recurrent or convolution states, which forward passes over static buffers cannot take back.

    Raises:
        UserError: an unknown mode, CUDA graphs without CUDA, or any mode but eager for a model on several devices.
    """
    if name == AUTO:
        return CUDA_GRAPH if device.type == "cuda" and num_devices == 1 and not has_states else EAGER
    if name not in (*MODES, FIXED):
        raise UserError(f"mode must be {', '.join(MODES[:-1])} or {MODES[-1]}; got {name!r}; choose one of these")
    if name != EAGER and has_states:
        raise UserError(
            f"mode {name} cannot take back the recurrent or convolution states of a hybrid model; choose eager"
        )
    if name != EAGER and num_devices > 1:
        raise UserError(
            f"mode {name} needs a model on one device; it is spread over {num_devices}; choose eager, or load it on one device"
        )
    if name in CAPTURED and device.type != "cuda":
        raise UserError(f"mode {name} needs a CUDA device; the model is on {device}; choose eager")
    return name
