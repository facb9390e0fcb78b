"""``autotune check``: exact gates first, which have no noise; then, if they leave it open, time."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from autotune.check.comparison import Comparison, launcher, open_sides, write_requests
from autotune.check.local_run import LocalRun, decode_locally, evidence_for
from autotune.check.output import junit
from autotune.check.result import COUNTS, TIME, CheckResult, Gate, Timing, verdict_of
from autotune.check.sequential import Design
from autotune.check.settings import CheckSettings
from autotune.check.worker_process import WorkerRequest
from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.provenance import stamp, workload_beside
from autotune.files import write_bytes
from autotune.machine.device import choose_device
from autotune.runtime.answer_keys import AnswerKeys
from autotune.runtime.load import load
from autotune.workloads.workload import Workload, load_workload


def run_check(settings: CheckSettings, console: Console) -> CheckResult:
    settings.require_consistent()
    profile = DecodingProfile.load(settings.profile)
    names = settings.workloads or [workload_beside(settings.profile, profile.workload.name)]
    workloads = [_evaluated(name, profile, settings) for name in names]
    design = Design(tolerance=settings.tolerance, limit=settings.limit, num_workloads=len(workloads))
    device = choose_device(settings.device)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autotune-check-")))
        sides = None
        if settings.against is not None:
            sides = stack.enter_context(open_sides(settings.against, settings.profile, folder, settings.dtype))
        runs, evidence, processor = _decode_all(settings, profile, workloads, device, console)
        gates = [gate for run, proof in zip(runs, evidence, strict=True) for gate in _local_gates(settings, run, proof)]
        timings: list[Timing | None] = [None] * len(runs)
        if sides is not None:
            requests = [write_requests(run, processor, folder / f"{number}") for number, run in enumerate(runs)]
            comparison = Comparison(sides, launcher(device), design, settings.seed, console)
            timings = _compare(comparison, runs, requests, gates, settings.budget_s)
    verdict, code = verdict_of(gates, inconclusive_fails=settings.on_inconclusive == "fail")
    result = CheckResult(
        provenance=stamp(),
        profile=str(settings.profile),
        hardware=runs[0].hardware,
        target=profile.target,
        lossless=all(point.lossless for point in profile.points),
        against=None if sides is None else sides.base.label,
        workloads=[run.result(timing) for run, timing in zip(runs, timings, strict=True)],
        gates=gates,
        verdict=verdict,
        exit_code=code,
    )
    if settings.junit is not None:
        write_bytes(settings.junit, junit(result))
    if changes := profile.provenance.changes(stamp()):
        console.say(
            f"changed since {settings.profile} was made: {changes}; what this costs is seen by --min-speedup, or by a new search"
        )
    print_result(result, console)
    return result


def _evaluated(name: str, profile: DecodingProfile, settings: CheckSettings) -> Workload:
    """The held-out prompts of a workload; the prompts of the profile's own workload as its search decoded them."""
    workload = load_workload(name, "evaluate", num_prompts=settings.num_prompts, format=settings.workload_format)
    given = settings.chat_template_kwargs
    searched, asked = (
        one.with_variables(profile.chat_template_kwargs if given is None else given).cut(
            settings.num_prompts, settings.max_new_tokens
        )
        for one in (workload.as_searched(profile.workload), workload)
    )
    known = {prompt.prompt_sha256 for prompt in profile.evidence.prompts}
    is_own = workload.name == profile.workload.name or any(prompt.sha256 in known for prompt in searched.prompts)
    return searched if is_own else asked  # the same prompts may be in a file of another name


def _decode_all(
    settings: CheckSettings, profile: DecodingProfile, workloads: Sequence[Workload], device: str, console: Console
) -> tuple[list[LocalRun], list[list[Decoded] | str], Any]:
    """Decode every workload in this process; returns the evidence about it and the processor too. Workers need the
    memory of the models, so these are freed.
    """
    decoder = load(settings.profile, device=device, dtype=settings.dtype, console=console)
    fit = decoder.processor, decoder.target.max_context, console.say
    workloads = [workload.fitting(*fit) for workload in workloads]
    keys = AnswerKeys(decoder.target, decoder.processor)
    evidence = [evidence_for(profile, workload, settings, keys) for workload in workloads]
    runs = []
    for workload in workloads:
        with console.stage(f"check of {workload.name}", len(workload.prompts)) as update:
            report = lambda done, total, update=update: update(done, total, "")  # noqa: E731
            runs.append(decode_locally(decoder, workload, seed=settings.seed, report=report))
    processor = decoder.processor
    del decoder
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return runs, evidence, processor


def _local_gates(settings: CheckSettings, run: LocalRun, evidence: list[Decoded] | str) -> list[Gate]:
    """The gates that need no other process. ``evidence`` is the profile's, or why there is none."""
    gates = [run.lossless_gate()]
    if isinstance(evidence, str):
        gates.append(run.skipped_gate(COUNTS, evidence))
    else:
        gates.append(run.counts_gate(evidence, settings.tolerance))
    if settings.min_speedup is not None:
        gates.append(run.speedup_gate(settings.min_speedup))
    return gates


def _compare(
    comparison: Comparison,
    runs: Sequence[LocalRun],
    requests: Sequence[list[WorkerRequest]],
    gates: list[Gate],
    budget_s: float,
) -> list[Timing | None]:
    """Compare counts with the base, then times if no gate has failed. Adds the gates to ``gates``."""
    if not has_failed(gates):
        gates += [comparison.counts_gate(run, of_run) for run, of_run in zip(runs, requests, strict=True)]
    if has_failed(gates):
        gates += [run.skipped_gate(TIME, "decided without timing") for run in runs]
        return [None] * len(runs)
    deadline = time.monotonic() + budget_s
    timings = []
    for number, (run, of_run) in enumerate(zip(runs, requests, strict=True)):
        share_s = (deadline - time.monotonic()) / (len(runs) - number)
        gate, timing = comparison.time_gate(run, of_run, budget_s=share_s)
        gates.append(gate)
        timings.append(timing)
    return timings


def has_failed(gates: Sequence[Gate]) -> bool:
    return any(gate.verdict == "failed" for gate in gates)


def print_result(result: CheckResult, console: Console) -> None:
    for gate in result.gates:
        console.say(str(gate))
        for detail in gate.details:
            console.say(f"  {detail}")
    for workload in result.workloads:
        console.say(
            f"{workload.name}: speedup {workload.speedup:.2f}x ({workload.ci95[0]:.2f}-{workload.ci95[1]:.2f}), "
            f"{workload.identical_outputs}/{workload.num_prompts} outputs identical"
        )
    console.say(result.verdict)
