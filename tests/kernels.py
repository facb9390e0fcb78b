"""Kernels of a round that the device leads: those that a CUDA graph captures, and those that torch's compiler leaves of them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._inductor.config
from torch import Tensor
from torch._inductor.graph import GraphLowering

from autotune.modeling.graph_runner import GraphRunner
from autotune.modeling.grouped_attention import grouped_attention
from autotune.modeling.target import Target
from autotune.runtime import device_rounds
from autotune.runtime.decoder import Decoder
from autotune.runtime.token_sampler import TokenSampler
from tests.rehearsal import Rehearsal

NewModel = Callable[[], Any]
NewDraft = Callable[[Target], Any]
Tree = Mapping[str, Any]

ATTENTION = "torch.ops.autotune.grouped_attention.default"
# Calls in generated code that launch nothing. Every other call counts as a kernel.
NOT_KERNELS = {"args.clear", "assert_alignment", "assert_size_stride", "empty_strided_cpu", "reinterpret_tensor"}


class Kernels(NamedTuple):
    """Kernels of one round."""

    drafting: int
    verification: int
    """Greedy; without the moves in the target's cache, which are the same in both modes and not compiled."""


def captured_kernels(new_model: NewModel, new_draft: NewDraft, tree: Tree, *, triton: bool = False) -> Kernels:
    """Kernels in mode ``cuda-graph``, on a rehearsed device, with or without kernels of Triton for tree operations."""
    with Rehearsal(triton=triton) as rehearsal, mock.patch.object(device_rounds.DeviceRound, "_compact"):
        decoder = _decoded(new_model().to("cuda:0"), new_draft, tree, "cuda-graph")
        device_round = decoder._device_rounds.get(decoder.point, TokenSampler())
        assert device_round is not None
        found = []
        for runner in (device_round._drafting, device_round._greedy):
            replay = next(iter(runner._captured.values()))
            with rehearsal.counted() as counts:
                replay()
            found.append(counts.graph_operations)
        return Kernels(*found)


def compiled_kernels(new_model: NewModel, new_draft: NewDraft, tree: Tree) -> Kernels:
    """Kernels in mode ``compile``, in the code that torch generates for a CPU, which is neither built nor run."""
    is_led_by_device = mock.patch.object(device_rounds, "_pays", lambda device, mode: True)
    with is_led_by_device, _generated_code() as codes:
        _decoded(new_model(), new_draft, tree, "compile")
    return Kernels(kernels_in(codes["_grow_tree"]), kernels_in(codes["_verify_greedily"]))


def _decoded(model: Any, new_draft: NewDraft, tree: Tree, mode: str) -> Decoder:
    """A decoder after one round."""
    target = Target(model)
    decoder = Decoder(target, new_draft(target), tree=dict(tree), mode=mode)
    decoder.generate(input_ids=torch.arange(10, device=target.device)[None] + 5, max_new_tokens=2)
    return decoder


class _Generated(Exception):
    """Code was generated and is not run."""


@contextmanager
def _generated_code() -> Iterator[dict[str, str]]:
    """The code of each function that is compiled within the context, by the function's name. The function itself then runs
    eagerly.
    """
    codes: dict[str, str] = {}
    compile_now = GraphRunner._compile

    def generate(
        runner: GraphRunner, function: Any, key: Hashable, inputs: Mapping[str, Tensor], padded: Collection[str]
    ) -> Any:
        def keep(graph: GraphLowering) -> Any:
            codes[function.__name__] = graph.codegen()[0].value
            return SimpleNamespace(call=mock.Mock(side_effect=_Generated))

        with mock.patch.object(GraphLowering, "compile_to_module", keep), suppress(_Generated):
            compile_now(runner, function, key, inputs, padded)
        return function

    without_caches = torch._inductor.config.patch(force_disable_caches=True)
    with without_caches, mock.patch.object(GraphRunner, "_compile", generate):
        yield codes


def kernels_in(code: str) -> int:
    """Kernels that generated code launches. Attention of grouped queries counts as the operations that it runs."""
    (body,) = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef) and node.name == "call")
    names = [ast.unparse(node.func) for node in ast.walk(body) if isinstance(node, ast.Call)]
    return sum(_attention_kernels() if name == ATTENTION else name not in NOT_KERNELS for name in names)


def _attention_kernels() -> int:
    query, key, mask = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 32, 16), torch.zeros(1, 1, 8, 32)
    with Rehearsal() as rehearsal:
        states = [one.bfloat16().to("cuda:0") for one in (query, key, key, mask)]
        with rehearsal.counted() as counts:
            grouped_attention(*states)
    return counts.operations
