"""Fake workers: they decode nothing, advance their own clock, and take the times that a test sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from autotune.check.worker_process import Side, WorkerRequest
from autotune.documents.decoded import Decoded
from autotune.workloads.workload import WARM_UP_TOKENS

BASE, HEAD = (Side(name=name, label=f"the {name}", profile=Path("profile.json")) for name in ("base", "head"))


def requests(count: int = 3) -> list[WorkerRequest]:
    long = {"max_new_tokens": 128}
    return [WorkerRequest(f"prompt {n}", str(n), Path(f"{n}.safetensors"), long, "prompt", n % 2) for n in range(count)]


def decoded(decode_ms: float = 100.0, **fields: object) -> Decoded:
    known = {
        "arm": "head",
        "prompt": "prompt",
        "prompt_sha256": "0",
        "decode_ms": decode_ms,
        "new_tokens": 11,
        "tokens_sha256": "same",
        "accepted_lengths": [1] * 5,
    }
    known |= {"target_forwards": 5, "draft_forwards": 10, "plain_steps": 0, "verified_nodes": 10}
    return Decoded.model_validate({**known, **fields})


@dataclass
class World:
    """Two sides that take ``ms(side, prompt)`` per prompt, and 200 ms for plain decoding."""

    ms: Callable[[str, str], float] = lambda side, prompt: 100.0
    answer: Callable[[str, str], str] = lambda side, prompt: "same"
    launch_s: float = 10.0
    now_s: float = 0.0
    log: list[tuple[str, ...]] = field(default_factory=list)
    """All calls: ("launch", side), (side, prompt, "tuned" or "plain"), ("close", side)."""
    num_short: int = 0
    """Number of warm-ups: requests for a few tokens."""

    def launch(self, side: Side) -> World.Worker:
        self.log.append(("launch", side.name))
        self.now_s += self.launch_s / 2
        return World.Worker(self, side.name)

    def clock(self) -> float:
        return self.now_s

    @dataclass
    class Worker:
        world: World
        name: str

        def decode(self, request: WorkerRequest, *, plain: bool) -> Decoded:
            world = self.world
            world.log.append((self.name, request.name, "plain" if plain else "tuned"))
            world.num_short += request.settings["max_new_tokens"] <= WARM_UP_TOKENS
            ms = 200.0 if plain else world.ms(self.name, request.name)
            world.now_s += ms / 1e3
            return decoded(ms, tokens_sha256=world.answer(self.name, request.name))

        def close(self) -> None:
            self.world.log.append(("close", self.name))
