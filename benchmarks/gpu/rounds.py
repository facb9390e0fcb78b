"""Stages of rounds: times of arms in turns and in random order, settings of the compiler, kernels and their gaps."""

from __future__ import annotations

import gzip
import json
import random
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from autotune.modeling.graph_memory import graph_memory
from autotune.runtime.decoder import Decoder
from benchmarks.gpu.models import SWITCHES, TREES, decoders, load_random, write_models
from benchmarks.gpu.stage import DEVICE, Job

SOME = ("chain", "eagle2")
LLAMA, QWEN = "Llama-3.1-8B", "Qwen2.5-VL-7B"
TOKENS, REQUESTS = 24, 5
SETTINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "top-p": {"temperature": 0.6, "top_p": 0.9}}
FLAGS: dict[str, dict[str, Any]] = {
    **{"layer": {}, "pdl": {"triton.enable_pdl": True}, "combo kernels": {"combo_kernels": True}},
    **{"coordinate descent": {"coordinate_descent_tuning": True}, "whole step": {}},
}
"""Settings of inductor, each of which compiles anew."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LEAST_GAP_US = 5.0  # of the gaps that the host causes; those between the kernels of a graph are shorter


def short(job: Job) -> None:
    """Llama-3.1-8B after prompts of 600 tokens."""
    measure(job, {LLAMA: 600})


def long(job: Job) -> None:
    """Llama-3.1-8B after 4,000 tokens, and Qwen2.5-VL-7B after 600."""
    measure(job, {LLAMA: 4000, QWEN: 600})


def measure(job: Job, lengths: dict[str, int]) -> None:
    """Prepare the arms of every switch, and time requests of all of them."""
    found: dict[str, list[dict[str, Any]]] = {"preparations": [], "rounds": [], "late captures": []}
    for target, length in lengths.items():
        arms: dict[tuple[str, ...], Decoder] = {}
        model, head, inputs = load_random(job, target), write_models(job, target), prompt(job, length)
        common = {"target": target, "prompt_tokens": length}
        # Compiled steps first: merging products moves weights, which drops all captures.
        for switch in sorted(job.switches, key=lambda switch: SWITCHES[switch].mode != "compiled"):
            prepared, row = prepare(model, head, switch, inputs, SOME if job.dry else TREES)
            arms |= {(switch, tree): decoder for tree, decoder in prepared.items()}
            found["preparations"].append({**common, "switch": switch, **row})
            job.save(found)
        before, captures = found["rounds"], graph_memory(torch.device(DEVICE)).num_kept
        timed: dict[tuple[str, ...], list[tuple[float, ...]]] = {}
        for setting, arguments in SETTINGS.items():
            for repeat in range(2 if job.dry else 1 + REQUESTS):
                for arm in random.Random(repeat).sample([*arms], len(arms)):
                    counts = time_request(arms[arm], inputs, repeat, arguments, 4 if job.dry else TOKENS)
                    if repeat:  # the first is a warm-up
                        timed.setdefault((setting, *arm), []).append(counts)
                rows = [{**common, **named(key), **summary(values)} for key, values in timed.items()]
                found["rounds"] = before + rows
                job.save(found)
        late = graph_memory(torch.device(DEVICE)).num_kept - captures  # such requests took longer
        found["late captures"].append({**common, "captures": late})
        job.save(found)
        del model, arms, prepared
        torch.cuda.empty_cache()


def prompt(job: Job, length: int) -> dict[str, Any]:
    """A prompt of random tokens; of a twentieth of them in a dry run."""
    return {"input_ids": torch.randint(10, 300, (1, length // (20 if job.dry else 1)), device=DEVICE)}


def prepare(
    model: Any, head: str, switch: str, inputs: dict[str, Any], trees: Iterable[str] = SOME
) -> tuple[dict[str, Decoder], dict[str, Any]]:
    """Capture what the decoders of a switch need. Returns the decoders by tree, and what the captures took or why there
    are none.
    """
    made: dict[str, Decoder] = {}
    memory, started, error = graph_memory(torch.device(DEVICE)), time.perf_counter(), None
    captures, num_bytes = memory.num_kept, memory.memory_bytes
    with warnings.catch_warnings(record=True) as warned:
        try:
            with SWITCHES[switch].preparing():
                made = dict(decoders(model, head, SWITCHES[switch], trees))
                for decoder in reversed(made.values()):  # the largest trees first
                    decoder.prepare(inputs["input_ids"].shape[1] + TOKENS)
        except Exception as problem:  # this device or package does not have the switch
            made, error = {}, f"{type(problem).__name__}: {problem}"[:300]
    return made, {
        "seconds": round(time.perf_counter() - started, 2),
        "captures": memory.num_kept - captures,
        "mib": round((memory.memory_bytes - num_bytes) / 2**20, 1),
        "warnings": sorted({str(warning.message)[:200] for warning in warned}),
        "error": error,
    }


def time_request(
    decoder: Decoder, inputs: dict[str, Any], seed: int, settings: dict[str, Any], tokens: int
) -> tuple[float, ...]:
    """Milliseconds, draft levels and nodes a round, of a request."""
    stats = decoder.generate(**inputs, **settings, seed=seed, max_new_tokens=tokens, min_new_tokens=tokens).stats
    total = stats.decode_ms - stats.draft_prefill_ms, stats.draft_forwards, sum(stats.verified_nodes)
    return tuple(value / stats.rounds for value in total)


def named(key: tuple[str, ...]) -> dict[str, str]:
    """Setting, switch and tree of an arm."""
    return dict(zip(("setting", "switch", "tree"), key, strict=True))


def summary(requests: list[tuple[float, ...]]) -> dict[str, Any]:
    """Quartiles of the milliseconds of rounds, and medians of their levels and nodes."""
    quartiles, levels, nodes = np.quantile(np.array(requests), (0.25, 0.5, 0.75), axis=0).round(4).T.tolist()
    return {"quartiles_ms": quartiles, "levels": levels[1], "nodes": nodes[1], "requests": len(requests)}


def flags(job: Job) -> None:
    """Plain steps of Llama-3.1-8B with one layer compiled, by settings of the compiler, and with the whole step
    compiled; and the seconds until they are captured, without what earlier processes have compiled.
    """
    import torch._inductor.config as inductor
    from torch._inductor.utils import fresh_cache

    found, model, head, inputs = [], load_random(job, LLAMA), write_models(job, LLAMA), prompt(job, 600)
    for name, settings in FLAGS.items():
        torch._dynamo.reset()
        switch, text = "compiled", model.get_decoder()
        if name == "whole step":
            switch = "captured"
            if not job.dry:  # Dynamo asks CUDA for its device
                text.forward = torch.compile(text.forward)
        with fresh_cache(), inductor.patch(settings):
            made, row = prepare(model, head, switch, inputs, trees=())
        counts = [
            time_request(decoder, inputs, seed, SETTINGS["greedy"], 4 if job.dry else TOKENS)
            for decoder in made.values()
            for seed in range(1 + REQUESTS)
        ]
        found.append({"flag": name, **row, **(summary(counts[1:]) if counts else {})})
        job.save(found)


def kernels(job: Job) -> None:
    """Tables of the kernels of a few rounds, by switch and tree, their gaps, and the traces of ``eagle2``."""
    found: list[dict[str, Any]] = []
    model, head, inputs = load_random(job, LLAMA), write_models(job, LLAMA), prompt(job, 600)
    activity, sort = ProfilerActivity.CUDA, "self_device_time_total"
    if job.dry:
        activity, sort = ProfilerActivity.CPU, "self_cpu_time_total"
    for switch in job.switches:
        made, row = prepare(model, head, switch, inputs)
        found.append({"switch": switch, **row})
        for tree in made:
            time_request(made[tree], inputs, 0, SETTINGS["greedy"], 4)
            with profile(activities=[activity]) as profiled:
                time_request(made[tree], inputs, 0, SETTINGS["greedy"], 4)
            print(switch, tree, profiled.key_averages().table(sort_by=sort, row_limit=16, max_name_column_width=70))
            trace = Path(job.file).with_suffix(f".{switch}-{tree}.json")
            profiled.export_chrome_trace(str(trace))
            found.append({**named(("greedy", switch, tree)), **gaps(json.loads(trace.read_text())["traceEvents"])})
            if tree == "eagle2":
                trace.with_suffix(".json.gz").write_bytes(gzip.compress(trace.read_bytes()))
            trace.unlink()
            job.save(found)


def gaps(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Time in which the device was busy, and quartiles of its gaps that the host causes, from the events of a trace."""
    spans = sorted((one["ts"], one["ts"] + one["dur"]) for one in events if one.get("cat") in ON_DEVICE)
    begins, ends = np.array(spans or [(0.0, 0.0)]).T
    found = begins[1:] - np.maximum.accumulate(ends)[:-1]
    caused = found[found > LEAST_GAP_US]
    quartiles = np.quantile(caused, (0.25, 0.5, 0.75)).round(1).tolist() if len(caused) else []
    return {"busy_us": float((ends - begins).sum()), "gaps": len(caused), "gap_quartiles_us": quartiles}
