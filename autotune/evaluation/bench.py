"""``autotune bench``: a profile beside other ways to decode, in one run, prompt by prompt in random order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from autotune.console import Console
from autotune.device import fingerprint
from autotune.documents.configuration import PUBLISHED_DEFAULTS
from autotune.documents.provenance import stamp
from autotune.errors import UserError, nearest
from autotune.evaluation.arms import HF, HF_ASSISTED, PROMPT_LOOKUP, PROMPT_LOOKUP_ARM, Arm, Run
from autotune.evaluation.profile_runner import TUNED, ProfileArmRunner, points_used
from autotune.evaluation.runner import AR, DISTURBED, STALLED, ArmRunner
from autotune.evaluation.summary import Summary, decoded_pairs, speedup, summarize
from autotune.modeling.vision_timing import timed_vision, vision_parts
from autotune.runtime.load import load
from autotune.trees.acceptance_counts import AcceptanceCounts
from autotune.trees.verification import WetapVerification
from autotune.workloads.workload import Workload, WorkloadPrompt, load_workload

# WETAP as the paper has it, its own acceptance included: another output than the target's.
LOSSY = Arm("wetap-lossy", PUBLISHED_DEFAULTS["wetap"].model_copy(update={"verification": WetapVerification()}))
WITHOUT_DRAFT = "the profile decodes without a draft"


def known_arms() -> dict[str, Arm]:
    """What a profile can be compared with, by name."""
    published = [Arm(name, configuration) for name, configuration in PUBLISHED_DEFAULTS.items()]
    return {arm.name: arm for arm in (Arm(AR), Arm(HF), Arm(HF_ASSISTED), PROMPT_LOOKUP_ARM, *published, LOSSY)}


def run_bench(
    profile: Path, workload: str, against: list[str] | None, num_prompts: int, seed: int, device: str, console: Console
) -> dict[str, Any]:
    """Measure the arms and print them pooled and by task; returns the figures. ``against`` is all that can run and keep
    the target's own output where it is None.

    Raises:
        UserError: an arm that does not exist, or the profile or workload cannot be read.
    """
    known = known_arms()
    for name in against or ():
        if name not in known:
            raise UserError(f"--against {name}: no such arm; {nearest(name, known)}")
    prompts = load_workload(workload, "evaluate", num_prompts=num_prompts)
    decoder = load(profile, device=device)
    if decoder.draft is None and any(name in {*PUBLISHED_DEFAULTS, LOSSY.name} for name in against or ()):
        raise UserError(
            "this profile decodes without a draft, so trees cannot be compared with it; "
            f"bench it --against {AR},{HF},{PROMPT_LOOKUP}"
        )
    points = decoder.profile.points
    is_lossy = LOSSY.name in (against or ()) or not all(point.lossless for point in points)
    runner = ProfileArmRunner(decoder, with_perplexity=is_lossy)
    names = [name for name in known if name != LOSSY.name] if against is None else against
    chosen = choose_arms([AR, *names], runner, prompts)
    arms = [*chosen.arms, Arm(TUNED)] if decoder.draft is not None else chosen.arms
    for name, reason in chosen.unavailable.items():
        console.say(f"{name} is left out: {reason}")
    for name, note in chosen.notes.items():
        console.say(f"{name}: {note}")
    with console.stage("bench") as update:
        runs = runner.compare(arms, prompts, seed=seed, report=lambda done, of: update(done, of, ""))
    summaries = [summarize(arm.name, runs[arm.name], runs[AR], seed=seed) for arm in arms]
    if runner.num_disturbed:
        console.say(
            f"{runner.num_disturbed} disturbed runs were measured again: their prefill took {DISTURBED:g} times the usual, or a "
            f"forward {STALLED:g} times the least"
        )
    if len(points) > 1:
        console.say(f"{TUNED}: {points_used(decoder.profile, runs[TUNED])}")
    by_task = speedups_by_task(runs, prompts)
    geomeans = {name: _geomean(found) for name, found in by_task.items()}
    print_arms(summaries, console)
    print_tasks(by_task, geomeans, console)
    counts = {name: pool_counts(arm_runs) for name, arm_runs in runs.items()}
    if TUNED in counts:
        print_acceptance(TUNED, counts[TUNED], console)
    return {
        "provenance": stamp().model_dump(mode="json"),
        "hardware": fingerprint(str(decoder.target.device)).model_dump(mode="json"),
        "profile": str(profile),
        "workload": workload,
        "workload_sha256": prompts.sha256,
        "seed": seed,
        "arms": [asdict(summary) for summary in summaries],
        "unavailable": chosen.unavailable,
        "notes": chosen.notes,
        "speedup_by_task": by_task,
        "speedup_geomean": geomeans,
        "acceptance_counts": {name: found.to_json() for name, found in counts.items() if not found.is_empty},
        "disturbed_runs": runner.num_disturbed,
        "runs": {name: [run.model_dump(mode="json") for run in arm_runs] for name, arm_runs in runs.items()},
    }


# ----------------------------------------------------------------------------------------------------------------- arms


@dataclass
class ChosenArms:
    """The arms that can run; by name why others cannot, and what to know of those that can."""

    arms: list[Arm] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def choose_arms(names: Sequence[str], runner: ArmRunner, prompts: Workload) -> ChosenArms:
    """The arms of these names, each once, in this order, as far as they can run here."""
    known, chosen = known_arms(), ChosenArms()
    for name in dict.fromkeys(names):
        if runner.decoder.draft is None and (name in {*PUBLISHED_DEFAULTS, LOSSY.name, HF_ASSISTED}):
            chosen.unavailable[name] = WITHOUT_DRAFT
            continue
        if name == HF_ASSISTED:
            failure, note = try_assisted(runner, prompts)
            if failure is not None:
                chosen.unavailable[name] = failure
                continue
            if note is not None:
                chosen.notes[name] = note
        chosen.arms.append(known[name])
    return chosen


def try_assisted(runner: ArmRunner, prompts: Workload) -> tuple[str | None, str | None]:
    """Why Hugging Face's assisted generation does not work here, or None; and what to know of it where it does.

    Tried on the first prompt with an image and the first without. Rounding can flip a near tie in half precision, so
    that only in float32 another output than that of plain ``generate`` means that it does not work.
    """
    if runner.assistant is None:
        return "the profile's draft is no model that generate takes as its assistant_model", None
    note = None
    for prompt in first_of_each_kind(prompts):
        inputs = prompt.inputs(runner.processor, runner.decoder.target.device)
        try:
            with timed_vision(runner.assistant) as sight:
                tokens, _ = runner.decode(Arm(HF_ASSISTED), inputs, prompt)
        except Exception as error:  # whatever transformers raises on models that it was not made for
            return f"on {prompt.name} generate raised {type(error).__name__}: {_first_line(error)}", None
        is_exact = runner.decoder.target.dtype == torch.float32 and prompt.settings.temperature == 0
        if is_exact and tokens != runner.decode(Arm(HF), inputs, prompt)[0]:
            return f"on {prompt.name} its output is not that of generate alone", None
        if prompt.pixels and vision_parts(runner.assistant) and sight.num_forwards == 0:
            note = "generate gives the draft no image, so that it drafts blind"
    return None, note


def first_of_each_kind(prompts: Workload) -> list[WorkloadPrompt]:
    """The first prompt with an image and the first without, as far as there are any."""
    firsts: dict[bool, WorkloadPrompt] = {}
    for prompt in prompts.prompts:
        firsts.setdefault(bool(prompt.pixels), prompt)
    return list(firsts.values())


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


# --------------------------------------------------------------------------------------------------------------- tables


def speedups_by_task(runs: dict[str, list[Run]], workload: Workload) -> dict[str, dict[str, float | None]]:
    """Pooled speedup over ``ar`` for each arm and task; None for a task in which nothing was decoded."""
    tasks = [prompt.settings.task for prompt in workload.prompts[: len(runs[AR])]]
    found: dict[str, dict[str, float | None]] = {name: {} for name in runs}
    for name, arm_runs in runs.items():
        for task in dict.fromkeys(tasks):
            of_task, baseline = (
                [run for run, its in zip(of, tasks, strict=True) if its == task] for of in (arm_runs, runs[AR])
            )
            found[name][task] = speedup(of_task, baseline) if decoded_pairs(of_task, baseline) else None
    return found


def _geomean(speedups: dict[str, float | None]) -> float:
    """Over tasks, each of which counts alike, however many tokens it has."""
    return geometric_mean([value for value in speedups.values() if value is not None])


def print_arms(summaries: Sequence[Summary], console: Console) -> None:
    """A row for each arm; the profile's own stands out."""
    rows = [
        [
            s.name,
            f"{s.speedup:.2f}x",
            f"{s.ci95[0]:.2f}-{s.ci95[1]:.2f}",
            f"{s.median_speedup:.2f}x",
            f"{s.tokens_per_round:.2f}" if s.tokens_per_round else "-",
            f"{s.tokens_per_second:.0f}",
            f"{s.prefill_ms:.1f}",
            f"{s.vision_ms:.1f}",
            f"{s.draft_prefill_ms:.1f}",
            f"{100 * s.outside_share:.1f} %" if s.outside_share is not None else "-",
            f"{s.outside_us_per_round:.0f}" if s.outside_us_per_round is not None else "-",
            f"{s.identical_outputs}/{s.num_prompts}",
            *([] if s.perplexity is None else [f"{s.perplexity:.3f}"]),
        ]
        for s in summaries
    ]
    title = f"Decoding {summaries[0].num_prompts} prompts, {summaries[0].num_tokens} tokens; speedup over ar with its 95 % interval"
    console.table(
        title,
        [
            "arm",
            "speedup",
            "interval",
            "per prompt",
            "M",
            "tokens/s",
            "prefill ms",
            "vision ms",
            "draft prefill ms",
            "outside models",
            "us a round",
            "same output",
            *([] if summaries[0].perplexity is None else ["perplexity"]),
        ],
        rows,
        emphasised=_tuned([s.name for s in summaries]),
    )


