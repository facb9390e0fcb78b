"""The tree stage: every configuration is replayed over the traces and priced by the cost table; Optuna proposes where
they are too many to enumerate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.acceptance.replay import Replay, plain_decode_ms, replay
from autotune.acceptance.trace import Trace
from autotune.cost.table import CostTable, DensePrices
from autotune.errors import UserError
from autotune.files import content_key
from autotune.provenance import ModelReference
from autotune.search.space import PUBLISHED_DEFAULTS, Configuration, SearchSpace
from autotune.trees.policy import parse_policy
from autotune.trees.tree import MAX_NODES

Report = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Candidate:
    """A configuration and what replay says of it."""

    configuration: Configuration
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
        max_tokens = min(MAX_NODES, table.verify.max_tokens, table.costs_of(draft).propose.max_tokens)
        self.prices: DensePrices = table.prices(draft, max_tokens=max_tokens, max_kv_length=longest)
        any_trace = next(iter(self.traces.values()))
        if any_trace.num_tokens == 0:
            raise UserError(
                "every recorded answer has one token, so there is nothing to speed up; raise max_new_tokens"
            )
        self.ar_ms_per_token = float(plain_decode_ms(any_trace, self.prices).sum() / any_trace.num_tokens)
        self._seen: dict[str, Candidate] = {}

    @property
    def num_evaluated(self) -> int:
        """Distinct configurations replayed so far."""
        return len(self._seen)

    def replay(self, configuration: Configuration) -> Replay:
        """What decoding with a configuration would do.

        Raises:
            UserError: no trace has its visual keep ratio.
        """
        trace = self.traces.get(configuration.visual_keep)
        if trace is None:
            known = ", ".join(f"{keep:g}" for keep in sorted(self.traces))
            raise UserError(
                f"no trace has visual keep {configuration.visual_keep:g}; there are {known}; record it, or narrow the space"
            )
        policy = parse_policy(configuration.tree)
        largest = self.prices.verify_ms.shape[0] - 1
        if policy.max_nodes + 1 > largest:
            raise UserError(
                f"the cost table prices steps of up to {largest} tokens; {configuration.label} verifies up to "
                f"{policy.max_nodes + 1} at once; profile a larger grid, or narrow the space"
            )
        return replay(trace, policy, self.prices)

    def evaluate(self, configuration: Configuration) -> Candidate:
        """A configuration's figures; a second call costs nothing."""
        key = configuration.key
        if key not in self._seen:
            result = self.replay(configuration)
            ms = result.ms_per_token
            nodes = float(result.verified_nodes.sum() / result.rounds.sum())
            self._seen[key] = Candidate(configuration, ms, result.tokens_per_round, nodes, self.ar_ms_per_token / ms)
        return self._seen[key]

    @property
    def best(self) -> Candidate:
        """The fastest so far."""
        return min(self._seen.values(), key=_rank)

    @property
    def candidates(self) -> list[Candidate]:
        """All evaluated, fastest first; of equal ones the smaller tree."""
        return sorted(self._seen.values(), key=_rank)


def _rank(candidate: Candidate) -> tuple[float, float, str]:
    return candidate.ms_per_token, candidate.nodes_per_round, candidate.configuration.key


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
    """Evaluate the space, fastest first: small policies outright, the others by TPE from the published defaults on.

    ``storage`` is an Optuna RDB URL, or the path of a journal file. The study is named by ``documents`` (the hashes of
    what it searches over), so that the same command goes on with it and another one does not.

    Raises:
        UserError: the storage does not answer.
    """
    import optuna

    sampled = []
    for policy in space.trees:
        configurations = space.enumerated(policy)
        if configurations is None:
            sampled.append(policy)
            continue
        for configuration in configurations:
            evaluator.evaluate(configuration)
    for configuration in PUBLISHED_DEFAULTS.values():
        if configuration.visual_keep in evaluator.traces:
            evaluator.evaluate(configuration)
    if sampled:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = _open_study(storage, content_key([documents, space.model_dump(mode="json"), seed]), seed)
        # Trials of earlier runs are replayed anew: that is cheaper than trusting figures of another program version.
        finished = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.COMPLETE]
        for trial in finished:
            evaluator.evaluate(Configuration.model_validate(trial.user_attrs["configuration"]))
        for number in range(len(finished), num_trials):
            if deadline is not None and time.monotonic() > deadline:
                break
            trial = study.ask()
            configuration = space.suggest(trial, sampled)
            trial.set_user_attr("configuration", configuration.model_dump(mode="json"))
            study.tell(trial, evaluator.evaluate(configuration).ms_per_token)
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
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials), multivariate=True, n_startup_trials=60)
    return study


def choose_finalists(candidates: list[Candidate], count: int) -> list[Candidate]:
    """The fastest of every (policy, visual keep), and of those the ``count`` fastest: neighbours of one winner would be
    measured for nothing.
    """
    best: dict[tuple[str, float], Candidate] = {}
    for candidate in candidates:
        best.setdefault((candidate.configuration.tree["policy"], candidate.configuration.visual_keep), candidate)
    return sorted(best.values(), key=lambda c: c.ms_per_token)[:count]
