"""Estimated cost tables from the limits in a device's datasheet (roofline model).

Latency is the largest of: bytes over bandwidth, operations over peak throughput, and kernel launches by the host. Limits are
scaled to tables that were measured on the device with other models. Everything made from an estimate is marked ``estimated``.
Speedups that papers published are predicted with a median error of 13 % (``benchmarks/published_speedups.py``), single ones with far
larger ones: an estimate serves to rank configurations.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from pydantic import Field

from autotune.cost.draft_costs import DraftCosts, ModelShape
from autotune.cost.request_costs import Overhead, PrefillCost
from autotune.cost.surface import Point, Surface
from autotune.cost.table import TOKENS, CostTable
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, stamp
from autotune.documents.subnet import Subnet
from autotune.execution import CUDA_GRAPH, EAGER
from autotune.files import Document, data_root
from autotune.trees.limits import Floats

COMPUTE_SLICES, MEMORY_SLICES = 7, 8  # of a GPU that is split into MIG slices
KV_LENGTHS = (64, 512, 4096)
# Eager PyTorch, whatever the GPU; fitted by benchmarks/published_speedups.py to what papers and blogs published, and tested against it.
EAGER_LAYER_MS = 0.9  # the host launches the kernels of a layer; published plain steps lie between 0.25 and 1.55
LAYERS_OUTSIDE = 2.4  # a forward pass launches as much outside its layers (embedding, head, choice) as in this many
ROUND_MS = 0.4  # a round outside the models, an assumption
REGULARIZATION = 1e-6  # keeps scales at 1 that no measured point depends on


class DatasheetLimits(Document, kind="device-limits"):
    """Limits of a device, in the units of datasheets, and of the host, which are the same for all devices unless measured."""

    model: str
    source: str
    memory_gb: float = Field(gt=0)
    memory_gb_per_second: float = Field(gt=0)
    bfloat16_tflops: float = Field(gt=0)
    float32_tflops: float = Field(gt=0)
    eager_layer_ms: float = Field(default=EAGER_LAYER_MS, gt=0)
    layers_outside: float = Field(default=LAYERS_OUTSIDE, ge=0)
    round_ms: float = Field(default=ROUND_MS, ge=0)
    has_mig: bool = False
    """Whether the device can be split into MIG slices."""


def datasheets() -> dict[str, Path]:
    """Files of device limits, by device name."""
    return {path.stem: path for path in sorted((data_root() / "profiles" / "devices").glob("*.yaml"))}


def find_limits(name: str) -> DatasheetLimits | None:
    """Limits of a device in ``datasheets()`` or of one of its MIG slices, ``h100-mig-1g.10gb``; None if there are none."""
    device, _, part = name.partition("-mig-")
    path = datasheets().get(device)
    if path is None:
        return None
    limits = DatasheetLimits.load(path)
    return limits if name == device else _slice_limits(limits, part)


def _slice_limits(limits: DatasheetLimits, part: str) -> DatasheetLimits | None:
    """Limits of a MIG slice, ``1g.10gb`` or ``1c.3g.40gb``: a GPU has seven slices of compute and eight of memory, which
    divide capacity and bandwidth equally (MIG user guide, partitioning). None for a part that the GPU does not have.
    """
    match = re.fullmatch(r"(?:(\d)c\.)?(\d)g\.(\d+)gb", part)
    if match is None or not limits.has_mig:
        return None
    memory_gb = int(match[3])
    compute, memory = int(match[1] or match[2]), round(MEMORY_SLICES * memory_gb / limits.memory_gb)
    if not 1 <= compute <= int(match[2]) <= COMPUTE_SLICES or memory not in (1, 2, 4, MEMORY_SLICES):
        return None
    return limits.model_copy(
        update={
            "model": f"{limits.model} MIG {part}",
            "memory_gb": memory_gb,
            "memory_gb_per_second": limits.memory_gb_per_second * memory / MEMORY_SLICES,
            "bfloat16_tflops": limits.bfloat16_tflops * compute / COMPUTE_SLICES,
            "float32_tflops": limits.float32_tflops * compute / COMPUTE_SLICES,
        }
    )


def load_limits(name: str) -> DatasheetLimits:
    """Limits of a device that ``find_limits`` knows."""
    limits = find_limits(name)
    assert limits is not None, f"no datasheet of {name}"
    return limits


def step_ms(shape: ModelShape, limits: DatasheetLimits, tokens: float, kv_length: float) -> float:
    """Latency of a forward of ``tokens`` tokens with ``kv_length`` tokens in the KV cache."""
    # The host launches kernels ahead of the device, so the slower of the two determines the latency.
    return max(_bounds_ms(shape, limits, tokens, kv_length))


def first_level_ms(shape: ModelShape, limits: DatasheetLimits, tokens: float, kv_length: float) -> float:
    """Latency of a draft's first forward pass of a round, which reads ``tokens`` committed tokens."""
    return step_ms(shape, limits, tokens + shape.block_tokens, kv_length)


