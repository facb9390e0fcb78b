"""The tree stage: every tree is replayed over the traces of every surviving subnet, priced by the cost table; Optuna goes
on from the best of them.

Its work is cut into units whose records a ledger keeps: any number of workers share them, and what they find does not
depend on who did what.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.acceptance.replay import Replay, check_reach, plain_decode_ms, replay
from autotune.acceptance.trace import Trace
from autotune.cost.table import CostTable, DensePrices
from autotune.errors import UserError
from autotune.files import content_key
from autotune.provenance import version_of
from autotune.search.bootstrap import bootstrap_ratio
from autotune.search.ledger import Ledger, Record, storage_url
from autotune.search.sequoia import rank_acceptance, sequoia_trees
from autotune.search.space import STATIC_FIELDS, Configuration, Place, SearchSpace
from autotune.subnet import Subnet
from autotune.trees.fallback import RoundPrice
from autotune.trees.policy import Policy, parse_policy
from autotune.trees.tree import MAX_STEP, Floats

Report = Callable[[int, int, str], None]

NUM_SWEPT = 2048  # trees of each policy and subnet that are replayed before TPE begins; a power of two, as Sobol's are
SWEPT_AT_ONCE = 256  # a unit of work
TRIALS_AT_ONCE = 50
NUM_KEPT = 24  # of a unit, the fastest go into its record; with as many of all TPE begins...
NUM_KEPT_OF_TASK = 2  # ...and so many of the fastest of each task
MOST_ALIKE = 2  # finalists of one draft and policy


@dataclass(frozen=True)
class Candidate:
    """A configuration and what replay says of it."""

    configuration: Configuration
    key: str
    """The configuration's."""
    ms_per_token: float
    tokens_per_round: float
    nodes_per_round: float
    speedup: float
    """Over plain decoding, predicted by the same table."""


@dataclass(frozen=True)
class Constraints:
    """What a configuration must keep to."""

    max_round_ms: float | None = None
    """Of the largest round that a tree can make: every level as wide, and the tree as large, as it may get."""
    max_draft_mib: float | None = None
    """Memory of the draft: its own weights, and its cache of the longest prompt and answer with the largest tree."""


