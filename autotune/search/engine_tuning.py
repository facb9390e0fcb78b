"""Tuning of an engine: its plain answers are recorded once, every configuration is replayed and priced, and the fastest
race in real servers. Loads no torch.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from autotune.console import Console
from autotune.documents.decoding_profile import AR, DecodingProfile, Evidence, OperatingPoint, WorkloadReference
from autotune.documents.deployment import EngineEvidence, PredictedSettings
from autotune.documents.provenance import stamp
from autotune.documents.speculation import Speculation
from autotune.engines.backend import Backend, Prices
from autotune.errors import UserError
from autotune.evaluation.arms import Arm
from autotune.evaluation.race import Fastest, Race, Rule, TimeLimit, race
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.summary import bootstrap_ratio
from autotune.machine.container import num_cores
from autotune.machine.device import cpu_fingerprint
from autotune.search import thresholds
from autotune.search.backends import named_arm
from autotune.search.engine_loads import LoadServers, tune_loads
from autotune.search.evidence import Evaluation, print_evaluation
from autotune.study.search_settings import SearchSettings
from autotune.study.storage import RUNS
from autotune.table import Table, times
from autotune.workloads.workload import Workload, WorkloadSplit

SHOWN = 3  # fastest configurations on the console
FINALISTS = Fastest(risk=thresholds.RISK, prompts_per_block=thresholds.HELD_OUT_PROMPTS, always=[AR])
EVALUATION = Fastest(
    risk=thresholds.RISK,
    tolerance=thresholds.PROCESS_DIFFERENCE,
    prompts_per_block=thresholds.KEPT_PROMPTS[0][0],
    ends=lambda leaders: AR not in leaders or len(leaders) == 1,
)
"""Ends when plain decoding is slower than another arm, or is the only one that is left."""


class RankedConfiguration(NamedTuple):
    """A configuration with its speedup over plain decoding by replay and prices."""

    configuration: Speculation
    predicted: PredictedSettings
    counts: Sequence[tuple[int, int, int]]
    """Predicted verifications, draft tokens and accepted ones, by prompt."""


def engine_prompts(settings: SearchSettings, split: WorkloadSplit) -> Workload:
    """The prompts that engines are given: first turns, because later ones follow a target's answers."""
    return settings.load_prompts(split).first_turns().cut(thresholds.ENGINE_PROMPTS[split])


def tune_engine(
    backend: Backend, settings: SearchSettings, budget_s: float, folder: Path, console: Console
) -> DecodingProfile:
    """The profile of an engine.

    Args:
        budget_s: time for its tuning, in seconds.
        folder: of the study, whose ledger keeps the real runs.

    Raises:
        UserError: the engine cannot be used; what was recorded is kept.
    """
    begun, all_s = time.monotonic(), budget_s
    budget_s *= 1 - thresholds.LOADS_SHARE * bool(settings.loads)
    ends = {stage: begun + share * budget_s for stage, share in thresholds.ENGINE_ENDS.items()}
    tune, held_out = engine_prompts(settings, "tune"), engine_prompts(settings, "evaluate")
    evaluation, as_predicted = None, dict[str, tuple[int, int]]()
    with backend.kept_open():
        recorded = backend.record(tune.prompts, ends["answers"])
        say_late("answers", ends, begun, settings, console)
        tune = tune.cut(len(recorded.answers))
        prices = backend.price(recorded, ends["prices"])
        say_late("prices", ends, begun, settings, console)
        ranked = rank(backend, recorded, prices, console)
        chosen = ranked[0] if ranked[0].predicted.speedup > 1.0 else None
        if not backend.is_fixed:
            races = EngineRaces(backend, folder / RUNS, console, settings.seed)
            arms, as_predicted = race_finalists(races, ranked, tune, ends["finalists"])
            say_late("finalists", ends, begun, settings, console)
            evaluation, chosen = evaluate(races, arms, held_out, begun + budget_s)
    deployed = None if chosen is None else chosen.configuration
    engine = EngineEvidence(
        num_replayed=Counter(candidate.predicted.type for candidate in ranked),
        predicted=[candidate.predicted for candidate in ranked],
        prices=list(prices.priced),
        factors=dict(prices.factors),
        left_out=dict(prices.left_out),
        as_predicted=as_predicted,
    )
    if settings.loads and evaluation is not None:
        servers, given = LoadServers(backend, recorded, console, folder), deployed or ranked[0].configuration
        loads, schedule, deployed = tune_loads(servers, settings.loads, given, deployed, begun + all_s)
        engine = engine.model_copy(update={"loads": loads, "schedule": schedule})
    evidence, measured = Evidence(engine=engine), None
    if evaluation is not None:
        decoded = AR if chosen is None else chosen.predicted.label
        evidence, measured = Evidence(engine=engine, **evaluation.evidence(decoded)), evaluation.measured(decoded)
    deployment = backend.deploy(deployed)
    return DecodingProfile(
        provenance=stamp(),
        target=backend.model,
        workload=WorkloadReference(
            name=tune.name,
            tune_sha256=tune.sha256,
            evaluate_sha256=held_out.sha256,
            num_tune_prompts=len(tune.prompts),
            num_evaluate_prompts=len(held_out.prompts),
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
        ),
        hardware=cpu_fingerprint(num_cores()),
        precision=backend.precision,
        point=OperatingPoint(draft=None, tree=None, deployment=deployment, predicted=None, measured=measured),
        evidence=evidence,
    )


