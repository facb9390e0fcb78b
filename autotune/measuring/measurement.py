"""Measures cost tables with the code that decodes: steps of a ``Decoder`` at the sizes of a ``Sampler``, prefills, and
real decoding for the overhead outside the models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autotune.cost.request_costs import Overhead, PrefillCost, fit_costs
from autotune.cost.surface import Surface
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

    ``settings.time_limit_s`` covers everything, by ``clock``. Slow models get fewer repetitions, sizes and prompts.

    Args:
        log: file that keeps the timed steps, so that an interrupted measurement continues; None keeps nothing.
    """
    if not drafts:
        raise UserError("a cost table needs a draft; name one with --draft")
    started, limit_s = clock(), settings.time_limit_s
    settings = replace(settings, every_row=target.text.quantization is not None or target.device.type == "cpu")
    monitor = ContentionMonitor(str(target.device))
    benches = _benches(target, drafts, processor, workload, settings, say)
    threads = _choose_threads(benches, limit_s, log, clock)

    def plain_step() -> float:
        with limited_threads(threads), torch.inference_mode():
            return benches[0].decode_ms(settings.kv_lengths[0])

    prefills, runs = _time_requests(target, drafts, processor, workload, plain_step, settings, threads, clock)
    sampler = _time_steps(benches, drafts, settings, log, started=started, threads=threads, report=report, clock=clock)
    if (took_s := clock() - started) > (1 + ACCEPTED_EXCESS) * limit_s:
        say(
            f"the cost table took {took_s:.0f} s, more than its limit of {limit_s:.0f} s: the least, a "
            f"sample of a few sizes of every draft and {LEAST_PREFILLS} prefills, takes that long here"
        )
    observations, unit_ms = sampler.observations(), sampler.plain_ms
    surfaces = sampler.surfaces(observations)
    (prefill,) = fit_costs(PrefillCost, [_in_ms(prefills.target_samples, unit_ms)])
    return CostTable(
        provenance=stamp(monitor.contention()),
        device=fingerprint(str(target.device)),
        precision=target.text.precision,
        mode=settings.mode,
        steps_version=STEPS_VERSION,
        capture_sizes=settings.capture_sizes,
        attention_backends=choose_attention(target.device),
        threads=threads,
        prefill_threads=prefills.threads,
        disturbed_samples=sampler.disturbed_samples,
        target=target_reference,
        target_shape=target.shape,
        decode=surfaces[DECODE],
        verify=surfaces[VERIFY],
        prefill=prefill,
        drafts=_draft_costs(drafts, surfaces, observations.verify_ratios, prefills, runs, unit_ms),
    )


def _benches(
    target: Target,
    drafts: Sequence[tuple[LoadedDraft, ModelReference]],
    processor: Any,
    workload: Workload,
    settings: CostSettings,
    say: Callable[[str], None],
) -> list[StepBench]:
    """The bench of every draft, which decides tokens as requests of the workload do."""
    first = workload.prompts[0]
    token_sampler = Decoder(target).sampler(**first.inputs(processor, target.device), **first.settings.generation)
    if target.device.type != "cpu" and (slow := token_sampler.one_by_one):
        say(
            f"{', '.join(slow)} of the target's generation config: the tokens of a round are decided one by one, and so priced"
        )
    return [StepBench(target, draft, settings, token_sampler) for draft, _ in drafts]


def _time_steps(
    benches: Sequence[StepBench],
    drafts: Sequence[tuple[LoadedDraft, ModelReference]],
    settings: CostSettings,
    log: JobLog | None,
    *,
    started: float,
    threads: int | None,
    report: Report,
    clock: Callable[[], float],
) -> Sampler:
    """Time steps in what is left of the time limit since ``started``."""
    spent_s, limit_s = clock() - started, settings.time_limit_s

    def report_steps(share: float) -> None:
        report(round(10 * (spent_s + share * max(0.0, limit_s - spent_s))), round(10 * max(limit_s, spent_s)))

    networks: dict[ModelReference, int] = {}
    subnets = [(networks.setdefault(reference, len(networks)), draft.subnet) for draft, reference in drafts]
    sampler = Sampler(benches, settings, subnets=subnets, log=log, clock=clock)
    with limited_threads(threads), torch.inference_mode():
        sampler.run(started + limit_s, report_steps)
    return sampler


def _time_requests(
    target: Target,
    drafts: Sequence[tuple[LoadedDraft, ModelReference]],
    processor: Any,
    workload: Workload,
    plain_step: Callable[[], float],
    settings: CostSettings,
    threads: int | None,
    clock: Callable[[], float],
) -> tuple[PrefillTimer, dict[ModelReference, OverheadRuns]]:
    """Time prefills, and real decoding with every draft for its overhead, in their shares of the time limit."""
    limit_s = settings.time_limit_s
    until = clock() + THREADS_SHARE * limit_s / 2
    prefill_threads = choose_prefill_threads(target, processor, workload, until=until, clock=clock)
    loaded = [draft for draft, _ in drafts]
    prefills = PrefillTimer(target, loaded, processor, workload, plain_step, prefill_threads)
    prefills.run(PREFILL_SHARE * limit_s, clock=clock)
    share_s = OVERHEAD_SHARE * limit_s / len({reference for _, reference in drafts})
    runs: dict[ModelReference, OverheadRuns] = {}
    for draft, reference in drafts:
        if reference not in runs:  # the number of heads does not change it
            runs[reference] = overhead_runs(
                target, draft, processor, workload, plain_step, settings, threads=threads, limit_s=share_s, clock=clock
            )
    return prefills, runs


def _draft_costs(
    drafts: Sequence[tuple[LoadedDraft, ModelReference]],
    surfaces: Mapping[str, Surface],
    verify_ratios: Mapping[int, tuple[float, float]],
    prefills: PrefillTimer,
    runs: Mapping[ModelReference, OverheadRuns],
    unit_ms: float,
) -> list[DraftCosts]:
    """The costs of every draft. Prefills of the subnets of a draft are fitted together, and their overhead is one."""
    fitted = fit_costs(Overhead, [_in_ms(timed, unit_ms) for timed in runs.values()])
    overheads = dict(zip(runs, fitted, strict=True))
    draft_prefills = [_in_ms(samples, unit_ms) for samples in prefills.draft_samples]
    prefill_costs: dict[int, PrefillCost] = {}
    for network in runs:
        numbers = [number for number, (_, reference) in enumerate(drafts) if reference == network]
        costs = fit_costs(PrefillCost, [draft_prefills[number] for number in numbers])
        prefill_costs |= dict(zip(numbers, costs, strict=True))
    return [
        DraftCosts(
            draft=reference,
            subnet=draft.subnet.of_price,
            shape=draft.shape,
            draft_first=surfaces[f"{DRAFT_FIRST} {number}"],
            draft_level=surfaces[f"{DRAFT_LEVEL} {number}"],
            prefill=prefill_costs[number],
            overhead=overheads[reference],
            verify_ratio=verify_ratios.get(number, (1.0, 0.0))[0],
            verify_error=verify_ratios.get(number, (1.0, 0.0))[1],
        )
        for number, (draft, reference) in enumerate(drafts)
    ]


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
