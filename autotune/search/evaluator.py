"""Predicts the speed of configurations without running a model: trees are replayed over traces and priced by a cost table."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from autotune.acceptance.replay import Replay, check_reach, plain_decode_ms, replay
from autotune.acceptance.trace import Trace
from autotune.cost.table import CostTable, DensePrices
from autotune.documents.configuration import Configuration, DraftVariant, Tree
from autotune.errors import UserError
from autotune.files import Document
from autotune.search.prices import SMALLEST, Constraints, TreePricing, largest_round_ms, memory_mib
from autotune.search.sequoia import rank_acceptance, sequoia_trees
from autotune.search.space import STATIC_FIELDS, SearchSpace
from autotune.search.thresholds import CONFIDENCE, CONFIRMING, DECODING_ERROR, MIN_SPLIT
from autotune.trees.fallback import RoundPrice
from autotune.trees.policy import Policy, parse_policy
from autotune.trees.tree import MAX_STEP, Floats, Ints
from autotune.workloads.workload import Workload

DEVIATIONS = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
DECODE = "decode"


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

    def __init__(
        self,
        traces: Iterable[Trace],
        table: CostTable,
        *,
        constraints: Constraints | None = None,
        jobs: int | None = None,
    ) -> None:
        """Traces are of the same answers, one per draft variant; ``jobs`` threads replay (None: one per core).

        Raises:
            UserError: the answers are too short to decode, or the table has no costs of a draft.
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
        self.max_kv_length = max(int((t.prompt_length + np.diff(t.answer_start)).max()) for t in self.traces.values())
        self.prices = {variant: self._prices_of(trace) for variant, trace in self.traces.items()}
        self._device_prices = {v: self._prices_of(trace, on_device=True) for v, trace in self.traces.items()}
        self.tree_pricing = {v: TreePricing(trace, self.prices[v]) for v, trace in self.traces.items()}
        self.ar_ms = plain_decode_ms(any_trace, next(iter(self.prices.values())))
        """Predicted time of plain decoding [prompts]."""
        self.ar_ms_per_token = float(self.ar_ms.sum() / any_trace.num_tokens)
        self.tasks = any_trace.header.tasks
        self._candidates: dict[str, Candidate] = {}

    def select(self, prompts: Ints) -> Evaluator:
        """The evaluator of the prompts with these indices only."""
        traces = [trace.select(prompts) for trace in self.traces.values()]
        return Evaluator(traces, self.table, constraints=self.constraints, jobs=self.jobs)

    def prices_for(self, variant: DraftVariant, policy: Policy, *, is_lossless: bool = True) -> DensePrices:
        """Prices of a policy's rounds, which the device leads where the table has such costs, and policy and verification
        allow it; those of a tree with a second source have its time too.
        """
        prices = (self._device_prices if policy.has_fixed_levels and is_lossless else self.prices)[variant]
        if not policy.uses_retrieval:
            return prices
        return replace(prices, overhead_round_ms=prices.overhead_round_ms + prices.overhead_retrieval_ms)

    def _prices_of(self, trace: Trace, *, on_device: bool = False) -> DensePrices:
        draft, subnet = trace.header.draft, trace.header.subnet
        *costs, _ = self.table.costs_around(draft, subnet)
        largest_level = min(draft_costs.draft_level.max_tokens for draft_costs in costs)
        max_tokens = min(MAX_STEP, self.table.verify.max_tokens, largest_level)
        return self.table.prices(
            draft, max_tokens=max_tokens, max_kv_length=self.max_kv_length, subnet=subnet, on_device=on_device
        )

    def resolve(self, configuration: Configuration) -> Configuration:
        """The configuration with a draft and an injection layer, by default the first draft and a draft's last layer, and a
        ``priced`` tree with prices and a calibration.
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

    def replay(
        self, configuration: Configuration, prompts: Ints | None = None, context_boundaries: Sequence[int] = ()
    ) -> Replay:
        """Replay a configuration over the prompts with these indices (None: all), split into bands of context lengths.

        Raises:
            UserError: no trace of its draft variant, or trees larger than traces or prices.
        """
        trace, policy, prices = self._replay_arguments(configuration)
        return replay(trace, policy, prices, configuration.fallback, prompts, context_boundaries)

    def _replay_arguments(self, configuration: Configuration) -> tuple[Trace, Policy, DensePrices]:
        configuration = self.resolve(configuration)
        variant = configuration.draft or "", configuration.subnet
        if variant not in self.traces:
            known = "; ".join(f"{draft} {subnet.label}" for draft, subnet in self.traces)
            raise UserError(
                f"no trace has {configuration.draft} {configuration.subnet.label}; there are {known}; "
                "record it, or narrow the space"
            )
        trace, policy = self.traces[variant], parse_policy(configuration.tree)
        prices = self.prices_for(variant, policy, is_lossless=configuration.verification.is_lossless)
        check_reach(trace, policy)
        largest = prices.verify_ms.shape[0] - 1
        if policy.max_step > largest:
            raise UserError(
                f"the cost table prices steps of up to {largest} tokens; {configuration.label} verifies up to "
                f"{policy.max_nodes + 1} and drafts up to {policy.max_width} at once; profile a larger grid, or narrow the space"
            )
        return trace, policy, prices

    def can_replay(self, configuration: Configuration) -> bool:
        """Whether a trace has its draft variant and nearly all of its nodes: nodes outside the trace would not be priced."""
        try:
            return self.replay(configuration).is_covered
        except UserError:
            return False

    def round_ms(self, variant: DraftVariant, policy: Policy) -> float:
        """Latency of the largest round that a policy can make, at the longest KV length."""
        return largest_round_ms(self.prices_for(variant, policy), policy)

    def draft_mib(self, variant: DraftVariant, policy: Policy) -> float | None:
        """MiB of a draft with its KV cache at the longest KV length; None where the cost table has no sizes."""
        header = self.traces[variant].header
        *costs, weight = self.table.costs_around(header.draft, header.subnet)
        num_tokens = self.max_kv_length + policy.max_grown
        low, high = (memory_mib(draft_costs, self.table.precision, num_tokens) for draft_costs in costs)
        return None if low is None or high is None else (1 - weight) * low + weight * high

    def is_feasible(self, variant: DraftVariant, tree: Tree) -> bool:
        """Whether a tree keeps the constraints."""
        limits = self.constraints
        if limits == Constraints():
            return True
        policy = parse_policy(tree)
        if limits.max_round_ms is not None and self.round_ms(variant, policy) > limits.max_round_ms:
            return False
        return limits.max_draft_mib is None or (self.draft_mib(variant, policy) or 0.0) <= limits.max_draft_mib

    def check_feasible(self) -> None:
        """Check that the smallest tree keeps the constraints.

        Raises:
            UserError: names the limit and the least value possible.
        """
        self.constraints.check(
            (self.round_ms(variant, SMALLEST) for variant in self.traces),
            (self.draft_mib(variant, SMALLEST) for variant in self.traces),
        )

    def evaluate(self, configuration: Configuration) -> Candidate:
        """Predict the speed of a configuration; results are cached."""
        configuration = self.resolve(configuration)
        key = configuration.key
        if key not in self._candidates:
            self._candidates[key] = self.candidate(configuration, self.replay(configuration))
        return self._candidates[key]

    def candidate(self, configuration: Configuration, result: Replay) -> Candidate:
        """The candidate of a resolved configuration and its replay."""
        return Candidate(
            configuration=configuration,
            ms_per_token=result.ms_per_token,
            tokens_per_round=result.tokens_per_round,
            nodes_per_round=float(result.verified_nodes.sum() / result.rounds.sum()),
            speedup=self.ar_ms_per_token / result.ms_per_token,
        )

    def replay_many(
        self,
        configurations: Iterable[Configuration],
        prompts: Ints | None = None,
        context_boundaries: Sequence[int] = (),
    ) -> list[Replay]:
        """Replay configurations in ``jobs`` threads."""
        for trace in self.traces.values():
            _ = trace.packed  # computed once, before the threads need it
        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(lambda c: self.replay(c, prompts, context_boundaries), configurations))

    def prompt_ms(self, configurations: Sequence[Configuration]) -> Floats:
        """Predicted decoding times [configurations, prompts]."""
        return np.array([result.decode_ms for result in self.replay_many(configurations)])

    def band_ms(self, configurations: Sequence[Configuration], context_boundaries: Sequence[int]) -> Floats:
        """Predicted decoding times of the same tokens, [configurations, prompts, bands of context lengths].

        A round belongs to the band in which it starts, so of two trees the larger one emits more tokens of the next band.
        Each band's time is therefore scaled from the tokens that its rounds emitted to the tokens of the band.
        """
        trace = next(iter(self.traces.values()))
        first = trace.prompt_length
        ends = [np.zeros_like(first), *(np.full_like(first, b) for b in context_boundaries), np.full_like(first, 2**62)]
        num_tokens = np.diff(np.clip(ends, first, first + np.diff(trace.answer_start) - 1), axis=0).T
        found = []
        for result in self.replay_many(configurations, context_boundaries=context_boundaries):
            mean_ms = result.decode_ms / np.maximum(result.tokens, 1)  # per token, for bands in which no round starts
            scale = num_tokens / np.maximum(result.band_tokens, 1)
            found.append(np.where(result.band_tokens > 0, result.band_ms * scale, mean_ms[:, None] * num_tokens))
        return np.array(found)

    def round_price(self, configuration: Configuration) -> RoundPrice:
        """The replayed cost of a round, a draft level and a node, in plain steps."""
        result = self.replay(configuration.model_copy(update={"fallback": None}))
        prices = self._replay_arguments(configuration)[2]
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

    def with_fallback(self, candidate: Candidate) -> Candidate:
        """The candidate with a fallback to plain decoding."""
        price = self.round_price(candidate.configuration)
        return self.evaluate(candidate.configuration.model_copy(update={"fallback": price}))

    def static_trees(self, variant: DraftVariant, space: SearchSpace) -> list[Tree]:
        """Sequoia's trees for a draft variant, of the budgets and depths of a space."""
        budgets, depths = (space.trees["static"][name].values or [] for name in STATIC_FIELDS)
        trees = sequoia_trees(rank_acceptance(self.traces[variant]), budgets=budgets, depths=depths)
        return [tree.model_dump(mode="json") for tree in trees]


