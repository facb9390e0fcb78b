"""Jobs of a measurement: plain steps or rounds, timed in one go. A ``Bench`` runs and times their single steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from autotune.measuring.settings import Size

PLAIN_STEPS = 3  # timed in a row, after warm-ups
PLAIN_WARM_UPS = 8
SLOW_STEP_MS = 30.0
"""A model whose plain steps take longer does not fit into caches. It needs fewer warm-ups, and no untimed rounds."""


class Bench(Protocol):
    """Times single steps of a target and one draft, in milliseconds."""

    def decode_ms(self, kv_length: int) -> float:
        """A plain step."""

    def verify_ms(self, tokens: int, kv_length: int) -> float:
        """A verification."""

    def draft_first_ms(self, tokens: int, kv_length: int) -> float:
        """The draft's first forward of a round."""

    def draft_level_ms(self, tokens: int, kv_length: int) -> float:
        """Another draft level."""


def plain_steps_ms(bench: Bench, kv_length: int) -> list[float]:
    """Times of consecutive plain steps, as in plain decoding, after untimed ones."""
    for _ in range(PLAIN_WARM_UPS):
        if bench.decode_ms(kv_length) > SLOW_STEP_MS:
            break
    return [bench.decode_ms(kv_length) for _ in range(PLAIN_STEPS)]


@dataclass(frozen=True)
class PlainSteps:
    """A job: consecutive plain steps."""

    kv_length: int


@dataclass(frozen=True)
class TimedRound:
    """Verification, the draft's first forward, draft levels. Without a size, a step is run small and untimed."""

    verify: Size | None
    draft_first: Size | None
    draft_levels: tuple[Size | None, ...]


@dataclass(frozen=True)
class Rounds:
    """A job: consecutive rounds of a draft, after untimed ones."""

    draft: int
    rounds: tuple[TimedRound, ...]


Job = PlainSteps | Rounds
