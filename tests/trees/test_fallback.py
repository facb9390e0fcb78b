"""Fallback to plain decoding and probes, against sequences computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.trees import fallback
from autotune.trees.fallback import NO_FALLBACK, STATE_SIZE, Fallback, RoundPrice

PRICE = RoundPrice(round_steps=4.0, level_steps=0.0, node_steps=0.0)
"""A round costs four plain steps: it saves 1 - 4 = -3 with nothing accepted, 9 - 4 = 5 with 8 accepted."""
USELESS, GOOD = 0, 8


class Machine:
    """The compiled functions on one request, as replay drives them."""

    def __init__(self, price: RoundPrice | None = PRICE) -> None:
        self.params = NO_FALLBACK if price is None else price.encode()
        self.state = np.full(STATE_SIZE, 77.0)
        fallback.reset(self.state)

    def run(self, *accepted: int) -> list[int]:
        """The number of plain steps after each of some rounds, by their accepted lengths."""
        return [self._round(length) for length in accepted]

    def _round(self, accepted: int) -> int:
        assert not fallback.is_plain(self.params, self.state)
        fallback.update(self.params, self.state, 0, 0, accepted)
        steps = 0
        while fallback.is_plain(self.params, self.state):
            fallback.count_plain_step(self.state)
            steps += 1
        return steps


COSTS_TWO = RoundPrice(round_steps=2.0, level_steps=0.0, node_steps=0.0)
# The accepted lengths of rounds, and the numbers of plain steps after the last of them. The average of a request starts
# from 1 and moves by an eighth of its distance to what a round saves; a probe starts from 0.2.
SEQUENCES: list[tuple[str, RoundPrice | None, list[int], list[int]]] = [
    ("a useless draft: 0.5, 0.0625, -0.32", PRICE, [USELESS] * 3, [0, 0, 8]),
    ("one that loses little: 0.75, ... 0.026, -0.102", COSTS_TWO, [USELESS] * 8, [0, 0, 0, 0, 0, 8, 0, 16]),
    ("every failed probe doubles the stretch", PRICE, [USELESS] * 9, [8, 16, 32, 64, 128, 128, 128]),
    # Good rounds lead to 0.8 and 1.325, more than the credit of a new request; then 0.784, 0.311, -0.103.
    ("a draft that pays again", PRICE, [USELESS] * 4 + [GOOD] * 2 + [USELESS] * 3, [16, 0, 0, 0, 0, 8]),
    ("one good round is no recovery", PRICE, [USELESS] * 4 + [GOOD, USELESS, USELESS], [16, 0, 0, 32]),
    ("a draft that pays", PRICE, [GOOD] * 200, [0] * 200),
    ("exactly as fast as plain decoding", PRICE, [3] * 200, [0] * 200),
    ("many good rounds: 4, 3.125, ... 0.14, -0.25", PRICE, [GOOD] * 200 + [USELESS] * 8, [0] * 7 + [8]),
    ("without a price", None, [USELESS] * 300, [0] * 300),
]


@pytest.mark.parametrize(("_", "price", "accepted", "steps"), SEQUENCES)
def test_plain_steps_by_hand(_: str, price: RoundPrice | None, accepted: list[int], steps: list[int]) -> None:
    """A new request begins as the first one."""
    machine = Machine(price)
    for _request in range(2):
        assert machine.run(*accepted)[-len(steps) :] == steps
        fallback.reset(machine.state)


def test_a_round_is_priced_by_its_forwards_and_nodes() -> None:
    """1.1 + 3 * 0.2 + 10 * 0.01 = 1.8 steps for 2 + 1 tokens: 1.2 saved; the average goes from 1 to 1.025."""
    params, state = RoundPrice(round_steps=1.1, level_steps=0.2, node_steps=0.01).encode(), np.zeros(STATE_SIZE)
    fallback.reset(state)
    fallback.update(params, state, 3, 10, 2)
    assert state[fallback._SAVED] == pytest.approx(1.025)


# -------- the runtime's


def test_the_class_decides_as_the_compiled_functions() -> None:
    """Replay drives the functions, the runtime the class."""
    rng = np.random.default_rng(61)
    price = RoundPrice(round_steps=1.2, level_steps=0.3, node_steps=0.02)
    machine, control, num_plain = Machine(price), Fallback(price), 0
    for _ in range(2000):
        if rng.random() < 0.01:
            fallback.reset(machine.state)
            control.begin_request()
        assert control.is_plain == fallback.is_plain(machine.params, machine.state)
        if control.is_plain:
            num_plain += 1
            control.count_plain_step()
            fallback.count_plain_step(machine.state)
            continue
        forwards, nodes, accepted = int(rng.integers(1, 8)), int(rng.integers(0, 60)), int(rng.integers(0, 4))
        control.update(draft_forwards=forwards, nodes=nodes, accepted=accepted)
        fallback.update(machine.params, machine.state, forwards, nodes, accepted)
    assert 100 < num_plain < 1900
