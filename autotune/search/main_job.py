"""``autotune search``: profile, record, search, measure, and write the decoding profile. Each stage leaves documents that the next run finds again."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.acceptance.recorder import Recorder
from autotune.acceptance.trace import ForestBounds, Trace, agreement, save_trace
from autotune.console import Console
from autotune.cost.device import Fingerprint, choose_device, fingerprint, local_devices, shipped_tables
from autotune.cost.profiler import ProfileSettings, kv_lengths_for, profile
from autotune.cost.table import CostTable
from autotune.decoding_profile import (
    ComparedArm,
    DecodingProfile,
    DraftChoice,
    Evidence,
    Measured,
    OperatingPoint,
    Predicted,
    PromptEvidence,
    Subnet,
    WorkloadReference,
    save_profile,
)
from autotune.drafters.independent import IndependentDraft
from autotune.errors import UserError, nearest
from autotune.files import content_key, parse, read_json, require_writable, write_document
from autotune.models import load_model, load_processor, reference
from autotune.provenance import ModelReference, stamp, version_of
from autotune.runtime.decoder import Decoder
from autotune.runtime.target import Target
from autotune.search.finalists import AR, Arm, Run, Runner, Summary, bootstrap_ratio, summarise
from autotune.search.space import PUBLISHED_DEFAULTS, Configuration, load_space
from autotune.search.study import Candidate, Evaluator, choose_finalists, search_trees
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
    space: str = "quick"
    gpu: str = "auto"
    budget_s: float = 300.0
    num_trials: int = 400
    storage: str | None = None
    study: str | None = None
    seed: int = 0
    num_tune_prompts: int = 64
    num_evaluate_prompts: int = 64
    output: Path = Path("profile.json")
    folder: Path = Path(".autotune")
    """Where studies keep their documents."""


class Pair:
    """Target and draft, loaded, with what documents call them."""

    def __init__(self, target: str, draft: str, device: str) -> None:
        self.target_reference = reference(target)
        self.draft_reference = reference(draft)
        self.processor = load_processor(target)
        self.target = Target(load_model(target, device=device))
        self.draft = IndependentDraft(load_model(draft, device=device))
        self.decoder = Decoder(self.target, self.draft)  # checks that they fit
        self.device = fingerprint(device)

    @property
    def key(self) -> str:
        """Names documents that speak of this pair on this device, through these versions."""
        models = [self.target_reference.sha256 or self.target_reference.id, self.draft_reference.sha256 or self.draft_reference.id]
        return content_key([*models, self.device.key, version_of("torch"), version_of("transformers")])


def check_settings(settings: SearchSettings) -> None:
    """Refuse what cannot work before anything is loaded.

    Raises:
        UserError: no time, no trials, or an output that cannot be written.
    """
    if settings.budget_s <= 0:
        raise UserError(f"--budget must be longer than nothing; got {settings.budget_s:g} s; give for example --budget 5m")
    if settings.num_trials < 1:
        raise UserError(f"--trials must be at least 1; got {settings.num_trials}; the default is 400")
    require_writable(settings.output)


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
    tune = load_workload(settings.workload, "tune", num_prompts=settings.num_tune_prompts)
    evaluate = load_workload(settings.workload, "evaluate", num_prompts=settings.num_evaluate_prompts)
    device = device_for(settings.gpu)
    pair = Pair(settings.target, settings.draft, device or "cpu")
    folder = settings.folder / (settings.study or f"{settings.target.replace('/', '-')}-{pair.key}")
    console.say(f"target {settings.target}, draft {settings.draft}, workload {settings.workload}; study in {folder}")

    table = local_table(pair, tune, folder, console) if device is not None else foreign_table(settings.gpu, pair)
    print_table(table, console)
    recorded_keeps = sorted({*keeps, *(c.visual_keep for c in PUBLISHED_DEFAULTS.values())}, reverse=True)
    traces = record_traces(pair, tune, recorded_keeps, folder, console)
    print_agreement(traces[0], console)

    evaluator = Evaluator(traces, table, pair.draft_reference)
    documents = [pair.key, tune.sha256, table.provenance.model_dump(mode="json"), recorded_keeps]
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
    candidates = [candidate for candidate in candidates if candidate.configuration.visual_keep in keeps and candidate.configuration.tree["policy"] in space.trees]
    console.say(f"{evaluator.num_evaluated} configurations replayed; plain decoding is predicted at {evaluator.ar_ms_per_token:.2f} ms a token")
    workload_reference = WorkloadReference(
        name=settings.workload,
        tune_sha256=tune.sha256,
        evaluate_sha256=evaluate.sha256,
        num_tune_prompts=len(tune.prompts),
        num_evaluate_prompts=len(evaluate.prompts),
    )
    if device is None:
        document = predicted_profile(pair, table, candidates[0], workload_reference, evaluator)
    else:
        runner = Runner(pair.decoder, pair.processor, folder / "runs.jsonl", context=[pair.key])
        winner = measure_finalists(runner, choose_finalists(candidates, NUM_FINALISTS), tune, evaluator, settings, deadline, console)
        document = judged_profile(runner, pair, table, winner, workload_reference, evaluate, evaluator, settings, deadline, console)
    save_profile(settings.output, document)
    console.say(f"decoding profile written to {settings.output}")
    return document


# ------------------------------------------------------------------------------------------------------------ cost table


def device_for(gpu: str) -> str | None:
    """The local device to measure on, or None where ``gpu`` names another one, whose shipped table is used.

    Raises:
        UserError: a device that is neither here nor shipped.
    """
    if gpu == "auto" or gpu in local_devices():
        return choose_device(gpu)
    for device in local_devices():
        if fingerprint(device).name == gpu:
            return device
    shipped = shipped_tables()
    if gpu not in shipped:
        raise UserError(f"--gpu {gpu}: neither this machine's device nor one with a shipped cost table; {nearest(gpu, ['auto', *local_devices(), *shipped])}")
    return None


def load_table(path: Path) -> CostTable:
    """The cost table in ``path``."""
    return parse(CostTable, "cost-table", read_json(path), source=path)


def foreign_table(gpu: str, pair: Pair) -> CostTable:
    """The shipped table of another device for this pair.

    Raises:
        UserError: that device's tables speak of other models.
    """
    for path in shipped_tables()[gpu]:
        table = load_table(path)
        if table.target.sha256 == pair.target_reference.sha256 and any(c.draft.sha256 == pair.draft_reference.sha256 for c in table.drafts):
            return table
    raise UserError(f"--gpu {gpu}: its shipped tables are of other models than {pair.target_reference.id}; run autotune profile on that device")


def local_table(pair: Pair, workload: Workload, folder: Path, console: Console) -> CostTable:
    """This device's table: from the study's folder if it was measured for this pair, else measured now."""
    path = folder / f"{content_key([pair.key, workload.sha256])}.cost.json"
    if path.exists():
        table = load_table(path)
        console.say(f"cost table of {table.provenance.created} reused: {path}")
        return table
    table = measure_table(pair, workload, console)
    write_document(path, "cost-table", table)
    return table


def measure_table(pair: Pair, workload: Workload, console: Console) -> CostTable:
    """Measure the pair at the KV lengths that the workload's prompts and answers reach."""
    lengths = [prompt.inputs(pair.processor)["input_ids"].shape[1] for prompt in workload.prompts]
    longest = max(length + prompt.settings.max_new_tokens for length, prompt in zip(lengths, workload.prompts, strict=True))
    kv_lengths, between = kv_lengths_for(min(lengths), longest)
    with console.stage("cost table") as update:
        return profile(
            pair.target,
            pair.target_reference,
            [(pair.draft, pair.draft_reference)],
            pair.processor,
            workload,
            settings=ProfileSettings(kv_lengths=kv_lengths, held_out_kv_length=between),
            report=lambda done, of: update(done, of, ""),
        )


