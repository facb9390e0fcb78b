"""Figures of the papers against loops over rounds and numbers by hand."""

from __future__ import annotations

import math
import statistics
from collections import Counter

import numpy as np
import pytest

from autotune.acceptance.rounds import Round, rounds
from autotune.acceptance.trace import Trace
from autotune.report.decoding_figures import (
    ENTROPY_BANDS,
    MIN_PAIRS,
    accepted_positions,
    autocorrelation,
    decoding_figures,
    gain_by_length,
    normalised_entropy,
    parents_by_entropy,
    ranks_by_entropy,
    root_proposals,
)
from autotune.report.sources import Sources
from autotune.trees.policy import parse_policy
from autotune.trees.sage import root_confidence
from autotune.trees.tree import CHILD
from tests.sample_documents import random_trace

WIDE = parse_policy({"policy": "eagle2", "depth": 4, "k": 4, "budget": 24})


@pytest.fixture(scope="module")
def trace() -> Trace:
    return random_trace(3, num_prompts=6, num_tokens=30)


@pytest.fixture(scope="module")
def decoded(trace: Trace) -> list[Round]:
    return [one for prompt in range(trace.num_prompts) for one in rounds(trace, prompt, WIDE)]


def test_normalised_entropy_by_hand_and_as_in_sage() -> None:
    assert normalised_entropy(np.full(5, 0.1)) == pytest.approx(1.0)
    assert normalised_entropy(np.array([1.0, 0.0])) == 0.0 == normalised_entropy(np.array([0.7]))
    assert normalised_entropy(np.array([0.9, 0.1])) == pytest.approx(-(0.9 * math.log2(0.9) + 0.1 * math.log2(0.1)))
    rng = np.random.default_rng(0)
    for _ in range(50):
        probabilities = 0.9 * rng.dirichlet(np.full(6, 0.4))
        proposals = np.zeros((1, 6), CHILD)
        proposals["probability"], proposals["logprob"] = probabilities, np.log(probabilities)
        assert normalised_entropy(probabilities) == pytest.approx(1 - root_confidence(proposals, 0, 6), abs=1e-5)


def test_autocorrelation_pairs_values_of_one_sequence() -> None:
    rng = np.random.default_rng(1)
    sequences = [rng.normal(size=length).cumsum() for length in (3, 20, 1, 12)]
    found = autocorrelation(sequences, max_lag=4)
    for lag in range(1, 5):
        pairs = [(s[i], s[i + lag]) for s in sequences for i in range(len(s) - lag)]
        expected = statistics.correlation(*zip(*pairs, strict=True))
        assert found.loc[lag].tolist() == pytest.approx([expected, len(pairs)])
    assert autocorrelation([np.arange(MIN_PAIRS)]).empty, "too few pairs"
    assert autocorrelation([np.ones(50)]).empty, "constant"
    assert autocorrelation([]).empty


def test_accepted_positions_count_every_accepted_node(decoded: list[Round]) -> None:
    expected: Counter[tuple[int, int]] = Counter()
    for one in decoded:
        assert one.tree is not None
        layers: dict[int, list[tuple[float, int]]] = {}
        for node in range(1, one.num_nodes + 1):
            layers.setdefault(int(one.tree.depth[node]), []).append((-float(one.tree.path_logprob[node]), node))
        for node in one.path.tolist():
            layer = int(one.tree.depth[node])
            expected[1 + [other for _, other in sorted(layers[layer])].index(node), layer] += 1
    found = accepted_positions(decoded)
    assert {key: n for key, n in found.stack().items() if n} == expected
    assert found.to_numpy().sum() == sum(len(one.path) for one in decoded) > 50
    assert list(found.columns) == [1, 2, 3, 4]


