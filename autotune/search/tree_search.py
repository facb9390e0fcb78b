"""Tree search: trees are replayed over the traces of every surviving subnet and priced by the cost table.

Small policies are enumerated; the others are swept evenly, and Optuna's TPE sampler continues from the best trees of
the sweeps. The work is divided into units whose records a ledger keeps, so that any number of workers share it and the
result does not depend on which worker did what.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.console import Update
from autotune.documents.configuration import Configuration, DraftVariant, Tree, variants_json
from autotune.documents.provenance import DISTRIBUTION, version_of
from autotune.documents.search_space import SearchSpace
from autotune.errors import UserError
from autotune.files import content_key
from autotune.replay.evaluator import Candidate, Evaluator
from autotune.replay.replay import Replay
from autotune.search import thresholds
from autotune.study.ledger import Ledger, Record
from autotune.study.storage import optuna_storage
from autotune.trees.policy import POLICIES

if TYPE_CHECKING:
    from autotune.search.tuning import Tuning
    from autotune.search.tuning_prompts import TuningPrompts

UNIT = "unit"  # attribute of an Optuna trial: the number of trials before its unit


@dataclass(frozen=True)
class TreeSearchResult:
    """The fastest configurations of a space."""

    fastest: list[Candidate]
    """Over all prompts, the fastest first."""
    num_replayed: int
    """Number of configurations that all workers have replayed."""
    optuna_study: str
    """Name of the Optuna study with TPE's trials."""


def search_trees(
    evaluator: Evaluator,
    space: SearchSpace,
    ledger: Ledger,
    *,
    num_trials: int,
    documents: Any,
    seed: int = 0,
    deadline: float | None = None,
    report: Update = lambda done, total, note="": None,
) -> TreeSearchResult:
    """Search the trees of a space over all draft variants of the evaluator.

    The keys of the ledger's records contain ``documents`` (hashes of the models, workload, cost table and traces) and
    the seed: the same call resumes from them. No unit is started after ``deadline``, of ``time.monotonic``.

    Raises:
        UserError: no tree was found before ``deadline``.
    """
    stage = _TreeStage(evaluator, space, ledger, [version_of(DISTRIBUTION), documents], seed)

    def report_best(done: int, of: int) -> None:
        best = stage.best
        report(done, of, "" if best is None else f"best so far: {best.speedup:.2f}x ({best.policy})")

    sweeps = stage.sweeps()
    records = list(ledger.work("trees", sweeps, deadline=deadline, report=report_best).values())
    if len(records) == len(sweeps):
        records += stage.sample(records, num_trials, deadline, report_best)
    fastest = {candidate.key: candidate for record in records for candidate in _candidates(record["fastest"])}
    if not fastest:
        raise UserError(f"no tree of space {space.name} was found within the budget; raise it, or widen the space")
    return TreeSearchResult(
        fastest=sorted(fastest.values(), key=lambda candidate: candidate.rank),
        num_replayed=sum(record["num_replayed"] for record in records),
        optuna_study=stage.optuna_study,
    )


def tune_trees(tuning: Tuning, prompts: TuningPrompts) -> TreeSearchResult:
    """The stage of a search that finds the fastest configurations by replay of the choosing prompts."""
    evaluator, settings = prompts.choosing, tuning.settings
    table, bounds = evaluator.table.content_hash, tuning.bounds.model_dump()
    with tuning.console.stage("tree search") as update:
        result = search_trees(
            evaluator,
            tuning.space,
            tuning.ledger,
            num_trials=settings.num_trials,
            documents=[tuning.pool.key, tuning.tune_key, thresholds.CONFIRMING, table, bounds],
            seed=settings.seed,
            deadline=max(tuning.clock.deadline_of("tree search"), time.monotonic() + thresholds.MIN_TREE_SEARCH_S),
            report=update,
        )
    plain = f"plain decoding: {evaluator.ar_ms_per_token:.2f} ms/token"
    tuning.console.say(f"{result.num_replayed:,} configurations replayed; {plain}")
    return result


def _candidates(records: Iterable[Record]) -> Iterator[Candidate]:
    return (Candidate.model_validate(record, strict=False) for record in records)


def _fastest(results: Sequence[Replay], count: int) -> list[int]:
    """Indices of the results with the shortest times over all prompts."""
    ms = [float(result.decode_ms.sum()) for result in results]
    return sorted(range(len(ms)), key=ms.__getitem__)[:count]


