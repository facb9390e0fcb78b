"""``rounds`` yields the rounds that ``replay`` counts."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune.cost.request_costs import PrefillCost
from autotune.replay.reference_replay import count_acceptance, rounds
from autotune.replay.replay import Replay, plain_decode_ms, replay
from autotune.replay.trace import Trace
from autotune.trees.fallback import RoundPrice
from autotune.trees.policy import POLICIES, parse_policy
from tests.replay.configurations import HASH_DEPTH, HASH_PROPOSALS, Sizes, hash_trace, random_price, random_tree_policy
from tests.sample_documents import free_prices, random_trace

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
        assert sum(len(one.widths) for one in shown) == counted.draft_forwards[prompt]
        assert sum(one.num_nodes for one in shown) == counted.verified_nodes[prompt]
        assert sum(one.num_missing for one in shown) == counted.missing[prompt]
        assert sum(one.tree is None for one in shown) == counted.plain_steps[prompt]
    return counted


def test_times_add_up_to_the_whole() -> None:
    """With 1 ms for every target forward, the time is the number of rounds; the draft's prefill is priced once a
    prompt.
    """
    trace = hash_trace(1, num_prompts=3, num_tokens=60)
    prefill = PrefillCost(intercept_ms=5, per_token_ms=0, image_ms=0, samples=[])
    prices = replace(free_prices(), decode_ms=np.ones(1), verify_ms=np.ones((200, 1)), draft_prefill=prefill)
    for tree in TREES:
        for fallback in (None, DEAR):
            found = replay(trace, parse_policy(tree), prices, fallback)
            assert found.decode_ms.tolist() == (found.rounds + 5).tolist()
    assert plain_decode_ms(trace, prices).tolist() == [59.0] * 3


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


def test_acceptance_counts_every_round() -> None:
    """Accepted at depth d are the rounds of accepted length d or more."""
    trace = random_trace(5, num_tokens=30)
    lengths = np.concatenate(replayed(trace, TREES[0], None).accepted_lengths)
    prompts = range(trace.num_prompts)
    counts = count_acceptance(one for prompt in prompts for one in rounds(trace, prompt, parse_policy(TREES[0])))
    by_depth = counts.by_depth
    assert by_depth[1:4, 1].tolist() == [int((lengths >= depth).sum()) for depth in (1, 2, 3)]
    assert by_depth[1:4, 0].tolist() == [len(lengths), *by_depth[1:3, 1].tolist()]
