"""The baselines of the pair `code`."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("torch", exc_type=ImportError)

from benchmarks.code_quality import KneserNey


def obvious_kneser_ney(
    tokens: list[int], context: tuple[int, ...], token: int, vocabulary_size: int, order: int
) -> float:
    """The definition, with dictionaries: counts of the longest n-grams, and of distinct predecessors of the others."""
    grams = {order: Counter(tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1))}
    for length in range(order - 1, 0, -1):
        grams[length] = Counter(gram[1:] for gram in grams[length + 1])

    def probability(context: tuple[int, ...]) -> float:
        lower = probability(context[1:]) if context else 1 / vocabulary_size
        counts = grams[len(context) + 1]
        ones, twos = (sum(count == number for count in counts.values()) for number in (1, 2))
        discount = ones / max(ones + 2 * twos, 1)
        followers = [count for gram, count in counts.items() if gram[:-1] == context]
        if not followers:
            return lower
        seen = max(counts[(*context, token)] - discount, 0)
        return (seen + discount * len(followers) * lower) / sum(followers)

    return probability(context)


def test_kneser_ney_equals_its_definition_and_sums_to_one() -> None:
    rng, vocabulary_size, order = np.random.default_rng(0), 6, 3
    tokens = rng.choice(vocabulary_size - 1, 60, p=[0.5, 0.2, 0.1, 0.1, 0.1])  # the last token never occurs
    model = KneserNey(tokens, vocabulary_size, order=order, token_bits=3)
    for context in ((0, 0), (1, 4), (5, 0), (3, 5)):
        found = [float(model.probabilities(np.array([*context, token]))[0]) for token in range(vocabulary_size)]
        expected = [
            obvious_kneser_ney(tokens.tolist(), context, token, vocabulary_size, order)
            for token in range(vocabulary_size)
        ]
        np.testing.assert_allclose(found, expected)
        assert math.isclose(sum(found), 1.0)
