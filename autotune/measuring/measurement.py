"""Measures cost tables with the code that decodes: steps of a ``Decoder`` at the sizes of a ``Sampler``, prefills, and
real decoding for the overhead outside the models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autotune.cost.request_costs import Overhead, PrefillCost, fit_costs
from autotune.cost.table import CostTable, DraftCosts
from autotune.documents.execution import STEPS_VERSION
from autotune.documents.provenance import ModelReference, stamp
from autotune.drafters.checkpoint import LoadedDraft
from autotune.errors import UserError
from autotune.machine.contention_monitor import ContentionMonitor
from autotune.machine.device import fingerprint
from autotune.measuring.jobs import JobLog
from autotune.measuring.request_timing import (
    LEAST_PREFILLS,
    OverheadRuns,
    PrefillTimer,
    choose_prefill_threads,
    overhead_runs,
)
from autotune.measuring.sampling import DECODE, DRAFT_FIRST, DRAFT_LEVEL, VERIFY, Sampler
from autotune.measuring.settings import CostSettings
from autotune.measuring.step_bench import StepBench, choose_threads
from autotune.modeling.attention import choose_attention
from autotune.modeling.host import limited_threads
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.workloads.workload import Workload

Report = Callable[[int, int], None]
"""Called as report(done, total)."""
DEFAULT_SETTINGS = CostSettings()
ACCEPTED_EXCESS = 0.1  # of the time limit, before it is mentioned
# Shares of the time limit; the rest is for the steps. Their order is the order of the measurements, so that the steps,
# most of the time, use exactly what the others have left.
THREADS_SHARE, PREFILL_SHARE, OVERHEAD_SHARE = 0.08, 0.12, 0.2


def kv_lengths_for(shortest: int, longest: int) -> tuple[int, int, int]:
    """Three KV lengths that span a workload."""
    first = max(16, shortest)
    last = max(32, longest, first + 8)
    return first, (first + last) // 2, last


def measure_costs(
    target: Target,
    target_reference: ModelReference,
    drafts: list[tuple[LoadedDraft, ModelReference]],
    processor: Any,
    workload: Workload,
    *,
    settings: CostSettings = DEFAULT_SETTINGS,
    log: JobLog | None = None,
    report: Report = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> CostTable:
    """Measure a target and its drafts on their device, with prompts of a workload for prefills and overhead.

    ``settings.time_limit_s`` covers everything. Slow models get fewer repetitions, sizes and prompts; where even the
    least exceeds the limit, ``say`` is called with a line about it.

    Args:
        log: file that keeps the timed steps, so that an interrupted measurement continues; None keeps nothing.
        clock: seconds, with which the time limit is compared.
    """
    if not drafts:
        raise UserError("a cost table needs a draft; name one with --draft")
    started, limit_s = clock(), settings.time_limit_s
    every_row = target.text.quantization is not None or target.device.type == "cpu"
    settings = replace(settings, every_row=every_row)
    monitor = ContentionMonitor(str(target.device))
    loaded = [draft for draft, _ in drafts]
    first = workload.prompts[0]
    token_sampler = Decoder(target).sampler(**first.inputs(processor, target.device), **first.settings.generation)
    if target.device.type != "cpu" and (slow := token_sampler.one_by_one):
        say(
            f"{', '.join(slow)} of the target's generation config: the tokens of a round are decided one by one, and so priced"
        )
    benches = [StepBench(target, draft, settings, token_sampler) for draft in loaded]
    threads = _choose_threads(benches, limit_s, log, clock)

    def plain_step() -> float:
        with limited_threads(threads), torch.inference_mode():
            return benches[0].decode_ms(settings.kv_lengths[0])

    until = clock() + THREADS_SHARE * limit_s / 2
    prefill_threads = choose_prefill_threads(target, processor, workload, until=until, clock=clock)
    prefills = PrefillTimer(target, loaded, processor, workload, plain_step, prefill_threads)
    prefills.run(PREFILL_SHARE * limit_s, clock=clock)
    share_s = OVERHEAD_SHARE * limit_s / len({reference for _, reference in drafts})
    runs: dict[ModelReference, OverheadRuns] = {}
    for draft, reference in drafts:
        if reference not in runs:  # the number of heads does not change it
            runs[reference] = overhead_runs(
                target, draft, processor, workload, plain_step, settings, threads=threads, limit_s=share_s, clock=clock
            )
    spent_s = clock() - started

    def report_steps(share: float) -> None:
        report(round(10 * (spent_s + share * max(0.0, limit_s - spent_s))), round(10 * max(limit_s, spent_s)))

    networks: dict[ModelReference, int] = {}
    subnets = [(networks.setdefault(reference, len(networks)), draft.subnet) for draft, reference in drafts]
    sampler = Sampler(benches, settings, subnets=subnets, log=log, clock=clock)
    with limited_threads(threads), torch.inference_mode():
        sampler.run(started + limit_s, report_steps)
    if (took_s := clock() - started) > (1 + ACCEPTED_EXCESS) * limit_s:
        say(
            f"the cost table took {took_s:.0f} s, more than its limit of {limit_s:.0f} s: the least, a "
            f"sample of a few sizes of every draft and {LEAST_PREFILLS} prefills, takes that long here"
        )
    observations, unit_ms = sampler.observations(), sampler.plain_ms
    surfaces, ratios = sampler.surfaces(observations), observations.verify_ratios
    (prefill,) = fit_costs(PrefillCost, [_in_ms(prefills.target_samples, unit_ms)])
    fitted = fit_costs(Overhead, [_in_ms(of_draft, unit_ms) for of_draft in runs.values()])
    overheads = dict(zip(runs, fitted, strict=True))
    draft_prefills = [_in_ms(samples, unit_ms) for samples in prefills.draft_samples]
    prefill_costs: dict[int, PrefillCost] = {}
    for network in networks.values():
        numbers = [number for number, (own, _) in enumerate(subnets) if own == network]
        costs = fit_costs(PrefillCost, [draft_prefills[number] for number in numbers])
        prefill_costs |= dict(zip(numbers, costs, strict=True))
    return CostTable(
        provenance=stamp(monitor.contention()),
        device=fingerprint(str(target.device)),
        precision=target.text.precision,
        mode=settings.mode,
        steps_version=STEPS_VERSION,
        capture_sizes=settings.capture_sizes,
        attention_backends=choose_attention(target.device),
        threads=threads,
        prefill_threads=prefill_threads,
        disturbed_samples=sampler.disturbed_samples,
        target=target_reference,
        target_shape=target.shape,
        decode=surfaces[DECODE],
        verify=surfaces[VERIFY],
        prefill=prefill,
        drafts=[
            DraftCosts(
                draft=reference,
                heads=draft.subnet.heads,
                vocabulary=draft.subnet.vocabulary,
                weights=draft.subnet.weights,
                num_parameters=draft.num_parameters,
                kv_bytes_per_token=draft.kv_bytes_per_token,
                shape=draft.shape,
                draft_first=surfaces[f"{DRAFT_FIRST} {number}"],
                draft_level=surfaces[f"{DRAFT_LEVEL} {number}"],
                prefill=prefill_costs[number],
                overhead=overheads[reference],
                verify_ratio=ratios.get(number, (1.0, 0.0))[0],
                verify_error=ratios.get(number, (1.0, 0.0))[1],
            )
            for number, (draft, reference) in enumerate(drafts)
        ],
    )


def _choose_threads(
    benches: list[StepBench], limit_s: float, log: JobLog | None, clock: Callable[[], float]
) -> int | None:
    """The number of CPU threads: the number of the samples in the log, or else the best one."""
    if log is not None and log.is_begun:
        return log.threads
    threads = choose_threads(benches, until=clock() + THREADS_SHARE * limit_s, clock=clock)
    if log is not None:
        log.begin(threads)
    return threads


def _in_ms(samples: Sequence[tuple[*tuple[int, ...], float]], unit_ms: float) -> list[Any]:
    """Samples whose last entry is in milliseconds, of ones in plain steps."""
    return [(*counts, unit_ms * duration) for *counts, duration in samples]
