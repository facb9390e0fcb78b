"""``autotune search``: profile, record, search, measure, and write the decoding profile.

Each stage leaves documents that the next run finds again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autotune.acceptance.trace import ForestBounds, bounds_for
from autotune.console import Console
from autotune.cost.device import Fingerprint
from autotune.cost.table import TOKENS, CostTable
from autotune.decoding_profile import (
    ComparedArm,
    DecodingProfile,
    DraftChoice,
    Evidence,
    Measured,
    OperatingPoint,
    Predicted,
    PromptEvidence,
    WorkloadReference,
    save_profile,
)
from autotune.errors import UserError
from autotune.files import require_writable
from autotune.provenance import stamp
from autotune.search.documents import (
    device_for,
    foreign_table,
    local_table,
    print_agreement,
    print_table,
    record_traces,
)
from autotune.search.finalists import AR, Arm, Run, Runner, Summary, bootstrap_ratio, summarise
from autotune.search.pair import Pair
from autotune.search.space import PUBLISHED_DEFAULTS, Configuration, SearchSpace, largest_policies, load_space
from autotune.search.study import Candidate, Evaluator, choose_finalists, search_trees
from autotune.subnet import Subnet
from autotune.trees.buckets import check_buckets
from autotune.trees.policy import parse_policy
from autotune.workload import Workload, load_workload

NUM_FINALISTS = 4
FINALIST_PROMPTS = 16


@dataclass(frozen=True)
class SearchSettings:
    """What the user asked of a search."""

    target: str
    draft: str
    workload: str
    subnet: Subnet = field(default_factory=Subnet)
    """Heads and injection layer of the draft."""
    space: str = "quick"
    gpu: str = "auto"
    budget_s: float = 300.0
    num_trials: int = 200
    storage: str | None = None
    study: str | None = None
    seed: int = 0
    buckets: tuple[int, ...] = ()
    """Sizes that forwards are rounded up to; none: every size as it is."""
    num_tune_prompts: int = 48
    num_evaluate_prompts: int = 64
    output: Path = Path("profile.json")
    folder: Path = Path(".autotune")
    """Where studies keep their documents."""


def check_settings(settings: SearchSettings) -> None:
    """Refuse what cannot work before anything is loaded.

    Raises:
        UserError: no time, no trials, or an output that cannot be written.
    """
    if settings.budget_s <= 0:
        raise UserError(
            f"--budget must be longer than nothing; got {settings.budget_s:g} s; give for example --budget 5m"
        )
    if settings.num_trials < 1:
        raise UserError(f"--trials must be at least 1; got {settings.num_trials}; the default is 200")
    check_buckets(settings.buckets)
    require_writable(settings.output)


def bounds_of(space: SearchSpace, largest: int = TOKENS[-1]) -> ForestBounds:
    """How far traces must reach for a space; refuses one that cost tables of steps up to ``largest`` tokens do not reach,
    before anything is made.

    Raises:
        UserError: trees larger or wider than what is measured.
    """
    policies = list(largest_policies(space))
    for policy in policies:
        if max(policy.max_nodes + 1, policy.max_width) > largest:
            raise UserError(
                f"space {space.name}: steps are priced up to {largest} tokens; {policy.policy} verifies up to "
                f"{policy.max_nodes + 1} and drafts {policy.max_width} at once; narrow the space"
            )
    return bounds_for(policies)


def search(settings: SearchSettings, console: Console) -> DecodingProfile:
    """The main job. Interrupted at any moment, the same call goes on from what is on disk.

    Raises:
        UserError: anything the user can mend, before long work where possible.
    """
    check_settings(settings)
    deadline = time.monotonic() + settings.budget_s
    space = load_space(settings.space)
    keeps = space.visual_keep.values
    if keeps is None:
        raise UserError(f"space {space.name}: visual_keep must list its choices, for each is recorded; give choices")
    bounds = bounds_of(space, max(settings.buckets, default=TOKENS[-1]))
    tune = load_workload(settings.workload, "tune", num_prompts=settings.num_tune_prompts)
    evaluate = load_workload(settings.workload, "evaluate", num_prompts=settings.num_evaluate_prompts)
    device = device_for(settings.gpu)
    pair = Pair(settings.target, settings.draft, device or "cpu", settings.buckets, settings.subnet)
    folder = settings.folder / (settings.study or f"{settings.target.replace('/', '-')}-{pair.key}")
    console.say(f"target {settings.target}, draft {settings.draft}, workload {settings.workload}; study in {folder}")

    table = local_table(pair, tune, folder, console) if device is not None else foreign_table(settings.gpu, pair)
    print_table(table, console)
    traces = record_traces(pair, tune, sorted(keeps, reverse=True), folder, console, bounds=bounds)
    print_agreement(traces[0], console)

    evaluator = Evaluator(traces, table, pair.draft_reference)
    documents = [pair.key, tune.sha256, table.provenance.model_dump(mode="json"), bounds.model_dump()]
    with console.stage("trees by replay") as update:
        candidates = search_trees(
            evaluator,
            space,
            num_trials=settings.num_trials,
            storage=settings.storage or folder / "optuna.journal",
            documents=documents,
            seed=settings.seed,
            deadline=time.monotonic() + max(5.0, 0.4 * (deadline - time.monotonic())),
            report=update,
        )
    # Published defaults may lie outside the space; only what the space allows can win.
    candidates = [
        candidate
        for candidate in candidates
        if candidate.configuration.visual_keep in keeps and candidate.configuration.tree["policy"] in space.trees
    ]
    console.say(
        f"{evaluator.num_evaluated} configurations replayed; plain decoding is predicted at {evaluator.ar_ms_per_token:.2f} ms a token"
    )
    workload_reference = WorkloadReference(
        name=settings.workload,
        tune_sha256=tune.sha256,
        evaluate_sha256=evaluate.sha256,
        num_tune_prompts=len(tune.prompts),
        num_evaluate_prompts=len(evaluate.prompts),
    )
    if device is None:
        document = predicted_profile(pair, table, evaluator.guarded(candidates[0]), workload_reference, evaluator)
    else:
        pair.decoder.threads = table.threads
        runner = Runner(pair.decoder, pair.processor, folder / "runs.jsonl", context=[pair.key, table.threads])
        winner = measure_finalists(
            runner,
            [evaluator.guarded(c) for c in choose_finalists(candidates, NUM_FINALISTS)],
            tune,
            evaluator,
            settings,
            deadline,
            console,
        )
        document = judged_profile(
            runner, pair, table, winner, workload_reference, evaluate, evaluator, settings, deadline, console
        )
    save_profile(settings.output, document)
    console.say(f"decoding profile written to {settings.output}")
    return document


# ----------------------------------------------------------------------------------------------------------- measuring


def measure_finalists(
    runner: Runner,
    finalists: list[Candidate],
    tune: Workload,
    evaluator: Evaluator,
    settings: SearchSettings,
    deadline: float,
    console: Console,
) -> Candidate:
    """The finalists decode tuning prompts for real; the fastest wins, ties go to the smaller tree."""
    prompts = Workload(tune.name, tune.split, tune.prompts[:FINALIST_PROMPTS])
    arms = [Arm(f"finalist {number + 1}", candidate.configuration) for number, candidate in enumerate(finalists)]
    with console.stage("finalists, measured") as update:
        half = time.monotonic() + 0.4 * (deadline - time.monotonic())
        runs = runner.compare(
            [Arm(AR), *arms], prompts, seed=settings.seed, deadline=half, report=lambda done, of: update(done, of, "")
        )
    rows, totals = [], {}
    for arm, candidate in zip(arms, finalists, strict=True):
        summary = summarise(arm.name, runs[arm.name], runs[AR])
        predicted_ms = float(evaluator.replay(candidate.configuration).decode_ms[: len(runs[AR])].sum())
        measured_ms = sum(run.decode_ms for run in runs[arm.name])
        totals[arm.name] = measured_ms
        error = predicted_ms / measured_ms - 1
        rows.append(
            [
                candidate.configuration.label,
                f"{candidate.speedup:.2f}x",
                f"{summary.speedup:.2f}x",
                f"{100 * error:+.1f} %",
            ]
        )
    console.table(
        f"Finalists on {len(runs[AR])} tuning prompts",
        ["configuration", "predicted", "measured", "predicted time against measured"],
        rows,
    )
    fastest = min(arms, key=lambda arm: totals[arm.name])
    winner = fastest
    for arm, candidate in zip(arms, finalists, strict=True):
        low, _ = bootstrap_ratio(_times(runs[arm.name]), _times(runs[fastest.name]))
        is_tied = low <= 1.0 and totals[arm.name] <= 1.005 * totals[fastest.name]
        if is_tied and candidate.nodes_per_round < finalists[arms.index(winner)].nodes_per_round:
            winner = arm
    return finalists[arms.index(winner)]


def _times(runs: list[Run]) -> NDArray[np.float64]:
    return np.array([run.decode_ms for run in runs])


def judged_profile(
    runner: Runner,
    pair: Pair,
    table: CostTable,
    winner: Candidate,
    workload: WorkloadReference,
    evaluate: Workload,
    evaluator: Evaluator,
    settings: SearchSettings,
    deadline: float,
    console: Console,
) -> DecodingProfile:
    """Winner, published defaults and plain decoding on prompts that tuned nothing; the profile says what came out."""
    tuned = Arm("tuned", winner.configuration)
    defaults = [Arm(name, configuration) for name, configuration in PUBLISHED_DEFAULTS.items()]
    with console.stage("evaluation, measured") as update:
        runs = runner.compare(
            [Arm(AR), *defaults, tuned],
            evaluate,
            seed=settings.seed + 1,
            deadline=deadline,
            min_prompts=16,
            report=lambda done, of: update(done, of, ""),
        )
    summaries = {name: summarise(name, arm_runs, runs[AR]) for name, arm_runs in runs.items()}
    predicted = {
        arm.name: evaluator.evaluate(arm.configuration)
        for arm in [*defaults, tuned]
        if arm.configuration is not None and evaluator.can_replay(arm.configuration)
    }
    labels = {arm.name: arm.configuration.label for arm in [*defaults, tuned] if arm.configuration is not None}
    print_comparison(summaries, predicted, labels, console)
    best = summaries["tuned"]
    evidence = Evidence(
        prompts=[_prompt_evidence(run, plain) for run, plain in zip(runs["tuned"], runs[AR], strict=True)],
        compared=[
            ComparedArm(
                name=arm.name,
                tree=arm.configuration.tree if arm.configuration else None,
                visual_keep=arm.configuration.visual_keep if arm.configuration else None,
                predicted_speedup=predicted[arm.name].speedup if arm.name in predicted else None,
                speedup=summaries[arm.name].speedup,
                ci95=summaries[arm.name].ci95,
                tokens_per_round=summaries[arm.name].tokens_per_round,
                tokens_per_second=summaries[arm.name].tokens_per_second,
            )
            for arm in [Arm(AR), *defaults, tuned]
        ],
        configurations_replayed=evaluator.num_evaluated,
    )
    if best.speedup < 1.0:
        console.say("no draft beats plain decoding here: the profile says to decode without one")
        point = plain_point(summaries[AR], evaluator)
    else:
        measured = Measured(
            speedup=best.speedup,
            ci95=best.ci95,
            tokens_per_round=best.tokens_per_round,
            tokens_per_second=best.tokens_per_second,
            ar_tokens_per_second=summaries[AR].tokens_per_second,
            num_prompts=best.num_prompts,
            num_tokens=best.num_tokens,
            identical_outputs=best.identical_outputs,
        )
        point = _point(pair, winner, measured, estimated=table.estimated)
    return _profile(pair, pair.device, table, workload, [point], evidence)


def print_comparison(
    summaries: dict[str, Summary], predicted: dict[str, Candidate], labels: dict[str, str], console: Console
) -> None:
    """The final table: plain decoding, published defaults, winner; predicted beside measured."""
    rows = []
    for name, summary in summaries.items():
        label = f"{name}: {labels[name]}" if name in labels else "plain decoding (ar)"
        rows.append(
            [
                label,
                f"{predicted[name].speedup:.2f}x" if name in predicted else "-",
                f"{summary.speedup:.2f}x",
                f"{summary.ci95[0]:.2f}-{summary.ci95[1]:.2f}",
                f"{summary.tokens_per_round:.2f}" if summary.tokens_per_round else "-",
                f"{summary.tokens_per_second:.0f}",
                f"{summary.identical_outputs}/{summary.num_prompts}",
            ]
        )
    first = next(iter(summaries.values()))
    title = f"Evaluation on {first.num_prompts} held-out prompts, {first.num_tokens} tokens"
    console.table(
        title,
        ["arm", "predicted", "measured", "95 % interval", "M", "tokens/s", "same output"],
        rows,
        emphasised=len(rows) - 1,
    )


def _prompt_evidence(run: Run, plain: Run) -> PromptEvidence:
    return PromptEvidence(
        name=run.prompt,
        sha256=run.prompt_sha256,
        tokens_sha256=run.tokens_sha256,
        rounds=run.rounds,
        draft_forwards=run.draft_forwards,
        accepted_tokens=sum(run.accepted_lengths),
        decode_ms=run.decode_ms,
        ar_decode_ms=plain.decode_ms,
    )


# ------------------------------------------------------------------------------------------------------------- profile


def predicted_profile(
    pair: Pair, table: CostTable, winner: Candidate, workload: WorkloadReference, evaluator: Evaluator
) -> DecodingProfile:
    """A profile for a device that is not here: predictions only."""
    if winner.speedup < 1.0:
        points = [OperatingPoint(draft=None, tree=None, predicted=_plain_prediction(evaluator), measured=None)]
    else:
        points = [_point(pair, winner, None, estimated=table.estimated)]
    return _profile(
        pair, table.device, table, workload, points, Evidence(configurations_replayed=evaluator.num_evaluated)
    )


def _plain_prediction(evaluator: Evaluator) -> Predicted:
    return Predicted(speedup=1.0, ms_per_token=evaluator.ar_ms_per_token, tokens_per_round=None)


def plain_point(summary: Summary, evaluator: Evaluator) -> OperatingPoint:
    """Plain decoding, measured against itself."""
    measured = Measured(
        speedup=1.0,
        ci95=(1.0, 1.0),
        tokens_per_round=None,
        tokens_per_second=summary.tokens_per_second,
        ar_tokens_per_second=summary.tokens_per_second,
        num_prompts=summary.num_prompts,
        num_tokens=summary.num_tokens,
        identical_outputs=summary.num_prompts,
    )
    return OperatingPoint(draft=None, tree=None, predicted=_plain_prediction(evaluator), measured=measured)


def _point(pair: Pair, winner: Candidate, measured: Measured | None, *, estimated: bool) -> OperatingPoint:
    return OperatingPoint(
        draft=DraftChoice(
            kind=pair.draft.kind,
            id=pair.draft_reference.id,
            sha256=pair.draft_reference.sha256,
            subnet=pair.draft.subnet.model_copy(update={"visual_keep": winner.configuration.visual_keep}),
        ),
        tree=parse_policy(winner.configuration.tree),
        fallback=winner.configuration.fallback,
        predicted=Predicted(
            speedup=winner.speedup,
            ms_per_token=winner.ms_per_token,
            tokens_per_round=winner.tokens_per_round,
            estimated=estimated,
        ),
        measured=measured,
    )


def _profile(
    pair: Pair,
    device: Fingerprint,
    table: CostTable,
    workload: WorkloadReference,
    points: list[OperatingPoint],
    evidence: Evidence,
) -> DecodingProfile:
    return DecodingProfile(
        provenance=stamp(),
        target=pair.target_reference,
        workload=workload,
        hardware=device,
        precision=table.precision,
        buckets=table.buckets,
        threads=table.threads,
        points=points,
        evidence=evidence,
    )


def configuration_of(profile: DecodingProfile) -> Configuration | None:
    """The profile's choice as a configuration; None for plain decoding."""
    point = profile.point
    if point.draft is None or point.tree is None:
        return None
    return Configuration(
        tree=point.tree.model_dump(),
        visual_keep=point.draft.subnet.visual_keep,
        verification=point.verification,
        fallback=point.fallback,
    )
