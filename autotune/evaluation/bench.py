"""``autotune bench``: compares a profile with other ways to decode in one run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from autotune.console import Console
from autotune.documents.contention import Contention
from autotune.documents.decoded import Decoded, time_shares
from autotune.documents.decoding_profile import AR, HF, TUNED
from autotune.documents.execution import EAGER
from autotune.documents.provenance import stamp
from autotune.documents.published_defaults import HF_ASSISTED, NAMED, PROMPT_LOOKUP
from autotune.drafters.checkpoint import load_draft
from autotune.errors import UserError
from autotune.evaluation.arms import Arm
from autotune.evaluation.bench_settings import BenchSettings
from autotune.evaluation.bench_tables import (
    benchmark_results,
    gain_by_length,
    geomeans,
    is_lossy_arm,
    points_used,
    pool_counts,
    print_arms,
    print_benchmark,
    print_lengths,
    print_tasks,
    speedups_by_task,
)
from autotune.evaluation.race import Everyone, race
from autotune.evaluation.runner import SLOW_FORWARD, SLOW_PREFILL, ArmRunner
from autotune.evaluation.runtime_arms import DecoderArm, HuggingFaceArm, RuntimeArms
from autotune.evaluation.summary import summarize
from autotune.machine.contention_monitor import ContentionMonitor, wait_until_idle
from autotune.machine.device import fingerprint
from autotune.modeling.vision_timing import timed_vision, vision_parts
from autotune.replay.degenerate_answers import degenerate_answers
from autotune.runtime.decoder import Decoder
from autotune.runtime.load import load
from autotune.trees.policy import parse_policy
from autotune.workloads.formats import OWN
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload

ARMS: dict[str, Callable[[RuntimeArms], Arm]] = {
    AR: lambda arms: arms.plain,
    HF: lambda arms: HuggingFaceArm(HF, arms),
    HF_ASSISTED: lambda arms: HuggingFaceArm(HF_ASSISTED, arms, assistant_of(arms)),
    PROMPT_LOOKUP: RuntimeArms.prompt_lookup,
    **{name: partial(RuntimeArms.arm, name=name, configuration=tree) for name, tree in NAMED.items()},
}
"""Makers of the arms that a profile can be compared with, by the names in ``ARM_NAMES``."""


def run_bench(profile: Path, settings: BenchSettings, console: Console) -> dict[str, Any]:
    """Measure the arms and print tables; returns the figures as JSON.

    Raises:
        UserError: the profile or workload cannot be read, or a published configuration was asked for without a draft.
    """
    prompts = settings.prompts.load()
    # Warm-ups capture.
    decoder = load(profile, device=settings.device, dtype=settings.dtype, context_tokens=0, console=console)
    prompts = prompts.fitting(decoder.processor, decoder.target.max_context, console.say)
    makes = _arms(decoder, settings)
    runner = makes.runner()
    chosen = choose_arms(settings.arms, makes, prompts)
    for reason in dict.fromkeys(chosen.unavailable.values()):
        names = [name for name, own in chosen.unavailable.items() if own == reason]
        console.say(f"left out: {', '.join(names)}: {reason}")
    for name, note in chosen.notes.items():
        console.say(f"{name}: {note}")
    arms = [*chosen.arms, DecoderArm(TUNED, decoder, makes)] if decoder.draft is not None else chosen.arms
    device = str(decoder.target.device)
    runs, contention = _measure(runner, arms, prompts, device, settings, console)
    if runner.num_repeated:
        console.say(
            f"{runner.num_repeated} runs were measured again: their prefill took {SLOW_PREFILL:g} times the "
            f"median, a forward {SLOW_FORWARD:g} times the shortest, or a forward pass was captured"
        )
    if decoder.profile is not None and len(decoder.profile.points) > 1:
        console.say(f"{TUNED}: {points_used(decoder.profile, runs[TUNED])}")
    decoded = prompts.prompts[: len(runs[AR])]
    limits = [prompt.settings.max_new_tokens for prompt in decoded]
    degenerate = degenerate_answers([run.tokens for run in runs[AR]], limits)
    if degenerate is not None:
        console.say(degenerate)
    results = BenchResults(runs, prompts, settings.seed)
    results.print(console)
    return {
        "provenance": stamp(contention).model_dump(mode="json"),
        "hardware": fingerprint(device).model_dump(mode="json"),
        "profile": str(profile),
        "workload": settings.prompts.workload,
        "workload_sha256": prompts.sha256,
        "seed": settings.seed,
        "unavailable": chosen.unavailable,
        "notes": chosen.notes,
        "repeated_runs": runner.num_repeated,
        "degenerate_answers": degenerate,
        **results.to_json(),
    }


def _arms(decoder: Decoder, settings: BenchSettings) -> RuntimeArms:
    """The arms of the profile's target, with perplexities where an arm or a point is lossy."""
    if decoder.draft is None and settings.draft is None and any(name in NAMED for name in settings.given_arms or ()):
        raise UserError(
            "this profile decodes without a draft, so trees cannot be compared with it; "
            f"bench it --arms {AR},{HF},{PROMPT_LOOKUP}, or name a --draft"
        )
    own_draft = None if settings.draft is None else load_draft(settings.draft, decoder.target)
    assert decoder.profile is not None
    is_lossy = any(map(is_lossy_arm, settings.given_arms or ())) or not all(
        point.lossless for point in decoder.profile.points
    )
    draft_of = None if own_draft is None else lambda configuration: own_draft
    return RuntimeArms(decoder, with_perplexity=is_lossy, draft_of=draft_of)


