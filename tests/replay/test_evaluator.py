"""Configurations evaluated by replay: figures of candidates, constraints and errors."""

from __future__ import annotations

import dataclasses

import pytest

from autotune.documents.configuration import Configuration
from autotune.documents.published_defaults import PUBLISHED_DEFAULTS
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.measuring.measurement import kv_lengths_for
from autotune.replay.evaluator import Evaluator
from autotune.replay.replay import plain_decode_ms, replay
from autotune.replay.trace import ForestBounds
from autotune.trees.policy import parse_policy
from tests.sample_documents import DRAFT, cost_table, random_trace, surface
from tests.search.small_searches import KEEPS, evaluator, variant


def test_candidate_has_the_figures_of_its_replay() -> None:
    found = evaluator()
    configuration = Configuration(tree={"policy": "sage", "k": 4, "d_max": 4}, subnet=Subnet(visual_keep=0.5))
    candidate = found.evaluate(configuration)
    replayed = replay(found.traces[variant(0.5)], parse_policy(configuration.tree), found.prices[variant(0.5)])
    assert candidate.ms_per_token == replayed.decode_ms.sum() / replayed.tokens.sum()
    assert candidate.tokens_per_round == replayed.tokens.sum() / replayed.rounds.sum()
    assert candidate.nodes_per_round == replayed.verified_nodes.sum() / replayed.rounds.sum()
    whole = found.traces[variant(1.0)]
    plain = plain_decode_ms(whole, found.prices[variant(1.0)]).sum() / whole.num_tokens
    assert found.ar_ms_per_token == pytest.approx(plain)
    assert candidate.speedup == pytest.approx(plain / candidate.ms_per_token)


def test_subnet_without_a_trace_is_refused() -> None:
    with pytest.raises(UserError, match=rf"no trace has {DRAFT.id} keep=0\.3; there are {DRAFT.id}; .*record it, or"):
        evaluator().evaluate(Configuration(tree={"policy": "chain"}, subnet=Subnet(visual_keep=0.3)))


def test_configuration_is_resolved_to_a_draft_and_its_last_layer() -> None:
    """Published defaults name neither a draft nor its injection layer."""
    layers = [Subnet(injection_layer=layer) for layer in (3, 4)]
    traces = [random_trace(number) for number in range(2)]
    traces = [
        dataclasses.replace(trace, header=trace.header.model_copy(update={"subnet": subnet}))
        for trace, subnet in zip(traces, layers, strict=True)
    ]
    found = Evaluator(traces, cost_table())
    default = Configuration(tree={"policy": "chain", "depth": 3})
    own = default.model_copy(update={"draft": DRAFT.id, "subnet": layers[1]})
    other = own.model_copy(update={"subnet": layers[0]})
    assert found.evaluate(default) == found.evaluate(own) != found.evaluate(other)


def test_table_of_short_prompts_covers_their_answers() -> None:
    """The KV lengths that ``autotune search`` measures for a workload suffice to evaluate it."""
    lengths = kv_lengths_for(20, 60)
    flat = surface(lambda n, m: 1.0, kv_lengths=lengths)
    table = cost_table(decode=surface(lambda n, m: 1.0, tokens=(1,), kv_lengths=lengths), verify=flat)
    costs = table.drafts[0].model_copy(update={"draft_level": flat})
    Evaluator([random_trace(0)], table.model_copy(update={"drafts": [costs]}))


def test_trees_larger_than_the_table_are_refused() -> None:
    found = evaluator()
    assert found.prices[variant(1.0)].verify_ms.shape[0] - 1 == 65
    with pytest.raises(UserError, match="65"):
        found.evaluate(Configuration(tree={"policy": "sage", "k": 4, "d_max": 4, "n_max": 128}))


def test_replay_many_equals_single_replays() -> None:
    """In parallel threads, for both visual keeps and every policy."""
    trees = [
        {"policy": "chain", "depth": 2},
        {"policy": "sage", "k": 4, "d_max": 4},
        {"policy": "eagle2", "k": 2, "depth": 3, "budget": 4},
        {"policy": "wetap", "top_k": 3, "length": 4, "w_min": 2, "w_max": 4, "budget": 6},
        {"policy": "static", "paths": [[0], [1], [0, 0], [0, 1]]},
    ]
    wanted = [Configuration(tree=tree, subnet=Subnet(visual_keep=keep)) for tree in trees for keep in KEEPS] * 2
    together, alone = evaluator(), evaluator()
    results = together.replay_many(wanted)
    found = [together.candidate(together.resolve(one), result) for one, result in zip(wanted, results, strict=True)]
    assert found == [alone.evaluate(one) for one in wanted]


def test_round_price_adds_up_to_the_replayed_time() -> None:
    """Rounds, draft forwards and nodes times their prices equal the replayed time without the draft's prefill."""
    found = evaluator()
    for tree in ({"policy": "chain", "depth": 3}, {"policy": "sage", "k": 4, "d_max": 4}):
        wanted = Configuration(tree=tree)
        replayed, price = found.replay(wanted), found.round_price(wanted)
        steps = price.round_steps * replayed.rounds.sum() + price.level_steps * replayed.draft_forwards.sum()
        steps += price.node_steps * replayed.verified_nodes.sum()
        expected = (replayed.decode_ms - replayed.draft_prefill_ms).sum() / found.ar_ms_per_token
        assert steps == pytest.approx(expected)
        fallback = found.with_fallback(found.evaluate(wanted))
        assert fallback.configuration.fallback == price and fallback.key != found.evaluate(wanted).key


def test_published_defaults_are_replayed_where_the_traces_reach() -> None:
    found = evaluator()
    reached = [default for default in PUBLISHED_DEFAULTS.values() if found.can_replay(default)]
    for default in PUBLISHED_DEFAULTS.values():
        policy = parse_policy(default.tree)
        bounds = next(iter(found.traces.values())).header.bounds
        fits = policy.size.proposals <= bounds.num_proposals and policy.size.depth <= bounds.depth
        assert (default in reached) == (fits and default.subnet.visual_keep in KEEPS)
        assert policy.size.proposals <= ForestBounds().num_proposals and policy.size.depth <= ForestBounds().depth
