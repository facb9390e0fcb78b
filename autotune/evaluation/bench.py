"""``autotune bench``: arms decode the same prompts in one race, and tables say how fast they were. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from autotune.console import Console
from autotune.documents.decoded import Decoded, time_shares
from autotune.documents.decoding_profile import AR, TUNED, DecodingProfile
from autotune.documents.deployment import RUNTIME
from autotune.documents.provenance import stamp
from autotune.errors import UserError
from autotune.evaluation.bench_settings import BenchArms
from autotune.evaluation.bench_tables import (
    benchmark_results,
    gain_by_length,
    geomeans,
    is_lossy_arm,
    pool_counts,
    print_arms,
    print_benchmark,
    print_lengths,
    print_tasks,
    speedups_by_task,
)
from autotune.evaluation.race import Everyone, race
from autotune.evaluation.runner import SLOW_FORWARD, SLOW_PREFILL, ArmRunner
from autotune.evaluation.summary import summarize
from autotune.machine.contention_monitor import ContentionMonitor, wait_until_idle
from autotune.machine.device import fingerprint
from autotune.replay.degenerate_answers import degenerate_answers
from autotune.workloads.formats import OWN
from autotune.workloads.workload import Workload


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
        device: on which arms decode.
        seed: of the order of the runs, and of bootstrap intervals.
        wait_until_idle_s: the longest time to wait until the machine is idle; None: do not wait.

    Raises:
        UserError: plain decoding or the profile cannot go on.
    """
    for reason in dict.fromkeys(chosen.unavailable.values()):
        names = [name for name, own in chosen.unavailable.items() if own == reason]
        console.say(f"left out: {', '.join(names)}: {reason}")
    for name, note in chosen.notes.items():
        console.say(f"{name}: {note}")
    if wait_until_idle_s is not None:
        wait_until_idle(wait_until_idle_s, device, console)
    runner, monitor, prompts = ArmRunner(), ContentionMonitor(device), chosen.prompts
    with console.stage("bench", len(prompts.prompts)) as update:
        raced = race(runner, chosen.arms, prompts.prompts, Everyone(), seed=seed, report=update)
    for name, reason in raced.failed.items():
        if name in (AR, TUNED):
            raise UserError(f"{name}: {reason}")
        console.say(f"left out: {name}: {reason}")
        del raced.runs[name]
    contention = monitor.contention()
    console.say(contention.describe("while runs were timed"))
    if runner.num_repeated:
        console.say(
            f"{runner.num_repeated} runs were measured again: their prefill took {SLOW_PREFILL:g} times the "
            f"median, a forward {SLOW_FORWARD:g} times the shortest, or a forward pass was captured"
        )
    limits = [prompt.settings.max_new_tokens for prompt in prompts.prompts]
    degenerate = degenerate_answers([run.tokens for run in raced.runs[AR]], limits)
    if degenerate is not None:
        console.say(degenerate)
    runs = raced.runs
    if profile.backend != RUNTIME:
        runs = {name: [run.in_passes for run in of_arm] for name, of_arm in runs.items()}
    results = BenchResults(runs, prompts, seed)
    results.print(console)
    return {
        "provenance": stamp(contention).model_dump(mode="json"),
        "hardware": fingerprint(device).model_dump(mode="json"),
        "workload": prompts.name,
        "workload_sha256": prompts.sha256,
        "seed": seed,
        "unavailable": chosen.unavailable | raced.failed,
        "notes": chosen.notes,
        "repeated_runs": runner.num_repeated,
        "degenerate_answers": degenerate,
        **results.to_json(),
    }


class BenchResults:
    """Tables that sum up the runs of a bench."""

    def __init__(self, runs: Mapping[str, list[Decoded]], prompts: Workload, seed: int) -> None:
        """``runs`` by arm are of these prompts in their order, and include plain decoding; ``seed``: of bootstrap
        intervals. Tasks are those of the prompts: not every arm repeats them.
        """
        tasks = [{"task": prompt.settings.task} for prompt in prompts.prompts]
        self.format = prompts.format
        self.runs = {
            name: [run.model_copy(update=task) for run, task in zip(of_arm, tasks, strict=True)]
            for name, of_arm in runs.items()
        }
        self.summaries = [summarize(name, of_arm, runs[AR], seed=seed) for name, of_arm in runs.items()]
        self.by_task, self.by_length = speedups_by_task(self.runs), gain_by_length(self.runs)
        self.benchmark = benchmark_results(self.runs, prompts.prompts)
        self.time_shares = {name: shares for name, of_arm in runs.items() if (shares := time_shares(of_arm))}
        self.counts = {name: pool_counts(of_arm) for name, of_arm in runs.items()}

    def print(self, console: Console) -> None:
        """Print the tables."""
        print_arms(self.summaries, console)
        print_tasks(self.by_task, console)
        if self.format != OWN:
            print_benchmark(self.format, self.benchmark, console)
        print_lengths(self.by_length, console)

    def to_json(self) -> dict[str, Any]:
        return {
            "arms": [asdict(summary) for summary in self.summaries],
            "lossy_arms": [summary.name for summary in self.summaries if is_lossy_arm(summary.name)],
            "speedup_by_task": self.by_task.astype(object).where(self.by_task.notna(), None).to_dict("index"),
            "speedup_geomean": geomeans(self.by_task).to_dict(),
            "benchmark_results": json.loads(self.benchmark.to_json(orient="records")),
            "by_length": json.loads(self.by_length.to_json(orient="records")),
            "time_shares": self.time_shares,
            "acceptance_counts": {name: count.to_json() for name, count in self.counts.items() if not count.is_empty},
            "runs": {
                name: [run.model_dump(mode="json", exclude={"tokens"}) for run in of_arm]
                for name, of_arm in self.runs.items()
            },
        }