def say_late(stage: str, ends: Mapping[str, float], begun: float, settings: SearchSettings, console: Console) -> None:
    """A line with a sufficient budget, where the fewest prompts of a stage have taken much longer than its share."""
    spent_s, given_s = time.monotonic() - begun, ends[stage] - begun
    if spent_s > thresholds.LATE * given_s:
        minutes = math.ceil(settings.budget_s * spent_s / given_s / 60)
        console.say(
            f"late       {stage} ended after {spent_s:.0f} s, and the budget gives them {given_s:.0f} s: "
            f"this search ends after its budget, with few prompts; they fit into --budget {minutes}m"
        )


def rank(backend: Backend, recorded: Any, prices: Prices, console: Console) -> list[RankedConfiguration]:
    """All configurations by predicted time, the fastest first; shows the fastest and the best default."""
    ranked = list[RankedConfiguration]()
    plain_ms = prices.ms(backend.replay(None, recorded))
    configurations = [c for c in backend.configurations() if c.type not in prices.left_out]
    if not configurations:
        raise UserError(f"{backend.name}: no speculation is left to tune; see the lines above")
    with console.stage(f"replay of {len(configurations)} configurations", len(configurations)) as update:
        for number, configuration in enumerate(configurations, start=1):
            steps = backend.replay(configuration, recorded)
            ms = prices.ms(steps)
            predicted = PredictedSettings(
                label=configuration.label,
                type=configuration.type,
                is_default=configuration.is_default,
                speedup=float(plain_ms.sum() / ms.sum()),
                ci95=bootstrap_ratio(plain_ms, ms),
            )
            ranked.append(RankedConfiguration(configuration, predicted, steps.counts))
            update(number, len(configurations))
    ranked.sort(key=lambda candidate: -candidate.predicted.speedup)
    shown = {candidate.predicted.title: candidate.predicted for candidate in [*ranked[:SHOWN], best_default(ranked)]}
    rows = [
        [title, times(candidate.speedup), "{:.2f} to {:.2f}".format(*candidate.ci95)]
        for title, candidate in shown.items()
    ]
    console.show(Table("Predicted on the tuning prompts", ["configuration", "speedup", "95 %"], rows))
    return ranked


def best_default(ranked: Sequence[RankedConfiguration]) -> RankedConfiguration:
    """The fastest of the types' defaults by prediction."""
    return next(candidate for candidate in ranked if candidate.predicted.is_default)


