"""The tree stage: every tree is replayed over the traces of every surviving subnet, priced by the cost table; Optuna goes
on from the best of them.

Its work is cut into units whose records a ledger keeps: any number of workers share them, and what they find does not
depend on who did what.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autotune.acceptance.replay import Replay
from autotune.documents.configuration import Configuration, DraftVariant, Tree
from autotune.documents.provenance import version_of
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.evaluation.summary import bootstrap_ratio
from autotune.files import content_key
from autotune.search.evaluator import Candidate, Evaluator
from autotune.search.space import SearchSpace
from autotune.study.ledger import Ledger, Record
from autotune.study.storage import storage_url
from autotune.trees.tree import Floats

Report = Callable[[int, int, str], None]

NUM_SWEPT = 2048  # trees of each policy and subnet that are replayed before TPE begins; a power of two, as Sobol's are
SWEPT_AT_ONCE = 256  # a unit of work
TRIALS_AT_ONCE = 50
# One in so many prompts of each task, two at least, is replayed first; over all prompts only...
FIRST_OF_TASK = 3
NUM_GOING_ON = 64  # ...the fastest of a unit, so many,...
NUM_GOING_ON_OF_TASK = 8  # ...and so many of the fastest of each task.
NUM_KEPT = 24  # of a unit, the fastest go into its record; with as many of all TPE begins...
NUM_KEPT_OF_TASK = 2  # ...and so many of the fastest of each task
MOST_ALIKE = 2  # finalists of one draft and policy
UNIT = "unit"  # what a trial is tagged with: how many others' come before its unit


@dataclass(frozen=True)
class TreeSearchResult:
    """What a tree stage leaves."""

    fastest: list[Candidate]
    """Over all prompts, the fastest first."""
    of_task: dict[str, list[Candidate]]
    """The same over the prompts of each task."""
    num_replayed: int
    """Configurations, by all workers."""
    sampled: str
    """Name of the Optuna study that shows what TPE drew."""


def search_trees(
    evaluator: Evaluator,
    space: SearchSpace,
    ledger: Ledger,
    *,
    num_trials: int,
    documents: Any,
    seed: int = 0,
    deadline: float | None = None,
    report: Report | None = None,
) -> TreeSearchResult:
    """The fastest of the space over all subnets of the evaluator: small policies outright, the others by an even sweep, from
    whose best TPE goes on: a replay takes less time than TPE needs to think of a tree.

    ``documents`` are the hashes of what it searches over: with the seed they name the records, so that the same command
    goes on with them and another one does not.

    Raises:
        UserError: no tree of the space keeps to the constraints.
    """
    stage = _Stage(evaluator, space, ledger, [version_of("autotune"), documents, asdict(evaluator.constraints)], seed)
    evaluator.check_feasible()

    def say(done: int, of: int) -> None:
        if report is not None:
            report(done, of, stage.best_so_far())

    units = stage.sweeps()
    records = list(ledger.work("trees", units, deadline=deadline, report=say).values())
    if len(records) == len(units):
        records += stage.sample(records, num_trials, deadline, say)
    fastest = {one.key: one for record in records for one in _candidates(record["fastest"])}
    if not fastest:
        limits = {
            "--max-round-ms": evaluator.constraints.max_round_ms,
            "--max-draft-mib": evaluator.constraints.max_draft_mib,
        }
        given = ", ".join(f"{name} {limit:g}" for name, limit in limits.items() if limit is not None)
        raise UserError(
            f"no tree of space {space.name} was found that keeps to {given or 'the budget'}; raise it, or widen the space"
        )
    of_task = {}
    for task in dict.fromkeys(evaluator.tasks):
        leaders = sorted((one for record in records for one in record["of_task"].get(task, ())), key=_task_rank)
        of_task[task] = list(_candidates(one["candidate"] for one in leaders[:NUM_KEPT]))
    return TreeSearchResult(
        fastest=sorted(fastest.values(), key=lambda one: one.rank),
        of_task=of_task,
        num_replayed=sum(record["num_replayed"] for record in records),
        sampled=stage.optuna_name,
    )


def _candidates(records: Iterable[Record]) -> Iterator[Candidate]:
    return (Candidate.model_validate(record, strict=False) for record in records)


def _task_rank(leader: Record) -> tuple[float, str]:
    return leader["ms"], content_key(leader["candidate"])


class _Stage:
    """The units of one tree stage."""

    def __init__(self, evaluator: Evaluator, space: SearchSpace, ledger: Ledger, documents: Any, seed: int) -> None:
        self.evaluator = evaluator
        self.space = space
        self.ledger = ledger
        self.seed = seed
        self.variants = list(evaluator.traces)
        described = [[draft, subnet.model_dump(mode="json")] for draft, subnet in self.variants]
        trees = {policy: {n: d.model_dump() for n, d in found.items()} for policy, found in space.trees.items()}
        self.key = content_key([documents, described, trees, seed])
        self.prompts_of_task = {
            task: np.flatnonzero([one == task for one in evaluator.tasks]) for task in dict.fromkeys(evaluator.tasks)
        }
        self.first_prompts = np.sort(
            np.concatenate([found[: max(2, len(found) // FIRST_OF_TASK)] for found in self.prompts_of_task.values()])
        )
        self.sampled = [p for p in space.trees if p != "static" and space.enumerated(p) is None]
        self._best: Candidate | None = None

    @property
    def optuna_name(self) -> str:
        """Of the study for ``optuna-dashboard``."""
        return f"trees-{self.key}"

    def best_so_far(self) -> str:
        """For people."""
        if self._best is None:
            return ""
        return f"best so far: {self._best.speedup:.2f}x {self._best.configuration.label}"

    def sweeps(self) -> dict[str, Callable[[], Record]]:
        """What is enumerated or swept, in an order in which whatever time there is serves all subnets and policies."""
        parts: list[tuple[int, str, DraftVariant]] = []
        for policy in self.space.trees:
            count = NUM_SWEPT // SWEPT_AT_ONCE if policy in self.sampled else 1
            parts += [(part, policy, variant) for part in range(count) for variant in self.variants]
        parts.sort(key=lambda found: found[0])
        return {
            content_key([self.key, part, policy, variant[0], variant[1].model_dump(mode="json")]): self._sweep(
                part, policy, variant
            )
            for part, policy, variant in parts
        }

    def _sweep(self, part: int, policy: str, variant: DraftVariant) -> Callable[[], Record]:
        def make() -> Record:
            if policy == "static":
                trees = self.evaluator.static_trees(variant, self.space)
            elif (few := self.space.enumerated(policy)) is not None:
                trees = few
            else:
                trees = self.space.sweep(policy, SWEPT_AT_ONCE, self.seed, first=part * SWEPT_AT_ONCE)
            configurations = self._feasible((variant, tree) for tree in trees)
            going_on = self._race(configurations)
            return self._record(going_on, self.evaluator.replay_many(going_on), num_replayed=len(configurations))

        return make

    def _race(self, configurations: list[Configuration]) -> list[Configuration]:
        """Those that are among the fastest over the first prompts, overall or of a task: only they are worth replaying over
        all.
        """
        if len(configurations) <= NUM_GOING_ON or 2 * len(self.first_prompts) > len(self.evaluator.tasks):
            return configurations
        ms = np.array([result.decode_ms for result in self.evaluator.replay_many(configurations, self.first_prompts)])
        fastest, of_task = self._leaders(ms, NUM_GOING_ON, NUM_GOING_ON_OF_TASK)
        return [configurations[number] for number in sorted({*fastest, *itertools.chain(*of_task.values())})]

    def _leaders(self, ms: Floats, count: int, count_of_task: int) -> tuple[list[int], dict[str, list[int]]]:
        """Rows of ``ms`` [configurations, prompts] with the least sums: of all, and of the prompts of each task."""

        def least(sums: Floats, count: int) -> list[int]:
            return np.argsort(sums, kind="stable")[:count].tolist()

        of_task = {task: least(ms[:, prompts].sum(1), count_of_task) for task, prompts in self.prompts_of_task.items()}
        return least(ms.sum(1), count), of_task

    def _feasible(self, trees: Iterable[tuple[DraftVariant, Tree]]) -> list[Configuration]:
        """Those that keep to the constraints."""
        return [
            Configuration(tree=tree, draft=draft, subnet=subnet)
            for (draft, subnet), tree in trees
            if self.evaluator.is_feasible((draft, subnet), tree)
        ]

    def _record(self, configurations: list[Configuration], results: list[Replay], *, num_replayed: int) -> Record:
        """Which are the fastest: over all prompts, and over those of each task."""
        if not results:
            return {"num_replayed": 0, "fastest": [], "of_task": {}}
        ms = np.array([result.decode_ms for result in results])

        def candidate(number: int) -> Record:
            return self.evaluator.candidate(configurations[number], results[number]).model_dump(mode="json")

        leaders, leaders_of_task = self._leaders(ms, NUM_KEPT, NUM_KEPT_OF_TASK)
        fastest = [candidate(number) for number in leaders]
        of_task = {
            task: [
                {"ms": float(ms[number, self.prompts_of_task[task]].sum()), "candidate": candidate(number)}
                for number in numbers
            ]
            for task, numbers in leaders_of_task.items()
        }
        first = min(_candidates(fastest), key=lambda one: one.rank)
        self._best = min(self._best or first, first, key=lambda one: one.rank)
        return {"num_replayed": num_replayed, "fastest": fastest, "of_task": of_task}

    def sample(
        self, swept: list[Record], num_trials: int, deadline: float | None, report: Callable[[int, int], None]
    ) -> list[Record]:
        """TPE over subnets, policies and hyperparameters together, from the best of what was swept: several samplers that
        know nothing of each other, so that workers can share them.
        """
        if not self.sampled:
            return []
        ranked = sorted(
            (one for record in swept for one in _candidates(record["fastest"]) if one.policy in self.sampled),
            key=lambda one: one.rank,
        )
        units = {}
        for first in range(0, num_trials, TRIALS_AT_ONCE):
            count = min(TRIALS_AT_ONCE, num_trials - first)
            key = content_key([self.key, "sampled", first, count])
            units[key] = partial(self._sample, ranked[:NUM_KEPT], first, count)

        def say(done: int, of: int) -> None:
            report(min(num_trials, done * TRIALS_AT_ONCE), num_trials)

        self.ledger.work("optuna", {content_key(["optuna's tables"]): self._open_optuna})
        return list(self.ledger.work("trees", units, deadline=deadline, report=say).values())

    def _open_optuna(self) -> Record:
        """Optuna makes its tables in steps that two workers cannot take at once."""
        import optuna

        optuna.storages.get_storage(optuna_storage(self.ledger.storage))
        return {}

    def _sample(self, seeds: list[Candidate], first: int, count: int) -> Record:
        """``count`` trials, of which so many as ``first`` are others' to make."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        names = [f"{draft} {subnet.label}" for draft, subnet in self.variants]
        sampler = optuna.samplers.TPESampler(seed=self.seed + first, multivariate=True, n_startup_trials=0)
        study = optuna.create_study(direction="minimize", sampler=sampler)
        distributions = self._distributions(names)
        for one in seeds:
            variant = one.configuration.draft or "", one.configuration.subnet
            parameters = {
                "subnet": names[self.variants.index(variant)],
                **self.space.parameters(one.configuration.tree),
            }
            study.add_trial(_finished(parameters, one.ms_per_token, distributions))
        configurations, results = [], []
        for _ in range(count):
            trial = study.ask()
            trial.set_user_attr(UNIT, first)
            variant = self.variants[names.index(trial.suggest_categorical("subnet", names))]
            feasible = self._feasible([(variant, self.space.suggest(trial, self.sampled))])
            if not feasible:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                continue
            configurations += feasible
            results.append(self.evaluator.replay(feasible[0]))
            study.tell(trial, results[-1].ms_per_token)
        self._show(study.get_trials(deepcopy=False)[-count:], first)
        return self._record(configurations, results, num_replayed=len(results))

    def _distributions(self, names: list[str]) -> dict[str, Any]:
        """Of all parameters, by name."""
        import optuna

        policies = {"policy": self.sampled, "subnet": names}
        fixed = {name: optuna.distributions.CategoricalDistribution(values) for name, values in policies.items()}
        return fixed | {
            f"{policy}.{name}": dimension.distribution
            for policy in self.sampled
            for name, dimension in self.space.trees[policy].items()
        }

    def _show(self, trials: list[Any], unit: int) -> None:
        """Add a unit's trials to an Optuna study beside the ledger, where ``optuna-dashboard`` finds them. A unit done anew
        adds none twice.
        """
        import optuna

        study = optuna.create_study(
            study_name=self.optuna_name,
            storage=optuna_storage(self.ledger.storage),
            direction="minimize",
            load_if_exists=True,
        )
        if not any(trial.user_attrs.get(UNIT) == unit for trial in study.get_trials(deepcopy=False)):
            study.add_trials(trials)


