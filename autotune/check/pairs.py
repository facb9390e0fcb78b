"""Pairs: base and head decode the same prompt within about a second, in random order.

A disturbance of the machine then affects either side with the same probability, so without a change a pair's log-ratio
is distributed symmetrically around 0, which is all that the test in ``sequential.py`` assumes. Processes also differ in
their memory layout, so both are restarted every few pairs. No pair is ever discarded.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from pydantic import Field, ValidationError

from autotune.check.sequential import PAIRS_PER_LAUNCH
from autotune.check.worker_process import Launch, Side, WorkerProcess, WorkerRequest
from autotune.documents.decoded import Decoded
from autotune.errors import NotComparable
from autotune.files import Document, append_line, read_lines
from autotune.workloads.workload import WARM_UP_TOKENS

AR_EVERY = 4  # pairs: plain decoding is measured too, for the speedup and as a control


class TimedPair(Document):
    """One prompt decoded by both sides. Times are in milliseconds per token after the first."""

    number: int
    launch: int
    """Pairs of one launch were decoded by the same two processes."""
    prompt: str
    head_first: bool
    base_ms: float = Field(gt=0)
    head_ms: float = Field(gt=0)
    plain_base_ms: float | None = None
    plain_head_ms: float | None = None

    @property
    def log_ratio(self) -> float:
        """ln(t_head / t_base)."""
        return math.log(self.head_ms / self.base_ms)

    @property
    def plain_log_ratio(self) -> float | None:
        """The log-ratio of plain decoding, if it was measured."""
        if self.plain_head_ms is None or self.plain_base_ms is None:
            return None
        return math.log(self.plain_head_ms / self.plain_base_ms)


@dataclass
class PairRunner(contextlib.AbstractContextManager["PairRunner"]):
    """Decodes pairs, and continues an interrupted comparison."""

    base: Side
    head: Side
    launch: Launch
    requests: Sequence[WorkerRequest]
    seed: int = field(kw_only=True)
    ledger: Path = field(kw_only=True)
    must_agree: bool = field(default=True, kw_only=True)
    """Whether different tokens make the sides incomparable."""
    clock: Callable[[], float] = field(default=time.monotonic, kw_only=True)
    """Seconds, for estimates."""
    pair_s: list[float] = field(default_factory=list, init=False)
    """Durations of the pairs decoded by this runner."""
    launch_s: list[float] = field(default_factory=list, init=False)
    _workers: tuple[WorkerProcess, WorkerProcess] | None = field(default=None, init=False)
    _num_left: int = field(default=0, init=False)  # pairs before the next launch

    def __post_init__(self) -> None:
        self.pairs = _pairs_in(self.ledger)

    def __exit__(self, *_: object) -> None:
        self._close_workers()

    def run_to(self, num_pairs: int, report: Callable[[int], None] = lambda done: None) -> None:
        while len(self.pairs) < num_pairs:
            number = len(self.pairs)
            if self._num_left == 0:
                self._relaunch([self.request(n) for n in range(number, number + PAIRS_PER_LAUNCH)])
            began = self.clock()
            pair = self._decode_pair(number, self.request(number))
            append_line(self.ledger, pair.model_dump())
            self.pairs.append(pair)
            self.pair_s.append(self.clock() - began)
            self._num_left -= 1
            report(len(self.pairs))

    def seconds_to(self, num_pairs: int) -> float:
        num_missing = max(0, num_pairs - len(self.pairs))
        num_launches = math.ceil(max(0, num_missing - self._num_left) / PAIRS_PER_LAUNCH)
        return num_missing * fmean(self.pair_s) + num_launches * self.launch_s[-1]

    def request(self, number: int) -> WorkerRequest:
        """The prompt of a pair. All prompts take turns, in a new random order each time."""
        turn, position = divmod(number, len(self.requests))
        return random.Random(f"{self.seed}/turn/{turn}").sample(list(self.requests), len(self.requests))[position]

    def _decode_pair(self, number: int, request: WorkerRequest) -> TimedPair:
        rng = random.Random(f"{self.seed}/pair/{number}")
        head_first = rng.random() < 0.5
        base, head = self._decode_both(request, head_first, plain=False)
        if self.must_agree and base.tokens_sha256 != head.tokens_sha256:
            raise NotComparable(
                f"{request.name}: base ({self.base.label}) and head answer differently ({base.new_tokens} and "
                f"{head.new_tokens} tokens), so their times are not of the same work; compare sides with the same target and "
                "precision"
            )
        plain_base_ms = plain_head_ms = None
        if number % AR_EVERY == 0:
            plain = self._decode_both(request, rng.random() < 0.5, plain=True)
            plain_base_ms, plain_head_ms = map(_ms_per_token, plain)
        return TimedPair(
            number=number,
            launch=self.pairs[-1].launch + (self._num_left == PAIRS_PER_LAUNCH) if self.pairs else 0,
            prompt=request.name,
            head_first=head_first,
            base_ms=_ms_per_token(base),
            head_ms=_ms_per_token(head),
            plain_base_ms=plain_base_ms,
            plain_head_ms=plain_head_ms,
        )

    def _decode_both(self, request: WorkerRequest, head_first: bool, *, plain: bool) -> tuple[Decoded, Decoded]:
        assert self._workers is not None
        answers = {
            side: self._workers[side].decode(request, plain=plain) for side in ((1, 0) if head_first else (0, 1))
        }
        return answers[0], answers[1]

    def _relaunch(self, coming: Sequence[WorkerRequest]) -> None:
        """Start new workers and warm them up: each decodes the start of one coming prompt per operating point."""
        self._close_workers()
        began = self.clock()
        first = random.Random(f"{self.seed}/launch/{len(self.pairs)}").randrange(2)
        made = {side: self.launch((self.base, self.head)[side]) for side in (first, 1 - first)}
        self._workers = made[0], made[1]
        for request in {request.point: request for request in coming}.values():
            for worker in self._workers:
                worker.decode(_shortened(request), plain=False)
        for worker in self._workers:
            worker.decode(_shortened(coming[0]), plain=True)
        self._num_left = PAIRS_PER_LAUNCH
        self.launch_s.append(self.clock() - began)

    def _close_workers(self) -> None:
        workers, self._workers, self._num_left = self._workers, None, 0
        for worker in workers or ():
            with contextlib.suppress(OSError):
                worker.close()


def _shortened(request: WorkerRequest) -> WorkerRequest:
    """The request with an answer long enough for a warm-up."""
    longest = min(WARM_UP_TOKENS, request.settings.get("max_new_tokens") or WARM_UP_TOKENS)
    return replace(request, settings={**request.settings, "max_new_tokens": longest})


def _pairs_in(ledger: Path) -> list[TimedPair]:
    """Pairs of an interrupted comparison, up to the first that is missing."""
    pairs: list[TimedPair] = []
    for record in read_lines(ledger):
        with contextlib.suppress(ValidationError):
            pair = TimedPair.model_validate(record)
            if pair.number == len(pairs):
                pairs.append(pair)
    return pairs


def _ms_per_token(decoded: Decoded) -> float:
    return decoded.decode_ms / max(1, decoded.new_tokens - 1)
