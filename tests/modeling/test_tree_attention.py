"""Attention of captured steps: the reference and the Triton kernels against float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from autotune.modeling import tree_attention
from autotune.modeling.tree_attention import attend, attend_with_mask, why_no_triton
from tests.imports import ROOT
from tests.modeling.attention_cases import Case, draw, drawn_cases, error_of

SHARED_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}  # of a block


def run_module(name: str, *arguments: str, **environment: str) -> str:
    """Run a module of the tests in a process of its own; returns its output."""
    command = [sys.executable, "-m", f"tests.modeling.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("case", drawn_cases(24), ids=str)
def test_the_reference_equals_float64(case: Case) -> None:
    inputs = draw(case, torch.float32)
    assert error_of(attend(*inputs.arguments), inputs) < 1e-5


def test_the_reference_of_a_capture_looks_at_the_whole_cache() -> None:
    """Where lengths cannot be read, masks hide what lies beyond the step."""
    for case in drawn_cases(8):
        inputs = draw(case, torch.float32)
        query, keys, values, *others = inputs.arguments
        found = attend_with_mask(query, keys.nan_to_num(9.0), values.nan_to_num(9.0), *others)
        assert error_of(found, inputs) < 1e-5


def kernel_errors(cases: str) -> list[float]:
    lines = run_module("attention_cases", cases, TRITON_INTERPRET="1").splitlines()
    return [float(line.split()[0]) for line in lines]


def test_kernels_equal_float64_in_the_interpreter() -> None:
    errors = kernel_errors("20")
    assert len(errors) == 20 and all(error < 1e-3 for error in errors), errors  # no error of NaN is small


@pytest.mark.nightly
def test_kernels_equal_float64_over_a_grid_of_sizes() -> None:
    errors = kernel_errors("grid")
    assert len(errors) == 4 * 4 * 4 * 4 and all(error < 1e-3 for error in errors), errors


def check_builds(*builds: str) -> None:
    found = [json.loads(line) for line in run_module("attention_builds", *builds).splitlines()]
    assert len(found) == 4 * len(builds)
    for one in found:
        assert one["stack"] == 0, f"registers are spilled: {one}"
        assert one["shared"] <= SHARED_BYTES[int(one["build"].split(":")[0])], one


def test_kernels_compile_without_spilling_registers() -> None:
    check_builds("90:bf16:128", "120:bf16:128")


@pytest.mark.nightly
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_compile_for_every_architecture(capability: int) -> None:
    check_builds(*(f"{capability}:{dtype}:{size}" for dtype in ("bf16", "fp16") for size in (64, 96, 128, 256)))


def test_devices_that_cannot_run_the_kernels_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_triton(torch.device("cpu")) == "the device is cpu"
    why_no_triton.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert why_no_triton(torch.device("cuda:0")) == "the kernels need compute capability 8.0, and the device has 7.5"
    why_no_triton.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "autotune.modeling.tree_attention_kernels", None)
    reason = why_no_triton(torch.device("cuda:0"))
    assert reason is not None and reason.startswith("ModuleNotFoundError")
    why_no_triton.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_equal_float64_on_a_gpu() -> None:
    large = Case(160, 16384, 0, 2, 4, 128, 0, 0.0, False)
    for seed, case in enumerate((*drawn_cases(32), large)):
        inputs = draw(case, torch.bfloat16, "cuda", seed)
        assert tree_attention.why_no_triton(torch.device("cuda")) is None
        assert error_of(attend(*inputs.arguments), inputs) < 1e-2, case
