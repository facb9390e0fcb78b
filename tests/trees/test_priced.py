"""``priced`` against an implementation that tries every width and every number of nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from autotune.trees import priced
from autotune.trees.priced import GRID, MAX_SURVIVAL, Calibration, PricedPolicy, TreePrices
from autotune.trees.tree import Retrieved
from tests.trees.drafts import Draft, Ranks, TreeSession, logprobs_of, random_draft, same_everywhere


def calibration(curves: Any, retrieved: Any = None) -> Calibration:
    numbers = tuple(tuple(tuple(map(float, curve)) for curve in of_depth) for of_depth in curves)
    return Calibration(
        curves=numbers,
        retrieved=None if retrieved is None else tuple(tuple(map(float, curve)) for curve in retrieved),
        draft="d",
        draft_sha256="1",
        workload_sha256="2",
        num_tokens=100,
        log_loss=0.1,
        raw_log_loss=0.2,
    )


class Reference:
    """The rounds of one request, node by node from the module's docstring."""

    def __init__(self, policy: PricedPolicy) -> None:
        self.policy = policy
        self.log_exponent = self.log_exponent_retrieved = 0.0

    def price(self, table: str, count: int, context_tokens: int) -> float:
        prices = self.policy.prices
        nearest = min(range(len(prices.contexts)), key=lambda i: abs(prices.contexts[i] - context_tokens))
        row = getattr(prices, table)[nearest]
        if count < len(row):
            return float(row[count])
        return float(row[-1] if table == "level" else row[-1] + (count - len(row) + 1) * (row[-1] - row[-2]))

    def of_child(self, depth: int, rank: int, logprob: float) -> float:
        found = self.policy.calibration
        logit = 10.0 if np.exp(np.float32(logprob)) >= 1 else logprob - np.log(1 - np.exp(np.float32(logprob)))
        curves = [[1 / (1 + np.exp(-GRID))]] if found is None else found.curves
        of_depth = curves[min(depth, len(curves)) - 1]
        return min(MAX_SURVIVAL, float(np.interp(logit, GRID, of_depth[min(rank, len(of_depth) - 1)])))

    def of_retrieved(self, match_length: int, step: int) -> float:
        """Survival of a retrieved token once those before it are accepted."""
        found = self.policy.calibration
        if found is None or found.retrieved is None:
            return 0.0
        return min(MAX_SURVIVAL, found.retrieved[step > 0][min(match_length + step, priced.MAX_MATCH) - 1])

    def grow(self, draft: Draft, context_tokens: int, retrieved: Retrieved) -> list[Ranks]:
        policy, exponent = self.policy, np.exp(self.log_exponent)
        verify = [
            self.price("verify", n, context_tokens) for n in range(policy.budget + policy.depth * policy.width + 1)
        ]
        least = priced.MIN_ROW_SHARE * (verify[policy.budget] - verify[0]) / policy.budget
        survival: dict[Ranks, float] = {(): 1.0}
        probability: dict[Ranks, float] = {(): 1.0}
        match_length = min(retrieved.match_length, priced.MAX_MATCH) if policy.retrieval else 0
        adaptation = np.exp(self.log_exponent_retrieved)
        self.first_retrieved = self.of_retrieved(match_length, 0) ** adaptation if match_length else None
        is_drafting = self.first_retrieved is None or self.first_retrieved < policy.skip_draft_above
        frontier: list[Ranks] = [()] if is_drafting else []
        num_expanded = 0
        for depth in range(1, policy.depth + 1):
            level: list[Ranks] = []
            for parent in frontier:
                for rank, logprob in enumerate(logprobs_of(draft, parent, policy.k)):
                    value = survival[parent] * self.of_child(depth, rank, float(logprob)) if logprob > -np.inf else 0.0
                    if logprob > -np.inf and value**exponent * policy.worth >= least:
                        node = (*parent, rank)
                        survival[node] = value
                        probability[node] = probability[parent] * float(np.exp(logprob))
                        level.append(node)
            likely = [node for node in level if probability[node] > priced.MIN_PROBABILITY * depth]
            ranked = sorted(likely, key=lambda node: -survival[node])[: policy.width]
            gains = [0.0]
            for m in range(1, len(ranked) + 1):
                worth = sum(policy.worth * policy.level_value * survival[node] ** exponent for node in ranked[:m])
                rows = verify[num_expanded + m] - verify[num_expanded]
                gains.append(worth - self.price("level", m, context_tokens) - rows)
            frontier = ranked[: int(np.argmax(gains))] if depth < policy.depth else []
            num_expanded += len(frontier)
        value, branch = 1.0, ()
        for step, token in enumerate(retrieved.tokens[: policy.depth].tolist() if match_length else ()):
            value *= self.of_retrieved(match_length, step)
            if token < 0 or value**adaptation * policy.worth < least:
                break
            branch = (*branch, token)
            survival[branch] = max(survival.get(branch, 0.0), value ** (adaptation / exponent))
        nodes = [node for node in survival if node]
        best = sorted(nodes, key=lambda node: -survival[node])[: policy.budget]
        values = [
            policy.worth * sum(survival[node] ** exponent for node in best[:n]) - verify[n]
            for n in range(len(best) + 1)
        ]
        count = int(np.argmax(values))
        self.expected = sum(survival[node] ** exponent for node in best[:count])
        return [node for node in nodes if node in best[:count]]

    def update(self, accepted: int, is_retrieved: bool) -> None:
        limit, rate = priced.MAX_LOG_EXPONENT, self.policy.rate
        if self.first_retrieved is not None:
            changed = self.log_exponent_retrieved - 4 * rate * (is_retrieved - self.first_retrieved)
            self.log_exponent_retrieved = float(np.clip(changed, -limit, limit))
        self.log_exponent = float(np.clip(self.log_exponent - rate * (accepted - self.expected), -limit, limit))


