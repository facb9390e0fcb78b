"""``autotune bench``: arms decode the same prompts in one race, and tables say how fast they were. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR, TUNED, DecodingProfile
from autotune.documents.deployment import RUNTIME
from autotune.documents.provenance import stamp
from autotune.documents.published_defaults import ARM_NAMES
from autotune.errors import UserError, nearest
from autotune.evaluation.arms import Arm
from autotune.evaluation.bench_tables import arms_table, benchmark_results, gains_by_task, gains_table
from autotune.evaluation.race import Everyone, race
from autotune.evaluation.runner import SLOW_FORWARD, SLOW_PREFILL, ArmRunner
from autotune.evaluation.summary import summarize
from autotune.machine.container import num_cores
from autotune.machine.contention_monitor import ContentionMonitor, wait_until_idle
from autotune.machine.device import cpu_fingerprint, fingerprint
from autotune.replay.degenerate_answers import degenerate_answers
from autotune.workloads.chat import Variables
from autotune.workloads.formats import OWN, Format
from autotune.workloads.workload import Workload, load_workload


@dataclass
class BenchArms:
    """The arms of a bench, plain decoding first, and the prompts that they decode."""

    arms: list[Arm]
    prompts: Workload
    unavailable: dict[str, str] = field(default_factory=dict)
    """Why other arms cannot run, by name."""


def evaluation_prompts(
    workload: str,
    *,
    workload_format: Format | None = None,
    num_prompts: int = 32,
    is_whole: bool = False,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    chat_template_kwargs: Variables | None = None,
) -> Workload:
    """Load the prompts of a workload that are decoded.

    Args:
        workload: name or file.
        workload_format: of the file; None finds it out.
        is_whole: load the prompts of both splits.
        max_new_tokens: limit of all answers; None: each prompt's own.
        temperature: of all prompts; None: each prompt's own.
        chat_template_kwargs: variables of the chat template that the prompts do not set.
    """
    whole = load_workload(workload, "evaluate", num_prompts=num_prompts, format=workload_format, is_whole=is_whole)
    loaded = whole.cut(num_prompts, max_new_tokens).with_variables(chat_template_kwargs)
    return loaded if temperature is None else loaded.sampled(temperature)


def require_arms(profile: DecodingProfile, names: Sequence[str]) -> None:
    """Refuse names of arms that a profile's backend does not have."""
    of_engine = tuple(filter(None, (AR, profile.evidence.best_default, TUNED)))
    known = ARM_NAMES if profile.backend == RUNTIME else of_engine
    for name in names:
        if name not in known:
            raise UserError(f"--arms {name}: no such arm of {profile.backend}; {nearest(name, known)}")


def run_bench(
    profile: DecodingProfile,
    chosen: BenchArms,
    console: Console,
    *,
    device: str,
    seed: int = 0,
    wait_until_idle_s: float | None = None,
) -> dict[str, Any]:
    """Measure arms and print tables; returns the figures as JSON.

    Args:
        device: on which arms decode; ``cpu`` for those of an engine, whose GPU its own process uses.
        seed: of the order of the runs, and of bootstrap intervals.
        wait_until_idle_s: the longest time to wait until the machine is idle; None: do not wait.

    Raises:
        UserError: plain decoding or the profile cannot go on.
    """
    for reason in dict.fromkeys(chosen.unavailable.values()):
        names = [name for name, reason_of_arm in chosen.unavailable.items() if reason_of_arm == reason]
        console.say(f"left out: {', '.join(names)}: {reason}")
    if wait_until_idle_s is not None:
        wait_until_idle(wait_until_idle_s, device, console)
    runner, monitor, prompts = ArmRunner(), ContentionMonitor(device), chosen.prompts
    with console.stage("bench", len(prompts.prompts)) as update:
        raced = race(runner, chosen.arms, prompts.prompts, Everyone(), seed=seed, report=update)
    for name, reason in raced.failed.items():
        if name in (AR, TUNED):
            raise UserError(f"{name}: {reason}")
        console.say(f"left out: {name}: {reason}")
    runs = {name: of_arm for name, of_arm in raced.runs.items() if name not in raced.failed}
    contention = monitor.contention()
    console.say(contention.describe("while runs were timed"))
    if runner.num_repeated:
        console.say(
            f"{runner.num_repeated} runs were measured again: their prefill took {SLOW_PREFILL:g} times the "
            f"median, a forward {SLOW_FORWARD:g} times the shortest, or a forward pass was captured"
        )
    limits = [prompt.settings.max_new_tokens for prompt in prompts.prompts]
    if (degenerate := degenerate_answers([run.tokens for run in runs[AR]], limits)) is not None:
        console.say(degenerate)
    if profile.backend != RUNTIME:
        runs = {name: [run.in_passes for run in of_arm] for name, of_arm in runs.items()}
    return {
        "provenance": stamp(contention).model_dump(mode="json"),
        "hardware": (fingerprint(device) if profile.backend == RUNTIME else cpu_fingerprint(num_cores())).model_dump(
            mode="json"
        ),
        "workload": prompts.name,
        "workload_sha256": prompts.sha256,
        "seed": seed,
        "unavailable": chosen.unavailable | raced.failed,
        "repeated_runs": runner.num_repeated,
        "degenerate_answers": degenerate,
        **results(runs, prompts, console, seed),
    }


def results(runs: Mapping[str, Sequence[Decoded]], prompts: Workload, console: Console, seed: int) -> dict[str, Any]:
    """Print what the runs of a bench add up to; returns it as JSON.

    Args:
        runs: of the prompts in their order, by arm; plain decoding is among them.
    """
    summaries = [summarize(name, of_arm, runs[AR], seed=seed) for name, of_arm in runs.items()]
    by_task = gains_by_task(runs, prompts.prompts)
    benchmark = benchmark_results(runs, prompts.prompts)
    console.show(arms_table(summaries))
    console.show(gains_table("Speedup over ar and M by task", by_task, "tokens_per_round"))
    if prompts.format != OWN:
        title = f"{prompts.format}: speedup over ar, prefill included, and mean accepted tokens"
        console.show(gains_table(title, benchmark, "mean_accepted_tokens"))
    return {
        "arms": [asdict(summary) for summary in summaries],
        "speedup_by_task": {
            name: {row["task"]: row["speedup"] for row in by_task if row["arm"] == name} for name in runs
        },
        "benchmark_results": benchmark,
        "runs": {
            name: [
                run.model_dump(mode="json", exclude={"tokens"}) | {"task": prompt.settings.task}
                for run, prompt in zip(of_arm, prompts.prompts, strict=True)
            ]
            for name, of_arm in runs.items()
        },
    }
