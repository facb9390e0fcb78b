"""When speculation does not pay: back to plain decoding, and out again.

Every round is priced in plain decoding steps by three numbers of the cost table; what it saved is its tokens minus that
price. Decisions are counted, not timed: replay takes the same ones. Saved steps are averaged over recent rounds; below
0 the request goes on by plain steps, and after a stretch of them one or two rounds probe whether speculation pays
again. Every failed probe makes the next stretch longer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pydantic import Field

from autotune.files import Document
from autotune.trees.tree import Floats, compiled

# params: the price of a round in this order; a negative first one: never fall back
_ROUND, _LEVEL, _NODE = range(3)
# state
_SAVED, _STRETCH, _REST, _TOTAL = range(4)
STATE_SIZE = 4

MEMORY = 8.0  # rounds: how far back the average looks
START = 1.0  # saved steps that a new request is trusted with: lost after 4 rounds that lose 1.85 each, 6 that lose 1
PROBE = 0.2  # the same for a probe: one round that loses 1.4 ends it
FIRST_STRETCH, LONGEST_STRETCH = 8, 128  # plain steps between probes
NEVER = np.full(3, -1.0)


class RoundPrice(Document):
    """What a round costs, in plain decoding steps of the same target on the same device."""

    round_steps: float = Field(gt=0)
    """Verification of the root alone, and what a round costs outside the models."""
    level_steps: float = Field(ge=0)
    """Every draft forward."""
    node_steps: float = Field(ge=0)
    """Every draft node verified."""

    def encode(self) -> Floats:
        return np.array([self.round_steps, self.level_steps, self.node_steps])


@compiled
def reset(state: Floats) -> None:
    """A new request: speculation has its chance."""
    state[_SAVED] = START
    state[_STRETCH] = FIRST_STRETCH
    state[_REST] = 0.0
    state[_TOTAL] = 0.0


@compiled
def is_plain(params: Floats, state: Floats) -> bool:
    """Whether the next token is a plain step."""
    return bool(params[_ROUND] >= 0.0 and state[_REST] > 0.0)


@compiled
def count_plain_step(state: Floats) -> None:
    """A plain step was taken."""
    state[_REST] -= 1.0


@compiled
def update(params: Floats, state: Floats, draft_forwards: int, nodes: int, accepted: int) -> None:
    """A round ended."""
    if params[_ROUND] < 0.0:
        return
    price = params[_ROUND] + params[_LEVEL] * draft_forwards + params[_NODE] * nodes
    saved = accepted + 1.0 - price
    state[_TOTAL] += saved
    state[_SAVED] += (saved - state[_SAVED]) / MEMORY
    if state[_SAVED] < 0.0:
        state[_REST] = state[_STRETCH]
        state[_STRETCH] = min(2.0 * state[_STRETCH], LONGEST_STRETCH)
        state[_SAVED] = PROBE
    elif state[_SAVED] > START:
        state[_STRETCH] = FIRST_STRETCH


class RequestMemory(NamedTuple):
    """What is remembered of requests."""

    num_failed: int = 0
    """That lost time, in a row."""
    pause: int = 0
    """Requests to come without a draft."""
    saved: float = 0.0
    """Plain steps saved by requests, older ones counting less."""


class Fallback:
    """The same for the runtime, with a memory of requests: a draft that lost time in ``PATIENCE`` requests in a row, and more
    than it gained in those before, is left out, unread, for the next few, and then for four times as many.
    """

    PATIENCE = 2
    MEMORY = 0.8  # what a request's steps saved count for after the next one
    LONGEST_PAUSE = 64  # requests

    def __init__(self, price: RoundPrice | None) -> None:
        self.price = price
        self._params = NEVER if price is None else price.encode()
        self._state = np.zeros(STATE_SIZE)
        self.forget()

    def forget(self) -> None:
        """As if no request had been decoded yet."""
        self.memory = RequestMemory()

    def begin_request(self) -> bool:
        """Whether this request speculates at all."""
        reset(self._state)
        if self._is_suspected:
            self._state[_SAVED] = PROBE
        if self.memory.pause > 0:
            self.memory = self.memory._replace(pause=self.memory.pause - 1)
            return False
        return True

    def end_request(self) -> None:
        """Called after a request that speculated."""
        total = float(self._state[_TOTAL])
        num_failed = 0 if self.price is None or total >= 0.0 else self.memory.num_failed + 1
        self.memory = RequestMemory(num_failed, 0, self.MEMORY * self.memory.saved + total)
        if self._is_suspected:
            pause = min(4 ** (num_failed - self.PATIENCE + 1), self.LONGEST_PAUSE)
            self.memory = self.memory._replace(pause=pause)

    @property
    def _is_suspected(self) -> bool:
        return self.memory.num_failed >= self.PATIENCE and self.memory.saved < 0.0

    @property
    def is_plain(self) -> bool:
        return bool(is_plain(self._params, self._state))

    def count_plain_step(self) -> None:
        """A plain step was taken."""
        count_plain_step(self._state)

    def update(self, *, draft_forwards: int, nodes: int, accepted: int) -> None:
        """A round ended."""
        update(self._params, self._state, draft_forwards, nodes, accepted)