def print_tasks(by_task: dict[str, dict[str, float | None]], geomeans: dict[str, float], console: Console) -> None:
    """A row for each arm, a column for each task, and their geometric mean."""
    tasks = list(next(iter(by_task.values())))
    rows = []
    for name, found in by_task.items():
        values = [found[task] for task in tasks] + [geomeans[name]]
        rows.append([name, *("-" if value is None else f"{value:.2f}x" for value in values)])
    console.table("Speedup over ar by task", ["arm", *tasks, "geomean"], rows, emphasised=_tuned(list(by_task)))


def pool_counts(runs: Sequence[Run]) -> AcceptanceCounts:
    """Of all runs of an arm."""
    counts = AcceptanceCounts()
    for run in runs:
        counts.add(AcceptanceCounts.from_json(run.acceptance_counts))
    return counts


def print_acceptance(name: str, acceptance: AcceptanceCounts, console: Console) -> None:
    """Shares of offered tokens that the target took, by depth and by rank, near an image and in running text."""
    found = acceptance.to_json()
    rows = []
    for place, tables in found.items():
        for table, counts in tables.items():
            if counts:
                shares = [f"{100 * accepted / offered:.0f} %" if offered else "-" for offered, accepted in counts]
                rows.append([f"{place.replace('_', ' ')}, {table.replace('_', ' ')}", *shares])
    width = max((len(row) for row in rows), default=1)
    console.table(
        f"Draft of {name}: accepted of offered, from depth 1 and from the most probable on",
        ["", *(str(number) for number in range(1, width))],
        [[*row, *[""] * (width - len(row))] for row in rows],
    )


def _tuned(names: list[str]) -> int | None:
    return names.index(TUNED) if TUNED in names else None