@dataclass(frozen=True)
class TuningPrompts:
    """The tuning prompts, and their split: trees are chosen on some of them, and the choice is confirmed on the others.

    The fastest of thousands of configurations on some prompts is partly the fastest by chance (the winner's curse). Prompts
    that did not take part in the choice predict its speed without this bias.
    """

    workload: Workload
    full: Evaluator
    """The evaluator of all prompts."""
    choosing: Evaluator
    confirming: Evaluator
    confirming_workload: Workload
    """The prompts of ``confirming``, in its order."""

    @classmethod
    def of(cls, workload: Workload, evaluator: Evaluator) -> TuningPrompts:
        """Split the prompts of an evaluator."""
        if len(workload.prompts) < MIN_SPLIT:
            return cls(workload, evaluator, evaluator, evaluator, workload)
        is_confirming = confirms(evaluator.tasks)
        chosen = np.flatnonzero(is_confirming)
        prompts = tuple(workload.prompts[number] for number in chosen)
        return cls(
            workload,
            evaluator,
            evaluator.select(np.flatnonzero(~is_confirming)),
            evaluator.select(chosen),
            Workload(workload.name, workload.split, prompts),
        )


def confirms(tasks: Sequence[str]) -> NDArray[np.bool_]:
    """Whether each prompt is a confirming one, [prompts]: every third of each task, and of the tasks with fewer prompts."""
    seen: Counter[str] = Counter()
    rare = {task for task, count in Counter(tasks).items() if count < CONFIRMING}
    flags = []
    for task in tasks:
        name = "" if task in rare else task
        flags.append(seen[name] % CONFIRMING == CONFIRMING - 1)
        seen[name] += 1
    return np.array(flags)


