"""Matrix products of one input, computed as one: those of queries, keys and values, and the two of gated feed-forward
layers.

A step of few tokens takes the time in which its weights are read, and one large product reads them faster than several
small ones. The weights become views of one tensor, so that they are in memory once; their values do not change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from autotune.modeling.graph_memory import graph_memory

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
