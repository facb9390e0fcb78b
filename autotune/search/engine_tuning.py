"""Tuning of an engine: its plain answers are recorded once, every configuration is replayed and priced, and the fastest
race in real servers. Loads no torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR, DecodingProfile, Evidence, OperatingPoint, WorkloadReference
from autotune.documents.deployment import EngineEvidence, PredictedSettings
from autotune.documents.provenance import stamp
from autotune.engines.backend import Backend, BackendSettings, Prices
from autotune.errors import UserError
from autotune.evaluation.arms import Arm
from autotune.evaluation.race import Fastest, Race, Rule, TimeLimit, race
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.summary import bootstrap_ratio
from autotune.machine.container import num_cores
from autotune.machine.device import cpu_fingerprint
from autotune.search import thresholds
from autotune.search.evidence import Evaluation, print_evaluation
from autotune.workloads.workload import Workload

SHOWN = 3  # fastest configurations of a type, and of all


class RankedConfiguration(NamedTuple):
    """A configuration with its speedup over plain decoding by replay and prices."""

    configuration: BackendSettings
    predicted: PredictedSettings
    counts: Sequence[tuple[int, int, int]]
    """Predicted verifications, draft tokens and accepted ones, by prompt."""

    @property
    def name(self) -> str:
        return self.predicted.label

    @property
    def title(self) -> str:
        """The label, marked where the settings are the default of their type."""
        return f"{self.name}{', default' if self.predicted.is_default else ''}"


@dataclass(frozen=True)
class EngineTuning:
    """The tuning of one engine.

    Attributes:
        runs: ledger of the real runs, with which an interrupted tuning goes on.
        requests_at_once: numbers of requests at a time that plain decoding and the winner serve in the end.
    """

    backend: Backend
    tune: Workload
    held_out: Workload
    runs: Path
    console: Console
    budget_s: float
    seed: int = 0
    requests_at_once: Sequence[int] = ()

    def run(self) -> DecodingProfile:
        """The profile of the engine.

        Raises:
            UserError: the engine cannot be used; what was recorded is kept.
        """
        backend, begun = self.backend, time.monotonic()
        ends = {stage: begun + share * self.budget_s for stage, share in thresholds.ENGINE_ENDS.items()}
        recorded = backend.record(self.tune.prompts, ends["answers"])
        tune = self.tune.cut(len(recorded.answers))
        prices = backend.price(recorded, ends["prices"])
        ranked = self.rank(recorded, prices)
        predicted = [one.predicted for one in ranked]
        by_type = {one.type: [other for other in predicted if other.type == one.type] for one in predicted}
        evidence = EngineEvidence(
            num_replayed={type: len(of_type) for type, of_type in by_type.items()},
            predicted=[one for one in predicted if one.is_default or one in by_type[one.type][:SHOWN]],
            prices=list(prices.priced),
            factors=dict(prices.factors),
            left_out=dict(prices.left_out),
        )
        if backend.is_fixed:
            best = ranked[0].configuration if predicted[0].speedup > 1.0 else None
            return self._profile(tune, best, Evidence(engine=evidence))
        winner, default, as_predicted = self.choose(ranked, tune, ends["finalists"])
        evaluation, chosen = self.evaluate(winner, default, begun + self.budget_s)
        raced = [None, *{one.name: one.configuration for one in (winner, default)}.values()]
        loads = [load for size in self.requests_at_once for load in backend.loads(raced, recorded, size)]
        decoded = AR if chosen is None else chosen.name
        evidence = evidence.model_copy(update={"loads": loads, "as_predicted": as_predicted})
        measured = Evidence(engine=evidence, **evaluation.evidence(decoded))
        profile = self._profile(tune, None if chosen is None else chosen.configuration, measured)
        point = profile.point.model_copy(update={"measured": evaluation.measured(decoded)})
        return profile.model_copy(update={"point": point})

    def rank(self, recorded: Any, prices: Prices) -> list[RankedConfiguration]:
        """All configurations by predicted time, the fastest first; prints the fastest and the best default."""
        backend, ranked = self.backend, list[RankedConfiguration]()
        plain_ms = prices.ms(backend.replay(None, recorded))
        configurations = [c for c in backend.configurations() if c.type not in prices.left_out]
        if not configurations:
            raise UserError(f"{backend.name}: no speculation is left to tune; see the lines above")
        with self.console.stage(f"replay of {len(configurations)} configurations", len(configurations)) as update:
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
        ranked.sort(key=lambda one: -one.predicted.speedup)
        shown = [*ranked[:SHOWN], *[one for one in [best_default(ranked)] if one not in ranked[:SHOWN]]]
        rows = [
            [one.title, f"{one.predicted.speedup:.2f}x", "{:.2f} to {:.2f}".format(*one.predicted.ci95)]
            for one in shown
        ]
        self.console.table("Predicted on the tuning prompts", ["configuration", "speedup", "95 %"], rows)
        return ranked

    def choose(
        self, ranked: Sequence[RankedConfiguration], tune: Workload, deadline: float
    ) -> tuple[RankedConfiguration, RankedConfiguration, dict[str, tuple[int, int]]]:
        """The fastest of the finalists on the tuning prompts, the best default, and by finalist the number of requests
        whose counts are those of the replay, of all.
        """
        default = best_default(ranked)
        others = [one for one in ranked if one is not default]
        others = [*others[:1], *[one for one in others if one.predicted.type != others[0].predicted.type][:1]]
        finalists = {one.name: one for one in (default, *others)}
        rule = Fastest(risk=thresholds.RISK, prompts_per_block=thresholds.HELD_OUT_PROMPTS, always=[AR])
        measured = self._race("finalists, measured", finalists, tune, rule, deadline)
        as_predicted = {}
        for name, one in finalists.items():
            pairs = list(zip(measured.runs[name], one.counts, strict=False))
            as_predicted[name] = sum(_counts(run) == tuple(counts) for run, counts in pairs), len(pairs)
        rows = [
            [
                one.title,
                f"{one.predicted.speedup:.2f}x",
                f"{len(measured.runs[name])}",
                "{}/{}".format(*as_predicted[name]),
            ]
            for name, one in finalists.items()
        ]
        self.console.table(
            "Finalists on tuning prompts", ["finalist", "predicted", "runs", "counts as predicted"], rows
        )
        return finalists[measured.remaining[0]], default, as_predicted

    def evaluate(
        self, winner: RankedConfiguration, default: RankedConfiguration, deadline: float
    ) -> tuple[Evaluation, RankedConfiguration | None]:
        """The runs of plain decoding, the winner and the best default on held-out prompts, and the fastest one if it is
        significantly faster than plain decoding; else None.
        """
        arms = {one.name: one for one in (default, winner)}
        rule = Fastest(
            risk=thresholds.RISK,
            tolerance=thresholds.PROCESS_DIFFERENCE,
            prompts_per_block=thresholds.KEPT_PROMPTS[0][0],
            ends=lambda leaders: AR not in leaders or len(leaders) == 1,
        )
        measured = self._race("evaluation, measured", arms, self.held_out, rule, deadline)
        chosen = None if AR in measured.remaining else arms[measured.remaining[0]]
        tuned = (chosen or winner).name
        shown = [name for name in (AR, *arms) if name != tuned and measured.runs[name]]
        evaluation = Evaluation(
            runs={name: [run.in_passes for run in measured.runs[name]] for name in (*shown, tuned)},
            configurations={AR: None} | {name: arms[name].configuration for name in (*shown, tuned) if name != AR},
            predicted={name: one.predicted.speedup for name, one in arms.items()},
            best_default=default.name if default.name in shown else None,
            tuned=tuned,
        )
        print_evaluation(evaluation, self.console)
        return evaluation, chosen

    def _race(
        self, stage: str, arms: Mapping[str, RankedConfiguration], workload: Workload, rule: Rule, deadline: float
    ) -> Race:
        """A race of configurations and plain decoding, each in a new server of its own. One that does not start, or
        ends, is left out with a line.

        Raises:
            UserError: plain decoding fails, or every configuration.
        """
        by_name = {AR: None} | {name: one.configuration for name, one in arms.items()}
        with ExitStack() as stack, self.console.stage(stage, len(workload.prompts)) as update:
            started: list[Arm] = []
            failed: dict[str, str] = {}
            for name, configuration in by_name.items():
                try:
                    started.append(stack.enter_context(self.backend.arm(configuration)))
                    started[-1].name = name
                except UserError as error:
                    failed[name] = str(error)
            limit = TimeLimit(deadline, thresholds.MIN_PROMPTS)
            measured = race(
                ArmRunner(self.runs, context=stage),
                started,
                workload.prompts,
                rule,
                time_limit=limit,
                seed=self.seed,
                report=update,
            )
        failed |= measured.failed
        for name, reason in failed.items():
            self.console.say(f"left out   {name}: {reason}")
        if AR in failed or failed.keys() >= arms.keys():
            raise UserError(f"{self.backend.name}: {failed.get(AR) or list(failed.values())[-1]}")
        return replace(measured, runs={name: [] for name in by_name} | measured.runs)

    def _profile(self, tune: Workload, chosen: BackendSettings | None, evidence: Evidence) -> DecodingProfile:
        deployment = self.backend.deploy(chosen)
        return DecodingProfile(
            provenance=stamp(),
            target=self.backend.model,
            workload=WorkloadReference(
                name=tune.name,
                tune_sha256=tune.sha256,
                evaluate_sha256=self.held_out.sha256,
                num_tune_prompts=len(tune.prompts),
                num_evaluate_prompts=len(self.held_out.prompts),
            ),
            hardware=cpu_fingerprint(num_cores()),
            backend=self.backend.name,
            precision=self.backend.precision,
            point=OperatingPoint(draft=None, tree=None, deployment=deployment, predicted=None, measured=None),
            evidence=evidence,
        )


def best_default(ranked: Sequence[RankedConfiguration]) -> RankedConfiguration:
    """The fastest of the types' defaults by prediction; without defaults, the fastest configuration."""
    return next((one for one in ranked if one.predicted.is_default), ranked[0])


def _counts(run: Decoded) -> tuple[int, int, int]:
    return run.rounds - run.plain_steps, run.verified_nodes, run.accepted_tokens
