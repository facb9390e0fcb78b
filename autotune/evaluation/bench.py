"""``autotune bench``: compares a profile with other ways to decode in one run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.console import Console
from autotune.contention import ContentionMonitor, wait_until_quiet
from autotune.device import fingerprint
from autotune.documents.decoding_profile import AR, HF, TUNED
from autotune.documents.provenance import stamp
from autotune.documents.published_defaults import COMPARED_DEFAULTS, NAMED
from autotune.drafters.checkpoint import load_draft
from autotune.drafters.gemma4_assistant import Gemma4AssistantDraft
from autotune.drafters.independent import IndependentDraft
from autotune.errors import UserError, nearest
from autotune.evaluation.arms import HF_ASSISTED, PROMPT_LOOKUP, Arm, DecoderArm, HuggingFaceArm
from autotune.evaluation.bench_tables import (
    LOSSY_SWEEP,
    benchmark_results,
    gain_by_length,
    geomeans,
    is_lossy_arm,
    points_used,
    pool_counts,
    print_acceptance,
    print_arms,
    print_benchmark,
    print_lengths,
    print_lossy_sweep,
    print_tasks,
    print_time_shares,
    speedups_by_task,
)
from autotune.evaluation.runner import DISTURBED, STALLED, ArmRunner
from autotune.evaluation.runs import time_shares
from autotune.evaluation.summary import summarize
from autotune.modeling.vision_timing import timed_vision, vision_parts
from autotune.runtime.load import load
from autotune.trees.policy import parse_policy
from autotune.workloads.formats import OWN, Format
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload, load_workload

if TYPE_CHECKING:
    pass

ARMS: dict[str, Callable[[ArmRunner], Arm]] = {
    AR: lambda runner: runner.plain,
    HF: lambda runner: HuggingFaceArm(HF, runner.decoder.target_model),
    HF_ASSISTED: lambda runner: HuggingFaceArm(HF_ASSISTED, runner.decoder.target_model, assistant_of(runner)),
    PROMPT_LOOKUP: ArmRunner.prompt_lookup_arm,
    **{name: partial(ArmRunner.arm, name=name, configuration=tree) for name, tree in NAMED.items()},
}
"""Arms that a profile can be compared with."""
COMPARED = (AR, HF, HF_ASSISTED, PROMPT_LOOKUP, *COMPARED_DEFAULTS)
"""The arms that a profile is compared with unasked: all of them keep the target's own output."""


def run_bench(
    profile: Path,
    workload: str,
    against: list[str] | None,
    num_prompts: int,
    seed: int,
    device: str,
    console: Console,
    *,
    draft: str | None = None,
    lossy_sweep: bool = False,
    temperature: float | None = None,
    uncoupled: bool = False,
    wait_until_quiet_s: float | None = None,
    workload_format: Format | None = None,
    is_whole: bool = False,
    max_new_tokens: int | None = None,
) -> dict[str, Any]:
    """Measure the arms and print tables; returns the figures as JSON.

    Args:
        against: names in ``ARMS``; None compares with those of ``COMPARED`` that can run.
        draft: drafts for published configurations in place of the profile's draft.
        lossy_sweep: also measure ``LOSSY_SWEEP``; without ``against``, nothing else.
        temperature: of all prompts; None: that of each.
        uncoupled: also measure every arm that drafts without coupled sampling.
        wait_until_quiet_s: the longest time to wait until the machine is quiet, in seconds; None: do not wait.
        workload_format: of the workload's file; None finds it out.
        is_whole: decode the prompts of both splits.
        max_new_tokens: limit of all answers; None: that of each prompt.

    Raises:
        UserError: an arm does not exist, or the profile or workload cannot be read.
    """
    for name in against or ():
        if name not in ARMS:
            raise UserError(f"--against {name}: no such arm; {nearest(name, ARMS)}")
    if lossy_sweep:
        against = [*(against or ()), *LOSSY_SWEEP]
    prompts = load_workload(
        workload, "evaluate", num_prompts=num_prompts, format=workload_format, is_whole=is_whole
    ).cut(num_prompts, max_new_tokens)
    if temperature is not None:
        prompts = prompts.sampled(temperature)
    decoder = load(profile, device=device, context_tokens=0)  # warm-ups capture
    if decoder.draft is None and draft is None and any(name in NAMED for name in against or ()):
        raise UserError(
            "this profile decodes without a draft, so trees cannot be compared with it; "
            f"bench it --against {AR},{HF},{PROMPT_LOOKUP}, or name a --draft"
        )
    other = None if draft is None else load_draft(draft, decoder.target)
    assert decoder.profile is not None
    points = decoder.profile.points
    is_lossy = any(map(is_lossy_arm, against or ())) or not all(point.lossless for point in points)
    draft_of = None if other is None else lambda configuration: other
    runner = ArmRunner(decoder, decoder.processor, with_perplexity=is_lossy, draft_of=draft_of)
    names = COMPARED if against is None else against
    chosen = choose_arms([AR, *names], runner, prompts)
    arms = [*chosen.arms, DecoderArm(TUNED, decoder)] if decoder.draft is not None else chosen.arms
    if uncoupled:
        drafting = [arm for arm in arms if isinstance(arm, DecoderArm) and arm.decoder.draft is not None]
        arms = [*arms, *(runner.uncoupled_arm(arm) for arm in drafting if not is_lossy_arm(arm.name))]
    for name, reason in chosen.unavailable.items():
        console.say(f"{name} is left out: {reason}")
    for name, note in chosen.notes.items():
        console.say(f"{name}: {note}")
    if wait_until_quiet_s is not None:
        wait_until_quiet(wait_until_quiet_s, str(decoder.target.device), console)
    with console.stage("bench") as update, ContentionMonitor(str(decoder.target.device)) as monitor:
        runs = runner.compare(arms, prompts, seed=seed, report=lambda done, of: update(done, of, ""))
    console.say(monitor.contention.describe("while runs were timed"))
    summaries = [summarize(arm.name, runs[arm.name], runs[AR], seed=seed) for arm in arms]
    if runner.num_disturbed:
        console.say(
            f"{runner.num_disturbed} disturbed runs were measured again: their prefill took {DISTURBED:g} times the "
            f"median, or a forward {STALLED:g} times the shortest"
        )
    if len(points) > 1:
        console.say(f"{TUNED}: {points_used(decoder.profile, runs[TUNED])}")
    by_task, by_length = speedups_by_task(runs), gain_by_length(runs)
    shares = {name: found for name, arm_runs in runs.items() if (found := time_shares(arm_runs))}
    print_arms(summaries, console)
    print_tasks(by_task, console)
    results = benchmark_results(runs, prompts.prompts)
    if prompts.format != OWN:
        print_benchmark(prompts.format, results, console)
    if lossy_sweep:
        print_lossy_sweep(summaries, console)
    print_lengths(by_length, console)
    print_time_shares(shares, console)
    counts = {name: pool_counts(arm_runs) for name, arm_runs in runs.items()}
    if TUNED in counts:
        print_acceptance(TUNED, counts[TUNED], console)
    return {
        "provenance": stamp(monitor.contention).model_dump(mode="json"),
        "hardware": fingerprint(str(decoder.target.device)).model_dump(mode="json"),
        "profile": str(profile),
        "workload": workload,
        "workload_sha256": prompts.sha256,
        "seed": seed,
        "arms": [asdict(summary) for summary in summaries],
        "lossy_arms": [summary.name for summary in summaries if is_lossy_arm(summary.name)],
        "unavailable": chosen.unavailable,
        "notes": chosen.notes,
        "speedup_by_task": by_task.astype(object).where(by_task.notna(), None).to_dict("index"),
        "speedup_geomean": geomeans(by_task).to_dict(),
        "benchmark_results": json.loads(results.to_json(orient="records")),
        "by_length": json.loads(by_length.to_json(orient="records")),
        "time_shares": shares,
        "acceptance_counts": {name: found.to_json() for name, found in counts.items() if not found.is_empty},
        "disturbed_runs": runner.num_disturbed,
        "runs": {name: [run.model_dump(mode="json") for run in arm_runs] for name, arm_runs in runs.items()},
    }


