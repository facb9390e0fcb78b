"""Engine replay against sums by hand and against the evaluator; batch schedules; the fastest tree of a space."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autotune.acceptance.replay import replay
from autotune.cost.draft_costs import DraftCosts
from autotune.cost.request_costs import Overhead, PrefillCost
from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration
from autotune.export.engine_replay import EngineReplay
from autotune.prediction.evaluator import Evaluator
from autotune.trees.chain import ChainPolicy
from autotune.trees.eagle2 import Eagle2Policy
from tests.export.studies import WHOLE, trace_of
from tests.sample_documents import DRAFT, cost_table, surface

LENGTHS = (16, 256, 400)


def flat_table(*, largest: int = 65, token_ms: float = 0.02) -> CostTable:
    """A cost table whose steps cost the same at every KV length."""
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


def test_chain_costs_an_engine_the_same_as_the_runtime() -> None:
    """Every round of a chain drafts and verifies the same number of tokens."""
    trace, table = trace_of(), cost_table()
    for depth in (1, 2, 4):
        evaluated = Evaluator([trace], table).evaluate(Configuration(tree={"policy": "chain", "depth": depth}))
        found = EngineReplay(trace, table).price(ChainPolicy(depth=depth)).predicted
        assert found.ms_per_token == pytest.approx(evaluated.ms_per_token, rel=1e-12), depth
        assert found.tokens_per_round == evaluated.tokens_per_round, depth
        assert found.speedup == pytest.approx(evaluated.speedup, rel=1e-12), depth


def test_every_round_costs_the_fixed_shapes_of_an_engine() -> None:
    """Rounds are those of replay. Each costs a first draft forward over the committed tokens, the other levels at full width
    and a verification of root and tree, for every request of the batch; overhead outside the models counts once.
    """
    trace, table = trace_of(), flat_table()
    (prices,) = Evaluator([trace], table).prices.values()
    trees = [Eagle2Policy(depth=4, k=3, budget=6), Eagle2Policy(depth=2, k=4, budget=9), ChainPolicy(depth=4)]
    for tree, batch in itertools.product(trees, (1, 3)):
        counted = replay(trace, tree, prices)
        rounds, tokens = int(counted.rounds.sum()), int(counted.tokens.sum())
        level_ms = 0.05 + 0.01 * tree.max_width * batch
        verify_ms = 1.0 + 0.02 * (tree.max_nodes + 1) * batch
        round_ms = 0.1 + (tree.max_depth - 1) * level_ms + verify_ms + 0.05 + 0.01 * tree.max_depth
        prefill_ms = batch * (0.1 * trace.num_prompts + 0.001 * trace.draft_prompt_length.sum())
        plain_ms = 1.0 if batch == 1 else 1.0 + 0.02 * batch
        found = EngineReplay(trace, table).price(tree, batch).predicted
        assert found.ms_per_token == pytest.approx((rounds * round_ms + prefill_ms) / tokens), (tree, batch)
        assert found.tokens_per_round == tokens / rounds, (tree, batch)
        assert found.speedup == pytest.approx(plain_ms / found.ms_per_token), (tree, batch)


def test_skipped_levels_are_charged() -> None:
    """The runtime stops when no further node can be among the best; an engine drafts every level."""
    trace, table, tree = trace_of(), flat_table(), Eagle2Policy(depth=4, k=3, budget=5)
    ours = Evaluator([trace], table).evaluate(Configuration(tree=tree.model_dump()))
    counted = Evaluator([trace], table).replay(ours.configuration)
    assert counted.draft_forwards.sum() < counted.rounds.sum() * tree.depth, "no level is skipped here"
    found = EngineReplay(trace, table).price(tree).predicted
    assert found.ms_per_token > ours.ms_per_token
    assert found.tokens_per_round == ours.tokens_per_round


def test_space_is_limited_by_trace_and_table() -> None:
    replayed = EngineReplay(trace_of(), cost_table())
    assert [chain.depth for chain in replayed.chains()] == [1, 2, 3, 4]
    trees = list(replayed.trees())
    assert {(tree.depth, tree.k) for tree in trees} == {(d, k) for d in (2, 3, 4) for k in (2, 3, 4)}
    assert all(tree.depth < tree.budget <= min(tree.max_grown, 64) and tree.floor == 0 for tree in trees)
    assert {tree.budget for tree in trees if (tree.depth, tree.k) == (4, 2)} == set(range(5, 15))
    small = EngineReplay(trace_of(), flat_table(largest=4))
    assert [chain.depth for chain in small.chains()] == [1, 2, 3]
    assert {(tree.depth, tree.budget) for tree in small.trees()} == {(2, 3)}


def test_trace_without_beams_has_no_trees() -> None:
    """A search over chains only records no trees to replay."""
    bounds = WHOLE.model_copy(update={"beam": 0, "beam_depth": 0})
    replayed = EngineReplay(trace_of(bounds=bounds), cost_table())
    assert list(replayed.trees()) == [] and replayed.fastest(replayed.trees()) is None


def test_fastest_tree_has_the_least_time() -> None:
    """Every tree of the space is replayed exactly: the trace holds all of it."""
    replayed = EngineReplay(trace_of(), cost_table())
    trees = list(replayed.trees())
    assert not any(replay(replayed.trace, tree, replayed.prices).missing.sum() for tree in trees)
    found = replayed.fastest(trees)
    assert found is not None
    assert found.predicted.ms_per_token == min(replayed.price(tree).predicted.ms_per_token for tree in trees)


def test_prompts_can_be_selected() -> None:
    """Two halves of the prompts are weighted by their tokens."""
    trace, table, tree = trace_of(), flat_table(), ChainPolicy(depth=3)
    even = np.arange(trace.num_prompts) % 2 == 0
    whole, *halves = (
        EngineReplay(trace, table, prompts=selected).price(tree).predicted for selected in (None, even, ~even)
    )
    tokens = np.diff(trace.answer_start) - 1
    shares = [tokens[half].sum() / tokens.sum() for half in (even, ~even)]
    parts = sum(share * half.ms_per_token for share, half in zip(shares, halves, strict=True))
    assert whole.ms_per_token == pytest.approx(parts)
    assert halves[0].ms_per_token != pytest.approx(halves[1].ms_per_token)


# --------------------------------------------------------------------------------------------------------------- batches


def test_schedule_drafts_less_for_larger_batches_and_ends_with_the_prices() -> None:
    trace = trace_of()
    for token_ms in (0.005, 0.02, 0.05):
        replayed = EngineReplay(trace, flat_table(token_ms=token_ms))
        chain = replayed.fastest(replayed.chains())
        assert chain is not None
        ranges = replayed.schedule(chain.tree.max_depth)
        assert (ranges[0].start, ranges[0].draft_tokens) == (1, chain.tree.max_depth), token_ms
        assert all(after.start == before.end + 1 for before, after in itertools.pairwise(ranges)), token_ms
        lengths = [found.draft_tokens for found in ranges]
        assert lengths == sorted(set(lengths), reverse=True) and len(lengths) > 1, token_ms
        assert [found.estimated for found in ranges] == [found.end > 1 for found in ranges], token_ms
        last = ranges[-1]
        assert last.end * (last.draft_tokens + 1) <= replayed.max_tokens < (last.end + 1) * (last.draft_tokens + 1)
        for found in ranges:
            sizes = range(found.start, found.end + 1)
            if depth := found.draft_tokens:
                speedups = [replayed.price(ChainPolicy(depth=depth), batch).predicted.speedup for batch in sizes]
                assert found.least_speedup == pytest.approx(min(speedups)) and found.least_speedup > 1, token_ms
            else:
                priced = [replayed.price(ChainPolicy(depth=1), batch).predicted for batch in sizes if 2 * batch <= 65]
                assert found.least_speedup == 1.0 and all(one.speedup <= 1 for one in priced), token_ms


def test_every_batch_size_gets_its_best_length() -> None:
    """The best of the lengths that do not exceed the length before."""
    replayed = EngineReplay(trace_of(), flat_table(token_ms=0.02))
    longest = 4
    for found in replayed.schedule(4):
        for batch in range(max(2, found.start), found.end + 1):
            chains = [ChainPolicy(depth=depth) for depth in range(1, longest + 1)]
            speedups = {chain.depth: replayed.price(chain, batch).predicted.speedup for chain in chains} | {0: 1.0}
            longest = max(speedups, key=lambda depth: speedups[depth])
            assert longest == found.draft_tokens


def test_table_of_small_steps_has_no_schedule() -> None:
    """A schedule of one request would switch speculation off for every larger batch."""
    trace = trace_of()
    assert EngineReplay(trace, flat_table(largest=9)).schedule(4) == []
    assert EngineReplay(trace, flat_table(largest=10)).schedule(4)[-1].end >= 2
