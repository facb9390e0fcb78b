"""Fallback to plain decoding and probes, against sequences computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

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


def test_a_useless_draft_is_dropped_after_a_few_rounds() -> None:
    """The average starts from 1 and moves by an eighth of its distance to -3: 0.5, 0.0625, -0.32."""
    assert Machine().run(USELESS, USELESS, USELESS) == [0, 0, 8]


def test_a_draft_that_loses_little_is_dropped_later() -> None:
    """Nothing accepted at a price of 2 saves -1: 0.75, 0.531, 0.340, 0.172, 0.026, -0.102. A probe starts from 0.2:
    0.05, -0.081.
    """
    machine = Machine(RoundPrice(round_steps=2.0, level_steps=0.0, node_steps=0.0))
    assert machine.run(*[USELESS] * 8) == [0, 0, 0, 0, 0, 8, 0, 16]


def test_every_failed_probe_doubles_the_stretch_up_to_the_longest() -> None:
    """A probe of one round: 0.2 + (-3 - 0.2) / 8 = -0.2."""
    machine = Machine()
    machine.run(USELESS, USELESS)
    assert machine.run(*[USELESS] * 7) == [8, 16, 32, 64, 128, 128, 128]


def test_a_draft_that_pays_again_begins_with_short_stretches_again() -> None:
    """After stretches of 8 and 16: 0.2, then good rounds 0.8 and 1.325, which is more than the credit of a new request.
    Useless ones: 0.784, 0.311, -0.103: a stretch of 8.
    """
    machine = Machine()
    assert machine.run(USELESS, USELESS, USELESS, USELESS) == [0, 0, 8, 16]
    assert machine.run(GOOD, GOOD) == [0, 0]
    assert machine.run(USELESS, USELESS, USELESS) == [0, 0, 8]


def test_a_draft_that_barely_pays_keeps_its_long_stretches() -> None:
    """After stretches of 8 and 16 one good round, 0.8, is no recovery. Useless ones, 0.325, -0.091: a stretch of 32."""
    machine = Machine()
    machine.run(USELESS, USELESS, USELESS, USELESS)
    assert machine.run(GOOD, USELESS, USELESS) == [0, 0, 32]


def test_a_draft_that_pays_is_never_dropped() -> None:
    assert Machine().run(*[GOOD] * 200) == [0] * 200
    assert Machine().run(*[3] * 200) == [0] * 200, "3 accepted tokens and a fourth: exactly as fast as plain decoding"


def test_a_draft_with_many_good_rounds_is_dropped_later() -> None:
    """The average reaches 5, then: 4, 3.125, 2.36, 1.69, 1.1, 0.59, 0.14, -0.25: eight rounds instead of three."""
    machine = Machine()
    machine.run(*[GOOD] * 200)
    assert machine.run(*[USELESS] * 8) == [0, 0, 0, 0, 0, 0, 0, 8]


def test_a_round_is_priced_by_its_forwards_and_nodes() -> None:
    """1.1 + 3 * 0.2 + 10 * 0.01 = 1.8 steps for 2 + 1 tokens: 1.2 saved; the average goes from 1 to 1.025."""
    params, state = RoundPrice(round_steps=1.1, level_steps=0.2, node_steps=0.01).encode(), np.zeros(STATE_SIZE)
    fallback.reset(state)
    fallback.update(params, state, 3, 10, 2)
    assert state[fallback._SAVED] == pytest.approx(1.025)


def test_without_a_price_there_is_no_fallback() -> None:
    machine = Machine(price=None)
    assert machine.run(*[USELESS] * 300) == [0] * 300
    machine.state[fallback._PLAIN_LEFT] = 5.0
    assert not fallback.is_plain(machine.params, machine.state)


def test_a_new_request_begins_with_short_stretches() -> None:
    machine = Machine()
    machine.run(*[USELESS] * 6)
    fallback.reset(machine.state)
    assert machine.run(USELESS, USELESS, USELESS, USELESS) == [0, 0, 8, 16]


# -------- the runtime's


def rounds_until_plain(fallback: Fallback) -> int:
    """Number of useless rounds before plain steps."""
    for number in range(1, 100):
        fallback.update(draft_forwards=1, nodes=1, accepted=USELESS)
        if fallback.is_plain:
            return number
    return 0


def test_plain_steps_end_with_the_request() -> None:
    fallback = Fallback(PRICE)
    fallback.begin_request()
    rounds_until_plain(fallback)
    for _ in range(7):
        fallback.count_plain_step()
        assert fallback.is_plain
    fallback.count_plain_step()
    assert not fallback.is_plain
    rounds_until_plain(fallback)
    assert fallback.is_plain
    fallback.begin_request()
    assert not fallback.is_plain


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


def test_a_price_out_of_range_is_refused() -> None:
    for mistake in ({"round_steps": 0.0}, {"level_steps": -0.1}, {"node_steps": float("inf")}, {"rounds": 1.0}):
        with pytest.raises(ValidationError):
            RoundPrice(**{"round_steps": 1.0, "level_steps": 0.1, "node_steps": 0.0, **mistake})