def record_traces(pair: Pair, workload: Workload, keeps: list[float], folder: Path, console: Console) -> list[Trace]:
    """The target's answers, then a trace of the draft for each visual keep ratio, saved under ``folder``."""
    recorder = Recorder(pair.target, pair.target_reference, pair.processor, folder)
    with console.stage("answers of the target") as update:
        recorder.answers(workload, lambda done, of: update(done, of, ""))
    traces: list[Trace] = []
    with console.stage("traces of the draft") as update:
        for number, keep in enumerate(keeps):

            def report(done: int, of: int, first: int = number) -> None:
                update(first * of + done, len(keeps) * of, "")

            trace = recorder.trace(pair.draft, pair.draft_reference, workload, visual_keep=keep, bounds=ForestBounds(), report=report)
            save_trace(folder / "traces" / f"keep-{keep:g}.trace.json", trace)
            traces.append(trace)
    return traces


def print_table(table: CostTable, console: Console) -> None:
    """The cost table's summary: latency by size, and how well it predicts sizes that it was not fitted to."""
    sizes = (1, 4, 8, 16, 32, 64)
    middle = sorted({point.kv_length for point in table.verify.points})[1:2] or [table.verify.points[0].kv_length]
    shown = {"target, plain step": (table.decode, (1,)), "target, verification": (table.verify, sizes)}
    shown |= {f"draft {costs.draft.id}, a level": (costs.propose, sizes) for costs in table.drafts}
    rows = []
    for name, (surface, tokens) in shown.items():
        import numpy as np

        latencies = surface.latency_ms(np.array(tokens, np.float64), np.array(middle, np.float64))[:, 0]
        errors = np.abs(surface.held_out_errors)
        cells = [f"{ms:.2f}" for ms in latencies] + ["-"] * (len(sizes) - len(tokens))
        rows.append([name, *cells, f"{100 * float(np.median(errors)):.1f} %" if len(errors) else "-"])
    mark = " (estimated)" if table.estimated else ""
    columns = ["part", *(f"{n} tok" for n in sizes), "held-out error"]
    console.table(f"Cost table, ms: {table.device.model}, {table.precision}, {table.runner}, KV length {middle[0]}{mark}", columns, rows)
    for costs in table.drafts:
        overhead = costs.overhead
        console.say(f"outside the models: {overhead.round_ms:.2f} ms a round + {overhead.level_ms:.2f} ms a draft level")