# How far predictions may be off: by the choice of prompts, and by the errors of the cost table. Errors of the parts of a cost
# table are taken as independent. Two configurations share most of them, so their ratio is known better than their speedups:
# only the difference of their shares of time counts.


def speedup_interval(
    evaluator: Evaluator, configuration: Configuration, *, other_prompts: bool = False
) -> tuple[float, float]:
    """90 % interval of a predicted speedup on the evaluator's prompts, or on ``other_prompts`` like them."""
    configuration = evaluator.resolve(configuration)
    result = evaluator.replay(configuration)
    shares = {DECODE: -1.0, **_shares(evaluator, configuration, result)}
    variance = DECODING_ERROR**2 + _table_variance(evaluator, shares)
    if other_prompts:
        variance += _prompts_variance(evaluator.ar_ms, result.decode_ms)
    speedup = float(evaluator.ar_ms.sum() / result.decode_ms.sum())
    return _interval_around(speedup, variance)


def ratio_interval(evaluator: Evaluator, configuration: Configuration, to: Configuration) -> tuple[float, float]:
    """90 % interval of the ratio of two predicted decoding times, on prompts like the evaluator's."""
    configuration, to = evaluator.resolve(configuration), evaluator.resolve(to)
    result, to_result = evaluator.replay(configuration), evaluator.replay(to)
    shares, to_shares = _shares(evaluator, configuration, result), _shares(evaluator, to, to_result)
    differences = {part: shares.get(part, 0.0) - to_shares.get(part, 0.0) for part in shares | to_shares}
    variance = _table_variance(evaluator, differences) + _prompts_variance(result.decode_ms, to_result.decode_ms)
    return _interval_around(float(result.decode_ms.sum() / to_result.decode_ms.sum()), variance)


