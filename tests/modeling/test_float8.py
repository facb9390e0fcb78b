"""Layers with weights in float8: products of the rounded numbers, and which layers have them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autotune.modeling import float8
from autotune.modeling.float8 import Float8Linear, round_weights, why_no_float8
from tests.rehearsal import Rehearsal


def dequantized(rows: Tensor) -> Tensor:
    """Rows rounded to the nearest multiple of their scales that e4m3 has, in float32."""
    scale = rows.float().abs().amax(-1, keepdim=True) / 448 + 1e-12
    return (rows.float() / scale).to(torch.float8_e4m3fn).float() * scale


@torch.inference_mode()
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_are_products_of_the_rounded_numbers(dtype: torch.dtype, has_bias: bool) -> None:
    """Up to the rounding of outputs to bfloat16; and also after the layer was told to have another data type."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=has_bias, dtype=dtype)
    layer = Float8Linear(linear)
    inputs = torch.randn(2, 5, 64).to(dtype) * torch.tensor([0.001, 0.1, 1, 30, 0])[:, None].to(dtype)
    bias = None if linear.bias is None else linear.bias.float()
    expected = nn.functional.linear(dequantized(inputs), dequantized(linear.weight), bias)
    for _ in range(2):
        found = layer(inputs)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=2**-7 if has_bias else 1e-6)
        assert layer(inputs[:, :0]).shape == (2, 0, 48)
        layer.to(torch.float16)
    assert linear.weight.dtype == dtype, "the other layer is not changed"
    torch.testing.assert_close(dequantized(linear.weight), linear.weight.float(), rtol=2**-4, atol=1e-3)


@torch.inference_mode()
def test_a_gpu_gives_the_products_of_the_cpu(gpu: str) -> None:
    """One token, and more than a tile of a kernel."""
    if (reason := why_no_float8(torch.device(gpu))) is not None:
        pytest.skip(reason)
    layer = Float8Linear(nn.Linear(256, 512, dtype=torch.bfloat16))
    inputs = torch.randn(200, 256, dtype=torch.bfloat16)
    expected = layer(inputs)
    moved, there = layer.to(gpu), inputs.to(gpu)
    for count in (1, 200):
        torch.testing.assert_close(moved(there[:count]).cpu(), expected[:count], rtol=2**-6, atol=2**-6)


def test_plain_linear_layers_are_rounded() -> None:
    class OtherLinear(nn.Linear):
        """As a layer of another method of quantization."""

    parts = [nn.Linear(32, 16), nn.Linear(32, 20), nn.Linear(8, 16), OtherLinear(32, 16), nn.Embedding(16, 32)]
    network = nn.Sequential(nn.ModuleList(parts))
    assert round_weights(network) is network
    (found,) = network.children()
    assert [type(part) for part in found.children()] == [Float8Linear, *map(type, parts[1:])]


def test_a_device_shows_whether_it_has_the_products(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:0")
    assert why_no_float8(gpu) is None and why_no_float8(torch.device("cpu")) == "a CPU computes them in float32"

    def refused(*args: object, **options: object) -> None:
        raise RuntimeError("only supported on later devices\nstack")

    monkeypatch.setattr(float8.torch, "_scaled_mm", refused)
    assert why_no_float8(gpu) == "only supported on later devices"