def race_finalists(
    races: EngineRaces, ranked: Sequence[RankedConfiguration], tune: Workload, deadline: float
) -> tuple[dict[str, RankedConfiguration], dict[str, tuple[int, int]]]:
    """The best default and the fastest of the finalists, which are also the fastest of the others and that of another
    type; and for each finalist, the number of its requests whose counts are those of the replay, and of all.
    """
    default = best_default(ranked)
    others = [candidate for candidate in ranked if candidate is not default]
    of_other_types = [candidate for candidate in others if candidate.predicted.type != others[0].predicted.type]
    finalists = {candidate.predicted.label: candidate for candidate in (default, *others[:1], *of_other_types[:1])}
    raced = races.race("finalists, measured", finalists, tune, FINALISTS, deadline)
    as_predicted, rows = dict[str, tuple[int, int]](), []
    for name, finalist in finalists.items():
        pairs = list(zip(raced.runs[name], finalist.counts, strict=False))
        same = sum(run.draft_counts == counts for run, counts in pairs)
        as_predicted[name] = same, len(pairs)
        speedup, runs = times(finalist.predicted.speedup), len(raced.runs[name])
        rows.append([finalist.predicted.title, speedup, f"{runs}", f"{same}/{len(pairs)}"])
    columns = ["finalist", "predicted", "runs", "counts as predicted"]
    races.console.show(Table("Finalists on tuning prompts", columns, rows))
    return {name: finalists[name] for name in (default.predicted.label, raced.remaining[0])}, as_predicted


def evaluate(
    races: EngineRaces, arms: Mapping[str, RankedConfiguration], held_out: Workload, deadline: float
) -> tuple[Evaluation, RankedConfiguration | None]:
    """The runs of plain decoding, the best default and the winner, which are ``arms``, on held-out prompts, and the
    fastest one if it is significantly faster than plain decoding; else None.
    """
    raced = races.race("evaluation, measured", arms, held_out, EVALUATION, deadline)
    (default, *_), winner = arms, list(arms)[-1]
    chosen = None if AR in raced.remaining else arms[raced.remaining[0]]
    tuned = winner if chosen is None else chosen.predicted.label
    names = [name for name in (AR, *arms) if name != tuned and raced.runs[name]] + [tuned]
    evaluation = Evaluation(
        runs={name: [run.in_passes for run in raced.runs[name]] for name in names},
        configurations={name: None if name == AR else arms[name].configuration for name in names},
        predicted={name: candidate.predicted.speedup for name, candidate in arms.items()},
        best_default=default if default in names[:-1] else None,
        tuned=tuned,
    )
    print_evaluation(evaluation, races.console)
    return evaluation, chosen


@dataclass(frozen=True)
class EngineRaces:
    """Races of configurations, each in a new server, and plain decoding.

    Attributes:
        runs: ledger of the real runs, with which an interrupted race goes on.
    """

    backend: Backend
    runs: Path
    console: Console
    seed: int

    def race(
        self, stage: str, arms: Mapping[str, RankedConfiguration], workload: Workload, rule: Rule, deadline: float
    ) -> Race:
        """One that does not start, or ends, is left out with a line.

        Raises:
            UserError: plain decoding fails, or every configuration.
        """
        configurations = {AR: None} | {name: candidate.configuration for name, candidate in arms.items()}
        with ExitStack() as stack, self.console.stage(stage, len(workload.prompts)) as update:
            started: list[Arm] = []
            failed: dict[str, str] = {}
            for name, configuration in configurations.items():
                try:
                    started.append(named_arm(stack, self.backend, configuration, name))
                except UserError as error:
                    failed[name] = str(error)
            raced = race(
                ArmRunner(self.runs, context=stage),
                started,
                workload.prompts,
                rule,
                time_limit=TimeLimit(deadline, thresholds.MIN_PROMPTS),
                seed=self.seed,
                report=update,
            )
        failed |= raced.failed
        for name, reason in failed.items():
            self.console.say(f"left out   {name}: {reason}")
        if AR in failed or failed.keys() >= arms.keys():
            raise UserError(f"{self.backend.name}: {failed.get(AR) or list(failed.values())[-1]}")
        return replace(raced, runs={name: [] for name in configurations} | raced.runs)
