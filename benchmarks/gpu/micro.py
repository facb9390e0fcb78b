"""Stages of the card and of single operations: products of matrices, attention, top-k, replays, an empty round trip.

An operation is captured several times in one graph, products over weights that together do not fit into the device's
cache, and the graph's time is divided by their number.
"""

from __future__ import annotations

import itertools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.stage import DEVICE, Job

PRODUCTS = {
    **{"qkv": (4096, (4096, 1024, 1024)), "o": (4096, (4096,)), "gate and up": (4096, (14336, 14336))},
    **{"down": (14336, (4096,)), "head": (4096, (128256,)), "qkv of the draft": (8192, (4096, 1024, 1024))},
    **{"fc of the draft": (12288, (4096,)), "head of the draft": (4096, (32000,))},
}
"""Products of Llama-3.1-8B and its EAGLE-3 head: inputs, and outputs of those that read the same inputs."""
CACHE_BYTES = 200e6  # more than the cache of a device
HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
COPIES, REPEATS = 8, 20
CARD = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,memory.total"
Calls = Sequence[Callable[[], Any]]


def captured(calls: Calls) -> Callable[[], None]:
    """A graph of these functions; call it to replay it."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        kept = [call() for _ in range(2) for call in calls]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, pool=None, stream=stream, capture_error_mode="thread_local"):
        kept = [call() for call in calls]
    return lambda _=kept: graph.replay()


def host_us(call: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
    """Median time of the host in a function, in microseconds; ``before`` is not timed."""
    found = []
    for _ in range(REPEATS):
        before()
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return round(statistics.median(found) * 1e6, 2)


def device_us(calls: Calls) -> float:
    """Median time of one of these functions on the device, captured together."""
    run = captured(calls)
    return round(host_us(lambda: ([run() for _ in range(REPEATS)], torch.cuda.synchronize())) / REPEATS / len(calls), 3)


def env(job: Job) -> None:
    """Card, clocks, driver, versions, the bandwidth of a copy, and the time of an addition in Python."""
    source = torch.ones(1 << (10 if job.dry else 30), dtype=torch.uint8, device=DEVICE)
    destination = torch.empty_like(source)
    command = ["true"] if job.dry else ["nvidia-smi", f"--query-gpu={CARD}", "--format=csv"]
    found = {
        "card": subprocess.run(command, capture_output=True, text=True).stdout.splitlines(),
        "versions": {"python": sys.version, "torch": torch.__version__, "cuda": torch.version.cuda},
        "copy_tb_s": round(2 * source.nbytes / device_us([lambda: destination.copy_(source)]) / 1e6, 3),
        "addition_ns": host_us(lambda: sum(1 for _ in range(1000))),
    }
    job.save(found)


def operations(job: Job) -> None:
    """Every table in turn. A row that fails holds its error."""
    global REPEATS
    REPEATS = 1 if job.dry else REPEATS
    found: dict[str, list[dict[str, Any]]] = {}
    for table, (function, cases) in TABLES.items():
        for case in cases:
            given = {name: value // 64 if job.dry and value >= 600 else value for name, value in case.items()}
            try:
                result = function(**given)
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}"[:300]}
            found.setdefault(table, []).append({**given, **result})
            job.save(found)


def product(m: int, inputs: int, **outputs: int) -> dict[str, Any]:
    """Products of m rows: one by one, merged, and merged with weights in float8 and inputs that are rounded first."""
    sizes = list(outputs.values())
    copies = math.ceil(CACHE_BYTES / (2 * inputs * sum(sizes))) if inputs > 1000 else 1
    x = torch.randn(m, inputs, device=DEVICE, dtype=torch.bfloat16)
    weights = [torch.randn(sum(sizes), inputs, device=DEVICE, dtype=torch.bfloat16) for _ in range(copies)]
    small, ones = [weight.to(torch.float8_e4m3fn) for weight in weights], torch.ones(1, sum(sizes), device=DEVICE)

    def scaled(weight: Tensor) -> Tensor:
        scale = x.abs().amax(1, keepdim=True).float().clamp_min(1e-6) / 448.0
        rows = (x / scale).to(torch.float8_e4m3fn)
        return torch._scaled_mm(rows, weight.t(), scale_a=scale, scale_b=ones, out_dtype=torch.bfloat16)

    parts = [part for weight in weights for part in weight.split(sizes)]
    return {
        "separate_us": round(len(sizes) * device_us([lambda w=w: functional.linear(x, w) for w in parts]), 3),
        "merged_us": device_us([lambda w=w: functional.linear(x, w) for w in weights]),
        "float8_us": device_us([lambda w=w: scaled(w) for w in small]),
    }


def attention(n: int, kv: int) -> dict[str, Any]:
    """A layer's attention of n tokens in a row after kv: by the runtime's operation, by SDPA with a mask, and the
    largest difference between both.
    """
    from autotune.modeling.tree_attention import attend

    query = torch.randn(HEADS, n, HEAD_SIZE, device=DEVICE, dtype=torch.bfloat16)
    keys, values = (torch.randn(KV_HEADS, kv + n, HEAD_SIZE, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    bits = [[0, -1 if row == 63 else (1 << row + 1) - 1] for row in range(n)]
    packed, mask = torch.tensor([[0, kv], *bits], device=DEVICE), torch.ones(n, kv + n, dtype=torch.bool).tril(kv)
    options = {"attn_mask": mask.to(DEVICE), "scale": HEAD_SIZE**-0.5, "enable_gqa": True}
    split = lambda: attend(query, keys, values, packed, HEAD_SIZE**-0.5)  # noqa: E731
    masked = lambda: functional.scaled_dot_product_attention(query[None], keys[None], values[None], **options)  # noqa: E731
    difference = (split().float() - masked()[0].transpose(0, 1).float()).abs().max()
    times = {"split_us": device_us([split] * COPIES), "masked_us": device_us([masked] * COPIES)}
    return {**times, "largest_difference": round(float(difference), 5)}


def top_k(k: int, rows: int, vocabulary: int) -> dict[str, Any]:
    """The best k of each row of logits, with their log-probabilities."""
    logits = torch.randn(rows, vocabulary, device=DEVICE, dtype=torch.bfloat16)
    return {"us": device_us([lambda: logits.topk(k).values.float() - logits.logsumexp(-1, keepdim=True)] * COPIES)}


def replay(nodes: int) -> dict[str, Any]:
    """The host's time for launching a graph of small kernels, and the time until it has run."""
    x = torch.zeros(32, device=DEVICE)
    run = captured([lambda: x.add_(1.0)] * nodes)
    launch_us = host_us(run, before=torch.cuda.synchronize)
    return {"launch_us": launch_us, "total_us": host_us(lambda: (run(), torch.cuda.synchronize()))}


