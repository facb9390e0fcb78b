"""Trees priced as engines run them, against sums by hand and against the evaluator; batches; and the fastest of a space."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from autotune.acceptance.replay import replay
from autotune.cost.table import CostTable, DraftCosts, Overhead, PrefillCost
from autotune.documents.configuration import Configuration
from autotune.export.choose import EngineReplay
from autotune.search.evaluator import Evaluator
from autotune.trees.chain import ChainPolicy
from autotune.trees.eagle2 import Eagle2Policy
from tests.export.studies import trace_of
from tests.sample_documents import DRAFT, cost_table, surface

LENGTHS = (16, 256, 400)


def flat_table(*, largest: int = 65, token_ms: float = 0.02) -> CostTable:
    """Steps that cost the same at any KV length."""
    sizes = {"tokens": sorted({1, min(8, largest), largest}), "kv_lengths": LENGTHS}
    costs = DraftCosts(
        draft=DRAFT,
        draft_first=surface(lambda n, m: 0.1, **sizes),
        draft_level=surface(lambda n, m: 0.05 + 0.01 * n, **sizes),
        prefill=PrefillCost(intercept_ms=0.1, per_token_ms=0.001, image_ms=0.0, samples=[]),
        overhead=Overhead(round_ms=0.05, level_ms=0.01),
    )
    return cost_table(
        decode=surface(lambda n, m: 1.0, tokens=(1,)),
        verify=surface(lambda n, m: 1.0 + token_ms * n, **sizes),
        drafts=[costs],
    )


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_chain_costs_an_engine_what_it_costs_us(depth: int) -> None:
    """Every round of it drafts and verifies as much."""
    trace, table = trace_of(), cost_table()
    evaluated = Evaluator([trace], table).evaluate(Configuration(tree={"policy": "chain", "depth": depth}))
    found = EngineReplay(trace, table).price(ChainPolicy(depth=depth))
    assert found.ms_per_token == pytest.approx(evaluated.ms_per_token, rel=1e-12)
    assert found.tokens_per_round == evaluated.tokens_per_round
    assert found.speedup == pytest.approx(evaluated.speedup, rel=1e-12)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tree", [Eagle2Policy(depth=4, k=3, budget=6), Eagle2Policy(depth=2, k=4, budget=9), ChainPolicy(depth=4)])  # fmt: skip
def test_every_round_costs_the_shapes_that_an_engine_prepares(tree: Any, batch: int) -> None:
    """Rounds are replay's. Each is a forward that reads what was committed, the other levels as wide as they may get, and a
    verification of root and tree, for every request of the batch; what is outside the models comes once.
    """
    trace, table = trace_of(), flat_table()
    (prices,) = Evaluator([trace], table).prices.values()
    counted = replay(trace, tree, prices)
    rounds, tokens = int(counted.rounds.sum()), int(counted.tokens.sum())
    level_ms = 0.05 + 0.01 * tree.max_width * batch
    verify_ms = 1.0 + 0.02 * (tree.max_nodes + 1) * batch
    round_ms = 0.1 + (tree.max_depth - 1) * level_ms + verify_ms + 0.05 + 0.01 * tree.max_depth
    prefill_ms = batch * (0.1 * trace.num_prompts + 0.001 * trace.draft_prompt_length.sum())
    plain_ms = 1.0 if batch == 1 else 1.0 + 0.02 * batch
    found = EngineReplay(trace, table).price(tree, batch)
    assert found.ms_per_token == pytest.approx((rounds * round_ms + prefill_ms) / tokens)
    assert found.tokens_per_round == tokens / rounds
    assert found.speedup == pytest.approx(plain_ms / found.ms_per_token)


def test_levels_that_our_trees_spare_are_paid_for() -> None:
    """Ours ends where nothing more can be among the best; an engine drafts on."""
    trace, table, tree = trace_of(), flat_table(), Eagle2Policy(depth=4, k=3, budget=5)
    ours = Evaluator([trace], table).evaluate(Configuration(tree=tree.model_dump()))
    counted = Evaluator([trace], table).replay(ours.configuration)
    assert counted.draft_forwards.sum() < counted.rounds.sum() * tree.depth, "nothing is spared here"
    found = EngineReplay(trace, table).price(tree)
    assert found.ms_per_token > ours.ms_per_token
    assert found.tokens_per_round == ours.tokens_per_round


def test_a_space_is_what_trace_and_table_hold() -> None:
    replayed = EngineReplay(trace_of(), cost_table())
    assert [chain.depth for chain in replayed.chains()] == [1, 2, 3, 4]
    trees = list(replayed.trees())
    assert {(tree.depth, tree.k) for tree in trees} == {(d, k) for d in (2, 3, 4) for k in (2, 3, 4)}
    assert all(tree.depth < tree.budget <= min(tree.max_grown, 64) and tree.floor == 0 for tree in trees)
    assert {tree.budget for tree in trees if (tree.depth, tree.k) == (4, 2)} == set(range(5, 15))
    small = EngineReplay(trace_of(), flat_table(largest=4))
    assert [chain.depth for chain in small.chains()] == [1, 2, 3]
    assert {(tree.depth, tree.budget) for tree in small.trees()} == {(2, 3)}


def test_trees_of_a_space_are_replayed_exactly() -> None:
    trace, table = trace_of(), cost_table()
    (prices,) = Evaluator([trace], table).prices.values()
    missing = [replay(trace, tree, prices).missing.sum() for tree in EngineReplay(trace, table).trees()]
    assert not any(missing)


def test_a_trace_without_beams_has_no_trees() -> None:
    """The search looked through chains alone; trees along it would be guesses."""
    trace = trace_of()
    bounds = trace.header.bounds.model_copy(update={"beam": 0, "beam_depth": 0})
    replayed = EngineReplay(trace_of(bounds=bounds), cost_table())
    assert list(replayed.trees()) == [] and replayed.fastest(replayed.trees()) is None


def test_the_fastest_is_the_fastest() -> None:
    replayed = EngineReplay(trace_of(), cost_table())
    trees = list(replayed.trees())
    found = replayed.fastest(trees)
    assert found is not None
    assert found.ms_per_token == min(replayed.price(tree).ms_per_token for tree in trees)


def test_prompts_may_be_chosen() -> None:
    """Two halves weigh as many tokens as they have."""
    trace, table, tree = trace_of(), flat_table(), ChainPolicy(depth=3)
    even = np.arange(trace.num_prompts) % 2 == 0
    whole, *halves = (EngineReplay(trace, table, prompts=chosen).price(tree) for chosen in (None, even, ~even))
    tokens = np.diff(trace.answer_start) - 1
    shares = [tokens[chosen].sum() / tokens.sum() for chosen in (even, ~even)]
    parts = sum(share * half.ms_per_token for share, half in zip(shares, halves, strict=True))
    assert whole.ms_per_token == pytest.approx(parts)
    assert halves[0].ms_per_token != pytest.approx(halves[1].ms_per_token)


# --------------------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("token_ms", [0.005, 0.02, 0.05])
def test_a_schedule_drafts_less_for_larger_batches_and_ends_with_the_prices(token_ms: float) -> None:
    replayed = EngineReplay(trace_of(), flat_table(token_ms=token_ms))
    chosen = replayed.fastest(replayed.chains())
    assert chosen is not None and isinstance(chosen.tree, ChainPolicy)
    ranges = replayed.schedule(chosen.tree)
    assert (ranges[0].start, ranges[0].draft_tokens) == (1, chosen.tree.depth)
    assert all(after.start == before.end + 1 for before, after in itertools.pairwise(ranges))
    lengths = [one.draft_tokens for one in ranges]
    assert lengths == sorted(set(lengths), reverse=True) and len(lengths) > 1
    last = ranges[-1]
    assert last.end * (last.draft_tokens + 1) <= replayed.largest_step < (last.end + 1) * (last.draft_tokens + 1)
    for one in ranges:
        sizes = range(one.start, one.end + 1)
        if one.draft_tokens:
            speedups = [replayed.price(ChainPolicy(depth=one.draft_tokens), batch).speedup for batch in sizes]
            assert one.least_speedup == pytest.approx(min(speedups)) and one.least_speedup > 1
        else:
            assert one.least_speedup == 1.0
            assert all(replayed.price(ChainPolicy(depth=1), batch).speedup <= 1 for batch in sizes if 2 * batch <= 65)


def test_of_every_batch_size_the_best_length_is_drafted() -> None:
    """Of those that are no longer than the one before."""
    replayed = EngineReplay(trace_of(), flat_table(token_ms=0.02))
    ranges = replayed.schedule(ChainPolicy(depth=4))
    longest = 4
    for one in ranges:
        for batch in range(max(2, one.start), one.end + 1):
            found = {depth: replayed.price(ChainPolicy(depth=depth), batch).speedup for depth in range(1, longest + 1)}
            best = max(found, key=lambda depth: found[depth], default=0)
            longest = best if best and found[best] > 1 else 0
            assert longest == one.draft_tokens


def test_a_table_of_small_steps_prices_no_batch() -> None:
    """A schedule of one request would say that speculation rests beyond it."""
    assert EngineReplay(trace_of(), flat_table(largest=9)).schedule(ChainPolicy(depth=4)) == []
    assert EngineReplay(trace_of(), flat_table(largest=10)).schedule(ChainPolicy(depth=4))[-1].end >= 2
