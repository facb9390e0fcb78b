"""Matrix products of one input, computed as one: the queries, keys and values of attention, and the two inner products
of gated feed-forward layers.

A step of few tokens takes the time in which its weights are read, and one large product reads them faster than several
small ones. The weights become views of one tensor, so that they are in memory once; their values do not change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Submodules that transformers calls with one input, once each in a forward pass."""


class _Product:
    """The product of several linear layers that have one input."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._sizes = [linear.out_features for linear in linears]
        self._weight = _joined([linear.weight for linear in linears])
        self._bias = None if linears[0].bias is None else _joined([linear.bias for linear in linears])
        self._waiting: dict[int, Tensor] = {}
        """Outputs of the layers that were not called since the latest product."""

    def output(self, number: int, inputs: Tensor) -> Tensor:
        """Output of one of the layers. The first one that is called computes those of all."""
        if number not in self._waiting:
            outputs = functional.linear(inputs, self._weight, self._bias).split(self._sizes, -1)
            self._waiting.update(enumerate(outputs))
        return self._waiting.pop(number)


class _MergedLinear(nn.Linear):
    """Class of a merged linear layer within the context. A compiled function serves all modules of a class, but not two
    instances' own ``forward`` functions.
    """

    product: _Product
    number: int

    def forward(self, inputs: Tensor) -> Tensor:
        return self.product.output(self.number, inputs)


@contextmanager
def merged_products(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Within the context, products of one input are merged in all layers. Linear layers that are quantized, have an
    adapter or differ in type remain as they are.
    """
    groups = [(_Product(linears), linears) for layer in layers for linears in _mergeable(layer)]
    try:
        for product, linears in groups:
            for number, linear in enumerate(linears):
                linear.__class__ = _MergedLinear
                vars(linear).update(product=product, number=number)
        yield
    finally:
        for linear in (linear for _, linears in groups for linear in linears):
            linear.__class__ = nn.Linear
            for name in _MergedLinear.__annotations__:
                vars(linear).pop(name, None)


def _mergeable(layer: nn.Module) -> Iterator[list[nn.Linear]]:
    """Groups of plain linear layers that read one input."""
    for module, names in itertools.product(layer.modules(), NAMES):
        linears = [linear for name in names if _is_plain(linear := getattr(module, name, None))]
        kinds = {(one.in_features, one.weight.dtype, one.weight.device, one.bias is None) for one in linears}
        if len(linears) == len(names) and len(kinds) == 1:
            yield linears


def _is_plain(module: Any) -> bool:
    """Whether a module is a linear layer of torch with a weight of its own, which no adapter or quantization wraps."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and "forward" not in vars(module)


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor of which the parameters are views, row after row. They become such views at the first call."""
    sizes = [len(parameter) for parameter in parameters]
    follow_each_other = (
        a.is_contiguous()
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.data_ptr() + a.nbytes == b.data_ptr()
        for a, b in itertools.pairwise(parameters)
    )
    if not all(follow_each_other):
        with torch.inference_mode(False):  # else the weights could not be used outside of that mode any more
            joined = torch.cat([parameter.data for parameter in parameters])
        for parameter, rows in zip(parameters, joined.split(sizes), strict=True):
            parameter.data = rows
    first = parameters[0].data
    return first.as_strided((sum(sizes), *first.shape[1:]), first.stride())
