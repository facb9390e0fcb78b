"""Prices configurations without running a model: replayed over the traces of their draft and subnet, by the cost table."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.acceptance.replay import Replay, check_reach, plain_decode_ms, replay
from autotune.acceptance.trace import Trace
from autotune.cost.table import CostTable, DensePrices, DraftCosts
from autotune.documents.configuration import Configuration, DraftVariant
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.files import Document
from autotune.search.sequoia import rank_acceptance, sequoia_trees
from autotune.search.space import STATIC_FIELDS, SearchSpace
from autotune.trees.fallback import RoundPrice
from autotune.trees.policy import Policy, parse_policy
from autotune.trees.tree import MAX_STEP, Floats, Ints


class Candidate(Document):
    """A configuration and what replay says of it."""

    configuration: Configuration
    ms_per_token: float
    tokens_per_round: float
    nodes_per_round: float
    speedup: float
    """Over plain decoding, predicted by the same table."""

    @property
    def key(self) -> str:
        """The configuration's."""
        return self.configuration.key

    @property
    def policy(self) -> str:
        """By its name."""
        return str(self.configuration.tree["policy"])

    @property
    def rank(self) -> tuple[float, float, str]:
        """Fastest first; of equal ones the smaller tree."""
        return self.ms_per_token, self.nodes_per_round, self.key


@dataclass(frozen=True)
class Constraints:
    """What a configuration must keep to."""

    max_round_ms: float | None = None
    """Of the largest round that a tree can make: every level as wide, and the tree as large, as it may get."""
    max_draft_mib: float | None = None
    """Memory of the draft: its own weights, and its cache of the longest prompt and answer with the largest tree."""

    def check(self, round_ms: Iterable[float], draft_mib: Iterable[float | None]) -> None:
        """Refuse limits that nothing keeps, given the least that rounds take and drafts need.

        Raises:
            UserError: says which limit binds, and what the least is.
        """
        if (limit := self.max_round_ms) is not None and (least := min(round_ms)) > limit:
            raise UserError(
                f"--max-round-ms {limit:g}: no tree keeps to it; a round with one drafted token takes {least:.2f} ms; raise it above that"
            )
        if (limit := self.max_draft_mib) is not None:
            sizes = [size for size in draft_mib if size is not None]
            if sizes and min(sizes) > limit:
                raise UserError(
                    f"--max-draft-mib {limit:g}: no draft keeps to it; the smallest takes {min(sizes):.1f} MiB; raise it, or name a smaller draft"
                )

    def check_table(self, table: CostTable) -> None:
        """The same before anything is recorded: with empty caches, so what is refused here fits nowhere.

        Raises:
            UserError: as ``check``.
        """
        of_drafts = [(costs.draft, Subnet(heads=costs.heads)) for costs in table.drafts]
        prices = [table.prices(draft, max_tokens=2, max_kv_length=0, subnet=subnet) for draft, subnet in of_drafts]
        self.check(
            (largest_round_ms(found, SMALLEST) for found in prices),
            (memory_mib(costs, table.precision, 0) for costs in table.drafts),
        )


SMALLEST = parse_policy({"policy": "chain", "depth": 1})


def largest_round_ms(prices: DensePrices, policy: Policy) -> float:
    """Latency of the largest round that a policy can make, at the longest KV length that is priced."""
    levels = policy.max_depth
    draft = (
        prices.draft_first_ms[1, -1]
        + (levels - 1) * prices.draft_ms[min(policy.max_width, len(prices.draft_ms) - 1), -1]
    )
    overhead = prices.overhead_round_ms + levels * prices.overhead_level_ms + policy.max_nodes * prices.overhead_node_ms
    return float(draft + prices.verify_ms[policy.max_nodes + 1, -1] + overhead)


