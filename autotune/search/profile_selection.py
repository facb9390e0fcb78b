"""The last stages of a search: finalists, operating points, evaluation on held-out prompts, and the profile."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

from autotune.console import Console
from autotune.contention_monitor import ContentionMonitor
from autotune.documents.condition import Condition
from autotune.documents.configuration import Configuration, configuration_of
from autotune.documents.decoding_profile import DecodingProfile, Shrinkage
from autotune.documents.provenance import stamp
from autotune.prediction.evaluator import Candidate
from autotune.search.finalists import (
    MeasuredFinalists,
    choose_finalists,
    confirmable,
    measure_finalists,
    published_defaults,
)
from autotune.search.held_out import evaluate_profile, print_evaluation
from autotune.search.model_pool import ModelPool
from autotune.search.operating_points import propose_points
from autotune.search.plan import StageClock
from autotune.search.point_confirmation import PointConfirmation
from autotune.search.profile_documents import ProfileDocuments, shrinkage_of
from autotune.search.thresholds import MAX_HELD_OUT_DEFAULTS, NUM_POINT_CANDIDATES, ROUNDS
from autotune.search.tree_search import TreeSearchResult
from autotune.search.tuning_prompts import TuningPrompts
from autotune.study.document import RUNS
from autotune.workloads.workload import Workload


@dataclass
class ProfileSelection:
    """Makes a decoding profile from the result of a tree search."""

    trees: TreeSearchResult
    model_pool: ModelPool
    prompts: TuningPrompts
    folder: Path
    """The study's folder, which keeps the runs."""
    evaluate: Workload
    seed: int
    clock: StageClock
    console: Console

    finalists: MeasuredFinalists | None = field(default=None, init=False)
    """Set by ``measured_profile``."""

    def __post_init__(self) -> None:
        self.evaluator = self.prompts.full
        self.runner = self.model_pool.runner(self.evaluator.table, self.folder / RUNS)
        self.documents = ProfileDocuments(self.model_pool, self.prompts, self.evaluate, self.trees.num_replayed)

    def predicted_profile(self) -> DecodingProfile:
        """The profile for another device, with predictions only."""
        (fastest,) = self.candidates(1)
        points: list[tuple[Condition, Configuration]] = []
        if fastest.speedup >= 1.0:
            proposed = self.points(self.evaluator.evaluate(fastest.configuration))
            points = [(when, self.evaluator.with_fallback(candidate).configuration) for when, candidate in proposed]
        return self.documents.predicted(self.evaluator.table.device, points)

    def measured_profile(self) -> DecodingProfile:
        """The profile for this device, with measurements on held-out prompts."""
        monitor = ContentionMonitor(str(self.model_pool.target.device))
        self.finalists = finalists = self.measure_finalists(self.candidates(ROUNDS[0][1]))
        points = [(Condition(), finalists.winner)]
        if self.evaluator.can_replay(finalists.winner):
            *proposed, _ = self.points(self.evaluator.evaluate(finalists.winner))
            points = [*self.confirmation(finalists).confirmed(proposed), *points]
        profile = self.evaluated(self.documents.predicted(self.model_pool.device, points), finalists)
        contention = monitor.contention()
        self.console.say(contention.describe("while configurations were run"))
        return profile.model_copy(update={"provenance": stamp(contention)})

    def candidates(self, count: int) -> list[Candidate]:
        """The configurations that are measured, ranked on confirming prompts."""
        return choose_finalists(confirmable(self.trees.fastest), self.prompts.confirming, count)

    def measure_finalists(self, candidates: list[Candidate]) -> MeasuredFinalists:
        """The results of candidates and published defaults in real runs."""
        return measure_finalists(
            candidates,
            published_defaults(self.model_pool),
            self.runner,
            self.prompts,
            self.console,
            seed=self.seed,
            deadline=self.clock.deadline_of("finalists"),
        )

    def points(self, winner: Candidate) -> list[tuple[Condition, Candidate]]:
        """Conditions under which another candidate is predicted to be faster than the winner, which is last."""
        fastest = [*self.trees.fastest[:NUM_POINT_CANDIDATES], *itertools.chain(*self.trees.fastest_by_task.values())]
        candidates = list({candidate.key: candidate for candidate in [winner, *fastest]}.values())
        return propose_points(candidates, self.evaluator, self.prompts.workload, seed=self.seed)

    def confirmation(self, finalists: MeasuredFinalists) -> PointConfirmation:
        """Confirms points by real runs next to the winner and the best published default."""
        return PointConfirmation(
            self.runner,
            self.evaluator,
            self.prompts.workload,
            finalists.winner,
            next(iter(finalists.best_defaults.values()), None),
            self.console,
            self.seed,
            self.clock.deadline_of("operating points"),
        )

    def evaluated(self, profile: DecodingProfile, finalists: MeasuredFinalists) -> DecodingProfile:
        """The profile with measurements on the evaluation prompts: its decoder next to the other arms."""
        evaluation = evaluate_profile(
            profile,
            dict(itertools.islice(finalists.best_defaults.items(), MAX_HELD_OUT_DEFAULTS)),
            self.model_pool,
            self.evaluator,
            self.evaluate,
            self.folder,
            self.console,
            seed=self.seed + 1,
            deadline=self.clock.deadline_of("evaluation"),
        )
        print_evaluation(evaluation, len(profile.points), self.console)
        last, shrinkage = configuration_of(profile.point), None
        if last is not None:
            measured = finalists.speedup(last)
            shrinkage = shrinkage_of(last, measured, evaluation, len(profile.points), self.prompts)
            self._say_shrinkage(shrinkage)
        measured_profile = self.documents.measured(profile, evaluation, shrinkage)
        if measured_profile.point.draft is None:
            self.console.say(
                "plain decoding is faster than the tuned configuration: the profile decodes without a draft"
            )
        return measured_profile

    def _say_shrinkage(self, shrinkage: Shrinkage) -> None:
        choosing, confirming = shrinkage.predicted_on_choosing, shrinkage.predicted_on_confirming
        if choosing is not None and confirming is not None:
            self.console.say(
                f"the tuned configuration: predicted {choosing:.2f}x on the {len(self.prompts.choosing.tasks)} prompts that "
                f"chose it and {confirming:.2f}x on {len(self.prompts.confirming.tasks)} others, measured "
                f"{shrinkage.measured_on_confirming:.2f}x on these and {shrinkage.measured_on_held_out:.2f}x on held-out "
                "prompts"
            )
