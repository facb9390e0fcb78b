"""``autotune bench``: compares a profile with other ways to decode in one run."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.console import Console
from autotune.contention import ContentionMonitor, wait_until_quiet
from autotune.device import fingerprint
from autotune.documents.decoding_profile import AR, HF, TUNED, DecodingProfile
from autotune.documents.provenance import stamp
from autotune.documents.published_defaults import COMPARED_DEFAULTS, NAMED
from autotune.drafters.checkpoint import load_draft
from autotune.drafters.independent import IndependentDraft
from autotune.errors import UserError, nearest
from autotune.evaluation.arms import HF_ASSISTED, PROMPT_LOOKUP, Arm, DecoderArm, HuggingFaceArm
from autotune.evaluation.runner import DISTURBED, STALLED, ArmRunner
from autotune.evaluation.runs import Run, length_bands, runs_dataframe, time_shares
from autotune.evaluation.summary import Summary, speedup, summarize
from autotune.modeling.vision_timing import timed_vision, vision_parts
from autotune.runtime.load import load
from autotune.trees.acceptance_counts import AcceptanceCounts
from autotune.trees.verification import LosslessVerification, WetapVerification
from autotune.workloads.formats import Format
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload, load_workload

if TYPE_CHECKING:
    from pandas import DataFrame, Series

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
LOSSY_SWEEP = ("wetap", "wetap-lossy", "wetap-lossy-0.5", "wetap-lossy-0.1")
"""WETAP with lossless verification, and with its own at falling thresholds."""


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
    return draft.model if isinstance(draft, IndependentDraft) else None


# --------------------------------------------------------------------------------------------------------------- tables


def points_used(profile: DecodingProfile, runs: Sequence[Run]) -> str:
    """How many prompts each operating point has decoded; a prompt that is switched counts for each of its points."""
    counts = Counter(itertools.chain.from_iterable(run.points for run in runs))
    return ", ".join(f"{counts[n]} by point {n} ({point.when.label})" for n, point in enumerate(profile.points))


def speedups_by_task(runs: dict[str, list[Run]]) -> DataFrame:
    """Pooled speedup over ``ar``: a row for each arm, a column for each task; NaN for a task in which nothing was decoded."""
    frame = runs_dataframe(runs)[["arm", "number", "task", "decode_ms", "new_tokens"]]
    frame["steps"] = frame.new_tokens - 1
    plain = frame[frame.arm == AR].set_index("number")[["decode_ms", "steps"]]
    pairs = frame.join(plain, on="number", rsuffix="_ar")
    pairs = pairs[(pairs.steps > 0) & (pairs.steps_ar > 0)]
    sums = pairs.groupby(["arm", "task"]).sum()
    speedups = (sums.decode_ms_ar / sums.steps_ar) / (sums.decode_ms / sums.steps)
    return speedups.unstack("task").reindex(index=list(runs), columns=frame.task.unique())


def geomeans(by_task: DataFrame) -> Series[float]:
    """Geometric mean over tasks, by arm: every task has the same weight, however many tokens it has."""
    return np.exp(np.log(by_task).mean(axis=1))


ARM_COLUMNS: dict[str, Callable[[Summary], str]] = {
    "speedup": lambda s: f"{s.speedup:.2f}x",
    "interval": lambda s: f"{s.ci95[0]:.2f}-{s.ci95[1]:.2f}",
    "per prompt": lambda s: f"{s.median_speedup:.2f}x",
    "M": lambda s: f"{s.tokens_per_round:.2f}" if s.tokens_per_round else "-",
    "tokens/s": lambda s: f"{s.tokens_per_second:.0f}",
    "prefill ms": lambda s: f"{s.prefill_ms:.1f}",
    "vision ms": lambda s: f"{s.vision_ms:.1f}",
    "draft prefill ms": lambda s: f"{s.draft_prefill_ms:.1f}",
    "outside models": lambda s: "-" if s.outside_share is None else f"{100 * s.outside_share:.1f} %",
    "us a round": lambda s: "-" if s.outside_us_per_round is None else f"{s.outside_us_per_round:.0f}",
    "same output": lambda s: f"{s.identical_outputs}/{s.num_prompts}",
    "perplexity": lambda s: "-" if s.perplexity is None else f"{s.perplexity:.3f}",
    "agreement": lambda s: "-" if s.agreement is None else f"{100 * s.agreement:.1f} %",
}
QUALITY = ("perplexity", "agreement")  # columns of comparisons with lossy arms


def print_arms(summaries: Sequence[Summary], console: Console) -> None:
    """Print a row for each arm; that of the profile is emphasised."""
    first = summaries[0]
    columns = [name for name in ARM_COLUMNS if name not in QUALITY or first.perplexity is not None]
    console.table(
        f"Decoding {first.num_prompts} prompts, {first.num_tokens} tokens; speedup over ar with its 95 % interval",
        ["arm", *columns],
        [[s.name, *(ARM_COLUMNS[name](s) for name in columns)] for s in summaries],
        emphasised=_tuned([s.name for s in summaries]),
    )


def print_lossy_sweep(summaries: Sequence[Summary], console: Console) -> None:
    """Print WETAP's tokens per round, and what they cost in quality, by the threshold of its acceptance (eq. 9)."""
    columns = ("M", *QUALITY, "same output", "speedup")
    by_name = {summary.name: summary for summary in summaries}
    rows = []
    for name in (AR, *LOSSY_SWEEP):
        verification = NAMED[name].verification if name in NAMED else LosslessVerification()
        rule = "plain decoding" if name == AR else "lossless"
        if isinstance(verification, WetapVerification):
            rule = f"LOSSY, threshold {verification.threshold:g}"
        rows.append([rule, *(ARM_COLUMNS[column](by_name[name]) for column in columns)])
    console.table("WETAP by acceptance", ["acceptance", *columns], rows)