def random_policy(rng: np.random.Generator) -> dict[str, Any]:
    """Prices with steps, as kernels and padding have them, at up to three context lengths."""
    contexts = np.sort(rng.choice(500, rng.integers(1, 4), replace=False))
    levels = np.cumsum(rng.choice([0.0, 0.01, 0.1], (len(contexts), 5)), 1)
    sizes = 1 + np.cumsum(rng.choice([0.0, 0.005, 0.1], (len(contexts), 21), p=[0.3, 0.6, 0.1]), 1)
    tree = {
        "worth": float(rng.uniform(0.02, 1.5)),
        "level_value": float(rng.uniform(0.4, 1.5)),
        "depth": int(rng.integers(1, 8)),
        "width": int(rng.integers(1, 7)),
        "k": int(rng.integers(1, 7)),
        "budget": int(rng.integers(1, 30)),
        "rate": float(rng.choice([0.0, 0.05, 0.3])),
        "prices": {"contexts": contexts.tolist(), "level": levels.tolist(), "verify": sizes.tolist()},
    }
    if rng.random() < 0.7:
        shape = (rng.integers(1, 3), rng.integers(1, 4), len(GRID))
        retrieved = np.sort(rng.random((2, priced.MAX_MATCH))) if rng.random() < 0.8 else None
        tree["calibration"] = calibration(np.sort(rng.random(shape), axis=-1), retrieved).model_dump()
        tree |= {"retrieval": bool(rng.random() < 0.7), "skip_draft_above": float(rng.choice([0.4, 0.8, 1.0]))}
    return tree


def random_branch(rng: np.random.Generator) -> Retrieved:
    """Up to eight tokens that the draft may propose too, or none."""
    tokens = rng.choice(4, 8, p=[0.6, 0.2, 0.1, 0.1])
    tokens[int(rng.integers(0, 9)) :] = -1
    return Retrieved(tokens, int(rng.integers(1, 20)) if tokens[0] >= 0 else 0)


def test_trees_are_the_references_in_two_thousand_rounds() -> None:
    rng, sizes, num_draft_free, num_shared = np.random.default_rng(0), [], 0, 0
    for number in range(400):
        session = TreeSession("priced", **random_policy(rng))
        assert isinstance(session.policy, PricedPolicy)
        reference = Reference(session.policy)
        draft = random_draft(number, float(rng.choice([0.05, 0.2, 1.0])))
        for _ in range(5):
            context_tokens = int(rng.integers(0, 600))
            branch = random_branch(rng)
            expected = reference.grow(draft, context_tokens, branch)
            assert session.grow(draft, context_tokens, branch) == expected
            sizes.append(len(expected))
            num_draft_free += not session.expanded
            num_shared += any(
                node == tuple(branch.tokens[: len(node)]) for level in session.expanded[1:] for node in level
            )
            accepted, is_retrieved = int(rng.integers(0, 6)), bool(rng.random() < 0.5 and branch.match_length)
            reference.update(accepted, is_retrieved)
            session.update(accepted, first_token=int(branch.tokens[0]) if is_retrieved else 99)
    assert min(sizes) == 0 and max(sizes) > 15 and num_draft_free > 50 and num_shared > 50


def test_survivals_adapt_within_bounds_and_are_forgotten_with_the_request() -> None:
    prices = TreePrices(level=((0.0, 0.2),), verify=((1.0, 1.05),)).model_dump()
    session = TreeSession("priced", worth=0.8, rate=0.2, k=1, depth=12, prices=prices)
    draft = same_everywhere(0.7)
    sizes = []
    for accepted in (0, *[12] * 30, *[0] * 60):
        sizes.append(len(session.grow(draft)))
        session.update(accepted)
    assert max(sizes[:32]) > sizes[0] > sizes[-1] >= 1
    session.grower.reset()
    assert len(session.grow(draft)) == sizes[0]


def test_a_long_match_drafts_nothing_and_a_short_one_competes() -> None:
    """The first retrieved token survives with 0.1 per token of the match."""
    retrieved = np.minimum(0.9, np.tile(0.1 * np.arange(1, priced.MAX_MATCH + 1), (2, 1)))
    found = calibration(priced.identity_curves(), retrieved).model_dump()
    prices = TreePrices(level=((0.0, 5.0),), verify=((1.0, 1.3, 1.35, 1.4, 1.45, 1.5),)).model_dump()
    tree = {"worth": 1.0, "k": 1, "depth": 3, "budget": 4, "prices": prices, "calibration": found}
    session = TreeSession("priced", retrieval=True, skip_draft_above=0.7, **tree)
    draft = same_everywhere(0.6)
    tokens = np.array([5, 6, 7])
    assert session.grow(draft, 0, Retrieved(tokens, 8)) == [(5,), (5, 6), (5, 6, 7)]
    assert session.expanded == []
    assert session.grow(draft, 0, Retrieved(tokens, 5)) == [(0,), (5,), (5, 6), (5, 6, 7)]
    assert session.grow(draft, 0, Retrieved(np.array([0, 6, 7]), 5)) == [(0,), (0, 6), (0, 6, 7)]
    assert session.grow(draft, 0, Retrieved(tokens, 0)) == [(0,)]
    assert TreeSession("priced", **tree).grow(draft, 0, Retrieved(tokens, 8)) == [(0,)]
