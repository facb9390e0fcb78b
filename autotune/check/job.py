"""``autotune check``: exact gates first, which have no noise; then, if they leave it open, time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from autotune.check.comparison import Comparison
from autotune.check.decoded_workload import DecodedWorkload
from autotune.check.evidence import evidence_for
from autotune.check.in_engine import Restore, decode_in_engine, open_engines
from autotune.check.output import junit
from autotune.check.result import TIME, CheckResult, Gate, Timing, verdict_of
from autotune.check.settings import CheckSettings
from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.deployment import RUNTIME
from autotune.documents.provenance import stamp, workload_beside
from autotune.evaluation.not_slower import Design
from autotune.files import write_bytes
from autotune.workloads.workload import Workload, load_workload


def run_check(settings: CheckSettings, console: Console, restore: Restore | None = None) -> CheckResult:
    """Check a profile, and print the result.

    Args:
        restore: finds the engine of a profile that is not the runtime's.
    """
    settings.require_consistent()
    profile = DecodingProfile.load(settings.profile)
    names = settings.workloads or [workload_beside(settings.profile, profile.workload.name)]
    workloads = [_evaluated(name, profile, settings) for name in names]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autotune-check-")))
        if profile.backend == RUNTIME:
            from autotune.check.in_runtime import decode_in_runtime, open_workers

            sides = stack.enter_context(open_workers(settings, folder)) if settings.against else None
            decoded = decode_in_runtime(settings, profile, workloads, folder, console)
        else:
            located = profile.located(settings.profile)
            assert restore is not None
            backend = restore(located, command=settings.engine_command, console=console)
            sides = open_engines(settings, located, backend, restore, folder, console) if settings.against else None
            evidence = [evidence_for(profile, workload, settings) for workload in workloads]
            decoded = [
                decode_in_engine(located, workload, known, backend, settings.seed, console)
                for workload, known in zip(workloads, evidence, strict=True)
            ]
        gates = [gate for one in decoded for gate in _local_gates(settings, one)]
        timings: list[Timing | None] = [None] * len(decoded)
        if sides is not None:
            design = Design(tolerance=settings.tolerance, limit=settings.limit, num_workloads=len(workloads))
            comparison = Comparison(*sides, design, settings.seed, console)
            timings = _compare(comparison, decoded, gates, settings.budget_s)
    verdict, code = verdict_of(gates, inconclusive_fails=settings.on_inconclusive == "fail")
    result = CheckResult(
        provenance=stamp(),
        profile=str(settings.profile),
        hardware=decoded[0].hardware,
        target=profile.target,
        lossless=profile.point.lossless,
        against=None if sides is None else sides[0].label,
        workloads=[one.result(timing) for one, timing in zip(decoded, timings, strict=True)],
        gates=gates,
        verdict=verdict,
        exit_code=code,
    )
    if settings.junit is not None:
        write_bytes(settings.junit, junit(result))
    if profile.backend == RUNTIME and (changes := profile.provenance.changes(stamp())):
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


def _local_gates(settings: CheckSettings, decoded: DecodedWorkload) -> list[Gate]:
    """The gates that need no base."""
    gates = [decoded.lossless_gate(), decoded.counts_gate(settings.tolerance), *decoded.gates]
    return gates if settings.min_speedup is None else [*gates, decoded.speedup_gate(settings.min_speedup)]


def _compare(
    comparison: Comparison, decoded: Sequence[DecodedWorkload], gates: list[Gate], budget_s: float
) -> list[Timing | None]:
    """Compare counts with the base, then times if no gate has failed. Adds the gates to ``gates``."""
    if not has_failed(gates):
        gates += [comparison.counts_gate(one) for one in decoded]
    if has_failed(gates):
        gates += [one.skipped_gate(TIME, "decided without timing") for one in decoded]
        return [None] * len(decoded)
    deadline = time.monotonic() + budget_s
    timings = []
    for number, one in enumerate(decoded):
        gate, timing = comparison.time_gate(one, budget_s=(deadline - time.monotonic()) / (len(decoded) - number))
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
