"""The tree stage: every configuration is replayed over the traces and priced by the cost table; Optuna proposes where
they are too many to enumerate.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.acceptance.replay import Replay, check_reach, plain_decode_ms, replay
from autotune.acceptance.trace import Trace
from autotune.cost.table import CostTable, DensePrices
from autotune.errors import UserError
from autotune.files import content_key
from autotune.provenance import ModelReference
from autotune.search.sequoia import rank_acceptance, sequoia_trees
from autotune.search.space import (
    PUBLISHED_DEFAULTS,
    STATIC_FIELDS,
    Configuration,
    Dimension,
    SearchSpace,
)
from autotune.trees.fallback import RoundPrice
from autotune.trees.policy import Policy, parse_policy
from autotune.trees.tree import MAX_STEP

Report = Callable[[int, int, str], None]
NUM_SWEPT = 2048  # configurations of each policy that are replayed before TPE begins; a power of two, as Sobol's are
NUM_SEEDS = 24  # of them TPE begins with


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


class Evaluator:
    """Replays configurations over the traces of every visual keep ratio."""

    def __init__(self, traces: Iterable[Trace], table: CostTable, draft: ModelReference) -> None:
        self.traces = {trace.header.visual_keep: trace for trace in traces}
        longest = max(int((t.prompt_length + np.diff(t.answer_start)).max()) for t in self.traces.values())
        any_trace = next(iter(self.traces.values()))
        subnet = any_trace.header.subnet
        max_tokens = min(MAX_STEP, table.verify.max_tokens, table.costs_of(draft, subnet).propose.max_tokens)
        self.prices: DensePrices = table.prices(draft, max_tokens=max_tokens, max_kv_length=longest, subnet=subnet)
        if any_trace.num_tokens == 0:
            raise UserError(
                "every recorded answer has one token, so there is nothing to speed up; raise max_new_tokens"
            )
        self.ar_ms_per_token = float(plain_decode_ms(any_trace, self.prices).sum() / any_trace.num_tokens)
        self._seen: dict[str, Candidate] = {}
        self._best: Candidate | None = None

    @property
    def num_evaluated(self) -> int:
        """Distinct configurations replayed so far."""
        return len(self._seen)

    def replay(self, configuration: Configuration) -> Replay:
        """What decoding with a configuration would do.

        Raises:
            UserError: no trace has its visual keep ratio, or its trees reach beyond traces or prices.
        """
        trace, policy = self._reach(configuration)
        return replay(trace, policy, self.prices, configuration.fallback)

    def _reach(self, configuration: Configuration) -> tuple[Trace, Policy]:
        """What a configuration is replayed with."""
        trace = self.traces.get(configuration.visual_keep)
        if trace is None:
            known = ", ".join(f"{keep:g}" for keep in sorted(self.traces))
            raise UserError(
                f"no trace has visual keep {configuration.visual_keep:g}; there are {known}; record it, or narrow the space"
            )
        policy = parse_policy(configuration.tree)
        check_reach(trace, policy)
        largest = self.prices.verify_ms.shape[0] - 1
        if max(policy.max_nodes + 1, policy.max_width) > largest:
            raise UserError(
                f"the cost table prices steps of up to {largest} tokens; {configuration.label} verifies up to "
                f"{policy.max_nodes + 1} at once and drafts {policy.max_width}; profile a larger grid, or narrow the space"
            )
        return trace, policy

    def can_replay(self, configuration: Configuration) -> bool:
        """Whether its visual keep ratio was recorded, and its trees lie within traces and prices."""
        try:
            self._reach(configuration)
        except UserError:
            return False
        return True

    def evaluate(self, configuration: Configuration) -> Candidate:
        """A configuration's figures; a second call costs nothing."""
        key = configuration.key
        if key not in self._seen:
            self._note(key, configuration, self.replay(configuration))
        return self._seen[key]

    def evaluate_many(self, configurations: Iterable[Configuration]) -> None:
        """The same for many at once, on all cores; the figures are in ``candidates``."""
        waiting = {c.key: c for c in configurations}
        new = {key: c for key, c in waiting.items() if key not in self._seen}
        for trace in self.traces.values():
            _ = trace.packed  # laid out once, before the threads ask for it
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for (key, configuration), result in zip(new.items(), pool.map(self.replay, new.values()), strict=True):
                self._note(key, configuration, result)

    def _note(self, key: str, configuration: Configuration, result: Replay) -> None:
        ms = result.ms_per_token
        nodes = float(result.verified_nodes.sum() / result.rounds.sum())
        found = Candidate(configuration, key, ms, result.tokens_per_round, nodes, self.ar_ms_per_token / ms)
        self._seen[key] = found
        if self._best is None or _rank(found) < _rank(self._best):
            self._best = found

    def round_price(self, configuration: Configuration) -> RoundPrice:
        """What a configuration's rounds cost in plain steps: its own rounds, divided among what they consist of."""
        result, prices = self.replay(configuration.model_copy(update={"fallback": None})), self.prices
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

    def static_trees(self, dimensions: dict[str, Dimension]) -> list[Configuration]:
        """Sequoia's trees of the budgets and depths of a search space, for every trace."""
        budgets, depths = (dimensions[name].values or [] for name in STATIC_FIELDS)
        return [
            Configuration(tree=tree.model_dump(mode="json"), visual_keep=keep)
            for keep, trace in self.traces.items()
            for tree in sequoia_trees(rank_acceptance(trace), budgets=budgets, depths=depths)
        ]

    @property
    def best(self) -> Candidate:
        """The fastest so far."""
        assert self._best is not None, "nothing was evaluated"
        return self._best

    @property
    def candidates(self) -> list[Candidate]:
        """All evaluated, fastest first; of equal ones the smaller tree."""
        return sorted(self._seen.values(), key=_rank)