def optuna_storage(ledger: str | Path) -> Any:
    """Where the trials beside a ledger are: a journal beside its file, or the same database."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if isinstance(ledger, Path):
        return JournalStorage(JournalFileBackend(str(ledger.with_suffix(".optuna"))))
    return storage_url(ledger)


def _finished(parameters: dict[str, Any], ms: float, distributions: dict[str, Any]) -> Any:
    import optuna

    known = {name: distributions[name] for name in parameters}
    return optuna.trial.create_trial(params=parameters, distributions=known, value=ms)


# ------------------------------------------------------------------------------------------------------------- finalists


def choose_finalists(
    candidates: Sequence[Candidate], evaluator: Evaluator, count: int, *, slack: float = 0.05
) -> list[Candidate]:
    """Up to ``count`` to measure: the fastest of every (draft, subnet, policy), at most two of a draft and policy, for
    neighbours of one winner would be measured for nothing; and none that over resampled prompts is surely slower than
    the fastest by more than ``slack``, which is what a prediction may be wrong by.
    """
    best: dict[tuple[str | None, Subnet, str], Candidate] = {}
    for candidate in sorted(candidates, key=lambda one: one.rank):
        c = candidate.configuration
        best.setdefault((c.draft, c.subnet, candidate.policy), candidate)
    chosen: list[Candidate] = []
    alike: dict[tuple[str | None, str], int] = {}
    fastest_ms = None
    for candidate in best.values():
        c = candidate.configuration
        kind = c.draft, candidate.policy
        if alike.get(kind, 0) >= MOST_ALIKE:
            continue
        (ms,) = evaluator.prompt_ms([c])
        fastest_ms = ms if fastest_ms is None else fastest_ms
        if bootstrap_ratio(ms, fastest_ms)[0] > 1.0 + slack:
            continue
        alike[kind] = alike.get(kind, 0) + 1
        chosen.append(candidate)
        if len(chosen) == count:
            break
    return chosen
