"""Runs with given times, and arms with given answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.evaluation.arms import Arm
from autotune.evaluation.runs import Run
from autotune.runtime.stats import DecodingStats
from autotune.trees.acceptance_counts import AcceptanceCounts
from autotune.workloads.workload import Prompt


def run(decode_ms: float, *, tokens: int = 11, rounds: int = 5, output: str = "same", **values: Any) -> Run:
    """A run of ``tokens`` new tokens, the first of which the prefill emitted."""
    zero = dict.fromkeys(("target_prefill_ms", "vision_ms", "draft_prefill_ms", "draft_ms"), 0.0)
    known = {**zero, "verify_ms": decode_ms, **values}
    return Run(
        arm="x",
        prompt="p",
        prompt_sha256="0",
        tokens_sha256=output,
        new_tokens=tokens,
        rounds=rounds,
        accepted_lengths=[1] * rounds,
        target_forwards=rounds,
        draft_forwards=rounds,
        decode_ms=decode_ms,
        acceptance_counts=AcceptanceCounts().to_json(),
        **known,
    )


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