def _measure(
    runner: ArmRunner, arms: Sequence[Arm], prompts: Workload, device: str, settings: BenchSettings, console: Console
) -> tuple[dict[str, list[Decoded]], Contention]:
    """The runs by arm, and what other processes took of the machine meanwhile."""
    if settings.wait_until_idle_s is not None:
        wait_until_idle(settings.wait_until_idle_s, device, console)
    monitor = ContentionMonitor(device)
    with console.stage("bench", len(prompts.prompts)) as update:
        done = race(runner, arms, prompts.prompts, Everyone(), seed=settings.seed, report=update)
    contention = monitor.contention()
    console.say(contention.describe("while runs were timed"))
    return done.runs, contention


class BenchResults:
    """Tables that sum up the runs of a bench."""

    def __init__(self, runs: Mapping[str, list[Decoded]], prompts: Workload, seed: int) -> None:
        """``runs`` by arm are of these prompts in their order, and include plain decoding; ``seed``: of bootstrap
        intervals.
        """
        self.runs, self.format = dict(runs), prompts.format
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


@dataclass
class ChosenArms:
    """Arms that can run here; by name, why others cannot, and limitations of those that run."""

    arms: list[Arm] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def choose_arms(names: Sequence[str], arms: RuntimeArms, prompts: Workload) -> ChosenArms:
    """The arms of these names that can run, each once, in this order."""
    chosen, decoder = ChosenArms(), arms.decoder
    has_states = decoder.target.has_states or (decoder.draft is not None and decoder.draft.has_states)
    for name in dict.fromkeys(names):
        failure: str | None = None
        note: str | None = None
        has_draft = decoder.draft is not None or (arms.draft_of is not None and name in NAMED)
        if not has_draft and (name in NAMED or name == HF_ASSISTED):
            failure = "the profile decodes without a draft"
        elif name in NAMED and not parse_policy(NAMED[name].tree).is_chain and has_states:
            failure = "recurrent or convolution states follow one path, so that only chains are decoded"
        elif name == HF_ASSISTED:
            failure, note = try_assisted(arms, prompts)
        elif name == HF and decoder.mode != EAGER:
            note = f"generate runs eagerly, so that gains over it include that of mode {decoder.mode}; gains over {AR} do not"
        if failure is not None:
            chosen.unavailable[name] = failure
            continue
        if note is not None:
            chosen.notes[name] = note
        chosen.arms.append(ARMS[name](arms))
    return chosen


def try_assisted(arms: RuntimeArms, prompts: Workload) -> tuple[str | None, str | None]:
    """Try Hugging Face's assisted generation on the first prompt with an image and the first without.

    Returns why it cannot run, or None, and a limitation to report, or None. In half precision rounding can flip the
    argmax of a near tie, so only in float32 an output that differs from ``generate`` alone is a failure.
    """
    assistant = assistant_of(arms)
    if assistant is None:
        return "the profile's draft is no model that generate takes as its assistant_model", None
    note = None
    first_of_kind: dict[bool, WorkloadPrompt] = {}
    for prompt in prompts.prompts:
        first_of_kind.setdefault(bool(prompt.pixels), prompt)
    for prompt in first_of_kind.values():
        try:
            with timed_vision(assistant) as vision:
                answer = ARMS[HF_ASSISTED](arms).decode(prompt)
        except Exception as error:  # whatever transformers raises for models it does not support
            first_line = next(iter(str(error).strip().splitlines()), "no message")
            return f"on {prompt.name} generate raised {type(error).__name__}: {first_line}", None
        is_exact = arms.decoder.target.text.is_exact and prompt.settings.temperature == 0
        if is_exact and answer.tokens != ARMS[HF](arms).decode(prompt).tokens:
            return f"on {prompt.name} its output differs from generate alone", None
        if prompt.pixels and vision_parts(assistant) and vision.num_forwards == 0:
            note = "generate gives the draft no image, so that it drafts blind"
    return None, note


def assistant_of(arms: RuntimeArms) -> Any | None:
    """The draft as an ``assistant_model`` of Hugging Face's generate; None if the draft is not a whole model."""
    draft = arms.decoder.draft
    return None if draft is None else draft.standalone_model