def later_level_ms(shape: ModelShape, limits: DatasheetLimits, tokens: float, kv_length: float) -> float:
    """Latency of any other draft level, of ``tokens`` nodes; 0 where the first forward pass has drafted it."""
    return 0.0 if shape.block_tokens else step_ms(shape, limits, tokens, kv_length)


def device_bound_ms(shape: ModelShape, limits: DatasheetLimits, tokens: float, kv_length: float) -> float:
    """The least latency of the same forward that the device allows, however fast the host is: memory traffic or arithmetic."""
    memory_ms, arithmetic_ms, _ = _bounds_ms(shape, limits, tokens, kv_length)
    return max(memory_ms, arithmetic_ms)


def operations(shape: ModelShape, tokens: float, kv_length: float) -> float:
    """Floating-point operations of a forward pass; a product of two matrices counts two for every multiplication."""
    attention = 4 * shape.num_layers * shape.hidden_size * tokens * (kv_length + tokens)
    return 2 * shape.text_parameters * tokens + attention


def _bounds_ms(
    shape: ModelShape, limits: DatasheetLimits, tokens: float, kv_length: float
) -> tuple[float, float, float]:
    """Lower bounds of the latency of a forward: memory, arithmetic, kernel launches; 0 for a draft without forward passes."""
    if not shape.has_forward_pass:
        return 0.0, 0.0, 0.0
    read = shape.text_parameters * shape.bytes_per_parameter + (kv_length + tokens) * shape.kv_bytes_per_token
    peak = limits.float32_tflops if shape.bytes_per_parameter == 4 else limits.bfloat16_tflops
    return (
        read / (limits.memory_gb_per_second * 1e6),
        operations(shape, tokens, kv_length) / (peak * 1e9),
        (shape.num_layers + limits.layers_outside) * limits.eager_layer_ms,
    )


def anchored(limits: DatasheetLimits, measured: Sequence[CostTable]) -> DatasheetLimits:
    """Scale bandwidth, peak throughput and launch time to tables measured on the device, by least squares of log latency.

    Limits that no measured point depends on are not changed. ``round_ms`` becomes the median of the tables.
    """
    from scipy.optimize import minimize

    parts = [(table.target_shape, surface) for table in measured for surface in (table.decode, table.verify)]
    for draft in (draft for table in measured for draft in table.drafts):
        is_forward = draft.shape is None or not draft.shape.block_tokens
        parts += [(draft.shape, surface) for surface in (draft.draft_first, *([draft.draft_level] * is_forward))]
    models = [(shape, surface) for shape, surface in parts if shape is not None and shape.has_forward_pass]
    points = [(shape, point) for shape, surface in models for point in surface.points]
    if not points:
        return limits
    latency_ms = np.array([point.latency_ms for _, point in points])
    bounds_ms = np.array(
        [_bounds_ms(shape, limits, point.tokens + shape.block_tokens, point.kv_length) for shape, point in points]
    )

    def error(logs: Floats) -> float:
        """Mean squared error with bounds scaled by ``exp(logs)``."""
        residuals = np.log((bounds_ms * np.exp(logs)).max(1) / latency_ms)
        return float((residuals**2).mean() + REGULARIZATION * (logs**2).sum())

    # The error has no slope in a bound that is never the largest, so minimize from several starting points.
    starts = [np.array(start, np.float64) for start in itertools.product((0.0, 2.0), repeat=bounds_ms.shape[1])]
    fits = [minimize(error, start, method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-10}) for start in starts]
    memory, arithmetic, launches = np.exp(min(fits, key=lambda fit: float(fit.fun)).x).tolist()
    rounds = [draft.overhead.round_ms for table in measured for draft in table.drafts]
    return limits.model_copy(
        update={
            "memory_gb_per_second": limits.memory_gb_per_second / memory,
            "bfloat16_tflops": limits.bfloat16_tflops / arithmetic,
            "float32_tflops": limits.float32_tflops / arithmetic,
            "eager_layer_ms": limits.eager_layer_ms * launches,
            "round_ms": float(np.median(rounds)),
        }
    )


