"""Estimated cost tables from the limits in a device's datasheet (roofline model).

Traffic takes bytes over reached bandwidth, and arithmetic operations over peak throughput. An eager step takes the
longest of both and the host's kernel launches; a captured step the longer of both, and the times of its kernels and of
the host. Limits are scaled to tables that were measured on the device with other models. Everything made from an
estimate is marked ``estimated``. Eager speedups that papers published, and captured steps that engines published, are
predicted with a median error of 13 % (``benchmarks/published_speedups.py``), single ones with far larger ones: an
estimate serves to rank configurations.

Several devices that share a target (tensor parallelism) read their parts of it at the same time, and sum the outputs of
each layer's attention and MLP over their links. Such estimates were compared with published figures only.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import Field

from autotune.cost.request_costs import Overhead, PrefillCost
from autotune.cost.surface import Point, Surface
from autotune.cost.table import TOKENS, CostTable, DraftCosts, ModelShape
from autotune.documents.execution import EAGER, STEPS_VERSION
from autotune.documents.fingerprint import MOST_DEVICES, Fingerprint, split_cards
from autotune.documents.provenance import ModelReference, stamp
from autotune.documents.subnet import Subnet
from autotune.files import Document, data_root
from autotune.trees.limits import Floats

# Of a GPU that is split into MIG slices.
COMPUTE_SLICES = 7
MEMORY_SLICES = 8
KV_LENGTHS = (64, 512, 4096)
REACHED_BANDWIDTH = 0.88  # of the datasheet's
KERNELS_OUTSIDE = 29  # captured kernels outside the layers
# An all-reduce besides its hops, and the latency of a hop in the datasheets: NCCL's own model of a small all-reduce in
# a ring (NVIDIA/nccl, src/graph/tuning.cc, protocol LL).
REDUCE_MS = 0.0066
REACHED_LINK = 0.82  # of a link's bandwidth: 370 of NVLink 4's 450 GB/s (NVIDIA/nccl, issue 1442)
REGULARIZATION = 1e-6  # keeps scales at 1 that no measured point depends on


class DatasheetLimits(Document, kind="device-limits"):
    """Limits of a device, in the units of datasheets, and of the host, which are the same for all devices unless
    measured.
    """

    model: str
    source: str
    memory_gb: float = Field(gt=0)
    memory_gb_per_second: float = Field(gt=0)
    bfloat16_tflops: float = Field(gt=0)
    float32_tflops: float = Field(gt=0)
    # Whatever the GPU; fitted by benchmarks/published_speedups.py, eager steps to what papers and others published,
    # captured ones to an H100.
    eager_layer_ms: float = Field(default=0.9, gt=0)
    """The host launches the kernels of a layer; published plain steps lie between 0.25 and 1.55."""
    kernel_ms: float = Field(default=0.0027, gt=0)
    """A kernel of a captured step, besides its memory traffic."""
    host_ms: float = Field(default=0.41, gt=0)
    """The host's part of a captured step, which copies its input, replays the graph and awaits the result."""
    layers_outside: float = Field(default=2.4, ge=0)
    """Eager launches outside the layers, as the number of layers that would take as long."""
    round_ms: float = Field(default=0.18, ge=0)
    """A round outside the models, measured on the host of an H100; a level takes an eighth of it."""
    has_mig: bool = False
    """Whether the device can be split into MIG slices."""
    link_gb_per_second: float = Field(default=32, gt=0)
    """Bandwidth of the link to other devices of one machine, in one direction; by default that of PCIe Gen4."""
    link_hop_ms: float = Field(default=0.001, gt=0)
    """Latency from one device to the next."""
    num_devices: int = Field(default=1, ge=1, le=MOST_DEVICES)
    """Devices that share a target; the other limits are those of one."""


def datasheets() -> dict[str, Path]:
    """Files of device limits, by device name."""
    return {path.stem: path for path in sorted((data_root() / "profiles" / "devices").glob("*.yaml"))}


def find_limits(cards: str) -> DatasheetLimits | None:
    """Limits of a device in ``datasheets()``, of several, ``4xh100``, or of a MIG slice, ``h100-mig-1g.10gb`` or
    ``h100-mig-1c.3g.40gb``: a GPU has seven slices of compute and eight of memory, which divide capacity and bandwidth
    equally (MIG user guide, partitioning), and no links. None if there are none.
    """
    num_devices, name = split_cards(cards)
    device, _, part = name.partition("-mig-")
    path = datasheets().get(device)
    if path is None or not 1 <= num_devices <= MOST_DEVICES:
        return None
    limits = DatasheetLimits.load(path).model_copy(update={"num_devices": num_devices})
    if name == device:
        return limits
    match = re.fullmatch(r"(?:(\d)c\.)?(\d)g\.(\d+)gb", part)
    if match is None or not limits.has_mig or num_devices > 1:
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


