"""Which steps to time, how often, and which timings to throw away. Decides only: a ``Bench`` takes the time.

A surface begins with few sizes. Then the sizes that its interpolation is most likely to get wrong are measured: the middle
of every gap, and the first size past a block of a matrix kernel, where the curve may step. What the interpolation missed
becomes part of the grid, and the gaps beside it are looked at in turn. Other points, chosen before anything is known, are
held out: they make the error that is reported, and decide nothing.

Samples are taken in blocks. Before and after each of them a reference step is timed; where it is slower or faster than
usual the device was throttled, or was somebody else's, and the block is measured again.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np

from autotune.cost.surface import Point, Surface
from autotune.cost.table import TOKENS
from autotune.execution import EAGER

Size = tuple[int, int]
"""(tokens, KV length)."""

COARSE_TOKENS = (1, 2, 4, 9, 33, 129)
HELD_OUT_TOKENS = (1, 3, 6, 11, 20, 40, 100)
KERNEL_BLOCK = 8  # tokens: kernels change behind multiples of it
LEVELS_OF_ROUND = 3  # draft levels behind the first one
STEPS_IN_A_ROW = 4  # plain steps
BLOCK_JOBS = 16  # rounds or rows of plain steps between two looks at the reference: half a second, or so
MEDIAN_ERROR = 1.2533  # standard error of a median in those of a mean


class Bench(Protocol):
    """Times single steps of a target and one draft, in milliseconds."""

    def decode_ms(self, kv_length: int) -> float:
        """A plain step."""

    def verify_ms(self, tokens: int, kv_length: int) -> float:
        """A verification."""

    def draft_first_ms(self, tokens: int, kv_length: int) -> float:
        """The draft's first forward of a round."""

    def draft_level_ms(self, tokens: int, kv_length: int) -> float:
        """Another level."""


def plain_steps_ms(bench: Bench, kv_length: int) -> list[float]:
    """In a row, as in plain decoding; the first comes behind something else and does not count."""
    return [bench.decode_ms(kv_length) for _ in range(STEPS_IN_A_ROW)][1:]


@dataclass(frozen=True)
class ProfileSettings:
    """What to measure, and how well."""

    kv_lengths: tuple[int, ...] = (160, 256, 400)
    """The ends are measured; those between them where the surface is bent."""
    held_out_kv_length: int = 208
    """Between the first two; its mirror image is held out as well."""
    capture_sizes: tuple[int, ...] = ()
    """Sizes that forwards are rounded up to: where there are any, they are the sizes measured."""
    mode: str = EAGER
    """How forwards run (``modeling/graph_runner.py``)."""
    min_samples: int = 6
    max_samples: int = 30
    settled: float = 0.015
    """Relative standard error of a median that is good enough."""
    tolerance: float = 0.02
    """Relative error of the interpolation that is good enough."""
    max_drift: float = 0.15
    """Relative change of the reference step with which a block is measured again."""
    retries: int = 2
    """How often that may happen in a row."""
    time_limit_s: float = 90.0
    """Of the steps. Past it no size is added, and each that was begun gets its fewest samples."""
    seed: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """The finest grid of sizes."""
        return self.capture_sizes or TOKENS

    @property
    def coarse_tokens(self) -> tuple[int, ...]:
        """Those measured in any case: prepared sizes all, for nothing is read between them."""
        return self.capture_sizes or COARSE_TOKENS

    @property
    def held_out(self) -> tuple[Size, ...]:
        """Off the grid in both directions, as far as sizes are not prepared."""
        sizes = self.capture_sizes or HELD_OUT_TOKENS
        lengths = self.held_out_kv_lengths
        return tuple((n, lengths[number % 2]) for number, n in enumerate(sizes))

    @property
    def held_out_kv_lengths(self) -> tuple[int, int]:
        between = self.held_out_kv_length
        return between, self.kv_lengths[0] + self.kv_lengths[-1] - between


def standard_error(samples: Sequence[float]) -> float:
    """Of the median, relative to it; from the median deviation, which interruptions do not move."""
    median = float(np.median(samples))
    deviation = 1.4826 * float(np.median(np.abs(np.array(samples) - median)))
    return MEDIAN_ERROR * deviation / median / len(samples) ** 0.5 if median > 0 else 0.0


