"""The papers' algorithms in plain Python, written from their text alone, to compare the policies with.

A node is its path of ranks from the root. A draft is a function from a node to its candidates, most probable first, as
pairs of log-probability and probability. Trees are dictionaries from nodes, in the order in which they are added, to
cumulative log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

Node = tuple[int, ...]
Draft = Callable[[Node], list[tuple[float, float]]]

# -------- EAGLE-2


def most_probable(logprob: Mapping[Node, float], count: int) -> list[Node]:
    """The best nodes; of equal ones those that come first, which are shallower."""
    return sorted(logprob, key=lambda node: -logprob[node])[:count]


def _candidates(draft: Draft, parents: Iterable[Node], logprob: Mapping[Node, float], k: int) -> dict[Node, float]:
    return {
        (*parent, rank): logprob.get(parent, 0.0) + own
        for parent in parents
        for rank, (own, _) in enumerate(draft(parent)[:k])
    }


def eagle2(draft: Draft, *, depth: int, k: int, total: int, floor: float = 0.0) -> tuple[dict[Node, float], list[Node]]:
    """The paper: ``depth`` levels, of each the k most probable nodes are expanded; then the ``total`` most probable of
    all nodes are kept. Returns all candidates, and those that are kept. The paper has no ``floor`` of the probability.
    """
    log_floor = math.log(floor) if floor else -math.inf
    logprob: dict[Node, float] = {}
    expanded: list[Node] = [()]
    for _ in range(depth):
        level = {node: value for node, value in _candidates(draft, expanded, logprob, k).items() if value >= log_floor}
        logprob |= level
        expanded = most_probable(level, k)
    kept = set(most_probable(logprob, total))
    return logprob, [node for node in logprob if node in kept]


def eagle2_release(draft: Draft, *, depth: int, k: int, total: int) -> list[Node]:
    """The released code: the root's k candidates, then ``depth`` times k candidates of the k most probable nodes;
    ``total`` counts the root.
    """
    logprob = _candidates(draft, [()], {}, k)
    expanded = list(logprob)
    for _ in range(depth):
        level = _candidates(draft, expanded, logprob, k)
        logprob |= level
        expanded = most_probable(level, k)
    kept = set(most_probable(logprob, total - 1))
    return [node for node in logprob if node in kept]


# -------- WETAP


def num_sampled(probabilities: list[float], *, top_k: int, top_p: float, renormalises: bool = True) -> int:
    """Candidates, most probable first, that are left by top-k and then top-p: the least probable ones are removed while
    all that is removed has at most 1 - top_p of the probability, and at least one is left.
    """
    best = probabilities[:top_k]
    total = sum(best) if renormalises else 1.0
    removed = 0.0 if renormalises else 1.0 - sum(best)
    count = len(best)
    while count > 1 and removed + best[count - 1] / total <= 1 - top_p:
        removed += best[count - 1] / total
        count -= 1
    return count


def wetap_width(probabilities: list[float], *, w_min: int, w_max: int, gamma: float) -> int:
    """Width of the level below a level of these probabilities (eq. 3 to 6)."""
    total = sum(probabilities)
    shares = [p / total for p in probabilities]
    entropy = -sum(share * math.log(share) for share in shares if share > 0)
    normalised = min(1.0, max(0.0, entropy / math.log(len(shares)))) if len(shares) > 1 else 0.0
    return math.floor(w_min + (w_max - w_min) * normalised**gamma + 0.5)


def wetap_grown(
    draft: Draft,
    *,
    length: int,
    w_min: int,
    w_max: int,
    gamma: float,
    top_k: int,
    top_p: float,
    renormalises: bool = True,
    is_of_token: bool = False,
) -> tuple[dict[Node, float], dict[Node, float]]:
    """Cumulative log-probability and probability of every node, by algorithm 1, lines 3 to 16. The probabilities of eq.
    3 are cumulative, or the tokens' own.
    """
    logprob: dict[Node, float] = {}
    probability: dict[Node, float] = {}
    level: list[Node] = [()]
    width = w_min
    for _ in range(length):
        candidates: dict[Node, tuple[float, float]] = {}
        for parent in level:
            own = draft(parent)
            count = num_sampled([p for _, p in own], top_k=top_k, top_p=top_p, renormalises=renormalises)
            for rank, (value, p) in enumerate(own[:count]):
                candidates[*parent, rank] = logprob.get(parent, 0.0) + value, probability.get(parent, 1.0) * p
        level = sorted(candidates, key=lambda node: -candidates[node][0])[:width]
        if not level:
            break
        logprob |= {node: candidates[node][0] for node in level}
        probability |= {node: candidates[node][1] for node in level}
        of_level = [draft(node[:-1])[node[-1]][1] if is_of_token else probability[node] for node in level]
        width = wetap_width(of_level, w_min=w_min, w_max=w_max, gamma=gamma)
    return logprob, probability


def wetap_pruned(
    logprob: Mapping[Node, float], p: Mapping[Node, float], *, budget: int, length: int, alpha: float
) -> tuple[list[Node], set[str]]:
    """The nodes kept by section 3.2.2, eq. 7 and 8, in the order of appendix D; and the steps that changed
    something.
    """
    nodes, steps = list(logprob), set()
    if len(nodes) <= budget:
        return nodes, steps
    least, most = min(p.values()), max(p.values())
    score = {
        node: alpha * ((p[node] - least) / (most - least + 1e-12)) + (1 - alpha) * len(node) / length for node in nodes
    }
    best = sorted(nodes, key=lambda node: -score[node])[:budget]
    kept = {node[:level] for node in best for level in range(1, len(node) + 1)}
    if len(kept) > len(best):
        steps.add("parents")
    for level in range(1, max(map(len, nodes))):
        parents = {node[:-1] for node in kept}
        # The nodes of a level are in order of probability, most probable first.
        for leaf in [n for n in reversed(nodes) if len(n) == level and n in kept and n not in parents]:
            if len(kept) > budget:
                kept.remove(leaf)
                steps.add("leaves")
    if len(kept) > budget:
        steps.add("least probable")
        kept = set(sorted([n for n in nodes if n in kept], key=lambda node: -logprob[node])[:budget])
    return [node for node in nodes if node in kept], steps
