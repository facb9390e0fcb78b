"""One decoder layer, compiled for all layers of a text model, or a draft network as one layer (mode ``compiled``).

All layers run the same code, so ``torch.compile`` makes one function of it whose inputs are the tensors of a layer and
its index: the cache writes to, and attention reads from, the row of one slab. It is compiled in the runs before a
capture (``GraphMemory.capture``), which then keeps its kernels; nothing is compiled later.

Matrix products of one input are computed as one: those of queries, keys and values, and the two of gated feed-forward
layers. A step of few tokens takes the time in which its weights are read, and one large product reads them faster than
several small ones. The weights become views of one tensor, so that they are in memory once; their values do not change.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from autotune.errors import first_line
from autotune.modeling.graph_memory import Outputs, graph_memory
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


_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Submodules that transformers calls with one input, each once in a forward pass."""


def merged_products(layers: Iterable[nn.Module]) -> dict[nn.Module, dict[str, Any]]:
    """The attributes with which linear layers of one input compute their products as one (``replaced_attributes``).
    Layers that are quantized, have an adapter or differ in type are left out.

    Weights that are not views of one tensor yet are moved. Captures read them where they were, so that all captures of
    the device are dropped.
    """
    own: dict[nn.Module, dict[str, Any]] = {}
    for linears in itertools.chain.from_iterable(map(_mergeable, layers)):
        shared = {
            "merged_weight": _joined([linear.weight for linear in linears]),
            "merged_bias": None if linears[0].bias is None else _joined([linear.bias for linear in linears]),
            "sizes": [linear.out_features for linear in linears],
            "outputs": {},  # of the layers that were not called since the latest product
        }
        for number, linear in enumerate(linears):
            own[linear] = {"forward": MethodType(_output, linear), "number": number, **shared}
    return own


@contextmanager
def replaced_attributes(own: Mapping[nn.Module, Mapping[str, Any]]) -> Iterator[None]:
    """Within the context, modules have these attributes of their own."""
    before = {module: {name: vars(module)[name] for name in own[module].keys() & vars(module)} for module in own}
    for module, attributes in own.items():
        vars(module).update(attributes)
    try:
        yield
    finally:
        for module, attributes in before.items():
            for name in own[module].keys() - attributes.keys():
                delattr(module, name)
            vars(module).update(attributes)


def _output(linear: Any, inputs: Tensor) -> Tensor:
    """The output of a merged layer. The first of the layers that is called computes those of all."""
    if linear.number not in linear.outputs:
        product = nn.functional.linear(inputs, linear.merged_weight, linear.merged_bias)
        linear.outputs.update(enumerate(product.split(linear.sizes, -1)))
    return linear.outputs.pop(linear.number)  # type: ignore[no-any-return]


def _mergeable(layer: nn.Module) -> Iterator[list[nn.Linear]]:
    """Groups of linear layers without quantization or adapters that read one input."""
    for module, names in itertools.product(layer.modules(), _NAMES):
        linears = [
            one
            for name in names
            if type(one := getattr(module, name, None)) is nn.Linear and type(one.weight) is nn.Parameter
        ]
        kinds = {(one.in_features, one.weight.dtype, one.weight.device, one.bias is None) for one in linears}
        if (len(linears), len(kinds)) == (len(names), 1):
            yield linears


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """A tensor of which the parameters are views, one after another. The first call makes them such views."""
    first, lengths = parameters[0].data, [len(parameter) for parameter in parameters]
    begins = itertools.accumulate([0, *(parameter.nbytes for parameter in parameters[:-1])])
    places = [(one.untyped_storage().data_ptr(), one.data_ptr()) for one in parameters]
    if places != [(places[0][0], first.data_ptr() + begin) for begin in begins]:
        with torch.inference_mode(first.is_inference()):  # no other tensor of that mode can be trained later
            first = torch.cat([parameter.data for parameter in parameters])
        for parameter, rows in zip(parameters, first.split(lengths), strict=True):
            parameter.data = rows
        graph_memory(first.device).drop_all()
    return first.as_strided((sum(lengths), *first.shape[1:]), first.stride())
