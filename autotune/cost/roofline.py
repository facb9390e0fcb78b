"""Cost tables of devices that are not here, from datasheet limits: the larger of bytes over bandwidth and operations
over peak, and an eager runner's launches.

An estimate, and marked so in all that is made from it: good enough to rank configurations, not to promise a speedup.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import Field

from autotune.cost.device import Fingerprint
from autotune.cost.surface import Point, Surface
from autotune.cost.table import TOKENS, CostTable, DraftCosts, Overhead, PrefillCost
from autotune.files import Document, data_root, parse, read_yaml
from autotune.provenance import ModelReference, stamp
from autotune.subnet import Subnet

KV_LENGTHS = (64, 512, 4096)


class DeviceLimits(Document):
    """What a datasheet promises, in its own units, and two assumptions about the host."""

    model: str
    source: str
    memory_gb: float = Field(gt=0)
    memory_gb_per_second: float = Field(gt=0)
    bfloat16_tflops: float = Field(gt=0)
    float32_tflops: float = Field(gt=0)
    eager_layer_ms: float = Field(gt=0)
    round_ms: float = Field(ge=0)


class ModelShape(Document):
    """What the latency of a model depends on."""

    num_layers: int
    hidden_size: int
    text_parameters: int
    """Read once for every step: the decoder layers and the head."""
    vision_parameters: int
    kv_bytes_per_token: int
    bytes_per_parameter: int


def datasheets() -> dict[str, Path]:
    """Devices with known limits, by name."""
    return {path.stem: path for path in sorted((data_root() / "profiles" / "devices").glob("*.yaml"))}


def load_limits(name: str) -> DeviceLimits:
    """The limits of a device among ``datasheets``."""
    path = datasheets()[name]
    return parse(DeviceLimits, "device-limits", read_yaml(path), source=path)


def step_ms(shape: ModelShape, limits: DeviceLimits, tokens: float, kv_length: float) -> float:
    """A step of ``tokens`` behind ``kv_length`` cached ones."""
    read = shape.text_parameters * shape.bytes_per_parameter + (kv_length + tokens) * shape.kv_bytes_per_token
    attention = 4 * shape.num_layers * shape.hidden_size * tokens * (kv_length + tokens)
    operations = 2 * shape.text_parameters * tokens + attention
    peak = limits.float32_tflops if shape.bytes_per_parameter == 4 else limits.bfloat16_tflops
    on_device = max(read / (limits.memory_gb_per_second * 1e9), operations / (peak * 1e12)) * 1e3
    # The host launches ahead of the device: whichever is slower sets the pace.
    return max(on_device, shape.num_layers * limits.eager_layer_ms)


def _surface(shape: ModelShape, limits: DeviceLimits, tokens: tuple[int, ...]) -> Surface:
    return Surface(
        points=[
            Point(tokens=n, kv_length=m, samples_ms=[step_ms(shape, limits, n, m)]) for n in tokens for m in KV_LENGTHS
        ]
    )


def _prefill(shape: ModelShape, limits: DeviceLimits) -> PrefillCost:
    short, long = (step_ms(shape, limits, n, 0) for n in (64, 1024))
    per_token = (long - short) / (1024 - 64)
    image = (
        2 * shape.vision_parameters * 600 / (limits.bfloat16_tflops * 1e9) if shape.vision_parameters else 0.0
    )  # some 600 patches
    return PrefillCost(intercept_ms=short - 64 * per_token, per_token_ms=per_token, image_ms=image, samples=[])


def estimate_table(
    name: str,
    *,
    target: ModelReference,
    target_shape: ModelShape,
    draft: ModelReference,
    draft_shape: ModelShape,
    precision: str,
    subnet: Subnet | None = None,
) -> CostTable:
    """The cost table that the datasheet of device ``name`` suggests for a pair. ``subnet``: what ``draft_shape`` is of."""
    limits = load_limits(name)
    overhead = Overhead(round_ms=limits.round_ms, level_ms=float(np.round(limits.round_ms / 8, 3)))
    memory = int(limits.memory_gb * 1e9)
    return CostTable(
        provenance=stamp(),
        device=Fingerprint(name=name, kind="cuda", model=limits.model, num_cores=0, memory_bytes=memory),
        precision=precision,
        estimated=True,
        target=target,
        decode=_surface(target_shape, limits, (1,)),
        verify=_surface(target_shape, limits, TOKENS),
        prefill=_prefill(target_shape, limits),
        drafts=[
            DraftCosts(
                draft=draft,
                heads=None if subnet is None else subnet.heads,
                commit=_surface(draft_shape, limits, TOKENS),
                propose=_surface(draft_shape, limits, TOKENS),
                prefill=_prefill(draft_shape, limits),
                overhead=overhead,
            )
        ],
    )
