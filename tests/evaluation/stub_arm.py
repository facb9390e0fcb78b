"""An arm with a given answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.evaluation.arms import Arm
from autotune.runtime.stats import DecodingStats
from autotune.workloads.prompt import Prompt


class StubArm(Arm):
    """Answers every prompt with three tokens; ``times`` sets the times of the statistics."""

    def __init__(
        self, name: str, times: Callable[[DecodingStats, Prompt], None] | None = None, *, key: str | None = None
    ) -> None:
        self.name, self.key, self.times = name, key or name, times
        self.prompts: list[str] = []
        """Texts of the decoded prompts."""
        self.warmed_up: list[str] = []

    def decode(self, inputs: dict[str, Any], settings: Prompt) -> tuple[list[int], DecodingStats]:
        self.prompts.append(settings.text)
        stats = DecodingStats(new_tokens=3, accepted_lengths=[0, 0], target_forwards=2)
        stats.target_prefill_ms, stats.verify_ms, stats.decode_ms = 10.0, 20.0, 20.0
        if self.times is not None:
            self.times(stats, settings)
        return [1, 2, 3], stats

    def warm_up(self, inputs: dict[str, Any], settings: Prompt) -> None:
        self.warmed_up.append(settings.text)