class Grid:
    """One surface on its way: its samples, and which sizes it consists of.

    Args:
        tokens: the finest grid of sizes.
        coarse_tokens: those of them to begin with, the ends among them.
        kv_lengths: the ends to begin with, and what may come between them.
        held_out: sizes that test it.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        coarse_tokens: Sequence[int],
        kv_lengths: Sequence[int],
        held_out: Iterable[Size],
        settings: ProfileSettings,
    ) -> None:
        self.settings = settings
        self.samples: dict[Size, list[float]] = {}
        self._all_tokens, self._all_lengths = sorted(tokens), sorted(kv_lengths)
        self._coarse = sorted(coarse_tokens)
        self._tokens = list(self._coarse)
        self._lengths = sorted({self._all_lengths[0], self._all_lengths[-1]})
        self._held_out = list(held_out)
        self._examined: list[Size] = []

    @property
    def sizes(self) -> list[Size]:
        """All that are measured, of whatever kind."""
        grid = [(n, m) for n in self._tokens for m in self._lengths]
        return list(dict.fromkeys([*grid, *self._held_out, *self._examined]))

    def wanted(self, *, at_least: bool) -> list[Size]:
        """Sizes that lack samples; with ``at_least`` those that lack the fewest."""
        rules = self.settings
        return [
            size
            for size in self.sizes
            if (count := len(self.samples.get(size, ()))) < rules.min_samples
            or (not at_least and count < rules.max_samples and standard_error(self.samples[size]) > rules.settled)
        ]

    def unsettled(self, count: int) -> list[Size]:
        """So many of the sizes whose samples scatter too much to tell, those that do most first and again from the first;
        none where there is no such size.
        """
        errors = {size: standard_error(self.samples[size]) for size in self.sizes if self.samples.get(size)}
        ranked = sorted(
            (size for size in errors if errors[size] > self.settings.settled), key=lambda size: -errors[size]
        )
        return [ranked[number % len(ranked)] for number in range(count)] if ranked else []

    def refine(self) -> bool:
        """Make sizes that the interpolation missed a part of the grid; whether there is more to measure."""
        before = len(self.sizes)
        row = self._lengths[0]  # kernels go by the number of tokens whatever the cache holds: one row tells
        along = [(n, row) for n in self._all_tokens]
        self._tokens = [n for n, _ in self._grown([(n, row) for n in self._tokens], along)]
        for a, b in pairwise(self._tokens):
            self._examine((n, row) for n in self._doubtful([n for n in self._all_tokens if a < n < b]))
        lengths = set(self._lengths)
        for n in self._coarse:
            column = [(n, m) for m in self._all_lengths]
            lengths.update(m for _, m in self._grown([(n, m) for m in self._lengths], column))
        self._lengths = sorted(lengths)
        for a, b in pairwise(self._lengths):
            if between := [m for m in self._all_lengths if a < m < b]:
                self._examine((n, between[len(between) // 2]) for n in self._coarse)
        return len(self.sizes) > before

    def _examine(self, sizes: Iterable[Size]) -> None:
        self._examined += [size for size in sizes if size not in self._examined]

    @staticmethod
    def _doubtful(sizes: list[int]) -> list[int]:
        """Of the sizes in a gap: those just past a kernel's block, and the middle."""
        past = [n for n in sizes if n > 1 and n % KERNEL_BLOCK == 1]
        return sorted({*past, *sizes[len(sizes) // 2 : len(sizes) // 2 + 1]})

    def _grown(self, chosen: list[Size], along: list[Size]) -> list[Size]:
        """The chosen sizes of a row or column and, one after the other, the examined ones that interpolation between them
        misses most.
        """
        chosen = sorted(chosen)
        axis = 0 if len({m for _, m in along}) == 1 else 1
        while True:
            known = [size for size in along if size in self._examined and size not in chosen]
            known = [size for size in known if self.samples.get(size)]
            missed = {size: excess for size in known if (excess := self._excess(size, chosen, axis)) > 0}
            if not missed:
                return chosen
            chosen = sorted([*chosen, max(missed, key=lambda size: missed[size])])

    def _excess(self, size: Size, chosen: list[Size], axis: int) -> float:
        """How much further than tolerance and noise explain a size lies from the line between its neighbours."""
        at = [place[axis] for place in chosen]
        above = int(np.searchsorted(at, size[axis]))
        around = [self.samples[place] for place in chosen[above - 1 : above + 1]]
        measured = float(np.median(self.samples[size]))
        predicted = float(np.interp(size[axis], at[above - 1 : above + 1], [float(np.median(s)) for s in around]))
        noise = np.hypot(standard_error(self.samples[size]), max(standard_error(samples) for samples in around))
        return abs(predicted / measured - 1) - max(self.settings.tolerance, 2 * float(noise))

    def surface(self) -> Surface:
        """What was measured, priced by the model that does it best."""

        def points(sizes: Iterable[Size]) -> list[Point]:
            return [Point(tokens=n, kv_length=m, samples_ms=self.samples[n, m]) for n, m in sorted(sizes)]

        grid = {(n, m) for n in self._tokens for m in self._lengths}
        examined = {size for size in self._examined if size not in grid}
        return Surface(
            points=points(grid), examined=points(examined), held_out=points(self._held_out)
        ).with_best_model()


Sample = tuple[Grid, Size, float]


@dataclass(eq=False)
class Block:
    """Samples taken together, and the reference step on either side of them, in milliseconds."""

    samples: list[Sample] = field(default_factory=list)
    references: list[float] = field(default_factory=list)


Job = Callable[[Block], None]
"""A round, or plain steps in a row: adds its samples to the block."""


class Sampler:
    """Measures the surfaces of a target and of several drafts together. The target's are measured once, whoever drafts.

    Every round is a verification, a draft's first forward behind it, and levels behind that, as in decoding; what no
    surface lacks is run all the same, small and untimed. Drafts take turns in random order, and sizes come in random order,
    so that neither a warm cache nor a drifting clock favours one.
    """

    def __init__(
        self, benches: Sequence[Bench], settings: ProfileSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.benches, self.settings, self._clock = benches, settings, clock
        self._random = random.Random(settings.seed)
        lengths = settings.kv_lengths

        def grid() -> Grid:
            return Grid(settings.tokens, settings.coarse_tokens, lengths, settings.held_out, settings)

        self.decode = Grid((1,), (1,), lengths, [(1, m) for m in settings.held_out_kv_lengths], settings)
        self.verify = grid()
        self.draft_firsts = [grid() for _ in benches]
        self.draft_levels = [grid() for _ in benches]
        self.remeasured_samples = 0
        self.drifted_samples = 0
        self._deadline = 0.0
        self._warm: set[tuple[int, Size]] = set()
        self._references: list[float] = []

    @property
    def grids(self) -> list[Grid]:
        return [self.decode, self.verify, *self.draft_firsts, *self.draft_levels]

    def run(self, report: Callable[[float], None] = lambda share: None) -> None:
        """Measure until the surfaces are good enough or the time is over. ``report`` is given the share done, 0 to 1."""
        started, limit = self._clock(), self.settings.time_limit_s
        self._deadline = started + limit

        def tell() -> None:
            report(min(1.0, (self._clock() - started) / limit))

        while True:
            # No stage may take all of the time: a coarse grid, however well measured, is coarse.
            self._measure(min(self._deadline, self._clock() + limit / 4), tell)
            if self._clock() >= self._deadline or not any([grid.refine() for grid in self.grids]):
                break
        self._measure(self._deadline, tell)
        report(1.0)

    def _measure(self, until: float, tell: Callable[[], None]) -> None:
        """Samples for every size that lacks some: the fewest in any case, enough if there is time."""
        blocks: list[Block] = []
        for attempt in range(1 + self.settings.retries):
            while jobs := self._jobs(at_least=self._clock() >= until):
                for first in range(0, len(jobs), BLOCK_JOBS):
                    blocks.append(self._run_block(jobs[first : first + BLOCK_JOBS]))
                    tell()
            drifted = [block for block in blocks if self._has_drifted(block)]
            if not drifted:
                return
            count = sum(len(block.samples) for block in drifted)
            if attempt == self.settings.retries or self._clock() >= self._deadline:
                self.drifted_samples += count
                return
            self.remeasured_samples += count
            for block in drifted:
                for grid, size, ms in block.samples:
                    grid.samples[size].remove(ms)
            blocks = [block for block in blocks if block not in drifted]

    def _has_drifted(self, block: Block) -> bool:
        """Whether a reference beside it was off by more than allowed, and by more than references scatter anyway."""
        usual = float(np.median(self._references))
        scatter = 1.4826 * float(np.median(np.abs(np.array(self._references) - usual)))
        allowed = max(self.settings.max_drift * usual, 3 * scatter)
        return any(abs(reference - usual) > allowed for reference in block.references)

    # ---------------------------------------------------------------------------------------------------------- blocks

    def _jobs(self, *, at_least: bool) -> list[Job]:
        """A sweep, in random order: one sample of each size that lacks some."""

        def queue(sizes: list[Size]) -> deque[Size]:
            self._random.shuffle(sizes)
            return deque(sizes)

        verify = self.verify.wanted(at_least=at_least)
        draft_firsts, draft_levels = (
            [queue(grid.wanted(at_least=at_least)) for grid in grids]
            for grids in (self.draft_firsts, self.draft_levels)
        )
        rounds = [
            number
            for number, (draft_first, draft_level) in enumerate(zip(draft_firsts, draft_levels, strict=True))
            for _ in range(max(len(draft_first), -(-len(draft_level) // LEVELS_OF_ROUND)))
        ]
        rounds += [number % len(self.benches) for number in range(len(verify) - len(rounds))]
        # Most of decoding is verification: what rounds of drafts have to spare goes where it is not settled.
        verifications = queue(verify + self.verify.unsettled(len(rounds) - len(verify)))
        jobs: list[Job] = [partial(self._run_plain, kv_length=m) for _, m in self.decode.wanted(at_least=at_least)]
        jobs += [
            partial(
                self._run_round,
                number=number,
                verify=verifications,
                draft_first=draft_firsts[number],
                draft_level=draft_levels[number],
            )
            for number in rounds
        ]
        self._random.shuffle(jobs)
        return jobs

    def _run_block(self, jobs: list[Job]) -> Block:
        block = Block()
        block.references.append(self._reference_ms())
        for job in jobs:
            job(block)
        block.references.append(self._reference_ms())
        self._references += block.references
        for grid, size, ms in block.samples:
            grid.samples.setdefault(size, []).append(ms)
        return block

    def _reference_ms(self) -> float:
        return float(np.median(plain_steps_ms(self.benches[0], self.settings.kv_lengths[0])))

    def _run_plain(self, block: Block, kv_length: int) -> None:
        block.samples += [(self.decode, (1, kv_length), ms) for ms in plain_steps_ms(self.benches[0], kv_length)]

    def _run_round(
        self, block: Block, number: int, verify: deque[Size], draft_first: deque[Size], draft_level: deque[Size]
    ) -> None:
        bench = self.benches[number]
        self._time(block, self.verify, bench.verify_ms, verify)
        self._time(block, self.draft_firsts[number], bench.draft_first_ms, draft_first)
        for _ in range(max(1, min(len(draft_level), LEVELS_OF_ROUND))):
            self._time(block, self.draft_levels[number], bench.draft_level_ms, draft_level)

    def _time(self, block: Block, grid: Grid, time_ms: Callable[[int, int], float], queue: deque[Size]) -> None:
        """A sample of the next size; the first time that a size is seen prepares kernels for it and does not count."""
        if not queue:
            time_ms(self.settings.tokens[0], self.settings.kv_lengths[0])
            return
        size = queue.popleft()
        ms = time_ms(*size)
        if (id(grid), size) in self._warm:
            block.samples.append((grid, size, ms))
        self._warm.add((id(grid), size))
