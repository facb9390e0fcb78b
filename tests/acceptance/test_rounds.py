"""``rounds`` yields the rounds that ``replay`` counts."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune.acceptance.replay import Replay, plain_band_ms, plain_decode_ms, replay
from autotune.acceptance.rounds import count_acceptance, rounds, switched_rounds
from autotune.acceptance.trace import Trace
from autotune.cost.request_costs import PrefillCost
from autotune.errors import UserError
from autotune.trees.fallback import RoundPrice
from autotune.trees.policy import POLICIES, parse_policy
from tests.acceptance.configurations import (
    HASH_DEPTH,
    HASH_PROPOSALS,
    Sizes,
    hash_trace,
    random_price,
    random_tree_policy,
)
from tests.sample_documents import DRAFT, cost_table, free_prices, random_trace

TREES: list[dict[str, Any]] = [
    {"policy": "chain", "depth": 3},
    {"policy": "static", "paths": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]},
    {"policy": "eagle2", "depth": 3, "k": 3, "budget": 7},
    {"policy": "sage", "d_min": 1, "d_max": 4, "w_min": 1, "w_max": 4, "k": 4, "n_max": 12, "window": 3},
    {"policy": "wetap", "length": 4, "w_min": 1, "w_max": 4, "budget": 6, "top_k": 3, "top_p": 0.8},
]
DEAR = RoundPrice(round_steps=2.5, level_steps=0.5, node_steps=0.1)  # falls back now and then


def replayed(trace: Trace, tree: dict[str, Any], fallback: RoundPrice | None) -> Replay:
    return replay(trace, parse_policy(tree), free_prices(), fallback)


def assert_same_rounds(trace: Trace, tree: dict[str, Any], fallback: RoundPrice | None) -> Replay:
    counted = replayed(trace, tree, fallback)
    for prompt in range(trace.num_prompts):
        shown = list(rounds(trace, prompt, parse_policy(tree), fallback))
        assert [len(one.path) for one in shown] == counted.accepted_lengths[prompt].tolist()
        assert sum(one.num_levels for one in shown) == counted.draft_forwards[prompt]
        assert sum(one.num_nodes for one in shown) == counted.verified_nodes[prompt]
        assert sum(one.num_missing for one in shown) == counted.missing[prompt]
        assert sum(one.tree is None for one in shown) == counted.plain_steps[prompt]
    return counted


BOUNDARIES = (12, 25, 40)  # hash_trace has prompts of 10 tokens


def test_bands_of_replay_hold_the_rounds_that_start_in_them() -> None:
    """With 1 ms for every target forward, the time of a band is its number of rounds. The bands add up to the whole."""
    trace = hash_trace(1, num_prompts=3, num_tokens=60)
    one_ms = replace(free_prices(), decode_ms=np.ones(1), verify_ms=np.ones((200, 1)))
    for tree in TREES:
        for fallback in (None, DEAR):
            found = replay(trace, parse_policy(tree), one_ms, fallback, context_boundaries=BOUNDARIES)
            for prompt in range(trace.num_prompts):
                shown = list(rounds(trace, prompt, parse_policy(tree), fallback))
                bands = np.searchsorted(BOUNDARIES, [one.context_tokens for one in shown], side="right")
                assert found.band_ms[prompt].tolist() == np.bincount(bands, minlength=4).tolist()
                ends = [*(one.position for one in shown[1:]), 59]
                emitted = np.array(ends) - [one.position for one in shown]
                assert found.band_tokens[prompt].tolist() == np.bincount(bands, emitted, minlength=4).tolist()
            assert (found.band_ms > 0).all() and found.band_tokens.sum(1).tolist() == found.tokens.tolist()


def test_bands_add_up_to_the_whole() -> None:
    """Draft, verification, overhead and the draft's prefill, which belongs to the first round's band."""
    trace = random_trace(6, num_tokens=30)
    prices = cost_table().prices(DRAFT, max_tokens=64, max_kv_length=64)
    prices = replace(prices, draft_prefill=PrefillCost(intercept_ms=5, per_token_ms=1, image_ms=2, samples=[]))
    for tree in TREES:
        whole, parts = (
            replay(trace, parse_policy(tree), prices, DEAR, context_boundaries=given) for given in ((), (21, 30, 300))
        )
        assert np.array_equal(whole.band_ms[:, 0], whole.decode_ms)
        assert whole.decode_ms == pytest.approx(parts.band_ms.sum(1), rel=1e-12)
        assert [a.tolist() for a in whole.accepted_lengths] == [a.tolist() for a in parts.accepted_lengths]
        assert (parts.band_ms[:, 3] == 0).all() and parts.band_ms[0, 0] > 5 + 10 > parts.band_ms[2, 0] == 0
    plain = plain_band_ms(trace, prices, (21, 30, 300))
    assert plain.sum(1) == pytest.approx(plain_decode_ms(trace, prices), rel=1e-12)
    assert plain[0, 0] == prices.decode_ms[20 // prices.kv_step] and (plain[:, 3] == 0).all()


def test_switched_rounds_are_those_of_each_point_from_its_first_root_on() -> None:
    """A plain stretch between two policies, both of which begin anew."""
    trace = hash_trace(2, num_prompts=2, num_tokens=60)
    points = {0: (parse_policy(TREES[3]), None), 1: (None, None), 2: (parse_policy(TREES[2]), DEAR)}
    for prompt in range(2):
        shown = list(switched_rounds(trace, prompt, points, lambda context: (context >= 25) + (context >= 32)))
        assert [number for number, _ in shown] == sorted(number for number, _ in shown)
        for number, (policy, price) in points.items():
            own = [one for of_point, one in shown if of_point == number]
            assert own and (policy is not None or len(own) <= 7)
            if policy is not None:
                expected = rounds(trace, prompt, policy, price, first=own[0].position)
                for one, other in zip(own, expected, strict=False):
                    assert (one.position, one.path.tolist()) == (other.position, other.path.tolist())
        ends = [one.position + len(one.path) + 1 for _, one in shown]
        assert [one.position for _, one in shown[1:]] == ends[:-1] and ends[-1] >= 59


def test_rounds_are_those_of_replay() -> None:
    trace = random_trace(3, num_tokens=40)
    for tree in TREES:
        for fallback in (None, DEAR):
            counted = assert_same_rounds(trace, tree, fallback)
            assert (counted.plain_steps.sum() > 0) == (fallback is not None)


@pytest.mark.parametrize("of_each", [60, pytest.param(200, marks=pytest.mark.nightly)])
def test_replay_of_random_configurations_equals_their_rounds(of_each: int) -> None:
    """So many of every policy on a trace that holds any tree, so that nothing is missing. Every third may fall back."""
    trace, rng = hash_trace(0, num_prompts=2, num_tokens=60), random.Random(0)
    sizes = Sizes(depth=HASH_DEPTH, beam_depth=10, k=10, width=32, top_k=HASH_PROPOSALS, top_p=1.0)
    nodes_per_round, accepted, num_rounds, fell_back = [], set(), set(), []
    for number, name in itertools.product(range(of_each), POLICIES):
        fallback = random_price(rng) if number % 3 == 1 else None
        counted = assert_same_rounds(trace, random_tree_policy(name, rng, sizes), fallback)
        assert counted.missing.sum() == 0
        nodes_per_round.append(counted.verified_nodes.sum() / counted.rounds.sum())
        accepted |= set(np.concatenate(counted.accepted_lengths).tolist())
        num_rounds.add(int(counted.rounds.sum()))
        if fallback is not None:
            fell_back.append(counted.plain_steps.sum() > 0)
    # Else the comparison would prove little.
    assert np.mean(np.array(nodes_per_round) > 4) > 0.4 and max(nodes_per_round) > 12
    assert accepted >= set(range(6)) and len(num_rounds) > 10 and np.mean(fell_back) > 0.4


def test_an_accepted_path_holds_the_answer() -> None:
    trace = random_trace(4, num_tokens=30)
    for one in rounds(trace, 1, parse_policy(TREES[3])):
        assert one.tree is not None
        answer = trace.forest.answer[trace.answer_start[1] + one.position :]
        assert one.tree.token[[0, *one.path]].tolist() == answer[: len(one.path) + 1].tolist()
        assert one.tree.parent[one.path].tolist() == [0, *one.path[:-1]][: len(one.path)]


def test_acceptance_counts_every_round() -> None:
    """Accepted at depth d are the rounds of accepted length d or more."""
    trace = random_trace(5, num_tokens=30)
    lengths = np.concatenate(replayed(trace, TREES[0], None).accepted_lengths)
    prompts = range(trace.num_prompts)
    counts = count_acceptance(one for prompt in prompts for one in rounds(trace, prompt, parse_policy(TREES[0])))
    by_depth = counts.by_depth.sum(0)
    assert by_depth[1:4, 1].tolist() == [int((lengths >= depth).sum()) for depth in (1, 2, 3)]
    assert by_depth[1:4, 0].tolist() == [len(lengths), *by_depth[1:3, 1].tolist()]


def test_a_policy_beyond_the_trace_is_refused() -> None:
    with pytest.raises(UserError, match="asks for"):
        next(rounds(random_trace(0), 0, parse_policy({"policy": "chain", "depth": 9})))
