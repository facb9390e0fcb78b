"""Choice of points online: candidates cost what they would have cost alone, and the choice follows the cheapest."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.acceptance import online_choice
from autotune.acceptance.online_choice import MARGIN, OnlineChoice
from autotune.acceptance.rounds import Round, adaptive_rounds, rounds
from autotune.acceptance.trace import Trace
from autotune.trees.fallback import RoundPrice
from autotune.trees.policy import Policy, parse_policy
from tests.acceptance.test_rounds import hash_trace

PRICE = RoundPrice(round_steps=0.6, level_steps=0.05, node_steps=0.01)  # always pays
SLOW = RoundPrice(round_steps=0.8, level_steps=0.08, node_steps=0.02)
DEAR = RoundPrice(round_steps=6.0, level_steps=1.0, node_steps=0.1)  # falls back to plain steps
DEEP = parse_policy({"policy": "chain", "depth": 10})
BRANCHES = parse_policy({"policy": "static", "paths": [[0], [1], [0, 0], [0, 1], [0, 0, 0]]})


def cost_of(decoded: list[Round], price: RoundPrice, num_tokens: int) -> float:
    """Plain steps of the first tokens after the first one; those of a round cost equally much."""
    total = 0.0
    for one in decoded:
        cost = price.round_steps + price.level_steps * one.num_levels + price.node_steps * one.num_nodes
        total += cost * min(1.0, max(0, num_tokens - one.position) / (len(one.path) + 1))
    return total


def observed(trace: Trace, prompt: int, points: dict[int, tuple[Policy, RoundPrice]]) -> tuple[OnlineChoice, list[int]]:
    """The state of the choice after a prompt, and the chosen points."""
    choice = OnlineChoice(points)
    return choice, [number for number, _ in adaptive_rounds(trace, prompt, points, choice)]


def test_candidates_cost_what_they_cost_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, for trees whose size does not depend on proposals, where the tree that decodes is never accepted to its end."""
    monkeypatch.setattr(online_choice, "MARGIN", np.inf)
    trace = hash_trace(3, num_prompts=3, num_tokens=60)
    points = {0: (DEEP, PRICE), 1: (parse_policy({"policy": "chain", "depth": 1}), PRICE), 4: (BRANCHES, DEAR)}
    for prompt in range(3):
        alone = {number: list(rounds(trace, prompt, policy)) for number, (policy, _) in points.items()}
        assert max(len(one.path) for one in alone[0]) < 10
        choice, numbers = observed(trace, prompt, points)
        num_tokens = min(candidate.position for candidate in choice._candidates)
        assert num_tokens > 45 and set(numbers) == {0}
        for cost, (number, (_, price)) in zip(choice.costs, points.items(), strict=True):
            assert cost == pytest.approx(cost_of(alone[number], price, num_tokens)), number


def test_adaptive_trees_cost_about_what_they_cost_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sizes depend on assumed proposals off the emitted path."""
    monkeypatch.setattr(online_choice, "MARGIN", np.inf)
    trace = hash_trace(4, num_prompts=4, num_tokens=120)
    points = {n: (parse_policy({"policy": name}), PRICE) for n, name in enumerate(("eagle2", "sage", "priced"))}
    for prompt in range(4):
        choice, _ = observed(trace, prompt, points)
        num_tokens = min(candidate.position for candidate in choice._candidates)
        for cost, (policy, price) in zip(choice.costs, points.values(), strict=True):
            expected = cost_of(list(rounds(trace, prompt, policy)), price, num_tokens)
            assert cost == pytest.approx(expected, rel=0.25), policy.policy


def test_a_request_leaves_a_point_that_does_not_pay() -> None:
    """And a cheaper point is not left. Whatever happens, the rounds cover the answer."""
    trace = hash_trace(5, num_prompts=2, num_tokens=60)
    cheap, dear = (parse_policy({"policy": "chain", "depth": 1}), PRICE), (DEEP, SLOW)
    for prompt in range(2):
        _, numbers = observed(trace, prompt, {0: dear, 1: cheap})
        assert numbers[0] == 0 and numbers[-1] == 1 and numbers == sorted(numbers)
        _, numbers = observed(trace, prompt, {0: cheap, 1: dear})
        assert set(numbers) == {0}
        shown = [one for _, one in adaptive_rounds(trace, prompt, {0: dear, 1: cheap})]
        ends = [one.position + len(one.path) + 1 for one in shown]
        assert [one.position for one in shown] == [0, *ends[:-1]] and ends[-1] >= 59


def test_plain_steps_begin_the_comparison_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of plain steps have no proposals, so they are not compared."""
    trace = hash_trace(6, num_prompts=1, num_tokens=120)
    points = {0: (DEEP, DEAR), 1: (BRANCHES, DEAR)}
    compared: list[int] = []
    end_round = OnlineChoice.end_round
    monkeypatch.setattr(
        OnlineChoice, "end_round", lambda self, *args: (end_round(self, *args), compared.append(self._num_known))
    )
    shown = list(adaptive_rounds(trace, 0, points))
    is_plain = [one.tree is None for _, one in shown]
    assert any(is_plain) and not all(is_plain)
    drafted = [n for n, plain in enumerate(is_plain) if not plain]
    for index, known in zip(drafted, compared, strict=True):
        if index == 0 or is_plain[index - 1]:
            assert known == len(shown[index][1].path) + 2


def test_long_answers_begin_a_new_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs of the tokens before stay."""
    monkeypatch.setattr(online_choice, "MARGIN", np.inf)
    monkeypatch.setattr(online_choice, "WINDOW", 24)
    trace = hash_trace(3, num_prompts=1, num_tokens=120)
    points = {0: (DEEP, PRICE), 1: (BRANCHES, PRICE)}
    choice, _ = observed(trace, 0, points)
    whole = cost_of(list(rounds(trace, 0, DEEP)), PRICE, 119)
    assert 0.5 * whole < choice.costs[0] < whole


def test_the_leader_is_followed_with_a_margin() -> None:
    """Ties go to the first, and only eligible points are chosen."""
    choice = OnlineChoice({7: (DEEP, PRICE), 3: (BRANCHES, PRICE), 5: (DEEP, DEAR)})
    choice.begin_request(3)
    assert choice.choose([3, 5, 7]) == 3
    choice.costs[:] = [1.0, 1.0 + MARGIN, 1.0]
    assert choice.choose([3, 5, 7]) == 3
    choice.costs[1] += 0.01
    assert choice.choose([3, 5, 7]) == 7
    assert choice.choose([3, 5]) == 5 and choice.choose([3]) == 3
    choice.begin_request(5)
    assert choice.choose([3, 5, 7]) == 5 and not choice.costs.any()


def test_the_regret_is_within_its_bound() -> None:
    rng = np.random.default_rng(0)
    choice = OnlineChoice({0: (DEEP, PRICE), 1: (BRANCHES, PRICE), 2: (DEEP, DEAR)})
    for _ in range(200):
        choice.begin_request(0)
        steps = rng.uniform(0, 3, (rng.integers(5, 80), 3)) * rng.uniform(0.2, 1, 3)
        total, chosen = 0.0, [0]
        for step in steps:
            total += step[chosen[-1]]
            choice.costs += step
            chosen.append(choice.choose([0, 1, 2]))
        switches = int(np.count_nonzero(np.diff(chosen)))
        largest = float(np.ptp(steps, axis=1).max())
        assert total <= choice.costs.min() + MARGIN + switches * (MARGIN + largest) + 1e-9