def memory_mib(costs: DraftCosts, precision: str, num_tokens: int) -> float | None:
    """Of a draft: its own weights, and a cache of so many tokens, MiB; None where the cost table does not say."""
    if costs.num_parameters is None or costs.kv_bytes_per_token is None:
        return None
    width = {"float32": 4, "float64": 8}.get(precision, 2)
    return (costs.num_parameters * width + costs.kv_bytes_per_token * num_tokens) / 2**20


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
        self.traces: dict[DraftVariant, Trace] = {(t.header.draft.id, t.header.subnet): t for t in traces}
        self.table = table
        self.constraints = constraints or Constraints()
        self.jobs = jobs or os.cpu_count() or 1
        any_trace = next(iter(self.traces.values()))
        if any_trace.num_tokens == 0:
            raise UserError(
                "every recorded answer has one token, so there is nothing to speed up; raise max_new_tokens"
            )
        self.longest = max(int((t.prompt_length + np.diff(t.answer_start)).max()) for t in self.traces.values())
        self.prices = {variant: self._prices_of(trace) for variant, trace in self.traces.items()}
        self.ar_ms = plain_decode_ms(any_trace, next(iter(self.prices.values())))
        """Of plain decoding, predicted, by prompt."""
        self.ar_ms_per_token = float(self.ar_ms.sum() / any_trace.num_tokens)
        self.tasks = any_trace.header.tasks
        self._seen: dict[str, Candidate] = {}

    def _prices_of(self, trace: Trace) -> DensePrices:
        draft, subnet = trace.header.draft, trace.header.subnet
        max_tokens = min(
            MAX_STEP, self.table.verify.max_tokens, self.table.costs_of(draft, subnet).draft_level.max_tokens
        )
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

    def replay(self, configuration: Configuration, prompts: Ints | None = None) -> Replay:
        """What decoding ``prompts``, by number, would do with a configuration; None: all.

        Raises:
            UserError: no trace is of its draft and subnet, or its trees reach beyond traces or prices.
        """
        trace, policy, prices = self._reach(configuration)
        return replay(trace, policy, prices, configuration.fallback, prompts)

    def _reach(self, configuration: Configuration) -> tuple[Trace, Policy, DensePrices]:
        """What a configuration is replayed with."""
        configuration = self.placed(configuration)
        variant = configuration.draft or "", configuration.subnet
        if variant not in self.traces:
            known = "; ".join(f"{draft} {subnet.label}" for draft, subnet in self.traces)
            raise UserError(
                f"no trace has {configuration.draft} {configuration.subnet.label}; there are {known}; record it, or narrow the space"
            )
        trace, prices, policy = self.traces[variant], self.prices[variant], parse_policy(configuration.tree)
        check_reach(trace, policy)
        largest = prices.verify_ms.shape[0] - 1
        if max(policy.max_nodes + 1, policy.max_width) > largest:
            raise UserError(
                f"the cost table prices steps of up to {largest} tokens; {configuration.label} verifies up to "
                f"{policy.max_nodes + 1} at once and drafts {policy.max_width}; profile a larger grid, or narrow the space"
            )
        return trace, policy, prices

    def can_replay(self, configuration: Configuration) -> bool:
        """Whether its draft and subnet were recorded, and its trees lie within traces and prices: nodes that a trace does not
        hold would not be priced.
        """
        try:
            return self.replay(configuration).is_covered
        except UserError:
            return False

    def round_ms(self, variant: DraftVariant, policy: Policy) -> float:
        """Latency of the largest round that a policy can make, at the longest KV length."""
        return largest_round_ms(self.prices[variant], policy)

    def draft_mib(self, variant: DraftVariant, policy: Policy) -> float | None:
        """Memory of a draft with its cache at the longest KV length, MiB; None where the cost table does not say."""
        header = self.traces[variant].header
        costs = self.table.costs_of(header.draft, header.subnet)
        return memory_mib(costs, self.table.precision, self.longest + policy.max_grown)

    def is_feasible(self, variant: DraftVariant, tree: dict[str, Any]) -> bool:
        """Whether a tree keeps to the constraints."""
        found = self.constraints
        if found == Constraints():
            return True
        policy = parse_policy(tree)
        if found.max_round_ms is not None and self.round_ms(variant, policy) > found.max_round_ms:
            return False
        return found.max_draft_mib is None or (self.draft_mib(variant, policy) or 0.0) <= found.max_draft_mib

    def check_feasible(self) -> None:
        """Refuse constraints that the smallest of trees does not keep.

        Raises:
            UserError: says which constraint binds, and what the least is.
        """
        self.constraints.check(
            (self.round_ms(variant, SMALLEST) for variant in self.traces),
            (self.draft_mib(variant, SMALLEST) for variant in self.traces),
        )

    def evaluate(self, configuration: Configuration) -> Candidate:
        """A configuration's figures; a second call costs nothing."""
        configuration = self.placed(configuration)
        key = configuration.key
        if key not in self._seen:
            self._seen[key] = self.candidate(configuration, self.replay(configuration))
        return self._seen[key]

    def candidate(self, configuration: Configuration, result: Replay) -> Candidate:
        """A configuration, with its draft and subnet, and what its replay says of it."""
        ms = result.ms_per_token
        nodes = float(result.verified_nodes.sum() / result.rounds.sum())
        return Candidate(
            configuration=configuration,
            ms_per_token=ms,
            tokens_per_round=result.tokens_per_round,
            nodes_per_round=nodes,
            speedup=self.ar_ms_per_token / ms,
        )

    def replay_many(self, configurations: Iterable[Configuration], prompts: Ints | None = None) -> list[Replay]:
        """``jobs`` at once."""
        for trace in self.traces.values():
            _ = trace.packed  # laid out once, before the threads ask for it
        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(lambda one: self.replay(one, prompts), configurations))

    def prompt_ms(self, configurations: Sequence[Configuration]) -> Floats:
        """Predicted decoding time of every prompt, [configurations, prompts]."""
        return np.array([result.decode_ms for result in self.replay_many(configurations)])

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
            round_steps=max(round_ms / step_ms, 0.01),
            level_steps=level_ms / step_ms,
            node_steps=(node_ms + prices.overhead_node_ms) / step_ms,
        )

    def guarded(self, candidate: Candidate) -> Candidate:
        """A candidate with its fallback to plain decoding."""
        price = self.round_price(candidate.configuration)
        return self.evaluate(candidate.configuration.model_copy(update={"fallback": price}))

    def static_trees(self, variant: DraftVariant, space: SearchSpace) -> list[dict[str, Any]]:
        """Sequoia's trees of the budgets and depths of a search space, for a subnet."""
        budgets, depths = (space.trees["static"][name].values or [] for name in STATIC_FIELDS)
        trees = sequoia_trees(rank_acceptance(self.traces[variant]), budgets=budgets, depths=depths)
        return [tree.model_dump(mode="json") for tree in trees]
