"""``autotune bench``: a profile beside other ways to decode, in one run, prompt by prompt in random order."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune.console import Console
from autotune.decoding_profile import load
from autotune.errors import UserError, nearest
from autotune.search.finalists import AR, HF, Arm, Run, Runner, Summary, summarise
from autotune.search.main_job import configuration_of
from autotune.search.space import PUBLISHED_DEFAULTS
from autotune.workload import Workload, load_workload

TUNED = "tuned"


def run_bench(
    profile: Path, workload: str, against: list[str], num_prompts: int, seed: int, device: str, console: Console
) -> dict[str, Any]:
    """Measure the arms and print them pooled and by task; returns the figures.

    Raises:
        UserError: an arm that does not exist, or the profile or workload cannot be read.
    """
    known = [AR, HF, *PUBLISHED_DEFAULTS]
    for name in against:
        if name not in known:
            raise UserError(f"--against {name}: no such arm; {nearest(name, known)}")
    prompts = load_workload(workload, "evaluate", num_prompts=num_prompts)
    decoder = load(profile, device=device)
    if decoder.draft is None and any(name in PUBLISHED_DEFAULTS for name in against):
        raise UserError(
            "this profile decodes without a draft, so trees cannot be compared with it; bench it --against ar,hf"
        )
    arms = [
        Arm(AR),
        *(Arm(name, PUBLISHED_DEFAULTS.get(name)) for name in against if name != AR),
        Arm(TUNED, configuration_of(decoder.profile)),
    ]
    if decoder.draft is None:
        arms = arms[:-1]
    with console.stage("bench") as update:
        runs = Runner(decoder, decoder.processor).compare(
            arms, prompts, seed=seed, report=lambda done, of: update(done, of, "")
        )
    summaries = [summarise(arm.name, runs[arm.name], runs[AR], seed=seed) for arm in arms]
    _print(summaries, console)
    by_task = speedups_by_task(runs, prompts)
    tasks = list(next(iter(by_task.values())))
    console.table(
        "Speedup over ar by task",
        ["arm", *tasks],
        [[name, *(f"{found[task]:.2f}x" for task in tasks)] for name, found in by_task.items()],
    )
    return {
        "arms": [asdict(summary) for summary in summaries],
        "speedup_by_task": by_task,
        "workload_sha256": prompts.sha256,
        "seed": seed,
    }


def _print(summaries: list[Summary], console: Console) -> None:
    rows = [
        [
            s.name,
            f"{s.speedup:.2f}x",
            f"{s.ci95[0]:.2f}-{s.ci95[1]:.2f}",
            f"{s.tokens_per_round:.2f}" if s.tokens_per_round else "-",
            f"{s.tokens_per_second:.0f}",
            f"{s.median_ms:.0f}",
            f"{100 * s.outside_share:.1f} %",
            f"{s.identical_outputs}/{s.num_prompts}",
        ]
        for s in summaries
    ]
    title = f"Decoding {summaries[0].num_prompts} prompts, {summaries[0].num_tokens} tokens; speedup over ar with its 95 % interval"
    console.table(
        title,
        ["arm", "speedup", "interval", "M", "tokens/s", "median ms", "outside models", "same output"],
        rows,
        emphasised=len(rows) - 1,
    )


def speedups_by_task(runs: dict[str, list[Run]], workload: Workload) -> dict[str, dict[str, float]]:
    """Pooled speedup over ``ar`` for each arm and task."""
    found: dict[str, dict[str, float]] = {}
    tasks = [prompt.settings.task for prompt in workload.prompts]
    for name, arm_runs in runs.items():
        found[name] = {}
        for task in dict.fromkeys(tasks[: len(arm_runs)]):
            rows = [i for i in range(len(arm_runs)) if tasks[i] == task]
            found[name][task] = sum(runs[AR][i].decode_ms for i in rows) / sum(arm_runs[i].decode_ms for i in rows)
    return found