class Evaluator:
    """Replays configurations over the traces of every draft and subnet."""

    def __init__(
        self,
        traces: Iterable[Trace],
        table: CostTable,
        *,
        constraints: Constraints | None = None,
        jobs: int | None = None,
    ) -> None:
        """``jobs`` replay at once; None: one for each core.

        Raises:
            UserError: answers too short to decode, or a draft that the table does not price.
        """
        self.traces: dict[Place, Trace] = {(t.header.draft.id, t.header.subnet): t for t in traces}
        self.table = table
        self.constraints = constraints or Constraints()
        self.jobs = jobs or os.cpu_count() or 1
        any_trace = next(iter(self.traces.values()))
        if any_trace.num_tokens == 0:
            raise UserError(
                "every recorded answer has one token, so there is nothing to speed up; raise max_new_tokens"
            )
        self.longest = max(int((t.prompt_length + np.diff(t.answer_start)).max()) for t in self.traces.values())
        self.prices = {place: self._prices_of(trace) for place, trace in self.traces.items()}
        ar_ms = plain_decode_ms(any_trace, next(iter(self.prices.values())))
        self.ar_ms_per_token = float(ar_ms.sum() / any_trace.num_tokens)
        self.tasks = any_trace.header.tasks
        self._seen: dict[str, Candidate] = {}
        self.num_evaluated = 0
        """Configurations replayed, by all workers."""

    def _prices_of(self, trace: Trace) -> DensePrices:
        draft, subnet = trace.header.draft, trace.header.subnet
        max_tokens = min(MAX_STEP, self.table.verify.max_tokens, self.table.costs_of(draft, subnet).propose.max_tokens)
        return self.table.prices(draft, max_tokens=max_tokens, max_kv_length=self.longest, subnet=subnet)

    def placed(self, configuration: Configuration) -> Configuration:
        """A configuration with its draft, the first where it names none, and with the draft's own layer, its last."""
        draft, subnet = configuration.draft or next(iter(self.traces))[0], configuration.subnet
        if subnet.injection_layer is None and (draft, subnet) not in self.traces:
            own = max((s.injection_layer or 0 for d, s in self.traces if d == draft), default=0)
            subnet = subnet.model_copy(update={"injection_layer": own or None})
        if (draft, subnet) == (configuration.draft, configuration.subnet):
            return configuration
        return configuration.model_copy(update={"draft": draft, "subnet": subnet})

    def replay(self, configuration: Configuration) -> Replay:
        """What decoding with a configuration would do.

        Raises:
            UserError: no trace is of its draft and subnet, or its trees reach beyond traces or prices.
        """
        trace, policy, prices = self._reach(configuration)
        return replay(trace, policy, prices, configuration.fallback)

    def _reach(self, configuration: Configuration) -> tuple[Trace, Policy, DensePrices]:
        """What a configuration is replayed with."""
        configuration = self.placed(configuration)
        place = configuration.draft or "", configuration.subnet
        if place not in self.traces:
            known = "; ".join(f"{draft} {subnet.label}" for draft, subnet in self.traces)
            raise UserError(
                f"no trace has {configuration.draft} {configuration.subnet.label}; there are {known}; record it, or narrow the space"
            )
        trace, prices, policy = self.traces[place], self.prices[place], parse_policy(configuration.tree)
        check_reach(trace, policy)
        largest = prices.verify_ms.shape[0] - 1
        if max(policy.max_nodes + 1, policy.max_width) > largest:
            raise UserError(
                f"the cost table prices steps of up to {largest} tokens; {configuration.label} verifies up to "
                f"{policy.max_nodes + 1} at once and drafts {policy.max_width}; profile a larger grid, or narrow the space"
            )
        return trace, policy, prices

    def can_replay(self, configuration: Configuration) -> bool:
        """Whether its draft and subnet were recorded, and its trees lie within traces and prices."""
        try:
            self._reach(configuration)
        except UserError:
            return False
        return True

    def round_ms(self, place: Place, policy: Policy) -> float:
        """Latency of the largest round that a policy can make, at the longest KV length."""
        prices = self.prices[place]
        levels = policy.max_depth
        draft = prices.commit_ms[1, -1] + (levels - 1) * prices.draft_ms[policy.max_width, -1]
        overhead = prices.overhead_round_ms + levels * prices.overhead_level_ms
        return float(draft + prices.verify_ms[policy.max_nodes + 1, -1] + overhead)

    def draft_mib(self, place: Place, policy: Policy) -> float | None:
        """Memory of a draft, MiB; None where the cost table does not say."""
        header = self.traces[place].header
        costs = self.table.costs_of(header.draft, header.subnet)
        if costs.num_parameters is None or costs.cache_bytes_per_token is None:
            return None
        width = {"float32": 4, "float64": 8}.get(self.table.precision, 2)
        cache = costs.cache_bytes_per_token * (self.longest + policy.max_grown)
        return (costs.num_parameters * width + cache) / 2**20

    def is_feasible(self, place: Place, tree: dict[str, Any]) -> bool:
        """Whether a tree keeps to the constraints."""
        found, policy = self.constraints, parse_policy(tree)
        if found.max_round_ms is not None and self.round_ms(place, policy) > found.max_round_ms:
            return False
        return found.max_draft_mib is None or (self.draft_mib(place, policy) or 0.0) <= found.max_draft_mib

    def check_feasible(self) -> None:
        """Refuse constraints that the smallest of trees does not keep.

        Raises:
            UserError: says which constraint binds, and what the least is.
        """
        chain = parse_policy({"policy": "chain", "depth": 1})
        if (limit := self.constraints.max_round_ms) is not None:
            least = min(self.round_ms(place, chain) for place in self.traces)
            if least > limit:
                raise UserError(
                    f"--max-round-ms {limit:g}: no tree keeps to it; a round with one drafted token takes {least:.2f} ms; raise it above that"
                )
        if (limit := self.constraints.max_draft_mib) is not None:
            sizes = [size for place in self.traces if (size := self.draft_mib(place, chain)) is not None]
            if sizes and min(sizes) > limit:
                raise UserError(
                    f"--max-draft-mib {limit:g}: no draft keeps to it; the smallest takes {min(sizes):.1f} MiB; raise it, or name a smaller draft"
                )

    def evaluate(self, configuration: Configuration) -> Candidate:
        """A configuration's figures; a second call costs nothing."""
        configuration = self.placed(configuration)
        key = configuration.key
        if key not in self._seen:
            self._note(key, configuration, self.replay(configuration))
        return self._seen[key]

    def evaluate_many(self, configurations: Iterable[Configuration]) -> list[Candidate]:
        """The same for many at once; in the order of ``configurations``."""
        placed = [(c.key, c) for c in map(self.placed, configurations)]
        new = {key: c for key, c in placed if key not in self._seen}
        for (key, c), result in zip(new.items(), self._replay_many(new.values()), strict=True):
            self._note(key, c, result)
        return [self._seen[key] for key, _ in placed]

    def _replay_many(self, configurations: Iterable[Configuration]) -> list[Replay]:
        for trace in self.traces.values():
            _ = trace.packed  # laid out once, before the threads ask for it
        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(self.replay, configurations))

    def _note(self, key: str, configuration: Configuration, result: Replay) -> None:
        ms = result.ms_per_token
        nodes = float(result.verified_nodes.sum() / result.rounds.sum())
        self._seen[key] = Candidate(configuration, key, ms, result.tokens_per_round, nodes, self.ar_ms_per_token / ms)

    def prompt_ms(self, configurations: Sequence[Configuration]) -> Floats:
        """Predicted decoding time of every prompt, [configurations, prompts]."""
        return np.array([result.decode_ms for result in self._replay_many(configurations)])

    @property
    def prompt_tokens(self) -> Floats:
        """Decoded tokens of every prompt."""
        return np.diff(next(iter(self.traces.values())).answer_start) - 1.0

    def round_price(self, configuration: Configuration) -> RoundPrice:
        """What a configuration's rounds cost in plain steps: its own rounds, divided among what they consist of."""
        result = self.replay(configuration.model_copy(update={"fallback": None}))
        prices = self._reach(configuration)[2]
        rounds, levels, nodes = (float(n.sum()) for n in (result.rounds, result.draft_forwards, result.verified_nodes))
        verify_ms = prices.verify_ms.mean(1)
        largest = parse_policy(configuration.tree).max_nodes + 1
        node_ms = max(0.0, float(verify_ms[largest] - verify_ms[1]) / (largest - 1))
        level_ms = float(result.draft_ms.sum()) / levels + prices.overhead_level_ms
        round_ms = (float(result.verify_ms.sum()) - node_ms * nodes) / rounds + prices.overhead_round_ms
        step_ms = self.ar_ms_per_token
        return RoundPrice(
            round_steps=max(round_ms / step_ms, 0.01), level_steps=level_ms / step_ms, node_steps=node_ms / step_ms
        )

    def guarded(self, candidate: Candidate) -> Candidate:
        """A candidate with its fallback to plain decoding."""
        price = self.round_price(candidate.configuration)
        return self.evaluate(candidate.configuration.model_copy(update={"fallback": price}))

    def static_trees(self, place: Place, space: SearchSpace) -> list[dict[str, Any]]:
        """Sequoia's trees of the budgets and depths of a search space, for a subnet."""
        budgets, depths = (space.trees["static"][name].values or [] for name in STATIC_FIELDS)
        trees = sequoia_trees(rank_acceptance(self.traces[place]), budgets=budgets, depths=depths)
        return [tree.model_dump(mode="json") for tree in trees]


