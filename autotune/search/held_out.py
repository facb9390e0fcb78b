"""Evaluation on held-out prompts: the profile beside plain decoding, Hugging Face and the best published defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from autotune.console import Console
from autotune.documents.configuration import Configuration, configuration_of
from autotune.documents.decoding_profile import AR, HF, TUNED, DecodingProfile, Gain
from autotune.documents.run import Run
from autotune.evaluation.arms import DecoderArm, HuggingFaceArm
from autotune.evaluation.race import race
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.summary import Summary, summarize
from autotune.prediction.evaluator import Evaluator
from autotune.runtime.load import decoder_for
from autotune.search.finalists import print_labels
from autotune.search.model_pool import ModelPool
from autotune.search.thresholds import HELD_OUT_PROMPTS, MIN_PROMPTS, RISK
from autotune.study.document import RUNS
from autotune.workloads.workload import Workload

ALL = "all"
"""Stands for the prompts of all tasks in tables of gains."""


@dataclass(frozen=True)
class Evaluation:
    """Runs of a profile and of the arms beside it on held-out prompts."""

    runs: Mapping[str, Sequence[Run]]
    """By arm name, the profile last."""
    configurations: Mapping[str, Configuration | None]
    """By arm name; None for arms without one. The profile has that of its last operating point."""
    predicted: Mapping[str, float]
    """Speedups of the arms that can be replayed. A profile of several operating points has none."""
    best_default: str | None
    """The default that was fastest."""

    @cached_property
    def summaries(self) -> dict[str, Summary]:
        return {name: summarize(name, runs, self.runs[AR][: len(runs)]) for name, runs in self.runs.items()}

    @cached_property
    def gains(self) -> list[Gain]:
        """The speedup of the profile over plain decoding, Hugging Face and the best default, by task and over all prompts."""
        gains = []
        for over in filter(None, (AR, HF, self.best_default)):
            pairs = list(zip(self.runs[TUNED], self.runs[over], strict=True))
            tasks = list(dict.fromkeys(run.task or "" for run, _ in pairs))
            for task in (*(tasks if len(tasks) > 1 else ()), ALL):
                task_pairs = [pair for pair in pairs if task in (ALL, pair[0].task)]
                if not any(run.new_tokens > 1 and base.new_tokens > 1 for run, base in task_pairs):
                    continue  # nothing was decoded after the first token
                summary = summarize(TUNED, *map(list, zip(*task_pairs, strict=True)))
                gains.append(
                    Gain(task=task, over=over, speedup=summary.speedup, ci95=summary.ci95, num_prompts=len(task_pairs))
                )
        return gains


def evaluate_profile(
    profile: DecodingProfile,
    defaults: Mapping[str, Configuration],
    model_pool: ModelPool,
    evaluator: Evaluator,
    workload: Workload,
    folder: Path,
    console: Console,
    *,
    seed: int,
    deadline: float,
) -> Evaluation:
    """Run the profile, plain decoding, Hugging Face and the defaults on held-out prompts until the deadline.

    Args:
        defaults: published defaults that may be the best one. They leave when they are significantly slower than the fastest.
        evaluator: predicts the speedups of the arms.
        folder: keeps the runs.
        deadline: of ``time.monotonic``. After ``MIN_PROMPTS`` prompts, no prompt is begun that would end later.
    """
    runner = _runner(profile, model_pool, folder)
    decoder = runner.decoder
    last = configuration_of(profile.point)
    tuned = DecoderArm(TUNED, decoder, key=last.key if last else TUNED)
    with console.stage("evaluation, measured") as update:
        measured = race(
            runner,
            [],
            workload,
            always=[runner.plain, HuggingFaceArm(HF, decoder.target.model, threads=decoder.threads), tuned],
            defaults=[runner.arm(name, default) for name, default in defaults.items()],
            risk=RISK,
            prompts_per_block=HELD_OUT_PROMPTS,
            min_prompts=MIN_PROMPTS,
            ends=lambda _: False,
            seed=seed,
            deadline=deadline,
            report=lambda done, of: update(done, of, ""),
        )
    configurations = {AR: None, HF: None, **defaults, TUNED: last}
    replayable = {name: c for name, c in configurations.items() if c is not None and evaluator.can_replay(c)}
    if len(profile.points) > 1:
        replayable.pop(TUNED, None)
    return Evaluation(
        runs={name: measured.runs[name] for name in configurations},
        configurations=configurations,
        predicted={name: evaluator.evaluate(configuration).speedup for name, configuration in replayable.items()},
        best_default=next(iter(measured.remaining_defaults), None),
    )


def _runner(profile: DecodingProfile, model_pool: ModelPool, folder: Path) -> ArmRunner:
    """A runner of arms beside the decoder of a profile."""
    decoder = decoder_for(
        profile,
        model_pool.target,
        lambda choice: model_pool.draft(choice.id, choice.subnet),
        processor=model_pool.processor,
    )
    points = [point.model_dump(mode="json") for point in profile.points]
    return ArmRunner(
        decoder,
        model_pool.processor,
        ledger=folder / RUNS,
        context=[model_pool.key, profile.threads, profile.prefill_threads, points],
        draft_of=model_pool.draft_of,
    )


def print_evaluation(evaluation: Evaluation, num_points: int, console: Console) -> None:
    """Print every arm's figures, the configurations below the table, and what tuning gained, by task."""
    summaries, plain = evaluation.summaries, evaluation.summaries[AR]
    rows = [
        [
            name,
            f"{evaluation.predicted[name]:.2f}x" if name in evaluation.predicted else "-",
            f"{summary.speedup:.2f}x",
            f"{summary.ci95[0]:.2f}-{summary.ci95[1]:.2f}",
            f"{summary.tokens_per_round:.2f}" if summary.tokens_per_round else "-",
            f"{summary.tokens_per_second:.0f}",
            f"{summary.num_prompts}",
            f"{summary.identical_outputs}/{summary.num_prompts}",
        ]
        for name, summary in summaries.items()
    ]
    console.table(
        f"Evaluation on {plain.num_prompts} held-out prompts, {plain.num_tokens} tokens",
        ["arm", "predicted", "measured", "95 % CI", "M", "tokens/s", "prompts", "same output"],
        rows,
        emphasised=len(rows) - 1,
    )
    labels = {name: configuration.label for name, configuration in evaluation.configurations.items() if configuration}
    print_labels(labels | ({TUNED: f"{num_points} operating points"} if num_points > 1 else {}), console)
    _print_gains(evaluation.gains, evaluation.best_default, console)


def _print_gains(gains: Sequence[Gain], best_default: str | None, console: Console) -> None:
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
