"""Runs the attention kernels over drawn cases in Triton's interpreter, or on a device, and prints the largest error.

TRITON_INTERPRET=1 python -m tests.modeling.attention_cases 40
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from autotune.modeling.step import Layout, PackedStep, Step, padded_columns


class Case(NamedTuple):
    """Sizes of a step, of the cache and of the heads."""

    n: int
    prefix: int
    num_uncommitted: int
    kv_heads: int
    groups: int
    size: int
    window: int
    softcap: float
    has_sinks: bool


def drawn_cases(number: int, seed: int = 0) -> Iterator[Case]:
    """Small ones, with every property in turn."""
    rng = np.random.default_rng(seed)
    sizes, groups = itertools.cycle((64, 48, 80, 128, 96, 256, 64)), itertools.cycle((1, 4, 7, 2, 8, 3, 5, 6))
    for index in range(number):
        yield Case(
            n=int(rng.choice([1, 1, 2, 5, 17, 33])),
            prefix=int(rng.choice([0, 1, 127, 128, 129, 300])),
            num_uncommitted=70 * (index % 3 == 2),
            kv_heads=1 + index % 2,
            groups=next(groups),
            size=next(sizes),
            window=(0, 40, 3)[index % 3] if index % 2 else 0,
            softcap=20.0 * (index % 5 == 4),
            has_sinks=index % 4 == 3,
        )


def grid_cases() -> Iterator[Case]:
    """From one token to 64, over prefixes up to 4,096."""
    for n, prefix, size in itertools.product((1, 7, 16, 64), (0, 255, 600, 4096), (48, 64, 128, 256)):
        for groups, window in ((1, 0), (4, 100), (7, 0), (8, 512)):
            yield Case(n, prefix, 0, 1, groups, size, window, 0.0, False)


class Inputs(NamedTuple):
    """Arguments of ``attend``, and what float64 makes of them."""

    arguments: tuple[Tensor, Tensor, Tensor, Tensor, float, float, Tensor | None]
    expected: Tensor  # [n, heads, size]


def draw(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Inputs:
    """A step of random states with a random tree mask. The last row is padding: it sees nothing."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    n, heads, num_columns = case.n, case.kv_heads * case.groups, case.num_uncommitted + case.n
    length = case.prefix + num_columns
    capacity = 64 * (length // 64 + 2)
    query = torch.randn(1, n, heads, case.size, generator=generator).to(dtype).transpose(1, 2)[0]
    keys, values = torch.randn(2, case.kv_heads, capacity, case.size, generator=generator).to(dtype)
    keys[:, length:], values[:, length:] = torch.nan, torch.nan
    sinks = torch.randn(heads, generator=generator).to(dtype) if case.has_sinks else None
    is_visible = rng.random((n, num_columns)) < 0.4
    is_visible[np.arange(n), case.num_uncommitted + np.arange(n)] = True
    offsets = np.sort(rng.integers(0, 9, n))
    column_offsets = np.concatenate([rng.integers(0, 9, case.num_uncommitted), offsets])
    layout = Layout(n, padded_columns(num_columns, 0), 1, 1)
    integers = np.zeros(sum(layout.sizes), np.int64)
    step = Step(np.zeros(n, np.int64), offsets, np.where(is_visible, 0.0, -1.0).astype(np.float32))
    packed = PackedStep.of(integers, layout)
    packed.write(step, np.array([case.prefix]), np.array([case.window]), column_offsets)
    seen = np.concatenate([np.ones((n, case.prefix), np.bool_), is_visible], 1)
    if case.window:
        key_offsets = np.concatenate([np.arange(-case.prefix, 0), column_offsets])
        seen &= key_offsets > offsets[:, None] - case.window
    scale = case.size**-0.5
    scores = query.double() @ keys[:, :length].double().repeat_interleave(case.groups, 0).transpose(1, 2) * scale
    if case.softcap:
        scores = (scores / case.softcap).tanh() * case.softcap
    scores = scores.masked_fill(torch.from_numpy(~seen), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, n, 1)], -1)
    weights = scores.softmax(-1)[..., :length]
    expected = (weights @ values[:, :length].double().repeat_interleave(case.groups, 0)).transpose(0, 1)
    mask = PackedStep.of(torch.from_numpy(integers).to(device), layout).masks[0]
    tensors = [tensor.to(device) for tensor in (query, keys, values)]
    on_device = None if sinks is None else sinks.to(device)
    return Inputs((*tensors, mask, scale, case.softcap, on_device), expected)


def error_of(found: Tensor, inputs: Inputs) -> float:
    """The error relative to the norm of what is expected; NaN where there is one."""
    return float((found.double().cpu() - inputs.expected).norm() / inputs.expected.norm())


def main() -> None:
    from autotune.modeling.tree_attention_kernels import attend_in_splits

    cases = grid_cases() if sys.argv[1] == "grid" else drawn_cases(int(sys.argv[1]))
    for seed, case in enumerate(cases):
        inputs = draw(case, torch.float16, seed=seed)
        print(error_of(attend_in_splits(*inputs.arguments), inputs), case, flush=True)


if __name__ == "__main__":
    main()
