"""Predicts the speed of configurations without running a model: trees are replayed over traces and priced by a cost
table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property

import numpy as np

from autotune.cost.table import CostTable, DensePrices
from autotune.documents.configuration import Configuration, DraftVariant, Tree
from autotune.documents.published_defaults import PUBLISHED_DEFAULTS
from autotune.errors import UserError
from autotune.files import Document
from autotune.machine.container import num_cores
from autotune.replay.prices import PriceDraws, TreePricing
from autotune.replay.replay import Replay, check_reach, plain_decode_ms, replay
from autotune.replay.trace import Trace
from autotune.trees.fallback import RoundPrice
from autotune.trees.policy import Policy, parse_policy
from autotune.trees.tree import MAX_STEP, Ints


class Candidate(Document):
    """A configuration with its predicted speed."""

    configuration: Configuration
    ms_per_token: float
    tokens_per_round: float
    nodes_per_round: float
    speedup: float
    """Over plain decoding, by the same cost table."""

    @property
    def key(self) -> str:
        return self.configuration.key

    @property
    def policy(self) -> str:
        return str(self.configuration.tree["policy"])

    @property
    def rank(self) -> tuple[float, float, str]:
        """Sort key: the fastest first; of equally fast ones the smaller tree."""
        return self.ms_per_token, self.nodes_per_round, self.key


class Evaluator:
    """Replays configurations over the traces of every draft variant."""

    def __init__(self, traces: Iterable[Trace], table: CostTable, *, jobs: int | None = None) -> None:
        """Traces are of the same answers, one per draft variant; ``jobs`` threads replay (None: one per core).

        Raises:
            UserError: the answers are too short to decode, or the table has no costs of a draft.
        """
        self.traces: dict[DraftVariant, Trace] = {(t.header.draft.id, t.header.subnet): t for t in traces}
        self.table = table
        self.jobs = jobs or num_cores()
        any_trace = next(iter(self.traces.values()))
        if any_trace.num_tokens == 0:
            raise UserError(
                "every recorded answer has one token, so there is nothing to speed up; raise max_new_tokens"
            )
        self.max_kv_length = max(int((t.prompt_length + np.diff(t.answer_start)).max()) for t in self.traces.values())
        self.prices = {variant: self._prices_of(trace) for variant, trace in self.traces.items()}
        self.tree_pricing = {v: TreePricing(trace, self.prices[v]) for v, trace in self.traces.items()}
        self.ar_ms = plain_decode_ms(any_trace, next(iter(self.prices.values())))
        """Predicted time of plain decoding [prompts]."""
        self.ar_ms_per_token = float(self.ar_ms.sum() / any_trace.num_tokens)
        self.tasks = any_trace.header.tasks
        self._candidates: dict[str, Candidate] = {}

    def select(self, prompts: Ints) -> Evaluator:
        """The evaluator of the prompts with these indices only."""
        traces = [trace.select(prompts) for trace in self.traces.values()]
        return Evaluator(traces, self.table, jobs=self.jobs)

    @cached_property
    def price_draws(self) -> PriceDraws:
        """Draws of what the prices of the table may truly be."""
        return PriceDraws(self.table)

    def with_table(self, table: CostTable) -> Evaluator:
        """The evaluator of the same traces with other prices."""
        return Evaluator(self.traces.values(), table, jobs=self.jobs)

    def _prices_of(self, trace: Trace) -> DensePrices:
        draft, subnet = trace.header.draft, trace.header.subnet
        *costs, _ = self.table.costs_around(draft, subnet)
        largest_level = min(draft_costs.draft_level.max_tokens for draft_costs in costs)
        max_tokens = min(MAX_STEP, self.table.verify.max_tokens, largest_level)
        return self.table.prices(draft, max_tokens=max_tokens, max_kv_length=self.max_kv_length, subnet=subnet)

    def resolve(self, configuration: Configuration) -> Configuration:
        """The configuration with a draft and an injection layer, by default the first draft and a draft's last layer,
        and a tree with the prices and the calibration that its policy needs.
        """
        draft, subnet = configuration.draft or next(iter(self.traces))[0], configuration.subnet
        if subnet.injection_layer is None and (draft, subnet) not in self.traces:
            last = max((s.injection_layer or 0 for d, s in self.traces if d == draft), default=0)
            subnet = subnet.model_copy(update={"injection_layer": last or None})
        tree = configuration.tree
        if (draft, subnet) in self.tree_pricing:
            tree = self.tree_pricing[draft, subnet].complete(tree)
        if (draft, subnet, tree) == (configuration.draft, configuration.subnet, configuration.tree):
            return configuration
        return configuration.model_copy(update={"draft": draft, "subnet": subnet, "tree": tree})

    def replay(self, configuration: Configuration, prompts: Ints | None = None) -> Replay:
        """Replay a configuration over the prompts with these indices (None: all).

        Raises:
            UserError: no trace of its draft variant, or trees larger than traces or prices.
        """
        trace, policy, prices = self._replay_arguments(configuration)
        return replay(trace, policy, prices, configuration.fallback, prompts)

    def _replay_arguments(self, configuration: Configuration) -> tuple[Trace, Policy, DensePrices]:
        configuration = self.resolve(configuration)
        variant = configuration.draft or "", configuration.subnet
        if variant not in self.traces:
            known = "; ".join(f"{draft} {subnet.label}".strip() for draft, subnet in self.traces)
            raise UserError(
                f"no trace has {configuration.draft} {configuration.subnet.label}; there are {known}; "
                "record it, or narrow the space"
            )
        trace, policy, prices = self.traces[variant], parse_policy(configuration.tree), self.prices[variant]
        if policy.uses_retrieval:
            round_ms = prices.overhead.round_ms + prices.overhead.retrieval_ms
            prices = replace(prices, overhead=prices.overhead.model_copy(update={"round_ms": round_ms}))
        check_reach(trace, policy)
        largest = prices.verify_ms.shape[0] - 1
        if policy.max_step > largest:
            raise UserError(
                f"the cost table prices steps of up to {largest} tokens; {configuration.label} verifies up to "
                f"{policy.size.nodes + 1} and drafts up to {policy.size.width} at once; measure a larger grid, or narrow the space"
            )
        return trace, policy, prices

    def can_replay(self, configuration: Configuration) -> bool:
        """Whether a trace has its draft variant and nearly all of its nodes: nodes outside the trace would not be
        priced.
        """
        try:
            return self.replay(configuration).is_covered
        except UserError:
            return False

    def evaluate(self, configuration: Configuration) -> Candidate:
        """Predict the speed of a configuration; results are cached."""
        configuration = self.resolve(configuration)
        key = configuration.key
        if key not in self._candidates:
            self._candidates[key] = self.candidate(configuration, self.replay(configuration))
        return self._candidates[key]

    def speedup(self, configuration: Configuration) -> float | None:
        """The predicted speedup of a configuration; None where it cannot be replayed."""
        return self.evaluate(configuration).speedup if self.can_replay(configuration) else None

    def candidate(self, configuration: Configuration, result: Replay) -> Candidate:
        """The candidate of a resolved configuration and its replay."""
        return Candidate(
            configuration=configuration,
            ms_per_token=result.ms_per_token,
            tokens_per_round=result.tokens_per_round,
            nodes_per_round=float(result.verified_nodes.sum() / result.rounds.sum()),
            speedup=self.ar_ms_per_token / result.ms_per_token,
        )

    def replay_many(self, configurations: Iterable[Configuration], prompts: Ints | None = None) -> list[Replay]:
        """Replay configurations in ``jobs`` threads."""
        for trace in self.traces.values():
            _ = trace.packed  # computed once, before the threads need it
        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(lambda c: self.replay(c, prompts), configurations))

    def round_price(self, configuration: Configuration) -> RoundPrice:
        """The replayed cost of a round, a draft level and a node, in plain steps."""
        result = self.replay(configuration.model_copy(update={"fallback": None}))
        prices = self._replay_arguments(configuration)[2]
        rounds, levels, nodes = (float(n.sum()) for n in (result.rounds, result.draft_forwards, result.verified_nodes))
        verify_ms = prices.verify_ms.mean(1)
        largest = parse_policy(configuration.tree).size.nodes + 1
        node_ms = max(0.0, float(verify_ms[largest] - verify_ms[1]) / (largest - 1))
        level_ms = float(result.draft_ms.sum()) / levels + prices.overhead.level_ms
        round_ms = (float(result.verify_ms.sum()) - node_ms * nodes) / rounds + prices.overhead.round_ms
        step_ms = self.ar_ms_per_token
        return RoundPrice(
            round_steps=max(round_ms / step_ms, 0.01),
            level_steps=level_ms / step_ms,
            node_steps=(node_ms + prices.overhead.node_ms) / step_ms,
        )

    def with_fallback(self, candidate: Candidate) -> Candidate:
        """The candidate with a fallback to plain decoding."""
        price = self.round_price(candidate.configuration)
        return self.evaluate(candidate.configuration.model_copy(update={"fallback": price}))

    def template_trees(self, variant: DraftVariant, values: Mapping[str, Iterable[int]]) -> list[Tree]:
        """Sequoia's trees for a draft variant, and the published ones, of the values of ``budget`` and ``depth``."""
        from autotune.replay.sequoia import rank_acceptance, sequoia_trees

        acceptance = rank_acceptance(self.traces[variant])
        trees = sequoia_trees(acceptance, budgets=values["budget"], depths=values["depth"])
        published = [parse_policy(one.tree) for one in PUBLISHED_DEFAULTS.values()]
        templates = [one for one in published if one.template_sizes]
        fitting = [one for one in templates if one.size.nodes in values["budget"] and one.size.depth in values["depth"]]
        return [tree.model_dump(mode="json") for tree in [*trees, *fitting]]