def is_lossy_arm(name: str) -> bool:
    """Whether the arm's output is not the target's own."""
    return name in NAMED and not NAMED[name].verification.is_lossless


def print_tasks(by_task: DataFrame, console: Console) -> None:
    """Print a row for each arm with a column for each task, and the geometric mean over tasks."""
    table = by_task.assign(geomean=geomeans(by_task)).map(lambda value: "-" if np.isnan(value) else f"{value:.2f}x")
    console.table(
        "Speedup over ar by task",
        ["arm", *table.columns],
        [[str(name), *row] for name, row in zip(table.index, table.to_numpy(), strict=True)],
        emphasised=_tuned(list(table.index)),
    )


def gain_by_length(runs: dict[str, list[Run]]) -> DataFrame:
    """Speedup over ``ar`` and tokens per round by the length of the answer of ``ar`` (SAGE, figure 3).

    Columns: arm, length, prompts, speedup, tokens_per_round; NaN where an arm has no rounds.
    """
    import pandas as pd

    plain = runs[AR]
    bands = np.asarray(length_bands([run.new_tokens for run in plain]).astype(str))
    rows = []
    for name, arm_runs in runs.items():
        for band in dict.fromkeys(sorted(bands, key=lambda band: int(band.split("-")[0]))):
            numbers = [
                n for n in np.flatnonzero(bands == band) if plain[n].new_tokens > 1 and arm_runs[n].new_tokens > 1
            ]
            chosen = [arm_runs[n] for n in numbers]
            num_rounds, num_tokens = sum(run.rounds for run in chosen), sum(run.new_tokens - 1 for run in chosen)
            ratio = speedup(chosen, [plain[n] for n in numbers]) if chosen else float("nan")
            rows.append((name, band, len(chosen), ratio, num_tokens / num_rounds if num_rounds else float("nan")))
    frame = pd.DataFrame(rows, columns=["arm", "length", "prompts", "speedup", "tokens_per_round"])
    return frame[frame.prompts > 0].reset_index(drop=True)


def print_lengths(by_length: DataFrame, console: Console) -> None:
    """Print speedup and M of each arm by the length of the answer, if the answers are of several lengths."""
    lengths = list(by_length.length.unique())
    if len(lengths) < 2:
        return
    figures = zip(by_length.speedup.to_numpy(float), by_length.tokens_per_round.to_numpy(float), strict=True)
    texts = [f"{gain:.2f}x" + ("" if np.isnan(tokens) else f", M {tokens:.2f}") for gain, tokens in figures]
    cells = dict(zip(zip(by_length.arm, by_length.length, strict=True), texts, strict=True))
    names = list(by_length.arm.unique())
    console.table(
        "Speedup over ar and M by the number of tokens of ar's answer",
        ["arm", *lengths],
        [[name, *(cells.get((name, length), "-") for length in lengths)] for name in names],
        emphasised=_tuned(names),
    )


def print_time_shares(shares: dict[str, dict[str, float]], console: Console) -> None:
    """Print the share of each part of an arm's time, prefill included."""
    if not shares:
        return
    console.table(
        "Shares of the total time",
        ["arm", *next(iter(shares.values()))],
        [[name, *(f"{100 * share:.1f} %" for share in parts.values())] for name, parts in shares.items()],
        emphasised=_tuned(list(shares)),
    )


def pool_counts(runs: Sequence[Run]) -> AcceptanceCounts:
    """Acceptance counts, summed over runs."""
    counts = AcceptanceCounts()
    for run in runs:
        counts.add(AcceptanceCounts.from_json(run.acceptance_counts))
    return counts


def print_acceptance(name: str, acceptance: AcceptanceCounts, console: Console) -> None:
    """Print accepted shares of offered tokens by depth and by rank, near an image and in running text."""
    rows = []
    for region, tables in acceptance.to_json().items():
        for table, counts in tables.items():
            if counts:
                shares = [f"{100 * accepted / offered:.0f} %" if offered else "-" for offered, accepted in counts]
                rows.append([f"{region.replace('_', ' ')}, {table.replace('_', ' ')}", *shares])
    width = max((len(row) for row in rows), default=1)
    console.table(
        f"Draft of {name}: accepted of offered, from depth 1 and from the most probable on",
        ["", *(str(number) for number in range(1, width))],
        [[*row, *[""] * (width - len(row))] for row in rows],
    )


def _tuned(names: list[str]) -> int | None:
    return names.index(TUNED) if TUNED in names else None
