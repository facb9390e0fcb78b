"""Compile the Triton kernels of tree operations for GPUs, without one, and report what they take of it.

    python benchmarks/tree_kernels.py [--target cuda:90 --target hip:gfx942 ...]

For each kernel of two trees: registers of a thread, bytes that a thread spills to memory, shared memory and warps, as ptxas or AMD's compiler report them. It needs the package triton, and
no GPU. The figures depend on the version of triton alone. It takes about three minutes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import click
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

TREES: dict[str, dict[str, Any]] = {
    "eagle2, 6 levels of 8, 60 nodes": {"policy": "eagle2", "depth": 6, "k": 8, "budget": 60},
    "eagle2, 8 levels of 10, 128 nodes": {"policy": "eagle2", "depth": 8, "k": 10, "budget": 128},
    "eagle2, the largest": {"policy": "eagle2", "depth": 24, "k": 16, "budget": 128},
    "chain of 6": {"policy": "chain", "depth": 6},
}
TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
COLUMNS = ("tree", "kernel", "target", "registers", "spilled bytes", "shared memory, bytes", "warps")
WARP_SIZES = {"cuda": 32, "hip": 64}


class Usage(NamedTuple):
    """Resources of a GPU that a compiled kernel takes."""

    registers: int
    """Per thread; vector registers on AMD."""
    spilled_bytes: int
    shared_bytes: int
    num_warps: int


def compiled_usage(tree: dict[str, Any], target: str) -> dict[str, Usage]:
    """Usage of each kernel of a tree, compiled for a target such as ``cuda:90`` or ``hip:gfx942``; of kernels that are
    compiled in several forms, the largest.
    """
    found: dict[str, Usage] = {}
    for kernel, args, options in _launches(tree):
        usage = _compiled(kernel, args, options, target)
        name = kernel.fn.__name__
        found[name] = max(usage, found.get(name, usage))
    return found


def _launches(tree: dict[str, Any]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The launches of one tree, without those that repeat a form: kernel, arguments and options. Nothing is launched."""
    from autotune.runtime import triton_trees
    from autotune.runtime.device_trees import device_grower
    from autotune.runtime.tree_operations import MaskFormat, Proposals, TensorTrees, grown
    from autotune.trees.policy import parse_policy

    cpu, policy = torch.device("cpu"), parse_policy(tree)
    mask = MaskFormat(torch.bfloat16, torch.finfo(torch.bfloat16).min)
    grower = device_grower(policy, cpu)
    assert grower is not None
    sizes = {"level_sizes": grower.widths, "num_tokens": grower.num_nodes + 1}
    trees = TensorTrees(grower, cpu, policy=policy, draft_mask=mask, target_mask=mask, **sizes)
    kernels = triton_trees.triton_trees(trees)
    launches = {}

    def keep(kernel: Any, *args: Any, num_programs: int = 1, **options: Any) -> None:
        types = tuple(str(arg.dtype) if isinstance(arg, torch.Tensor) else type(arg) for arg in args)
        launches[kernel, types, tuple(options.items())] = kernel, args, options

    with mock.patch.object(triton_trees, "_launch", keep):
        zeros = [torch.zeros(shape) for shape in trees.proposal_shapes]
        _, packed = grown(kernels, [Proposals(one.long(), one) for one in zeros], torch.zeros(1, dtype=torch.long))
        kernels.verification_step(packed)
        kernels.accepted(packed, packed[0])
    return list(launches.values())


def _compiled(kernel: Any, args: tuple[Any, ...], options: dict[str, Any], target: str) -> Usage:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, arch = target.split(":")
    num_warps = options.get("num_warps", 4)
    constants = {name: value for name, value in options.items() if name != "num_warps"}
    signature = {name: _type_name(arg) for name, arg in zip(kernel.arg_names, args, strict=False)}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    gpu = GPUTarget(backend, int(arch) if backend == "cuda" else arch, WARP_SIZES[backend])
    source = ASTSource(kernel, signature, constants, aligned)
    binary = triton.compile(source, target=gpu, options={"num_warps": num_warps})
    shared = binary.metadata.shared
    if backend == "hip":
        text = binary.asm["amdgcn"]
        return Usage(
            _number(r"\.vgpr_count:\s*(\d+)", text),
            4 * _number(r"\.vgpr_spill_count:\s*(\d+)", text),
            shared,
            num_warps,
        )
    text = _resource_usage(binary.asm["cubin"])
    return Usage(_number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text), shared, num_warps)


def _type_name(arg: Any) -> str:
    from triton.runtime.jit import mangle_type

    return str(mangle_type(arg)) if isinstance(arg, torch.Tensor) else "i32"


def _resource_usage(cubin: bytes) -> str:
    """The report of cuobjdump, which triton brings along, on a kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match, f"no {pattern} in {text}"
    return int(match[1])


@click.command()
@click.option("--target", "targets", multiple=True, default=TARGETS, show_default=True)
@click.option("--tree", "trees", multiple=True, type=click.Choice(list(TREES)), default=list(TREES))
def main(targets: tuple[str, ...], trees: tuple[str, ...]) -> None:
    """Print one row for every tree, kernel and target."""
    click.echo(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name in trees:
        for target in targets:
            for kernel, usage in compiled_usage(TREES[name], target).items():
                click.echo(f"| {' | '.join(map(str, (name, f'`{kernel}`', target, *usage)))} |")


if __name__ == "__main__":
    main()
