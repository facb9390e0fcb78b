"""``autotune check``: exact gates first, which have no noise; then, if they leave it open, time. Loads no torch."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from autotune.check.checked import CheckedBackend, CheckedWorkload, Side
from autotune.check.comparison import Comparison
from autotune.check.gates import skipped
from autotune.check.in_engine import CheckedEngine, Restore
from autotune.check.output import junit
from autotune.check.result import PROFILE_TIME, TIME, CheckResult, Gate, Timing, verdict_of
from autotune.check.settings import CheckSettings
from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.deployment import RUNTIME
from autotune.documents.provenance import stamp, workload_beside
from autotune.evaluation.not_slower import Design
from autotune.files import write_bytes
from autotune.workloads.workload import Workload, load_workload


def run_check(settings: CheckSettings, console: Console, restore: Restore) -> CheckResult:
    """Check a profile, and print the result.

    Args:
        restore: finds the engine of a profile that is not the runtime's.
    """
    profile = DecodingProfile.load(settings.profile)
    names = settings.workloads or [workload_beside(settings.profile, profile.workload.name)]
    workloads = [_evaluated(name, profile, settings) for name in names]
    backend = _backend(settings, profile, console, restore)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autotune-check-")))
        sides = stack.enter_context(backend.sides(folder)) if settings.against else None
        backend.load()
        with closing(backend):
            checked = [backend.check(workload) for workload in workloads]
        gates = [gate for workload in checked for gate in workload.gates]
        timings = _compare(sides, backend, checked, gates)
    verdict, code = verdict_of(gates, inconclusive_fails=settings.on_inconclusive == "fail")
    result = CheckResult(
        provenance=stamp(),
        profile=str(settings.profile),
        hardware=backend.hardware,
        target=profile.target,
        lossless=profile.point.verification.is_lossless,
        against=None if sides is None else sides[0].label,
        workloads=[
            workload.result.model_copy(update={"timing": timing})
            for workload, timing in zip(checked, timings, strict=True)
        ],
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


def _backend(settings: CheckSettings, profile: DecodingProfile, console: Console, restore: Restore) -> CheckedBackend:
    if profile.backend != RUNTIME:
        return CheckedEngine(settings, profile, console, restore)
    from autotune.check.in_runtime import CheckedRuntime

    return CheckedRuntime(settings, profile, console)


def _evaluated(name: str, profile: DecodingProfile, settings: CheckSettings) -> Workload:
    """The held-out prompts of a workload; the prompts of the profile's own workload as its search decoded them."""
    given = settings.chat_template_kwargs
    workload = load_workload(
        name, "evaluate", num_prompts=settings.num_prompts, format=settings.workload_format
    ).with_variables(profile.chat_template_kwargs if given is None else given)
    asked, searched = (
        prompts.cut(settings.num_prompts, settings.max_new_tokens)
        for prompts in (workload, workload.as_searched(profile.workload))
    )
    known = {prompt.prompt_sha256 for prompt in profile.evidence.prompts}
    is_own = workload.name == profile.workload.name or any(prompt.sha256 in known for prompt in searched.prompts)
    return searched if is_own else asked  # the same prompts may be in a file of another name


def _compare(
    against: tuple[Side, Side] | None, backend: CheckedBackend, checked: Sequence[CheckedWorkload], gates: list[Gate]
) -> list[Timing | None]:
    """Compare counts with the base, then times with the base or the profile, if no gate has failed. Adds the gates to
    ``gates``.
    """
    settings, timings = backend.settings, list[Timing | None]()
    design = Design(tolerance=settings.tolerance, limit=settings.limit, num_workloads=len(checked))
    if against is not None and not has_failed(gates):
        gates += [Comparison(*against, design, backend).counts_gate(workload) for workload in checked]
    deadline, is_decided = time.monotonic() + settings.budget_s, has_failed(gates)
    for number, workload in enumerate(checked):
        sides = against or backend.measured_sides(workload)
        timing = None
        if isinstance(sides, tuple) and not is_decided:
            left_s = (deadline - time.monotonic()) / (len(checked) - number)
            gate, timing = Comparison(*sides, design, backend).time_gate(workload, budget_s=left_s)
            gates.append(gate)
        elif sides is not None:
            reason = sides if isinstance(sides, str) else "decided without timing"
            gates.append(skipped(TIME if against else PROFILE_TIME, workload.workload.name, reason))
        timings.append(timing)
    return timings


def has_failed(gates: Sequence[Gate]) -> bool:
    return any(gate.verdict == "failed" for gate in gates)


def print_result(result: CheckResult, console: Console) -> None:
    for gate in result.gates:
        console.say("\n  ".join([str(gate), *gate.details]))
    for workload in result.workloads:
        console.say(
            f"{workload.name}: speedup {workload.speedup:.2f}x ({workload.ci95[0]:.2f}-{workload.ci95[1]:.2f}), "
            f"{workload.identical_outputs}/{workload.num_prompts} outputs identical"
        )
    console.say(f"{result.verdict}{'' if result.lossless else ' (LOSSY profile)'}")