def _rank(candidate: Candidate) -> tuple[float, float, str]:
    return candidate.ms_per_token, candidate.nodes_per_round, candidate.key


def search_trees(
    evaluator: Evaluator,
    space: SearchSpace,
    *,
    num_trials: int,
    storage: str | Path,
    documents: Any,
    seed: int = 0,
    deadline: float | None = None,
    report: Report | None = None,
) -> list[Candidate]:
    """Evaluate the space, fastest first: small policies outright, the others by an even sweep, from whose best TPE goes
    on: a replay takes less time than TPE needs to think of a configuration.

    ``storage`` is an Optuna RDB URL, or the path of a journal file. The study is named by ``documents`` (the hashes of
    what it searches over), so that the same command goes on with it and another one does not.

    Raises:
        UserError: the storage does not answer.
    """
    import optuna

    sampled = []
    for policy in space.trees:
        if policy == "static":
            evaluator.evaluate_many(evaluator.static_trees(space.trees[policy]))
            continue
        configurations = space.enumerated(policy)
        if configurations is None:
            sampled.append(policy)
        else:
            evaluator.evaluate_many(configurations)
    evaluator.evaluate_many(filter(evaluator.can_replay, PUBLISHED_DEFAULTS.values()))
    seeds: list[tuple[float, dict[str, Any]]] = []
    for policy in sampled:
        if deadline is not None and time.monotonic() > deadline:
            break
        swept = list(space.sweep(policy, NUM_SWEPT, seed))
        evaluator.evaluate_many(found for found, _ in swept)
        seeds += [(evaluator.evaluate(found).ms_per_token, parameters) for found, parameters in swept]
        if report is not None:
            best = evaluator.best
            report(0, num_trials, f"best so far: {best.speedup:.2f}x {best.configuration.label}")
    if sampled:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = _open_study(storage, content_key([documents, space.model_dump(mode="json"), seed]), seed)
        # Trials of earlier runs are replayed anew: that is cheaper than trusting figures of another program version.
        finished = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.COMPLETE]
        for trial in finished:
            evaluator.evaluate(Configuration.model_validate(trial.user_attrs["configuration"]))
        if not study.trials:
            for _, parameters in sorted(seeds, key=lambda found: found[0])[:NUM_SEEDS]:
                study.enqueue_trial(parameters)
        for number in range(len(finished), num_trials):
            if deadline is not None and time.monotonic() > deadline:
                break
            trial = study.ask()
            suggested = space.suggest(trial, sampled)
            trial.set_user_attr("configuration", suggested.model_dump(mode="json"))
            study.tell(trial, evaluator.evaluate(suggested).ms_per_token)
            if report is not None:
                best = evaluator.best
                report(number + 1, num_trials, f"best so far: {best.speedup:.2f}x {best.configuration.label}")
    return evaluator.candidates


def _open_study(storage: str | Path, name: str, seed: int) -> Any:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    opened: Any
    if isinstance(storage, Path):
        storage.parent.mkdir(parents=True, exist_ok=True)
        opened = JournalStorage(JournalFileBackend(str(storage)))
    else:
        opened = storage
    try:
        study = optuna.create_study(
            study_name=f"trees-{name}", storage=opened, direction="minimize", load_if_exists=True
        )
    except Exception as error:  # each database driver raises its own
        raise UserError(
            f"--storage {storage}: the storage does not answer ({str(error).splitlines()[0]}); check the URL and its driver"
        ) from None
    # A resumed study draws on from where it stood, not the same numbers again.
    study.sampler = optuna.samplers.TPESampler(
        seed=seed + len(study.trials), multivariate=True, n_startup_trials=NUM_SEEDS
    )
    return study


def choose_finalists(candidates: list[Candidate], count: int) -> list[Candidate]:
    """The fastest of every (policy, visual keep), and of those the ``count`` fastest: neighbours of one winner would be
    measured for nothing.
    """
    best: dict[tuple[str, float], Candidate] = {}
    for candidate in candidates:
        best.setdefault((candidate.configuration.tree["policy"], candidate.configuration.visual_keep), candidate)
    return sorted(best.values(), key=lambda c: c.ms_per_token)[:count]