def step_ms(shape: ModelShape, limits: DatasheetLimits, tokens: float, kv_length: float, mode: str = EAGER) -> float:
    """Latency of a forward of ``tokens`` tokens with ``kv_length`` tokens in the KV cache."""
    return float(_latency_ms(np.array(_parts_ms(shape, limits, tokens, kv_length, mode)), mode))


def device_bound_ms(shape: ModelShape, limits: DatasheetLimits, tokens: float, kv_length: float) -> float:
    """The least latency of the same forward that the device allows, however fast the host is: memory traffic or
    arithmetic.
    """
    memory_ms, arithmetic_ms, *_ = _parts_ms(shape, limits, tokens, kv_length, EAGER)
    return max(REACHED_BANDWIDTH * memory_ms, arithmetic_ms)


def operations(shape: ModelShape, tokens: float, kv_length: float) -> float:
    """Floating-point operations of a forward pass; a product of two matrices counts two for every multiplication."""
    attention = 4 * shape.num_layers * shape.hidden_size * tokens * (kv_length + tokens)
    return 2 * shape.text_parameters * tokens + attention


def step_parts(
    shape: ModelShape, limits: DatasheetLimits, tokens: float, kv_length: float, mode: str
) -> dict[str, float]:
    """The same latency by what takes it, in milliseconds. Parts of an eager step overlap."""
    memory, arithmetic, kernels, reduces = _parts_ms(shape, limits, tokens, kv_length, mode)
    weights, *_ = _parts_ms(shape, limits, 0, 0, mode)
    return {
        "weights": weights,
        "keys and values": memory - weights,
        "arithmetic": max(0.0, arithmetic - memory),
        "kernels and host": kernels,
        "all-reduces": reduces,
    }


def all_reduce_ms(limits: DatasheetLimits, num_bytes: float) -> float:
    """Time in which the devices sum an array of ``num_bytes`` that each has, in a ring."""
    sent_ms = num_bytes / limits.num_devices / (REACHED_LINK * limits.link_gb_per_second * 1e6)
    return REDUCE_MS + 2 * (limits.num_devices - 1) * (limits.link_hop_ms + sent_ms)


def _parts_ms(
    shape: ModelShape, limits: DatasheetLimits, tokens: float, kv_length: float, mode: str
) -> tuple[float, float, float, float]:
    """Times of a forward: memory traffic, arithmetic, the host's launches or else the captured kernels with the host's
    part, and the sums over devices; 0 for a draft without forward passes.
    """
    if not shape.has_forward_pass:
        return 0.0, 0.0, 0.0, 0.0
    whole = shape.text_parameters - shape.divided_parameters
    read = (whole + shape.divided_parameters / limits.num_devices) * shape.bytes_per_parameter
    read += (kv_length + tokens) * shape.kv_bytes_per_token / limits.num_devices
    peak, activation_bytes = (
        (limits.float32_tflops, 4) if shape.bytes_per_parameter == 4 else (limits.bfloat16_tflops, 2)
    )
    num_reduces = 2 * shape.num_layers if limits.num_devices > 1 else 0  # of attention and of MLP
    if mode == EAGER:
        kernels_ms = (shape.num_layers + limits.layers_outside) * limits.eager_layer_ms
    else:
        kernels_ms = (shape.num_layers * shape.layer_kernels + KERNELS_OUTSIDE) * limits.kernel_ms + limits.host_ms
    return (
        read / (REACHED_BANDWIDTH * limits.memory_gb_per_second * 1e6),
        operations(shape, tokens, kv_length) / limits.num_devices / (peak * 1e9),
        kernels_ms,
        num_reduces * all_reduce_ms(limits, tokens * shape.hidden_size * activation_bytes),
    )


def _latency_ms(parts_ms: Floats, mode: str) -> Floats:
    """Latency [...] of forwards whose ``_parts_ms`` are given, [..., 4]."""
    device_ms = parts_ms[..., :2].max(-1) + parts_ms[..., 3]
    # The host launches kernels ahead of the device. Captured, each small kernel waits for the one before it.
    return np.maximum(device_ms, parts_ms[..., 2]) if mode == EAGER else device_ms + parts_ms[..., 2]


