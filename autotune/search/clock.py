"""The clock of a search: deadlines of its stages."""

from __future__ import annotations

import time
from collections.abc import Mapping

from autotune.search.thresholds import STAGES

UNTIMED_STAGES = ("screening", "traces", "tree search")
"""The stages of a search for another device, whose cost table exists and where nothing is run."""


class StageClock:
    """Deadlines of the stages of a search in their order, of ``time.monotonic``.

    Args:
        budget_s: time in which all stages end.
        is_timed: whether the device is this machine's, so that all stages take time.

    Attributes:
        kept_s: seconds that earlier stages leave to a stage.
    """

    def __init__(self, budget_s: float, *, is_timed: bool = True) -> None:
        self.budget_s = budget_s
        self.weights = {stage: STAGES[stage] for stage in (STAGES if is_timed else UNTIMED_STAGES)}
        self.kept_s: Mapping[str, float] = {}
        self.start()

    def start(self) -> None:
        """The budget begins now."""
        self.deadline = time.monotonic() + self.budget_s

    @property
    def spent_s(self) -> float:
        return self.budget_s - (self.deadline - time.monotonic())

    def set_share(self, stage: str, share: float) -> None:
        """Give a stage another share of the budget, at the cost of all others equally."""
        others = sum(weight for name, weight in self.weights.items() if name != stage)
        self.weights[stage] = others * share / (1 - share)

    def deadline_of(self, stage: str) -> float:
        """The end of a stage that begins now: the time kept for it, and its share of the time that is left for it and
        the later stages and not kept.
        """
        kept = self._kept_from(stage)
        now, weights = time.monotonic(), [self.weights[name] for name in kept]
        free_s = max(0.0, self.deadline - now - sum(kept.values()))
        return now + kept[stage] + free_s * weights[0] / sum(weights)

    def limit_of(self, stage: str) -> float:
        """The end of the time that is not kept for later stages: the least of a stage may go on until then."""
        kept = self._kept_from(stage)
        return self.deadline - (sum(kept.values()) - kept[stage])

    def _kept_from(self, stage: str) -> dict[str, float]:
        """The time kept for this stage and every later one, less where not so much is left."""
        stages = list(self.weights)
        kept = {name: self.kept_s.get(name, 0.0) for name in stages[stages.index(stage) :]}
        share = min(1.0, max(0.0, self.deadline - time.monotonic()) / max(sum(kept.values()), 1e-9))
        return {name: share * seconds for name, seconds in kept.items()}