def print_agreement(trace: Trace, console: Console) -> None:
    """How often the draft names the target's next token, by task."""
    shares = agreement(trace)
    rows = [[task, f"{100 * found[1]:.1f} %", f"{100 * found[4]:.1f} %"] for task, found in shares.items()]
    console.table("Draft's agreement with the target", ["task", "top-1", "top-4"], rows)


# -------------------------------------------------------------------------------------------------------------- measuring


def measure_finalists(
    runner: Runner, finalists: list[Candidate], tune: Workload, evaluator: Evaluator, settings: SearchSettings, deadline: float, console: Console
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
        rows.append([candidate.configuration.label, f"{candidate.speedup:.2f}x", f"{summary.speedup:.2f}x", f"{100 * error:+.1f} %"])
    console.table(
        f"Finalists on {len(runs[AR])} tuning prompts", ["configuration", "predicted", "measured", "predicted time against measured"], rows
    )
    fastest = min(arms, key=lambda arm: totals[arm.name])
    winner = fastest
    for arm, candidate in zip(arms, finalists, strict=True):
        low, _ = bootstrap_ratio(_times(runs[arm.name]), _times(runs[fastest.name]))
        is_tied = low <= 1.0 and totals[arm.name] <= 1.005 * totals[fastest.name]
        if is_tied and candidate.nodes_per_round < finalists[arms.index(winner)].nodes_per_round:
            winner = arm
    return finalists[arms.index(winner)]


def _times(runs: list[Run]) -> Any:
    import numpy as np

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
            [Arm(AR), *defaults, tuned], evaluate, seed=settings.seed + 1, deadline=deadline, min_prompts=16, report=lambda done, of: update(done, of, "")
        )
    summaries = {name: summarise(name, arm_runs, runs[AR]) for name, arm_runs in runs.items()}
    predicted = {arm.name: evaluator.evaluate(arm.configuration) for arm in [*defaults, tuned] if arm.configuration is not None}
    print_comparison(summaries, predicted, console)
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
        point = _point(pair.draft_reference, winner, measured, estimated=table.estimated)
    return _profile(pair, pair.device, table.precision, workload, [point], evidence)


def print_comparison(summaries: dict[str, Summary], predicted: dict[str, Candidate], console: Console) -> None:
    """The final table: plain decoding, published defaults, winner; predicted beside measured."""
    rows = []
    for name, summary in summaries.items():
        label = f"{name}: {predicted[name].configuration.label}" if name in predicted else "plain decoding (ar)"
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
    console.table(title, ["arm", "predicted", "measured", "95 % interval", "M", "tokens/s", "same output"], rows, emphasised=len(rows) - 1)


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


# ---------------------------------------------------------------------------------------------------------------- profile


def predicted_profile(pair: Pair, table: CostTable, winner: Candidate, workload: WorkloadReference, evaluator: Evaluator) -> DecodingProfile:
    """A profile for a device that is not here: predictions only."""
    if winner.speedup < 1.0:
        points = [OperatingPoint(draft=None, tree=None, predicted=_plain_prediction(evaluator), measured=None)]
    else:
        points = [_point(pair.draft_reference, winner, None, estimated=table.estimated)]
    return _profile(pair, table.device, table.precision, workload, points, Evidence(configurations_replayed=evaluator.num_evaluated))


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


def _point(draft: ModelReference, winner: Candidate, measured: Measured | None, *, estimated: bool) -> OperatingPoint:
    return OperatingPoint(
        draft=DraftChoice(kind=IndependentDraft.kind, id=draft.id, sha256=draft.sha256, subnet=Subnet(visual_keep=winner.configuration.visual_keep)),
        tree=parse_policy(winner.configuration.tree),
        predicted=Predicted(
            speedup=winner.speedup, ms_per_token=winner.ms_per_token, tokens_per_round=winner.tokens_per_round, estimated=estimated
        ),
        measured=measured,
    )


def _profile(
    pair: Pair, device: Fingerprint, precision: str, workload: WorkloadReference, points: list[OperatingPoint], evidence: Evidence
) -> DecodingProfile:
    return DecodingProfile(
        provenance=stamp(),
        target=pair.target_reference,
        workload=workload,
        hardware=device,
        precision=precision,
        points=points,
        evidence=evidence,
    )


def configuration_of(profile: DecodingProfile) -> Configuration | None:
    """The profile's choice as a configuration; None for plain decoding."""
    point = profile.point
    if point.draft is None or point.tree is None:
        return None
    return Configuration(tree=point.tree.model_dump(), visual_keep=point.draft.subnet.visual_keep)
