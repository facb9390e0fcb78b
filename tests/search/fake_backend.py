"""A backend whose times are given, in place of an engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autotune.documents.decoded import Decoded, tokens_key
from autotune.documents.deployment import Deployment, ServedLoad
from autotune.documents.provenance import ModelReference
from autotune.documents.speculation import Speculation
from autotune.engines.backend import Backend, Prices
from autotune.errors import ArmFailed, UserError
from autotune.files import content_key
from autotune.trees.limits import Floats
from autotune.workloads.prompt import WorkloadPrompt

NUM_TOKENS = 11


@dataclass(frozen=True)
class FakeRecorded:
    answers: list[Decoded]


@dataclass(frozen=True)
class FakeSteps:
    ms: Floats
    counts: Sequence[tuple[int, int, int]]


class FakePrices(Prices):
    def ms(self, steps: FakeSteps) -> Floats:
        return steps.ms


@dataclass
class FakeArm:
    """Takes a given time for a token, with some noise by prompt, and ends after some prompts."""

    name: str
    key: str
    ms: float
    token: int = 7
    dies_after: float = math.inf
    keeps_state: bool = False
    served: list[str] = field(default_factory=list)

    def prepare(self, prompts: Sequence[WorkloadPrompt]) -> None: ...

    def decode(self, prompt: WorkloadPrompt) -> Decoded:
        if len(self.served) >= self.dies_after:
            raise ArmFailed("the server ended while it was used")
        self.served.append(prompt.name)
        tokens = [self.token] * NUM_TOKENS
        noise = 1 + 0.01 * math.sin(int(content_key([self.key, prompt.sha256]), 16) % 1000)
        return Decoded(
            arm=self.key,
            prompt=prompt.name,
            prompt_sha256=prompt.sha256,
            tokens=tokens,
            tokens_sha256=tokens_key(tokens),
            new_tokens=NUM_TOKENS,
            rounds=NUM_TOKENS - 1,
            plain_steps=NUM_TOKENS - 1,
            decode_ms=self.ms * (NUM_TOKENS - 1) * noise,
        )


class FakeBackend(Backend):
    """Two types, ``copy`` and ``guess``, each with its default and another configuration.

    Attributes:
        ms: measured time of a token by label; others take as long as plain decoding, ``off``.
        predicted: the same by replay; those of ``ms`` by default.
        dies_after: prompts after which an arm ends, by label.
    """

    name = "fake"

    def __init__(self, model: str = "model", **options: Any) -> None:
        self.model = ModelReference(id=model, sha256=f"sha of {model}")
        self.precision = "bfloat16"
        self.ms: dict[str, float] = {"off": 10.0}
        self.predicted: dict[str, float] | None = None
        self.dies_after: dict[str, int] = {}
        self.broken: tuple[str, ...] = ()
        self.arms: list[FakeArm] = []
        self.num_recorded, self.token = 0, 7

    def configurations(self) -> list[Speculation]:
        return [Speculation(type=type, options=o) for type in ("copy", "guess") for o in ({}, {"n": 2})]

    def record(self, prompts: Sequence[WorkloadPrompt], until: float = math.inf) -> FakeRecorded:
        self.num_recorded += 1
        arm = FakeArm("record", "record", self.ms["off"], self.token)
        return FakeRecorded([arm.decode(prompt) for prompt in prompts])

    def price(self, recorded: FakeRecorded, until: float = math.inf) -> FakePrices:
        return FakePrices()

    def replay(self, configuration: Speculation | None, recorded: FakeRecorded) -> FakeSteps:
        known, label = self.predicted or self.ms, configuration.label if configuration else "off"
        num_prompts = len(recorded.answers)
        ms = np.linspace(0.9, 1.1, num_prompts) * known.get(label, self.ms["off"])
        return FakeSteps(ms, [(0, 0, 0)] * num_prompts)

    @contextmanager
    def arm(self, configuration: Speculation | None) -> Iterator[FakeArm]:
        label = configuration.label if configuration else "off"
        if label in self.broken:
            raise UserError(f"fake does not start with {label}")
        ms, dies_after = self.ms.get(label, self.ms["off"]), self.dies_after.get(label, math.inf)
        self.arms.append(FakeArm(label, f"{self.model.id} {label}", ms, self.token, dies_after))
        yield self.arms[-1]

    def deploy(self, configuration: Speculation | None) -> Deployment:
        words = ["fake", self.model.id, *([configuration.label] if configuration else [])]
        return Deployment(backend=self.name, model=self.model, command=words, speculation=configuration, build="1")

    def loads(
        self, configurations: Sequence[Speculation | None], recorded: FakeRecorded, requests_at_once: int
    ) -> list[ServedLoad]:
        return [
            ServedLoad(
                label=c.label if c else "off",
                requests_at_once=requests_at_once,
                requests=1,
                tokens=1,
                seconds=1.0,
                first_token_ms=(1.0, 1.0),
                token_ms=(1.0, 1.0),
                identical=1,
            )
            for c in configurations
        ]