def round_trip(nodes: int) -> dict[str, Any]:
    """A step without work: integers from pinned memory, small kernels, results to pinned memory, an event. The host
    waits for the event, or asks for it again and again.
    """
    there = torch.zeros(64, dtype=torch.long, pin_memory=True)
    back = torch.zeros(64, dtype=torch.int32, pin_memory=True)
    x, event = torch.zeros(64, dtype=torch.long, device=DEVICE), torch.cuda.Event()
    ends = (lambda: x.copy_(there, non_blocking=True)), (lambda: back.copy_(x.int(), non_blocking=True))
    run = captured([ends[0], *[lambda: x.add_(1)] * nodes, ends[1]])

    def spin() -> None:
        if not any(event.query() for _ in range(10_000)):  # a rehearsed device is never done by itself
            event.synchronize()

    waits = {"synchronize_us": event.synchronize, "query_us": spin}
    return {name: host_us(lambda wait=wait: (run(), event.record(), wait())) for name, wait in waits.items()}


def grid(**values: Sequence[int]) -> list[dict[str, int]]:
    """All combinations."""
    return [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]


TABLES: dict[str, tuple[Callable[..., dict[str, Any]], list[dict[str, int]]]] = {
    "round trip": (round_trip, grid(nodes=[1, 30])),
    "replay": (replay, grid(nodes=[25, 100, 450, 1300])),
    "attention": (attention, grid(n=[1, 8, 16, 64], kv=[600, 4096, 16384])),
    "top-k": (top_k, grid(k=[1, 10, 16], rows=[1, 10, 32], vocabulary=[32000, 128256])),
    **{
        name: (
            product,
            grid(m=[1, 8, 16, 32, 64, 128], inputs=[inputs], **{f"output_{i}": [o] for i, o in enumerate(outputs)}),
        )
        for name, (inputs, outputs) in PRODUCTS.items()
    },
}