def _interval_around(ratio: float, variance: float) -> tuple[float, float]:
    half_width = DEVIATIONS * math.sqrt(variance)
    return ratio * math.exp(-half_width), ratio * math.exp(half_width)


def _shares(evaluator: Evaluator, configuration: Configuration, result: Replay) -> dict[str, float]:
    """Share of each part of the cost table in the decoding time of a configuration, by the part's name in the table.

    The draft's forward passes are one part, that of its levels: the first pass of a round is another level.
    """
    reference = evaluator.traces[configuration.draft or "", configuration.subnet].header.draft
    costs, *_ = evaluator.table.costs_around(reference, configuration.subnet)
    parts = {
        "verify": result.verify_ms,
        f"{costs.name}: draft_level": result.draft_ms,
        f"{costs.name}: prefill": result.draft_prefill_ms,
        f"{costs.draft.id}: overhead": result.overhead_ms,
    }
    total_ms = float(result.decode_ms.sum())
    return {name: float(ms.sum()) / total_ms for name, ms in parts.items()}


def _table_variance(evaluator: Evaluator, shares: Mapping[str, float]) -> float:
    """Variance of the logarithm of a time, or of a ratio, with these shares of the parts."""
    errors = evaluator.table.uncertainties
    return sum((share * errors.get(part, 0.0)) ** 2 for part, share in shares.items())


def _prompts_variance(above: Floats, below: Floats) -> float:
    """Variance of the logarithm of a ratio of sums over prompts (Taylor linearization)."""
    count = len(above)
    if count < 2:
        return 0.0
    residuals = above / above.sum() - below / below.sum()
    return float(count / (count - 1) * (residuals**2).sum())