def _rank(candidate: Candidate) -> tuple[float, float, str]:
    """Fastest first; of equal ones the smaller tree."""
    return candidate.ms_per_token, candidate.nodes_per_round, candidate.key


# --------------------------------------------------------------------------------------------------------------- stage


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
) -> list[Candidate]:
    """The fastest of the space over all subnets of the evaluator, fastest first: small policies outright, the others by an
    even sweep, from whose best TPE goes on: a replay takes less time than TPE needs to think of a tree.

    ``documents`` are the hashes of what it searches over: with the seed they name the records, so that the same command
    goes on with them and another one does not.

    Raises:
        UserError: no tree of the space keeps to the constraints.
    """
    stage = _Stage(evaluator, space, ledger, [version_of("autotune"), documents, evaluator.constraints.__dict__], seed)
    evaluator.check_feasible()

    def say(done: int, of: int) -> None:
        if report is not None:
            report(done, of, stage.best_so_far())

    units = stage.sweeps()
    records = list(ledger.work("trees", units, deadline=deadline, report=say).values())
    if len(records) == len(units):
        records += stage.sample(records, num_trials, deadline, say)
    evaluator.num_evaluated = sum(record["num_evaluated"] for record in records)
    best = {content_key(one): one for record in records for one in record["best"]}
    # Records may be another worker's: what is chosen among is replayed here.
    candidates = evaluator.evaluate_many(
        Configuration.model_validate(one["configuration"], strict=False) for one in best.values()
    )
    if not candidates:
        limits = {
            "--max-round-ms": evaluator.constraints.max_round_ms,
            "--max-draft-mib": evaluator.constraints.max_draft_mib,
        }
        given = ", ".join(f"{name} {limit:g}" for name, limit in limits.items() if limit is not None)
        raise UserError(
            f"no tree of space {space.name} was found that keeps to {given or 'the budget'}; raise it, or widen the space"
        )
    return sorted({found.key: found for found in candidates}.values(), key=_rank)