def test_parents_by_entropy_of_their_layer(decoded: list[Round]) -> None:
    """Per band: layers, and the mean share of the next layer's nodes below the 3 and 6 most probable nodes."""
    shares: dict[str, list[tuple[float, float]]] = {}
    for one in decoded:
        tree = one.tree
        assert tree is not None
        for layer in (1, 2, 3):
            nodes = [node for node in range(1, one.num_nodes + 1) if tree.depth[node] == layer]
            children = [node for node in range(1, one.num_nodes + 1) if tree.depth[node] == layer + 1]
            if len(nodes) < 2 or not children:
                continue
            total = sum(tree.path_probability[node] for node in nodes)
            p = [tree.path_probability[node] / total for node in nodes]
            entropy = -sum(x * math.log(x) for x in p if x > 0) / math.log(len(nodes))
            band = "low, below 0.3" if entropy < 0.3 else "middle, 0.3 to 0.6" if entropy < 0.6 else "high, from 0.6"
            best = sorted(nodes, key=lambda node: -tree.path_logprob[node])
            of_best = [sum(tree.parent[c] in best[:n] for c in children) / len(children) for n in (3, 6)]
            shares.setdefault(band, []).append((of_best[0], of_best[1]))
    found = parents_by_entropy(decoded)
    assert list(found.index) == [band for band in ENTROPY_BANDS if band in shares] and len(found) > 1
    for band, expected in shares.items():
        assert found.loc[band, ["layers", "top_3", "top_6"]].tolist() == pytest.approx(
            [len(expected), *np.mean(expected, axis=0)]
        )


def test_ranks_of_next_tokens_by_entropy() -> None:
    found = ranks_by_entropy(np.array([0.1, 0.2, 0.9, 0.95, 1.0]), np.array([0, 2, 5, -1, 0]))
    assert found.loc["low, below 0.3"].tolist() == [2, 0.5, 1.0, 1.0]
    assert found.loc["high, from 0.6"].tolist() == pytest.approx([3, 1 / 3, 1 / 3, 2 / 3])
    assert len(found) == 2


def test_root_proposals_are_those_of_the_round(trace: Trace) -> None:
    of_prompt = list(rounds(trace, 2, WIDE))
    entropies, ranks = root_proposals(trace, 2, of_prompt)
    answer = trace.forest.answer[trace.answer_start[2] : trace.answer_start[3]].tolist()
    for one, entropy, rank in zip(of_prompt, entropies, ranks, strict=True):
        node = trace.first_node[2] + one.position
        tokens = trace.forest.child_token[node].tolist()
        following = answer[one.position + 1]
        assert rank == (tokens.index(following) if following in tokens else -1)
        assert entropy == pytest.approx(normalised_entropy(np.exp(trace.forest.child_logprob[node])), abs=1e-5)


def test_gain_by_length_by_hand() -> None:
    found = gain_by_length(
        np.array([11, 16, 1, 21]),
        np.array([5, 5, 0, 4]),
        np.array([1.0, 2.0, 0.0, 4.0]),
        np.array([3.0, 3.0, 0.0, 16.0]),
    )
    assert found.loc["1-16"].tolist() == pytest.approx([2, 25 / 10, 2.0])
    assert found.loc["17-32"].tolist() == pytest.approx([1, 5.0, 4.0])
    assert gain_by_length(np.array([11]), np.array([5])).speedup.isna().all()


def test_figures_of_every_point(sources: Sources) -> None:
    figures = decoding_figures(sources)
    assert [one.number for one in figures] == [0, 1]
    for one in figures:
        trace = sources.trace_of(sources.points[one.number])
        assert trace is not None and one.num_replayed == len(sources.prompts_of(one.number)) > 0
        assert one.lengths.prompts.sum() == one.num_replayed and one.lengths.speedup.notna().all()
        assert one.positions.to_numpy().sum() > 0 and one.ranks.roots.sum() > 0
        # Prefill 5 ms; of 10, 11 or 12 ms of decoding, 1 + 3 in the draft and 4 in verification.
        assert one.time_shares["verification"] == pytest.approx(4 / (15 + {0: 1, 1: 1}[one.number]))
        assert sum(one.time_shares.values()) == pytest.approx(1.0)
    assert decoding_figures(Sources()) == []