def anchored(limits: DatasheetLimits, measured: Sequence[CostTable], mode: str = EAGER) -> DatasheetLimits:
    """Scale bandwidth, peak throughput and the time of launches, or else of captured kernels and the host, to tables
    measured on the device in a mode, by least squares of log latency.

    Limits that no measured point depends on are not changed. ``round_ms`` becomes the median of the tables.
    """
    from scipy.optimize import minimize

    parts = [(table.target_shape, surface) for table in measured for surface in (table.decode, table.verify)]
    for draft in (draft for table in measured for draft in table.drafts):
        parts += [(draft.shape, surface) for surface in (draft.draft_first, draft.draft_level)]
    points = [
        (shape, point)
        for shape, surface in parts
        if shape is not None and shape.has_forward_pass
        for point in surface.points
    ]
    if not points:
        return limits
    latency_ms = np.array([point.latency_ms for _, point in points])
    parts_ms = np.array([_parts_ms(shape, limits, point.tokens, point.kv_length, mode) for shape, point in points])

    def error(logs: Floats) -> float:
        """Mean squared error with the parts scaled by ``exp(logs)``, but for the sums over devices."""
        residuals = np.log(_latency_ms(parts_ms * np.exp([*logs, 0.0]), mode) / latency_ms)
        return float((residuals**2).mean() + REGULARIZATION * (logs**2).sum())

    # The error has no slope in a part that is never the largest, so minimize from several starting points.
    starts = [np.array(start, np.float64) for start in itertools.product((0.0, 2.0), repeat=3)]
    fits = [minimize(error, start, method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-10}) for start in starts]
    memory, arithmetic, kernels = np.exp(min(fits, key=lambda fit: float(fit.fun)).x).tolist()
    kernel_time = "eager_layer_ms" if mode == EAGER else "kernel_ms"
    return limits.model_copy(
        update={
            "memory_gb_per_second": limits.memory_gb_per_second / memory,
            "bfloat16_tflops": limits.bfloat16_tflops / arithmetic,
            "float32_tflops": limits.float32_tflops / arithmetic,
            kernel_time: getattr(limits, kernel_time) * kernels,
            "host_ms": limits.host_ms * (1 if mode == EAGER else kernels),
            "round_ms": float(np.median([draft.overhead.round_ms for table in measured for draft in table.drafts])),
        }
    )


def _surface(shape: ModelShape, limits: DatasheetLimits, tokens: tuple[int, ...], mode: str) -> Surface:
    """Latencies of forwards."""
    return Surface(
        points=[
            Point(tokens=n, kv_length=m, samples_ms=[step_ms(shape, limits, n, m, mode)])
            for n, m in itertools.product(tokens, KV_LENGTHS)
        ]
    )


def _prefill(shape: ModelShape, limits: DatasheetLimits) -> PrefillCost:
    """Latency of a prefill. A vision tower multiplies every patch by all of its weights; attention between patches,
    about a tenth of that, is not counted.
    """
    short, long = (step_ms(shape, limits, n, 0) for n in (64, 1024))
    per_token = (long - short) / (1024 - 64)
    peak = limits.float32_tflops if shape.bytes_per_parameter == 4 else limits.bfloat16_tflops
    return PrefillCost(
        intercept_ms=short - 64 * per_token,
        per_token_ms=per_token,
        image_ms=shape.vision_layers * limits.eager_layer_ms,
        patch_ms=2 * shape.vision_parameters / (peak * 1e9),
        samples=[],
    )


def estimate_table(
    cards: str,
    *,
    target: ModelReference,
    target_shape: ModelShape,
    drafts: Sequence[tuple[ModelReference, Subnet, ModelShape]],
    precision: str,
    mode: str = EAGER,
    capture_sizes: tuple[int, ...] = (),
    measured: Sequence[CostTable] = (),
) -> CostTable:
    """Estimate the cost table of a target and its drafts from the datasheet of a device. Prefills are always eager.
    Several devices share the target; drafts run on one of them.

    Args:
        cards: the devices, which ``find_limits`` knows.
        drafts: each with a subnet and the shape that it has with this subnet.
        measured: tables to scale the limits to; only measured ones of this device, precision and mode are used.
    """
    datasheet = find_limits(cards)
    assert datasheet is not None, f"no datasheet of {cards}"
    anchors = [
        table
        for table in measured
        if (table.device.name, table.precision, table.mode) == (cards, precision, mode)
        and (mode == EAGER or table.steps_version == STEPS_VERSION)
        and (not table.estimated and table.target_shape is not None)
    ]
    limits = anchored(datasheet, anchors, mode)
    of_drafts = limits.model_copy(update={"num_devices": 1})
    tokens = capture_sizes or TOKENS
    overhead = Overhead(round_ms=limits.round_ms, level_ms=float(np.round(limits.round_ms / 8, 3)))
    return CostTable(
        provenance=stamp(),
        device=Fingerprint(
            name=split_cards(cards)[1],
            kind="cuda",
            model=limits.model,
            num_cores=0,
            memory_bytes=int(limits.memory_gb * 1e9),
        ).shared_by(limits.num_devices),
        precision=precision,
        mode=mode,
        steps_version=STEPS_VERSION,
        capture_sizes=capture_sizes,
        estimated=True,
        num_anchors=len(anchors),
        target=target,
        target_shape=target_shape,
        decode=_surface(target_shape, limits, (1,), mode),
        verify=_surface(target_shape, limits, tokens, mode),
        prefill=_prefill(target_shape, limits),
        drafts=[
            DraftCosts(
                draft=draft,
                subnet=subnet.of_price,
                shape=shape,
                draft_first=_surface(shape, of_drafts, tokens, mode),
                draft_level=_surface(shape, of_drafts, tokens, mode),
                prefill=_prefill(shape, of_drafts),
                overhead=overhead,
            )
            for draft, subnet, shape in drafts
        ],
    )