class _TreeStage:
    """The units of one tree search."""

    def __init__(self, evaluator: Evaluator, space: SearchSpace, ledger: Ledger, documents: Any, seed: int) -> None:
        self.evaluator = evaluator
        self.space = space
        self.ledger = ledger
        self.seed = seed
        self.variants = list(evaluator.traces)
        self.key = content_key([documents, variants_json(self.variants), space.model_dump()["trees"], seed])
        tasks = np.array(evaluator.tasks)
        of_tasks = [np.flatnonzero(tasks == task) for task in dict.fromkeys(evaluator.tasks)]
        first = [prompts[: max(2, len(prompts) // thresholds.FIRST_REPLAYED)] for prompts in of_tasks]
        self.first_prompts = np.sort(np.concatenate(first))
        policies = [policy for policy in space.trees if not POLICIES[policy].template_sizes]
        self.sampled_policies = [policy for policy in policies if space.enumerated(policy) is None]
        self.optuna_study = f"trees-{self.key}"
        self.best: Candidate | None = None

    def sweeps(self) -> dict[str, Callable[[], Record]]:
        """Units that enumerate or sweep: a part of every policy with the best subnet, then with the next one, and so
        on, so that a search that is cut short has tried every policy.
        """
        units: dict[str, Callable[[], Record]] = {}
        for part, variant, policy in itertools.product(
            range(thresholds.NUM_SWEPT // thresholds.SWEEP_SIZE), self.variants, self.space.trees
        ):
            if part == 0 or policy in self.sampled_policies:
                key = content_key([self.key, part, policy, *variants_json([variant])[0]])
                units[key] = partial(self._sweep, part, policy, variant)
        return units

    def _sweep(self, part: int, policy: str, variant: DraftVariant) -> Record:
        if POLICIES[policy].template_sizes:
            trees = self.evaluator.template_trees(variant, self.space.values(policy))
        else:
            sweep = partial(
                self.space.sweep, policy, thresholds.SWEEP_SIZE, self.seed, first=part * thresholds.SWEEP_SIZE
            )
            trees = self.space.enumerated(policy) or sweep()
        configurations = [self._configuration(variant, tree) for tree in trees]
        fastest = self._promoted(configurations)
        return self._record(fastest, self.evaluator.replay_many(fastest), num_replayed=len(configurations))

    def _promoted(self, configurations: list[Configuration]) -> list[Configuration]:
        """The configurations that are worth a replay over all prompts."""
        if len(configurations) <= thresholds.NUM_PROMOTED or 2 * len(self.first_prompts) > len(self.evaluator.tasks):
            return configurations
        rows = _fastest(self.evaluator.replay_many(configurations, self.first_prompts), thresholds.NUM_PROMOTED)
        return [configurations[row] for row in sorted(rows)]

    def _configuration(self, variant: DraftVariant, tree: Tree) -> Configuration:
        return self.evaluator.resolve(Configuration(tree=tree, draft=variant[0], subnet=variant[1]))

    def _record(self, configurations: list[Configuration], results: list[Replay], *, num_replayed: int) -> Record:
        """The record of a unit: its fastest candidates."""
        rows = _fastest(results, thresholds.NUM_KEPT)
        fastest = [self.evaluator.candidate(configurations[row], results[row]) for row in rows]
        self.best = min(
            [*fastest, *([self.best] if self.best else [])], key=lambda candidate: candidate.rank, default=None
        )
        return {"num_replayed": num_replayed, "fastest": [candidate.model_dump(mode="json") for candidate in fastest]}

    def sample(
        self, swept: list[Record], num_trials: int, deadline: float | None, report: Callable[[int, int], None]
    ) -> list[Record]:
        """Sample subnets, policies and hyperparameters together by TPE, from the best candidates of the sweeps.

        Every unit has a sampler that knows no other unit's trials, so that workers can share the units.
        """
        if not self.sampled_policies:
            return []
        import optuna

        candidates = (candidate for record in swept for candidate in _candidates(record["fastest"]))
        ranked = sorted((c for c in candidates if c.policy in self.sampled_policies), key=lambda c: c.rank)
        units = {}
        for first in range(0, num_trials, thresholds.NUM_UNIT_TRIALS):
            count = min(thresholds.NUM_UNIT_TRIALS, num_trials - first)
            key = content_key([self.key, "sampled", first, count])
            units[key] = partial(self._sample, ranked[: thresholds.NUM_KEPT], first, count)

        # Optuna creates its tables in steps that must not run in two workers at once.
        create = partial(optuna.storages.get_storage, optuna_storage(self.ledger.storage))
        self.ledger.work("optuna", {content_key(["optuna's tables"]): lambda: {"are there": bool(create())}})
        return list(self.ledger.work("trees", units, deadline=deadline, report=report).values())

    def _sample(self, start: list[Candidate], first: int, count: int) -> Record:
        """Trials ``first`` to ``first + count``, by a sampler that starts from the candidates ``start``."""
        import optuna
        from optuna.trial import FixedTrial, create_trial

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        names = [f"{draft} {subnet.label}" for draft, subnet in self.variants]
        sampler = optuna.samplers.TPESampler(seed=self.seed + first, multivariate=True, n_startup_trials=0)
        study = optuna.create_study(direction="minimize", sampler=sampler)

        def suggest(trial: optuna.trial.BaseTrial) -> tuple[DraftVariant, Tree]:
            variant = self.variants[names.index(trial.suggest_categorical("subnet", names))]
            return variant, self.space.suggest(trial, self.sampled_policies)

        for candidate in start:
            c = candidate.configuration
            name = names[self.variants.index((c.draft or "", c.subnet))]
            fixed = FixedTrial({"subnet": name, **self.space.parameters(c.tree)})
            suggest(fixed)
            known = {"params": fixed.params, "distributions": fixed.distributions}
            study.add_trial(create_trial(value=candidate.ms_per_token, **known))
        configurations, results = [], []
        for _ in range(count):
            trial = study.ask()
            trial.set_user_attr(UNIT, first)
            configurations.append(self._configuration(*suggest(trial)))
            results.append(self.evaluator.replay(configurations[-1]))
            study.tell(trial, results[-1].ms_per_token)
        publish(self.optuna_study, self.ledger.storage, study.get_trials(deepcopy=False)[-count:], first)
        return self._record(configurations, results, num_replayed=len(results))


def publish(study_name: str, storage: Path | str, trials: list[Any], unit: int) -> None:
    """Add a unit's trials, once, to the Optuna study that ``optuna-dashboard`` shows."""
    import optuna

    study = optuna.create_study(
        study_name=study_name,
        storage=optuna_storage(storage, to_append=True),
        direction="minimize",
        load_if_exists=True,
    )
    if not any(trial.user_attrs.get(UNIT) == unit for trial in study.get_trials(deepcopy=False)):
        study.add_trials(trials)
