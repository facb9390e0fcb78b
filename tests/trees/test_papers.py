"""EAGLE-2 and WETAP against the papers' algorithms in plain Python, on at least a thousand random rounds each."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.trees import papers
from tests.trees.drafts import Draft, Ranks, TreeSession, assert_is_tree, logprobs_of, same_everywhere, small_wetap

NUM_ROUNDS = 1000


def in_float32(draft: Draft, num_candidates: int = 16) -> papers.Draft:
    """The same draft as log-probabilities and probabilities in the precision of a real one, without impossible
    candidates.
    """

    @functools.cache
    def candidates(path: Ranks) -> list[tuple[float, float]]:
        logprobs = logprobs_of(draft, path, num_candidates)
        pairs = zip(logprobs.tolist(), np.exp(logprobs).tolist(), strict=True)
        return [(logprob, p) for logprob, p in pairs if logprob > -math.inf]

    return candidates


TIED = [[0.5, 0.25, 0.25], [0.5, 0.5], [1.0], [0.25] * 4, [0.25] * 3 + [0.0625] * 4, [0.0625] * 16, [1.0, 1.0], []]


def random_round(rng: np.random.Generator, seed: int) -> Draft:
    """A draft with one of 64 distributions after each node. Every third draft has many exact ties."""
    if seed % 3 == 0:
        first = seed % len(TIED)
        return lambda path: TIED[(first + hash(path)) % len(TIED) if path else 0]
    rows = np.sort(rng.dirichlet(np.full(20, float(rng.choice([0.03, 0.1, 0.3, 1.0]))), 64))[:, ::-1].tolist()
    return lambda path: rows[hash(path) % len(rows)]  # type: ignore[no-any-return]


def grow_after_another(session: TreeSession, draft: Draft, logprob: Mapping[Ranks, float]) -> list[Ranks]:
    """The tree of a round after one of another draft, whose nodes have these cumulative log-probabilities."""
    session.grow(same_everywhere(0.4, 0.3, 0.3))
    paths, policy = session.grow(draft), session.policy
    assert_is_tree(session.tree)
    assert len(paths) <= policy.size.nodes and len(session.grown) <= policy.size.grown
    assert max(map(len, paths), default=0) <= policy.size.depth
    assert session.tree.path_logprob[1 : 1 + len(paths)].tolist() == [logprob[path] for path in paths]
    assert session.tree.rank[1 : 1 + len(paths)].tolist() == [path[-1] for path in paths]
    return paths


def test_eagle2_as_in_its_paper_and_as_released() -> None:
    """The release's tree of depth d and a total of n is the paper's of depth d + 1 and n - 1 nodes. A node is expanded
    only if it is among the ``budget`` best so far, and a floor ends drafting.
    """
    rng, num_pruned, num_different, num_floored, num_spared = np.random.default_rng(2), 0, 0, 0, 0
    for seed in range(NUM_ROUNDS):
        draft = random_round(rng, seed)
        depth, k = int(rng.integers(1, 8)), int(rng.choice([1, 2, 3, 4, 6, 10]))
        total = int(rng.choice([2, 5, 8, 16, 32, 60]))
        floor = float(rng.choice([0.0, 0.0, 0.001, 0.03, 0.2]))
        logprob, paper = papers.eagle2(in_float32(draft), depth=depth, k=k, total=total, floor=floor)
        release = papers.eagle2_release(in_float32(draft), depth=depth, k=k, total=total)
        session = TreeSession("eagle2", depth=depth, k=k, budget=total, floor=floor)
        assert grow_after_another(session, draft, logprob) == paper
        assert set(session.grown) <= set(logprob) and len(session.expanded) <= depth
        for level, nodes in enumerate(session.expanded[1:], start=1):
            known = {path: value for path, value in logprob.items() if len(path) <= level}
            assert len(nodes) <= k and set(nodes) <= set(papers.most_probable(known, total))
        assert TreeSession("eagle2", depth=depth + 1, k=k, budget=total - 1).grow(draft) == release
        num_pruned += len(paper) == total
        num_different += paper != release
        num_floored += floor > 0 and len(paper) > 3
        num_spared += len(session.grown) < len(logprob)
    assert min(num_pruned, num_different, num_floored, num_spared) > 100


def wide_wetap(rng: np.random.Generator) -> dict[str, Any]:
    """The width ranges of section 4.4.1 and appendix C.2."""
    w_min, w_max = [(16, 64), (32, 64), (16, 128), (32, 128), (16, 256), (32, 256), (128, 128)][rng.integers(7)]
    return {
        "length": 8,
        "w_min": w_min,
        "w_max": w_max,
        "gamma": float(rng.choice([0.5, 1.0, 1.2])),
        "alpha": float(rng.choice([0.1, 0.3, 0.6, 1.0])),
        "budget": int(rng.choice([32, 64, 128])),
        "top_k": int(rng.choice([10, 16])),
        "top_p": 0.9,
    }


def test_wetap_grows_and_prunes() -> None:
    """With both readings of top-p and of eq. 3. Every step of pruning occurs, and levels of more than 128 nodes."""
    rng, steps, widest = np.random.default_rng(3), Counter[str](), 0
    for seed in range(NUM_ROUNDS + 40):
        own, renormalises = small_wetap(rng) if seed < NUM_ROUNDS else wide_wetap(rng), seed % 4 > 0
        is_of_token = seed % 5 == 0
        draft = random_round(rng, seed if seed < NUM_ROUNDS else 3 * seed + 1)
        readings = {"nucleus": "top_k" if renormalises else "all", "entropy_of": "token" if is_of_token else "path"}
        session = TreeSession("wetap", **own, **readings)
        budget, alpha = own.pop("budget"), own.pop("alpha")
        logprob, p = papers.wetap_grown(in_float32(draft), **own, renormalises=renormalises, is_of_token=is_of_token)
        found = grow_after_another(session, draft, logprob)
        assert session.grown == list(logprob), (seed, own)
        expected, changed = papers.wetap_pruned(logprob, p, budget=budget, length=own["length"], alpha=alpha)
        assert found == expected, (seed, own)
        steps.update(changed)
        widest = max(widest, *map(len, session.expanded))
    assert set(steps) == {"parents", "leaves", "least probable"} and min(steps.values()) > 50
    assert widest > 128
