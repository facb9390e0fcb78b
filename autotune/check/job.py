"""``autotune check``: exact gates first, which are free of noise; then, if they leave it open, time."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from autotune.check.baseline import Session, add_sessions, comparable_sessions, judge_times, load_baseline
from autotune.check.comparison import Comparison, launcher, open_sides, write_requests
from autotune.check.launch import Request
from autotune.check.local_run import (
    LocalRun,
    decode_here,
    evidence_for,
    judge_counts,
    judge_lossless,
    judge_speedup,
    skipped,
)
from autotune.check.output import write_outputs
from autotune.check.result import COUNTS, SESSION_COUNTS, TIME, CheckResult, Gate, Timing, verdict_of
from autotune.check.sequential import Design
from autotune.check.settings import CheckSettings
from autotune.console import Console
from autotune.device import choose_device, fingerprint
from autotune.documents.decoding_profile import DecodingProfile, PromptEvidence
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import stamp
from autotune.runtime.load import load
from autotune.workloads.workload import Workload, load_workload


def run_check(settings: CheckSettings, console: Console) -> CheckResult:
    """Decode and judge, workload by workload.

    Raises:
        UserError: a setting out of range; a profile, workload or base that cannot be read or built; a budget too small.
        NotComparable: another model, other prompts, or another device than what is compared with.
    """
    settings.require_consistent()
    profile = DecodingProfile.load(settings.profile)
    workloads = [load_workload(name, "evaluate", num_prompts=settings.num_prompts) for name in settings.workloads]
    evidence = [
        evidence_for(profile, one, is_needed=settings.needs_evidence, source=settings.profile) for one in workloads
    ]
    design = Design(tolerance=settings.tolerance, limit=settings.limit, num_workloads=len(workloads))
    device = choose_device(settings.device)
    hardware = fingerprint(device)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autotune-check-")))
        sides = None
        if settings.is_timed:
            sides = stack.enter_context(open_sides(settings.against, settings.profile, folder))
        found, processor = _decode_all(settings, workloads, device, console)
        sessions = [_session(here, hardware) for here in found]
        gates = [
            gate
            for here, then, session in zip(found, evidence, sessions, strict=True)
            for gate in _judge_here(settings, design, here, then, session)
        ]
        timings: list[Timing | None] = [None] * len(found)
        if sides is not None:
            requests = [write_requests(here, processor, folder / f"{number}") for number, here in enumerate(found)]
            comparison = Comparison(sides, launcher(device), design, settings.seed, hardware.key, console)
            timings = _compare_sides(comparison, found, requests, gates, settings.budget_s)
    verdict, code = verdict_of(gates, inconclusive_fails=settings.on_inconclusive == "fail")
    result = CheckResult(
        provenance=stamp(),
        profile=str(settings.profile),
        hardware=hardware,
        target=profile.target,
        lossless=all(point.lossless for point in profile.points),
        against=None if sides is None else sides.base.what,
        workloads=[here.result(timing) for here, timing in zip(found, timings, strict=True)],
        gates=gates,
        verdict=verdict,
        exit_code=code,
    )
    if settings.baseline is not None and verdict == "passed":
        add_sessions(settings.baseline, sessions)
    write_outputs(result, junit_path=settings.junit, markdown_path=settings.markdown)
    print_result(result, console)
    return result


def _decode_all(
    settings: CheckSettings, workloads: Sequence[Workload], device: str, console: Console
) -> tuple[list[LocalRun], Any]:
    """Every workload, decoded in this process; and the processor. The models are gone afterwards: workers need their
    memory.
    """
    decoder = load(settings.profile, device=device)
    found = []
    for workload in workloads:
        with console.stage(f"check of {workload.name}") as update:
            found.append(
                decode_here(decoder, workload, seed=settings.seed, report=lambda done, of: update(done, of, ""))
            )
    processor = decoder.processor
    del decoder
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found, processor


def _judge_here(
    settings: CheckSettings, design: Design, here: LocalRun, then: list[PromptEvidence] | str, session: Session
) -> list[Gate]:
    """All that needs no other process. ``then`` is the profile's evidence, or why there is none."""
    gates = [judge_lossless(here)]
    if isinstance(then, str):
        gates.append(skipped(here, COUNTS, then))
    else:
        made, device = here.profile.provenance, here.profile.hardware.key
        source = "the profile's evidence"
        gates.append(
            judge_counts(here, then, COUNTS, source=source, made=made, device=device, tolerance=settings.tolerance)
        )
    if settings.min_speedup is not None:
        gates.append(judge_speedup(here, settings.min_speedup))
    if settings.baseline is not None:
        gates += _judge_baseline(settings, design, here, session)
    return gates


def _judge_baseline(settings: CheckSettings, design: Design, here: LocalRun, session: Session) -> list[Gate]:
    """Time beside all sessions of this device, counts beside the latest."""
    assert settings.baseline is not None
    known = comparable_sessions(load_baseline(settings.baseline), session, settings.baseline)
    gates = [judge_times(known, session, design)]
    if known:
        latest = known[-1]
        gates.append(
            judge_counts(
                here,
                latest.prompts,
                SESSION_COUNTS,
                source=f"the session of {latest.provenance.created}",
                made=latest.provenance,
                device=latest.hardware.key,
                tolerance=settings.tolerance,
            )
        )
    return gates


def _compare_sides(
    comparison: Comparison,
    found: Sequence[LocalRun],
    requests: Sequence[list[Request]],
    gates: list[Gate],
    budget_s: float,
) -> list[Timing | None]:
    """Counts of the base first; what they leave open is timed. Adds its gates, and spends nothing on what has failed."""
    if not comparison.sides.is_aa and not has_failed(gates):
        gates += [comparison.judge_counts(here, of) for here, of in zip(found, requests, strict=True)]
    if has_failed(gates):
        gates += [
            Gate(name=TIME, workload=here.workload.name, verdict="skipped", summary="decided without timing")
            for here in found
        ]
        return [None] * len(found)
    deadline = time.monotonic() + budget_s
    timings = []
    for number, (here, of) in enumerate(zip(found, requests, strict=True)):
        share_s = (deadline - time.monotonic()) / (len(found) - number)
        gate, timing = comparison.judge_time(here, of, budget_s=share_s)
        gates.append(gate)
        timings.append(timing)
    return timings


def _session(here: LocalRun, hardware: Fingerprint) -> Session:
    """This check as one among others."""
    return Session(
        provenance=stamp(),
        hardware=hardware,
        precision=here.precision,
        target=here.profile.target,
        workload=here.workload.name,
        workload_sha256=here.workload.sha256,
        prompts=here.prompts,
    )


def has_failed(gates: Sequence[Gate]) -> bool:
    return any(gate.verdict == "failed" for gate in gates)


def print_result(result: CheckResult, console: Console) -> None:
    """A line for each gate, what there is to say of its prompts, and the verdict."""
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