def _surface(
    shape: ModelShape,
    limits: DatasheetLimits,
    tokens: tuple[int, ...],
    latency_ms: Callable[[ModelShape, DatasheetLimits, float, float], float] = step_ms,
) -> Surface:
    sizes = itertools.product(tokens, KV_LENGTHS)
    return Surface(
        points=[Point(tokens=n, kv_length=m, samples_ms=[latency_ms(shape, limits, n, m)]) for n, m in sizes]
    )


def _prefill(shape: ModelShape, limits: DatasheetLimits) -> PrefillCost:
    short, long = (step_ms(shape, limits, n, 0) for n in (64, 1024))
    per_token = (long - short) / (1024 - 64)
    image = 2 * shape.vision_parameters * 600 / (limits.bfloat16_tflops * 1e9)  # about 600 patches
    return PrefillCost(intercept_ms=short - 64 * per_token, per_token_ms=per_token, image_ms=image, samples=[])


def estimate_table(
    name: str,
    *,
    target: ModelReference,
    target_shape: ModelShape,
    draft: ModelReference,
    draft_shape: ModelShape,
    precision: str,
    subnet: Subnet = Subnet(),  # noqa: B008
    mode: str = EAGER,
    capture_sizes: tuple[int, ...] = (),
    measured: Sequence[CostTable] = (),
) -> CostTable:
    """Estimate the cost table of a pair from the datasheet of a device. Unless the mode is ``eager``, the host launches nothing after
    the prefill.

    Args:
        name: the device, which ``find_limits`` knows.
        subnet: the draft's subnet, to which ``draft_shape`` belongs.
        mode, capture_sizes: as in ``CostTable``.
        measured: tables to scale the limits to; only measured ones of this device, precision and mode are used.
    """
    anchors = [
        table
        for table in measured
        if (table.device.name, table.precision, table.mode) == (name, precision, mode)
        and not table.estimated
        and table.target_shape is not None
    ]
    datasheet = load_limits(name)
    captured = mode == CUDA_GRAPH
    limits = anchored(datasheet.model_copy(update={"eager_layer_ms": 0.0}) if captured else datasheet, anchors)
    prefill_limits = limits.model_copy(update={"eager_layer_ms": datasheet.eager_layer_ms}) if captured else limits
    tokens = capture_sizes or TOKENS
    overhead = Overhead(round_ms=limits.round_ms, level_ms=float(np.round(limits.round_ms / 8, 3)))
    memory_bytes = int(limits.memory_gb * 1e9)
    return CostTable(
        provenance=stamp(),
        device=Fingerprint(name=name, kind="cuda", model=limits.model, num_cores=0, memory_bytes=memory_bytes),
        precision=precision,
        mode=mode,
        capture_sizes=capture_sizes,
        estimated=True,
        num_anchors=len(anchors),
        target=target,
        target_shape=target_shape,
        decode=_surface(target_shape, limits, (1,)),
        verify=_surface(target_shape, limits, tokens),
        prefill=_prefill(target_shape, prefill_limits),
        drafts=[
            DraftCosts(
                draft=draft,
                heads=subnet.heads,
                vocabulary=subnet.vocabulary,
                shape=draft_shape,
                draft_first=_surface(draft_shape, limits, tokens, first_level_ms),
                draft_level=_surface(draft_shape, limits, tokens, later_level_ms),
                prefill=_prefill(draft_shape, prefill_limits),
                overhead=overhead,
            )
        ],
    )