class _Stage:
    """The units of one tree stage."""

    def __init__(self, evaluator: Evaluator, space: SearchSpace, ledger: Ledger, documents: Any, seed: int) -> None:
        self.evaluator = evaluator
        self.space = space
        self.ledger = ledger
        self.seed = seed
        self.places = list(evaluator.traces)
        described = [[draft, subnet.model_dump(mode="json")] for draft, subnet in self.places]
        trees = {policy: {n: d.model_dump() for n, d in found.items()} for policy, found in space.trees.items()}
        self.key = content_key([documents, described, trees, seed])
        self.sampled = [p for p in space.trees if p != "static" and space.enumerated(p) is None]
        self._best: tuple[float, str] | None = None

    def best_so_far(self) -> str:
        """For people."""
        if self._best is None:
            return ""
        return f"best so far: {self.evaluator.ar_ms_per_token / self._best[0]:.2f}x {self._best[1]}"

    def sweeps(self) -> dict[str, Callable[[], Record]]:
        """What is enumerated or swept, in an order in which whatever time there is serves all subnets and policies."""
        parts: list[tuple[int, str, Place]] = []
        for policy in self.space.trees:
            count = NUM_SWEPT // SWEPT_AT_ONCE if policy in self.sampled else 1
            parts += [(part, policy, place) for part in range(count) for place in self.places]
        parts.sort(key=lambda found: found[0])
        return {
            content_key([self.key, part, policy, place[0], place[1].model_dump(mode="json")]): self._sweep(
                part, policy, place
            )
            for part, policy, place in parts
        }

    def _sweep(self, part: int, policy: str, place: Place) -> Callable[[], Record]:
        def make() -> Record:
            if policy == "static":
                trees = self.evaluator.static_trees(place, self.space)
            elif (few := self.space.enumerated(policy)) is not None:
                trees = few
            else:
                trees = self.space.sweep(policy, SWEPT_AT_ONCE, self.seed, first=part * SWEPT_AT_ONCE)
            return self._record([(place, tree) for tree in trees])

        return make

    def _record(self, trees: list[tuple[Place, dict[str, Any]]]) -> Record:
        """Replay trees; the record says how many, and which are the fastest: over all prompts, and over those of each task."""
        feasible = [one for one in trees if self.evaluator.is_feasible(*one)]
        configurations = [Configuration(tree=tree, draft=place[0], subnet=place[1]) for place, tree in feasible]
        if not configurations:
            return {"num_evaluated": 0, "best": []}
        ms, tokens = self.evaluator.prompt_ms(configurations), self.evaluator.prompt_tokens
        overall = ms.sum(1) / tokens.sum()
        chosen = set(np.argsort(overall, kind="stable")[:NUM_KEPT].tolist())
        for task in set(self.evaluator.tasks):
            of_task = [t == task for t in self.evaluator.tasks]
            chosen |= set(np.argsort(ms[:, of_task].sum(1), kind="stable")[:NUM_KEPT_OF_TASK].tolist())
        first = int(overall.argmin())
        if self._best is None or overall[first] < self._best[0]:
            self._best = float(overall[first]), configurations[first].label
        best = [
            {"configuration": configurations[i].model_dump(mode="json"), "ms_per_token": float(overall[i])}
            for i in sorted(chosen)
        ]
        return {"num_evaluated": len(configurations), "best": best}

    def sample(
        self, swept: list[Record], num_trials: int, deadline: float | None, report: Callable[[int, int], None]
    ) -> list[Record]:
        """TPE over subnets, policies and hyperparameters together, from the best of what was swept. Each unit begins with
        what the units before it found.
        """
        if not self.sampled or num_trials == 0:
            return []
        found: list[Record] = []
        ranked = sorted(
            (
                one
                for record in swept
                for one in record["best"]
                if one["configuration"]["tree"]["policy"] in self.sampled
            ),
            key=lambda one: (one["ms_per_token"], content_key(one)),
        )
        for first in range(0, num_trials, TRIALS_AT_ONCE):
            count = min(TRIALS_AT_ONCE, num_trials - first)
            key = content_key([self.key, "sampled", first, count])
            earlier = [trial for record in found for trial in record["trials"]]

            def make(first: int = first, count: int = count, earlier: list[Any] = earlier) -> Record:
                return self._sample(ranked[:NUM_KEPT], earlier, first, count)

            record = self.ledger.work("trees", {key: make}, deadline=deadline)
            if not record:
                break
            found += record.values()
            report(first + count, num_trials)
        return found

    def _sample(self, seeds: list[Any], earlier: list[Any], first: int, count: int) -> Record:
        """``count`` trials behind ``first`` earlier ones, which are [parameters, ms per token]."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        names = [f"{draft} {subnet.label}" for draft, subnet in self.places]
        sampler = optuna.samplers.TPESampler(seed=self.seed + first, multivariate=True, n_startup_trials=0)
        study = optuna.create_study(direction="minimize", sampler=sampler)
        distributions = self._distributions(names)
        for one in seeds:
            configuration = Configuration.model_validate(one["configuration"], strict=False)
            place = configuration.draft or "", configuration.subnet
            parameters = {"subnet": names[self.places.index(place)], **self.space.parameters(configuration.tree)}
            study.add_trial(_finished(parameters, one["ms_per_token"], distributions))
        for parameters, ms in earlier:
            study.add_trial(_finished(parameters, ms, distributions))
        trials, asked = [], []
        for _ in range(count):
            trial = study.ask()
            place = self.places[names.index(trial.suggest_categorical("subnet", names))]
            tree = self.space.suggest(trial, self.sampled)
            if not self.evaluator.is_feasible(place, tree):
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                continue
            asked.append((place, tree))
            ms = self.evaluator.evaluate(Configuration(tree=tree, draft=place[0], subnet=place[1])).ms_per_token
            study.tell(trial, ms)
            trials.append([trial.params, ms])
        self._show(study.get_trials(deepcopy=False)[-count:], first)
        return {**self._record(asked), "trials": trials}

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

    def _show(self, trials: list[Any], number: int) -> None:
        """Add trials to an Optuna study beside the ledger, where ``optuna-dashboard`` finds them; ``number`` counts those
        of the units before, so that a unit done anew adds none twice.
        """
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        place = self.ledger.storage
        opened: Any = (
            place if isinstance(place, str) else JournalStorage(JournalFileBackend(str(place.with_suffix(".optuna"))))
        )
        study = optuna.create_study(
            study_name=f"trees-{self.key}",
            storage=storage_url(opened) if isinstance(opened, str) else opened,
            direction="minimize",
            load_if_exists=True,
        )
        shown = len(study.get_trials(deepcopy=False))
        study.add_trials(trials[max(0, shown - number) :])


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
    for candidate in sorted(candidates, key=_rank):
        c = candidate.configuration
        best.setdefault((c.draft, c.subnet, c.tree["policy"]), candidate)
    chosen: list[Candidate] = []
    alike: dict[tuple[str | None, str], int] = {}
    fastest_ms = None
    for candidate in best.values():
        c = candidate.configuration
        kind = c.draft, c.tree["policy"]
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
