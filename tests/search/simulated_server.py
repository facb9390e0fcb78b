"""A server with price curves like an H100's, in simulated time: a closed loop of clients over requests whose drafts are
accepted by position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from autotune.documents.loads import LoadRun
from autotune.documents.speculation import OPTIONS, Speculation
from autotune.engines.loads import REQUESTS_PER_CLIENT, LoadedRequest, busy_run
from autotune.errors import UserError
from autotune.workloads.prompt import WorkloadPrompt
from tests.evaluation.fake_arm import FakeArm
from tests.search.fake_backend import FakeBackend

GOLDEN = 0.6180339887498949  # whose multiples spread evenly over the unit interval
PROMPTS = 24


@dataclass(frozen=True)
class Prices:
    """Milliseconds of a round.

    Attributes:
        flat: tokens of a pass up to which the weights are what it reads, so that it takes ``pass_ms``.
        token_ms: of each further token.
        request_ms: attention of a request, which reads its own keys and values.
        draft_ms: a step of the draft, of which a round has one for each token of its depth.
    """

    flat: int = 256
    pass_ms: float = 7.0
    token_ms: float = 0.02
    request_ms: float = 0.02
    draft_ms: float = 0.35

    def round_ms(self, at_once: int, depth: int, tokens: int) -> float:
        draft_ms = depth * (self.draft_ms + 0.1 * self.request_ms * at_once)
        return self.pass_ms + max(0, tokens - self.flat) * self.token_ms + self.request_ms * at_once + draft_ms


@dataclass(frozen=True)
class SimulatedRequest:
    number: int
    acceptance: Sequence[float]
    """The probability of a position's token, given those before it."""

    @property
    def new_tokens(self) -> int:
        return 97 + 13 * (self.number * 7 % 11)

    @property
    def prompt_tokens(self) -> int:
        return 40 + self.number * 5 % 17

    def passes(self, depth: int) -> Iterator[int]:
        """The tokens of each pass after the first token, as a draft of ``depth`` tokens gives them."""
        left, draw = self.new_tokens - 1, GOLDEN * self.number
        while left > 0:
            draw, likely, matching = (draw + GOLDEN) % 1.0, 1.0, 0
            for probability in self.acceptance[:depth]:
                likely *= probability
                matching += draw < likely
            tokens = min(left, 1 + matching)
            left -= tokens
            yield tokens


class SimulatedServer(FakeBackend):
    """An engine with a head, whose depth may follow from the number of requests.

    Attributes:
        held: the greatest load that its memory holds.
        served: depth and load of every run.
    """

    most_requests = 1024

    def __init__(self, acceptance: Sequence[float], prices: Prices, held: int = 4096) -> None:
        super().__init__()
        self.acceptance, self.curve, self.held = acceptance, prices, held
        self.served: list[tuple[int, int]] = []
        requests = [SimulatedRequest(number, acceptance) for number in range(PROMPTS)]
        answers = [SimpleNamespace(new_tokens=r.new_tokens, tokens_sha256=f"{r.number}") for r in requests]
        self.recorded = SimpleNamespace(answers=answers, requests=requests)

    def configurations(self) -> list[Speculation]:
        return [Speculation(type="mtp", options=OPTIONS["mtp"] | {"num_speculative_tokens": k}) for k in range(1, 9)]

    def replay(self, configuration: Speculation | None, recorded: Any) -> Any:
        depth = configuration.depth or 0 if configuration else 0
        passes = [list(request.passes(depth)) for request in recorded.requests]
        ms = [self.curve.round_ms(1, depth, depth + 1) * len(p) for p in passes]
        return SimpleNamespace(counts=[(len(p), depth * len(p), sum(p) - len(p)) for p in passes], ms=ms)

    def record(self, prompts: Sequence[WorkloadPrompt], until: float = math.inf) -> Any:
        return self.recorded

    def made(self, label: str) -> FakeArm:
        """Races find what the replay predicts."""
        by_label = {"off": None} | {configuration.label: configuration for configuration in self.configurations()}
        self.ms[label] = sum(self.replay(by_label[label], self.recorded).ms) / PROMPTS
        return super().made(label)

    def at_loads(self, configuration: Speculation | None, recorded: Any, loads: Sequence[int]) -> Iterator[LoadRun]:
        depth, label = (configuration.depth or 0, configuration.label) if configuration else (0, "off")
        for load in loads:
            self.served.append((depth, load))
            try:
                if load > self.held:
                    raise UserError("the server ended while it was used, with exit code 1")
                yield busy_run(self.loop(depth, load), load, label, hit_rate=0.25)
            except UserError as error:
                yield LoadRun(label=label, at_once=load, failure=str(error))

    def loop(self, depth: int, load: int) -> list[LoadedRequest]:
        """The requests of ``load`` clients. A prompt is read in the pass after it came, beside the other requests."""
        sent = [*self.recorded.requests] * -(-REQUESTS_PER_CLIENT * load // PROMPTS)
        now, done, running = 0.0, dict[int, LoadedRequest](), dict[int, tuple[float, float, int]]()
        while len(done) < len(sent):
            for number in range(len(done) + len(running), min(len(done) + load, len(sent))):
                running[number] = now, math.inf, len(list(sent[number].passes(depth)))
            tokens = sum(
                sent[number].prompt_tokens if first == math.inf else depth + 1
                for number, (_, first, _) in running.items()
            )
            now += self.curve.round_ms(len(running), depth, tokens) / 1e3
            for number, (begun, first, left) in list(running.items()):
                running[number] = (begun, now, left) if first == math.inf else (begun, first, left - 1)
                if first < math.inf and left == 1:
                    done[number] = begun, first, now, sent[number].new_tokens, True
                    del running[number]
        return [done[number] for number in range(len(sent))]
