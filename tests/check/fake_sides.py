"""Base and head that decode nothing, advance their own clock, and take the times that a test sets. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from autotune.check.checked import CheckedBackend, CheckedWorkload, Side
from autotune.check.comparison import Comparison
from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import DecodingProfile
from autotune.evaluation.arms import Arm
from autotune.evaluation.not_slower import Design
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from autotune.workloads.workload import Workload
from tests.check.sample_documents import check_result, prompt_evidence
from tests.sample_documents import DEVICE, decoding_profile

PROMPTS = tuple(WorkloadPrompt(f"prompt {n}", Prompt(prompt=f"{n}"), ()) for n in range(3))
RUNS = [prompt_evidence(prompt.name, prompt_sha256=prompt.sha256) for prompt in PROMPTS]
WORKLOAD = Workload("digits", "evaluate", PROMPTS)
CHECKED = CheckedWorkload(WORKLOAD, RUNS, check_result().workloads[0], [])


@dataclass
class World:
    """Two sides that take ``ms(side)`` per prompt, and the clock that they turn."""

    ms: Callable[[str], float] = lambda side: 100.0
    fields: Callable[[str], dict[str, Any]] = lambda side: {}
    """Fields of the answers of a side."""
    launch_s: float = 5.0
    now_s: float = 0.0
    log: list[tuple[str, str]] = field(default_factory=list)
    """All calls: ("launch", side), ("prepare", side), (side, prompt), ("close", side)."""

    def monotonic(self) -> float:
        return self.now_s

    @contextmanager
    def launch(self, side: str) -> Iterator[Arm]:
        self.log.append(("launch", side))
        self.now_s += self.launch_s
        yield Process(self, side)
        self.log.append(("close", side))

    def comparison(self, *, seed: int = 0, rounding: str = "", **base: Any) -> Comparison:
        """
        Args:
            base: fields of the base, in place of those that it shares with the head.
        """
        profile: DecodingProfile = decoding_profile()
        sides = []
        for name, fields in (("base", base), ("head", {})):
            known: dict[str, Any] = {"label": f"the {name}", "key": name, "profile": profile, **fields}
            sides.append(Side(launch=lambda name=name: self.launch(name), **known))  # type: ignore[misc]
        settings = SimpleNamespace(seed=seed)
        backend = SimpleNamespace(settings=settings, console=Console(), hardware=DEVICE, rounding=rounding)
        return Comparison(*sides, Design(), cast(CheckedBackend, backend))


@dataclass
class Process(Arm):
    world: World
    name: str

    def prepare(self, prompts: Sequence[WorkloadPrompt]) -> None:
        assert len(prompts) == 5
        self.world.log.append(("prepare", self.name))

    def decode(self, prompt: WorkloadPrompt) -> Decoded:
        world = self.world
        world.log.append((self.name, prompt.name))
        ms = world.ms(self.name)
        world.now_s += ms / 1e3
        return prompt_evidence(prompt.name, prompt_sha256=prompt.sha256, decode_ms=ms, **world.fields(self.name))
