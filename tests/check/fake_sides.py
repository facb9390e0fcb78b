"""Base and head that decode nothing, advance their own clock, and take the times that a test sets. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from autotune.check.comparison import Comparison, Contender
from autotune.check.decoded_workload import DecodedWorkload
from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.evaluation import race, runner
from autotune.evaluation.arms import Arm
from autotune.evaluation.not_slower import Design
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from autotune.workloads.workload import Workload
from tests.check.sample_documents import prompt_evidence
from tests.sample_documents import DEVICE, decoding_profile

PROMPTS = tuple(WorkloadPrompt(f"prompt {n}", Prompt(prompt=f"{n}"), ()) for n in range(3))


@dataclass
class World:
    """Two sides that take ``ms(side)`` per prompt."""

    ms: Callable[[str], float] = lambda side: 100.0
    answer: Callable[[str], str] = lambda side: "same"
    launch_s: float = 5.0
    now_s: float = 0.0
    log: list[tuple[str, str]] = field(default_factory=list)
    """All calls: ("launch", side), ("prepare", side), (side, prompt), ("close", side)."""

    @contextmanager
    def launch(self, side: str) -> Iterator[Arm]:
        self.log.append(("launch", side))
        self.now_s += self.launch_s
        yield self.Process(self, side)
        self.log.append(("close", side))

    def comparison(self, seed: int = 0) -> Comparison:
        known: dict[str, Any] = {"profile": decoding_profile()}
        base, head = (
            Contender(f"the {side}", side, launch=lambda _, side=side: self.launch(side), **known)
            for side in ("base", "head")
        )
        return Comparison(base, head, Design(), seed, Console())

    @dataclass
    class Process(Arm):
        world: World
        name: str
        key: str = ""

        def prepare(self, prompts: Sequence[WorkloadPrompt]) -> None:
            assert len(prompts) == 5
            self.world.log.append(("prepare", self.name))

        def decode(self, prompt: WorkloadPrompt) -> Decoded:
            world = self.world
            world.log.append((self.name, prompt.name))
            ms = world.ms(self.name)
            world.now_s += ms / 1e3
            named = {"prompt_sha256": prompt.sha256, "tokens_sha256": world.answer(self.name)}
            return prompt_evidence(prompt.name, decode_ms=ms, **named)


def decoded(**fields: Any) -> DecodedWorkload:
    """Three prompts, decoded twice as fast as plainly."""
    runs = [prompt_evidence(prompt.name, prompt_sha256=prompt.sha256) for prompt in PROMPTS]
    plain = [run.model_copy(update={"decode_ms": 2 * run.decode_ms}) for run in runs]
    known: dict[str, Any] = {"workload": Workload("digits", "evaluate", PROMPTS), "profile": decoding_profile()}
    known |= {"runs": runs, "plain": plain, "seed": 0}
    known |= {"divergences": {}, "evidence": runs, "precision": "float32", "hardware": DEVICE}
    return DecodedWorkload(**{**known, **fields})


def use_clock(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = type("Clock", (), {"monotonic": staticmethod(lambda: world.now_s)})
    for module in (race, runner):
        monkeypatch.setattr(module, "time", clock)