# ----------------------------------------------------------------------------------------------------------------- arms


@dataclass
class ChosenArms:
    """Arms that can run here."""

    arms: list[Arm] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)
    """Why an arm cannot run, by name."""
    notes: dict[str, str] = field(default_factory=dict)
    """Limitations of arms that run, by name."""


def choose_arms(names: Sequence[str], runner: ArmRunner, prompts: Workload) -> ChosenArms:
    """The arms of these names that can run, each once, in this order."""
    chosen = ChosenArms()
    for name in dict.fromkeys(names):
        has_draft = runner.decoder.draft is not None or (runner.draft_of is not None and name in NAMED)
        if not has_draft and (name in NAMED or name == HF_ASSISTED):
            chosen.unavailable[name] = "the profile decodes without a draft"
            continue
        if name in NAMED and not parse_policy(NAMED[name].tree).is_chain and runner.has_states:
            chosen.unavailable[name] = (
                "recurrent or convolution states follow one path, so that only chains are decoded"
            )
            continue
        if name == HF_ASSISTED:
            failure, note = try_assisted(runner, prompts)
            if failure is not None:
                chosen.unavailable[name] = failure
                continue
            if note is not None:
                chosen.notes[name] = note
        chosen.arms.append(ARMS[name](runner))
    return chosen


def try_assisted(runner: ArmRunner, prompts: Workload) -> tuple[str | None, str | None]:
    """Try Hugging Face's assisted generation on the first prompt with an image and the first without.

    Returns why it cannot run, or None, and a limitation to report, or None. In half precision rounding can flip the argmax
    of a near tie, so only in float32 an output other than that of ``generate`` alone is a failure.
    """
    assistant = assistant_of(runner)
    if assistant is None:
        return "the profile's draft is no model that generate takes as its assistant_model", None
    note = None
    first_of_kind: dict[bool, WorkloadPrompt] = {}
    for prompt in prompts.prompts:
        first_of_kind.setdefault(bool(prompt.pixels), prompt)
    for prompt in first_of_kind.values():
        inputs = prompt.inputs(runner.processor, runner.decoder.target.device)
        try:
            with timed_vision(assistant) as vision:
                tokens, _ = ARMS[HF_ASSISTED](runner).decode(inputs, prompt.settings)
        except Exception as error:  # whatever transformers raises for models it does not support
            first_line = next(iter(str(error).strip().splitlines()), "no message")
            return f"on {prompt.name} generate raised {type(error).__name__}: {first_line}", None
        is_exact = runner.decoder.target.text.is_exact and prompt.settings.temperature == 0
        if is_exact and tokens != ARMS[HF](runner).decode(inputs, prompt.settings)[0]:
            return f"on {prompt.name} its output is not that of generate alone", None
        if prompt.pixels and vision_parts(assistant) and vision.num_forwards == 0:
            note = "generate gives the draft no image, so that it drafts blind"
    return None, note


def assistant_of(runner: ArmRunner) -> Any | None:
    """The draft as an ``assistant_model`` of Hugging Face's generate; None if the draft is not a whole model."""
    draft = runner.decoder.draft
    return draft.model if isinstance(draft, IndependentDraft | Gemma4AssistantDraft) else None
