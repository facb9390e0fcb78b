"""Weights of drafts in float8 (e4m3), with a scale for each row: half the bytes of bfloat16, and other proposals, but
the same tokens, because the target verifies them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Float8Linear(nn.Module):
    """A linear layer with a copy of another one's weights in float8. Inputs are rounded to float8 too, with a scale for
    each row. Outputs are rounded to bfloat16: not every GPU has such products in another data type.

    Raises:
        RuntimeError: the device has no such products.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = _rounded(linear.weight.detach())
        self.weight, self.scale = nn.Parameter(weight, requires_grad=False), nn.Buffer(scale)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().bfloat16(), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs [..., outputs] in the data type of the inputs [..., inputs]."""
        rows, scale = _rounded(inputs.flatten(0, -2))
        products = torch._scaled_mm(rows, self.weight.t(), scale, self.scale.t(), self.bias, out_dtype=torch.bfloat16)
        return products.to(inputs.dtype).unflatten(0, inputs.shape[:-1])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float8Linear:
        """Move the layer to another device; data types do not change."""
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)


def _rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n, size] in float8, and their scales in float32, [n, 1], which are above 0 for rows of zeros too."""
    scale = torch.linalg.vector_norm(rows, torch.inf, -1, True, dtype=torch.float32) / 448 + 1e-12  # e4m3's largest
    return (rows / scale).to(torch.float8_e4m3fn), scale


def round_weights(module: nn.Module) -> nn.Module:
    """The module with the weights of its plain linear layers in float8. Layers whose sizes are no multiples of 16,
    which GPUs need, stay as they are.
    """
    if type(module) is nn.Linear and not any(size % 16 for size in module.weight.shape):
        return Float8Linear(module)
    for name, part in module.named_children():
        setattr(module, name, round_weights(part))
    return module


def why_no_float8(device: torch.device) -> str | None:
    """Why torch has no fast products of float8 with scales of rows on a device; None if a small one is possible."""
    try:
        Float8Linear(nn.Linear(16, 16, device=device))(torch.ones(1, 16, device=device))
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return "a CPU computes them in float32" if device.type == "cpu" else None
