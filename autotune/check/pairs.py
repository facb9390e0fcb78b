"""Pairs: base and head decode the same prompt within a second of each other, in an order drawn at random.

Whatever disturbs the machine then disturbs either side with the same chance, so that without a change a pair's ratio
is as likely above 1 as below, by as much: all that the test of ``sequential.py`` asks for. Processes differ, too, in
where their memory lies: both are launched anew every few pairs. Nothing is left out, however it looks.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import Field, ValidationError

from autotune.check.launch import Decoded, Launch, Request, Side, Worker
from autotune.check.sequential import PAIRS_PER_LAUNCH
from autotune.errors import NotComparable
from autotune.files import Document, append_line, read_lines
from autotune.workloads.workload import WARM_UP_TOKENS

AR_EVERY = 4  # pairs: plain decoding, for the speedup and as a control


class Pair(Document):
    """One prompt by both sides, one after the other. Times are milliseconds per decoded token."""

    number: int
    launch: int
    """Pairs of the same launch were decoded by the same two processes."""
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
        """The same of plain decoding, where it was measured."""
        if self.plain_head_ms is None or self.plain_base_ms is None:
            return None
        return math.log(self.plain_head_ms / self.plain_base_ms)


class PairRunner:
    """Decodes pair after pair, and goes on where a ledger ends.

    Args:
        base, head: the two sides.
        launch: how a side is launched.
        must_agree: whether other tokens mean that the two cannot be compared.
        clock: seconds, for estimates.
    """

    def __init__(
        self,
        base: Side,
        head: Side,
        launch: Launch,
        requests: Sequence[Request],
        *,
        seed: int,
        ledger: Path,
        must_agree: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sides = (base, head)
        self.launch = launch
        self.requests = requests
        self.seed = seed
        self.ledger = ledger
        self.must_agree = must_agree
        self.clock = clock
        self.pairs = _known_pairs(ledger)
        self.pair_s: list[float] = []
        """What pairs took here, those of earlier runs left out."""
        self.launch_s: list[float] = []
        self._workers: tuple[Worker, Worker] | None = None
        self._left = 0  # pairs that these workers still decode

    def __enter__(self) -> PairRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run_to(self, num_pairs: int, report: Callable[[int], None] = lambda done: None) -> None:
        """Decode until there are so many pairs."""
        while len(self.pairs) < num_pairs:
            number = len(self.pairs)
            if self._left == 0:
                self._relaunch([self.request(n) for n in range(number, number + PAIRS_PER_LAUNCH)])
            began = self.clock()
            pair = self._decode(number, self.request(number))
            append_line(self.ledger, pair.model_dump())
            self.pairs.append(pair)
            self.pair_s.append(self.clock() - began)
            self._left -= 1
            report(len(self.pairs))

    def seconds_to(self, num_pairs: int) -> float:
        """How long it will take until there are so many, by what those took that were decoded here."""
        missing = max(0, num_pairs - len(self.pairs))
        launches = math.ceil(max(0, missing - self._left) / PAIRS_PER_LAUNCH)
        return missing * _mean(self.pair_s) + launches * self.launch_s[-1]

    def request(self, number: int) -> Request:
        """The prompt of a pair: all take turns, each time in another order."""
        turn, place = divmod(number, len(self.requests))
        return random.Random(f"{self.seed}/turn/{turn}").sample(list(self.requests), len(self.requests))[place]

    def _decode(self, number: int, request: Request) -> Pair:
        assert self._workers is not None
        draws = random.Random(f"{self.seed}/pair/{number}")
        head_first = draws.random() < 0.5
        decoded = self._both(request, head_first, plain=False)
        self._require_same_answer(request, *decoded)
        base_ms, head_ms = (_ms_per_token(one) for one in decoded)
        plain_base_ms = plain_head_ms = None
        if number % AR_EVERY == 0:
            plain_base_ms, plain_head_ms = (
                _ms_per_token(one) for one in self._both(request, draws.random() < 0.5, plain=True)
            )
        return Pair(
            number=number,
            launch=self.pairs[-1].launch + (self._left == PAIRS_PER_LAUNCH) if self.pairs else 0,
            prompt=request.name,
            head_first=head_first,
            base_ms=base_ms,
            head_ms=head_ms,
            plain_base_ms=plain_base_ms,
            plain_head_ms=plain_head_ms,
        )

    def _both(self, request: Request, head_first: bool, *, plain: bool) -> tuple[Decoded, Decoded]:
        assert self._workers is not None
        base, head = self._workers
        if head_first:
            of_head = head.decode(request, plain=plain)
            return base.decode(request, plain=plain), of_head
        of_base = base.decode(request, plain=plain)
        return of_base, head.decode(request, plain=plain)

    def _require_same_answer(self, request: Request, base: Decoded, head: Decoded) -> None:
        if self.must_agree and base.tokens_sha256 != head.tokens_sha256:
            raise NotComparable(
                f"{request.name}: base ({self.sides[0].what}) and head answer differently ({base.new_tokens} and {head.new_tokens} "
                "tokens), so their times are not of the same work; compare sides with the same target and precision"
            )

    def _relaunch(self, coming: Sequence[Request]) -> None:
        """New processes, warm: of every point among the coming prompts the beginning of one is decoded, on both sides."""
        self._end()
        began = self.clock()
        first = random.Random(f"{self.seed}/launch/{len(self.pairs)}").randrange(2)
        made = {number: self.launch(self.sides[number]) for number in (first, 1 - first)}
        self._workers = made[0], made[1]
        for request in {request.point: request for request in coming}.values():
            for worker in self._workers:
                worker.decode(_beginning(request), plain=False)
        for worker in self._workers:
            worker.decode(_beginning(coming[0]), plain=True)
        self._left = PAIRS_PER_LAUNCH
        self.launch_s.append(self.clock() - began)

    def _end(self) -> None:
        workers, self._workers, self._left = self._workers, None, 0
        for worker in workers or ():
            with contextlib.suppress(OSError):
                worker.close()


def _beginning(request: Request) -> Request:
    """Enough of it to warm up."""
    longest = min(WARM_UP_TOKENS, request.settings.get("max_new_tokens") or WARM_UP_TOKENS)
    return replace(request, settings={**request.settings, "max_new_tokens": longest})


def _known_pairs(ledger: Path) -> list[Pair]:
    """Those of an interrupted comparison, up to the first that is missing."""
    found: list[Pair] = []
    for record in read_lines(ledger):
        with contextlib.suppress(ValidationError):
            pair = Pair.model_validate(record)
            if pair.number == len(found):
                found.append(pair)
    return found


def _ms_per_token(decoded: Decoded) -> float:
    return decoded.decode_ms / max(1, decoded.new_tokens - 1)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
