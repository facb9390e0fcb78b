"""A backend whose times are given, in place of an engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from autotune.documents.decoded import tokens_key
from autotune.documents.deployment import Deployment
from autotune.documents.provenance import ModelReference
from autotune.documents.speculation import Speculation
from autotune.engines.backend import Backend, Prices
from autotune.errors import ArmFailed, UserError
from autotune.files import content_key
from autotune.trees.limits import Floats
from autotune.workloads.prompt import WorkloadPrompt
from tests.evaluation.fake_arm import FakeArm

NUM_TOKENS = 11


class FakePrices(Prices):
    def ms(self, steps: Any) -> Floats:
        return np.array(steps.ms)


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
        self.num_recorded, self.token, self.prices = 0, 7, FakePrices()

    def configurations(self) -> list[Speculation]:
        return [Speculation(type=type, options=o) for type in ("copy", "guess") for o in ({}, {"n": 2})]

    def record(self, prompts: Sequence[WorkloadPrompt], until: float = math.inf) -> Any:
        self.num_recorded += 1
        return SimpleNamespace(answers=[self.made("off").decode(prompt) for prompt in prompts])

    def price(self, recorded: Any, until: float = math.inf) -> FakePrices:
        return self.prices

    def replay(self, configuration: Speculation | None, recorded: Any) -> Any:
        known, label = self.predicted or self.ms, configuration.label if configuration else "off"
        ms = np.linspace(0.9, 1.1, len(recorded.answers)) * known.get(label, self.ms["off"])
        return SimpleNamespace(ms=ms, counts=[(0, 0, 0)] * len(ms))

    def made(self, label: str) -> FakeArm:
        """An arm that takes a given time for a token, with some noise by prompt, and ends after some prompts."""
        key, tokens = f"{self.model.id} {label}", [self.token] * NUM_TOKENS
        ms, dies_after = self.ms.get(label, self.ms["off"]), self.dies_after.get(label, math.inf)
        passes = {"rounds": NUM_TOKENS - 1, "plain_steps": NUM_TOKENS - 1, "accepted_lengths": [], "verified_nodes": 0}
        answer = {"tokens": tokens, "tokens_sha256": tokens_key(tokens), **passes}

        def decode_ms(prompt: WorkloadPrompt) -> float:
            if len(arm.decoded) > dies_after:
                raise ArmFailed("the server ended while it was used")
            noise = 1 + 0.01 * math.sin(int(content_key([key, prompt.sha256]), 16) % 1000)
            return ms * (NUM_TOKENS - 1) * noise

        arm = FakeArm(label, decode_ms, key=key, values=lambda prompt: answer)
        return arm

    @contextmanager
    def arm(self, configuration: Speculation | None) -> Iterator[FakeArm]:
        label = configuration.label if configuration else "off"
        if label in self.broken:
            raise UserError(f"fake does not start with {label}")
        self.arms.append(self.made(label))
        yield self.arms[-1]

    def deploy(self, configuration: Speculation | None) -> Deployment:
        words = ["fake", self.model.id, *([configuration.label] if configuration else [])]
        return Deployment(backend=self.name, model=self.model, command=words, speculation=configuration, build="1")
