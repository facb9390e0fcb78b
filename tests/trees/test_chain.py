"""``chain``: the best child of the last node, to a fixed depth."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tests.trees.drafts import Draft, Ranks, TreeSession, by_table, random_draft, same_everywhere, tied_draft


def test_a_chain_ends_where_the_draft_proposes_nothing() -> None:
    """A proposal of probability 0 is none. prompt_lookup may propose nothing for the root."""
    assert TreeSession("chain", depth=3).grow(same_everywhere()) == []
    assert TreeSession("chain", depth=3).grow(by_table({(): [0.5], (0,): [0.5]})) == [(0,), (0, 0)]


def obvious_chain(draft: Draft, depth: int, p_min: float, n_min: int) -> list[Ranks]:
    """llama.cpp's loop: a token below ``p_min`` ends the draft and is not part of it; a short draft is dropped."""
    tokens: list[int] = []
    while len(tokens) < depth:
        probabilities = np.array(draft(tuple(tokens)), np.float32)
        if len(probabilities) == 0 or probabilities[0] < p_min:
            break
        tokens.append(0)
    return [tuple(tokens[:count]) for count in range(1, len(tokens) + 1)] if len(tokens) >= n_min else []


def test_a_floor_ends_drafts_as_in_llama_cpp() -> None:
    """1,000 random rounds. Probabilities of a table that are equal to ``p_min`` are not below it."""
    rng = np.random.default_rng(0)
    lengths = Counter[int]()
    for seed in range(1000):
        depth = int(rng.integers(1, 13))
        n_min = int(rng.integers(0, depth + 1)) if rng.random() < 0.5 else 0
        is_tied = rng.random() < 0.3
        p_min = float(rng.choice([0.0, 0.25, 0.5, 1.0]) if is_tied else rng.random())
        draft = tied_draft(seed) if is_tied else random_draft(seed, 0.05)
        expected = obvious_chain(draft, depth, p_min, n_min)
        assert TreeSession("chain", depth=depth, p_min=p_min, n_min=n_min).grow(draft) == expected
        lengths[len(expected)] += 1
    assert len(lengths) > 8 and lengths[0] > 100, "drafts of many lengths, and many that are dropped"


def test_a_dropped_draft_leaves_the_root_and_has_cost_its_forward_passes() -> None:
    session = TreeSession("chain", depth=5, p_min=0.5, n_min=3)
    table: dict[Ranks, list[float]] = {(): [0.9], (0,): [0.8], (0, 0): [0.4]}
    assert session.grow(by_table(table)) == [] and session.tree.size[0] == 1
    assert session.expanded == [[()], [(0,)], [(0, 0)]] and session.grown == [(0,), (0, 0)]
    assert session.grow(by_table(table | {(0, 0): [0.5]})) == [(0,), (0, 0), (0, 0, 0)]
