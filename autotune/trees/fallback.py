"""Fallback to plain decoding where speculation does not pay.

A round is priced in plain decoding steps by three numbers of the cost table; it saves its tokens minus that price. All
decisions follow from counts, not from times, so that replay makes the same ones. When the recent average of saved steps
falls below 0, the request continues with plain steps; after a stretch of them one or two rounds probe whether
speculation pays again. Every failed probe doubles the next stretch.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from autotune.files import Document
from autotune.trees.compilation import compiled
from autotune.trees.limits import Floats

_ROUND, _LEVEL, _NODE = range(3)  # params: prices in steps
_SAVED, _STRETCH, _PLAIN_LEFT = range(3)  # state
STATE_SIZE = 3

MEMORY = 8.0  # rounds in the average
START = 1.0  # saved steps credited to a new request: spent by 4 rounds that lose 1.85 each, or 6 that lose 1
PROBE = 0.2  # saved steps credited to a probe: spent by one round that loses 1.4
# Plain steps between probes.
FIRST_STRETCH = 8
LONGEST_STRETCH = 128
NO_FALLBACK = np.full(3, -1.0)  # params with which a request always speculates


class RoundPrice(Document):
    """Cost of a round, in plain decoding steps of the same target on the same device."""

    round_steps: float = Field(gt=0)
    """Verification of the root alone, and the time of a round outside the models."""
    level_steps: float = Field(ge=0)
    """Each draft forward pass."""
    node_steps: float = Field(ge=0)
    """Each draft node verified."""

    def encode(self) -> Floats:
        return np.array([self.round_steps, self.level_steps, self.node_steps])


@compiled
def reset(state: Floats) -> None:
    state[_SAVED], state[_STRETCH] = START, FIRST_STRETCH
    state[_PLAIN_LEFT] = 0.0


@compiled
def is_plain(params: Floats, state: Floats) -> bool:
    """Whether the next token is decoded by a plain step."""
    return bool(params[_ROUND] >= 0.0 and state[_PLAIN_LEFT] > 0.0)


@compiled
def count_plain_step(state: Floats) -> None:
    state[_PLAIN_LEFT] -= 1.0


@compiled
def update(params: Floats, state: Floats, draft_forwards: int, nodes: int, accepted: int) -> None:
    if params[_ROUND] < 0.0:
        return
    price = params[_ROUND] + params[_LEVEL] * draft_forwards + params[_NODE] * nodes
    saved = accepted + 1.0 - price
    state[_SAVED] += (saved - state[_SAVED]) / MEMORY
    if state[_SAVED] < 0.0:
        state[_PLAIN_LEFT] = state[_STRETCH]
        state[_STRETCH] = min(2.0 * state[_STRETCH], LONGEST_STRETCH)
        state[_SAVED] = PROBE
    elif state[_SAVED] > START:
        state[_STRETCH] = FIRST_STRETCH


class Fallback:
    """Fallback for the runtime: the compiled functions with their state."""

    def __init__(self, price: RoundPrice | None) -> None:
        self.price = price
        self._params = NO_FALLBACK if price is None else price.encode()
        self._state = np.zeros(STATE_SIZE)
        self.begin_request()

    def begin_request(self) -> None:
        reset(self._state)

    @property
    def is_plain(self) -> bool:
        return bool(is_plain(self._params, self._state))

    def count_plain_step(self) -> None:
        count_plain_step(self._state)

    def update(self, *, draft_forwards: int, nodes: int, accepted: int) -> None:
        update(self._params, self._state, draft_forwards, nodes, accepted)
