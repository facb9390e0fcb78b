"""Acceptance: the compiled walk against a recursive one, and WETAP's threshold against all paths."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.trees.tree import MAX_LEVELS, MAX_STEP, ROOT, Floats, Ints, Tree, new_tree, set_root
from autotune.trees.verification import accept_by_ratio, accept_path
from tests.obvious import add_node, ancestors_of, children_of, random_tree


def accepted_below(tree: Tree, node: int, target_token: Ints) -> list[int]:
    """The child that holds the target's token, and the nodes accepted below it."""
    for child in children_of(tree, node):
        if tree.token[child] == target_token[node]:
            return [child, *accepted_below(tree, child, target_token)]
    return []


def test_the_accepted_path_of_random_trees() -> None:
    """A small vocabulary, so that the target's token often is among the children."""
    rng, lengths = np.random.default_rng(0), []
    for _ in range(300):
        tree = random_tree(rng, int(rng.integers(0, 60)), num_tokens=5)
        target_token = rng.integers(0, 5, MAX_STEP)
        path = np.full(MAX_STEP, -1)
        length = accept_path(tree, target_token, path)
        assert path[:length].tolist() == accepted_below(tree, ROOT, target_token)
        lengths.append(length)
    assert min(lengths) == 0 and max(lengths) >= 4, "the random trees no longer cover short and long paths"


# -------- WETAP's acceptance


def accepted_by_ratio(tree: Tree, target_logprob: Floats, log_threshold: float) -> list[int]:
    """Section 3.3 over all paths from the root: the deepest that satisfies eq. 9, of these the most probable to the
    target, of equal ones the first.
    """
    paths = [ancestors_of(tree, node)[1:] for node in range(1, int(tree.size[0]))]
    target = [sum(target_logprob[node] for node in path) for path in paths]
    fit = [
        (len(path), target[i], -i)
        for i, path in enumerate(paths)
        if target[i] - tree.path_logprob[path[-1]] >= log_threshold
    ]
    return paths[-max(fit)[2]] if fit else []


def ratio_path(tree: Tree, target_logprob: Floats, threshold: float) -> list[int]:
    path = np.full(MAX_LEVELS, -1)
    length = accept_by_ratio(tree, target_logprob.copy(), np.log(threshold), path)
    assert (path[length:] == -1).all()
    return path[:length].tolist()


def tree_of(*nodes: tuple[int, float]) -> Tree:
    """A tree of nodes (parent, the draft's probability after the parent)."""
    tree = new_tree(len(nodes))
    set_root(tree, 0, -1)
    for token, (parent, probability) in enumerate(nodes, start=1):
        logprob = float(tree.path_logprob[parent] + (np.log(probability) if probability else -np.inf))
        add_node(tree, parent, token, logprob, len(children_of(tree, parent)), -1)
    return tree


def target_of(*probabilities: float) -> Floats:
    """The target's probabilities of nodes 1, 2, ..., each after its parent."""
    with np.errstate(divide="ignore"):
        return np.log([1.0, *probabilities])


FIVE_NODES = ((ROOT, 0.5), (ROOT, 0.5), (1, 0.5), (2, 0.5), (2, 0.25))
NEVER_DRAFTED = ((ROOT, 0.5), (ROOT, 0.0), (1, 0.5), (2, 0.0))
EDGES: tuple[tuple[str, tuple[tuple[int, float], ...], tuple[float, ...], float, list[int]], ...] = (
    ("equal to the threshold: eq. 9 has at least", ((ROOT, 0.5),), (0.25,), 0.5, [1]),
    ("equal to the threshold of 1", ((ROOT, 0.5),), (0.5,), 1.0, [1]),
    ("below the threshold", ((ROOT, 0.5),), (0.25,), 0.5001, []),
    ("three equal paths: the first", FIVE_NODES, (0.25, 0.5, 0.5, 0.25, 0.25), 0.25, [1, 3]),
    ("the last is the most probable", FIVE_NODES, (0.25, 0.5, 0.5, 0.25, 0.5), 0.25, [2, 5]),
    ("target probability 0 ends its branch", ((ROOT, 0.5), (1, 0.5), (1, 0.25)), (0.0, 1.0, 1.0), 0.01, []),
    ("target probability 0 below the root", ((ROOT, 0.5), (1, 0.5), (1, 0.25)), (0.5, 0.0, 1.0), 0.01, [1, 3]),
    ("draft probability 0, as in static trees", NEVER_DRAFTED, (0.1, 0.0, 0.1, 0.0), 0.1, [1]),
    ("draft probability 0, although the target may", NEVER_DRAFTED, (0.1, 0.3, 0.1, 0.3), 0.1, [1]),
)


@pytest.mark.parametrize(("_", "nodes", "target", "threshold", "path"), EDGES, ids=[edge[0] for edge in EDGES])
def test_edges_of_acceptance_by_ratio(
    _: str, nodes: tuple[tuple[int, float], ...], target: tuple[float, ...], threshold: float, path: list[int]
) -> None:
    """Powers of two are exact."""
    assert ratio_path(tree_of(*nodes), target_of(*target), threshold) == path


def test_acceptance_by_ratio_on_random_trees() -> None:
    """The target agrees with the draft up to noise; in every other tree probabilities are powers of two, with many
    ties.
    """
    rng, lengths, num_tied = np.random.default_rng(5), [], 0
    for turn in range(1000):
        tree = random_tree(rng, int(rng.integers(0, 60)), num_tokens=8)
        size = int(tree.size[0])
        if turn % 2:
            own = np.array([0.0, *(np.log(0.5) * rng.integers(1, 4, size - 1))])
            for node in range(1, size):
                tree.path_logprob[node] = own[ancestors_of(tree, node)].sum()
            target_logprob = np.array([np.log(0.5) * rng.integers(1, 5) for _ in range(size)])
        else:
            own = tree.path_logprob[:size] - tree.path_logprob[tree.parent[:size]]
            target_logprob = np.minimum(own + rng.normal(-0.5, 1.0, size), 0.0)
        threshold = float(rng.choice([0.125, 0.25, 0.3, 0.5, 0.8, 1.0]))
        path = ratio_path(tree, target_logprob, threshold)
        expected = accepted_by_ratio(tree, target_logprob, float(np.log(threshold)))
        assert path == expected
        lengths.append(len(path))
        deepest = [node for node in range(1, size) if tree.depth[node] == len(path) > 0]
        whole = [round(target_logprob[ancestors_of(tree, node)[1:]].sum(), 6) for node in deepest]
        num_tied += len(whole) > 1 and whole.count(max(whole)) > 1
    assert min(lengths) == 0 and max(lengths) >= 4, "the random trees no longer cover short and long paths"
    assert num_tied > 10, "the random trees no longer have equally probable paths"


# -------- in a document
