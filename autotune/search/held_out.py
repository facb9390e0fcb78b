"""Evaluation on held-out prompts: the profile beside plain decoding, Hugging Face and the best published defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotune.console import Console
from autotune.documents.decoding_profile import AR, HF, TUNED, Gain
from autotune.evaluation.arms import Arm, HuggingFaceArm
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.runs import Run
from autotune.evaluation.summary import Summary, summarize
from autotune.search.elimination import MIN_PROMPTS, PROMPTS_PER_ROUND, not_slower
from autotune.search.finalists import print_labels
from autotune.workloads.workload import Workload

ALL = "all"
"""Stands for the prompts of all tasks in tables of gains."""


def run_held_out(
    runner: ArmRunner,
    tuned: Arm,
    defaults: Sequence[Arm],
    workload: Workload,
    console: Console,
    *,
    seed: int,
    deadline: float,
) -> tuple[dict[str, list[Run]], str | None]:
    """Run the profile, plain decoding, Hugging Face and the defaults on held-out prompts until the deadline.

    Defaults leave as in ``eliminate``: when they are significantly slower than the fastest of them.

    Args:
        defaults: those that may be the best one.
        deadline: of ``time.monotonic``. After ``MIN_PROMPTS`` prompts, no prompt is begun that would end later.

    Returns the runs by arm name, and the name of the default that was fastest.
    """
    always = [runner.plain, HuggingFaceArm(HF, runner.decoder.target.model, threads=runner.decoder.threads), tuned]
    left = [arm.name for arm in defaults]
    runs: dict[str, list[Run]] = {arm.name: [] for arm in (*always, *defaults)}
    prompts = workload.prompts
    with console.stage("evaluation, measured") as update:
        for begin in range(0, len(prompts), PROMPTS_PER_ROUND):
            part = Workload(workload.name, workload.split, prompts[begin : begin + PROMPTS_PER_ROUND])

            def report(done: int, _: int, begin: int = begin) -> None:
                update(begin + done, len(prompts), "")

            found = runner.compare(
                [*always, *(arm for arm in defaults if arm.name in left)],
                part,
                seed=seed + begin,
                deadline=deadline,
                min_prompts=MIN_PROMPTS if begin == 0 else 0,
                keep_memory=begin > 0,
                report=report,
            )
            for name, more in found.items():
                runs[name] += more
            if len(found[AR]) < len(part.prompts):
                break
            left = not_slower(runs, left, left) if left else []
    best = min(left, key=lambda name: sum(run.decode_ms for run in runs[name]), default=None)
    return runs, best


def gains_of(runs: Mapping[str, Sequence[Run]], best_default: str | None) -> list[Gain]:
    """The speedup of the profile over plain decoding, Hugging Face and the best default, by task and over all prompts."""
    gains = []
    for other in (AR, HF, *([] if best_default is None else [best_default])):
        pairs = list(zip(runs[TUNED], runs[other], strict=True))
        tasks = list(dict.fromkeys(run.task or "" for run, _ in pairs))
        for task in (*(tasks if len(tasks) > 1 else ()), ALL):
            own = [pair for pair in pairs if task == ALL or pair[0].task == task]
            if not any(run.new_tokens > 1 and base.new_tokens > 1 for run, base in own):
                continue  # nothing was decoded after the first token
            summary = summarize(TUNED, *map(list, zip(*own, strict=True)))
            gains.append(Gain(task=task, over=other, speedup=summary.speedup, ci95=summary.ci95, num_prompts=len(own)))
    return gains


def print_comparison(
    summaries: Mapping[str, Summary], predicted: Mapping[str, float], labels: Mapping[str, str], console: Console
) -> None:
    """Print every arm's figures, and the configurations below the table."""
    rows = [
        [
            name,
            f"{predicted[name]:.2f}x" if name in predicted else "-",
            f"{summary.speedup:.2f}x",
            f"{summary.ci95[0]:.2f}-{summary.ci95[1]:.2f}",
            f"{summary.tokens_per_round:.2f}" if summary.tokens_per_round else "-",
            f"{summary.tokens_per_second:.0f}",
            f"{summary.num_prompts}",
            f"{summary.identical_outputs}/{summary.num_prompts}",
        ]
        for name, summary in summaries.items()
    ]
    plain = summaries[AR]
    console.table(
        f"Evaluation on {plain.num_prompts} held-out prompts, {plain.num_tokens} tokens",
        ["arm", "predicted", "measured", "95 % CI", "M", "tokens/s", "prompts", "same output"],
        rows,
        emphasised=len(rows) - 1,
    )
    print_labels(labels, console)


def print_gains(gains: Sequence[Gain], best_default: str | None, console: Console) -> None:
    """Print what tuning gained, by task, with 95 % intervals."""
    over = {AR: "over plain decoding", HF: "over Hugging Face", best_default: f"over {best_default}, the best default"}
    columns = [name for name in over if any(gain.over == name for gain in gains)]
    by_cell = {(gain.task, gain.over): gain for gain in gains}
    tasks = list(dict.fromkeys(gain.task for gain in gains))
    rows = []
    for task in tasks:
        cells = [by_cell.get((task, name or "")) for name in columns]
        texts = ["-" if g is None else f"{g.speedup:.2f}x ({g.ci95[0]:.2f}-{g.ci95[1]:.2f})" for g in cells]
        rows.append([f"{task} ({max(g.num_prompts for g in cells if g is not None)} prompts)", *texts])
    console.table(
        "What tuning gained on held-out prompts, with 95 % intervals",
        ["task", *(over[name] for name in columns)],
        rows,
        emphasised=len(rows) - 1,
    )
