"""Arms with given times, and a clock that they turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from autotune.documents.decoded import Decoded
from autotune.errors import ArmFailed
from autotune.evaluation.arms import Arm
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from tests.evaluation.sample_runs import run


class FakeClock:
    """In place of ``time`` in the modules of a race."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in ("race", "runner"):
            monkeypatch.setattr(f"autotune.evaluation.{module}.time", self)

    def monotonic(self) -> float:
        return self.now


class FakeArm(Arm):
    """Answers every prompt with 11 tokens.

    Args:
        ms: decoding time, or a function of the prompt that gives it.
        values: further fields of the record of a prompt.
        fails: name of the prompt at which the arm fails.
        clock: goes on by the decoding time.
    """

    def __init__(
        self,
        name: str,
        ms: float | Callable[[WorkloadPrompt], float] = 20.0,
        *,
        key: str | None = None,
        keeps_state: bool = False,
        values: Callable[[WorkloadPrompt], dict[str, Any]] = lambda prompt: {},
        fails: str | None = None,
        clock: FakeClock | None = None,
    ) -> None:
        self.name, self.key, self.keeps_state = name, key or name, keeps_state
        self.ms, self.values, self.fails, self.clock = ms, values, fails, clock
        self.decoded: list[str] = []
        """Names of the decoded prompts."""
        self.prepared: list[list[str]] = []
        self.template = run(1.0, arm=self.key, tokens=11)

    def prepare(self, prompts: Sequence[WorkloadPrompt]) -> None:
        self.prepared.append([prompt.name for prompt in prompts])

    def decode(self, prompt: WorkloadPrompt) -> Decoded:
        if prompt.name == self.fails:
            raise ArmFailed(f"{self.name}: the server has ended")
        self.decoded.append(prompt.name)
        ms = self.ms(prompt) if callable(self.ms) else self.ms
        if self.clock is not None:
            self.clock.now += ms / 1e3
        known = {"prompt": prompt.name, "prompt_sha256": prompt.sha256, "task": prompt.settings.task}
        return self.template.model_copy(update={**known, "decode_ms": ms, "verify_ms": ms, **self.values(prompt)})


@functools.cache
def prompts_by_hand(count: int) -> list[WorkloadPrompt]:
    """Prompts that are named by their numbers."""
    return [WorkloadPrompt(f"{n}", Prompt(prompt=f"{n}"), ()) for n in range(count)]
