"""One decoder layer, compiled for all layers of a text model, or a draft network as one layer (mode ``compiled``).

All layers run the same code, so ``torch.compile`` makes one function of it whose inputs are the tensors of a layer and
its index: the cache writes to, and attention reads from, the row of one slab. It is compiled in the runs before a
capture (``GraphMemory.capture``), which then keeps its kernels; nothing is compiled later.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from autotune.errors import first_line
from autotune.modeling.graph_memory import Outputs
from autotune.modeling.merged_products import merged_products, replaced_attributes
from autotune.modeling.text_model import TextModel


class UncompiledNotice(UserWarning):
    """The layers of a model cannot be compiled; its steps are captured as in mode ``cuda-graph``."""


class CompiledLayers:
    """Runs steps with one compiled function for all layers and merged products, or as they are if the layers cannot be
    compiled.

    It is made before the first step is prepared, because merging moves weights (``merged_products``).

    Args:
        description: of the model, for messages.
        obstacle: why the layers cannot be compiled.
        backend: of ``torch.compile``.
    """

    def __init__(
        self,
        layers: Sequence[torch.nn.Module],
        *,
        description: str,
        obstacle: str | None = None,
        backend: Any = "inductor",
    ) -> None:
        self._layers, self._description, self._backend = layers, description, backend
        self.why_uncompiled: str | None = None
        """The first reason for which steps run without compiled layers."""
        if obstacle is not None:
            self._give_up(obstacle)
        self._merged = merged_products(layers if obstacle is None else ())

    @classmethod
    def of(cls, text: TextModel, **options: Any) -> Self:
        """The layers of a text model; ``options`` as above."""
        maybe_install_capturing_hooks(text.module)  # now, because its first step would install them while it is traced
        description = f"a model of type {text.config.model_type}"
        return cls(text.layers, description=description, obstacle=_obstacle(text), **options)

    def run(self, step: Callable[[], Outputs]) -> Outputs:
        """Run a step. If it fails before the capture, it runs again as it is, as do all later ones."""
        if self.why_uncompiled is None:
            try:
                with (
                    replaced_attributes(self._merged),
                    replaced_attributes(_compiled_layers(self._layers, self._backend)),
                    # The index of a layer, an integer of its attention module, is an input and not a part of the code.
                    torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True, recompile_limit=64),
                    torch._inductor.config.patch({"triton.cudagraphs": False}),
                ):
                    return step()
            except torch.OutOfMemoryError:
                raise  # ``GraphMemory.capture`` makes room and tries again
            except Exception as error:
                if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                    raise
                self._give_up(first_line(error))
        return step()

    def _give_up(self, reason: str) -> None:
        self.why_uncompiled = reason
        warnings.warn(
            f"the layers of {self._description} are not compiled ({reason}); they are captured as in mode cuda-graph",
            UncompiledNotice,
            stacklevel=3,
        )


def _compiled_layers(layers: Sequence[torch.nn.Module], backend: Any) -> dict[torch.nn.Module, dict[str, Any]]:
    """The attributes with which all layers run one compiled function.

    Hooks by which transformers records what happens inside a layer are left out, because they cannot be traced; those
    of the layers themselves run outside of the function.
    """
    recorded = maybe_install_capturing_hooks.__module__
    own: dict[torch.nn.Module, dict[str, Any]] = {
        module: {"_forward_hooks": {n: hook for n, hook in hooks.items() if hook.__module__ != recorded}}
        for layer in layers
        for module in layer.modules()
        if (hooks := module._forward_hooks)
    }
    return own | {layer: {"forward": functools.partial(_compiled(backend), layer)} for layer in layers}


@functools.cache
def _compiled(backend: Any) -> Callable[..., Any]:
    return torch.compile(_forward, backend=backend, fullgraph=True)


def _forward(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def _obstacle(text: TextModel) -> str | None:
    """The property of a model for which its layers cannot share one compiled function."""
    obstacles = {
        "its layers keep recurrent or convolution states": text.has_states,
        "it is spread over several devices": text.num_devices > 1,
        "its layers do not cache keys and values of one shape": len(set(text.kv_shapes)) > 1,
        "its layers do not call an attention function by its name": not text.takes_packed_masks,
        f"it is quantized with {text.quantization}": text.quantization is not None,
        "the forward pass of its layers was replaced": any("forward" in vars(layer) for layer in text.layers),
    }
    return next((reason for reason, holds in obstacles.items() if holds), None)
