"""Times the steps of a target and its drafts in the order of decoding. A ``Bench`` runs and times the single steps.

Samples are taken in blocks. A reference step is timed before and after each block; if it was slower or faster than usual, the
device was throttled or shared during the block, and the block is measured again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

import numpy as np

from autotune.cost.adaptive_grid import AdaptiveGrid, robust_deviation
from autotune.cost.settings import ProfileSettings, Size

LEVELS_PER_ROUND = 3  # draft levels after the draft's first forward
STEPS_IN_A_ROW = 4  # plain steps
JOBS_PER_BLOCK = 16  # about half a second between two references


class Bench(Protocol):
    """Times single steps of a target and one draft, in milliseconds."""

    def decode_ms(self, kv_length: int) -> float:
        """A plain step."""

    def verify_ms(self, tokens: int, kv_length: int) -> float:
        """A verification."""

    def draft_first_ms(self, tokens: int, kv_length: int) -> float:
        """The draft's first forward of a round."""

    def draft_level_ms(self, tokens: int, kv_length: int) -> float:
        """Another draft level."""


def plain_steps_ms(bench: Bench, kv_length: int) -> list[float]:
    """Times of consecutive plain steps, as in plain decoding, without the first, which runs after something else."""
    return [bench.decode_ms(kv_length) for _ in range(STEPS_IN_A_ROW)][1:]


@dataclass(frozen=True)
class PlainSteps:
    """A job: consecutive plain steps."""

    kv_length: int


@dataclass(frozen=True)
class Round:
    """A job: verification, the draft's first forward, draft levels. Without a size, a step is run small and untimed."""

    draft: int
    verify: Size | None
    draft_first: Size | None
    draft_levels: tuple[Size | None, ...]


Job = PlainSteps | Round


@dataclass(eq=False)
class Block:
    """Samples (grid, size, ms) taken together, and the reference steps before and after them, in milliseconds."""

    samples: list[tuple[AdaptiveGrid, Size, float]] = field(default_factory=list)
    references: list[float] = field(default_factory=list)


class Sampler:
    """Measures the surfaces of a target and of several drafts; all drafts share those of the target.

    Steps run in the order of decoding: every round is a verification, then a draft's first forward, then draft levels. Drafts
    and sizes come in random order, so that neither a warm cache nor a drifting clock favors one.
    """

    def __init__(
        self, benches: Sequence[Bench], settings: ProfileSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.benches, self.settings, self._clock = benches, settings, clock
        self._random = random.Random(settings.seed)

        def grid() -> AdaptiveGrid:
            return AdaptiveGrid(
                settings.tokens, settings.coarse_tokens, settings.kv_lengths, settings.held_out, settings
            )

        held_out = [(1, kv_length) for kv_length in settings.held_out_kv_lengths]
        self.decode = AdaptiveGrid((1,), (1,), settings.kv_lengths, held_out, settings)
        self.verify = grid()
        self.draft_firsts = [grid() for _ in benches]
        self.draft_levels = [grid() for _ in benches]
        self.remeasured_samples = 0
        self.drifted_samples = 0
        self._deadline = 0.0
        self._warm: set[tuple[AdaptiveGrid, Size]] = set()
        self._references: list[float] = []

    @property
    def grids(self) -> list[AdaptiveGrid]:
        return [self.decode, self.verify, *self.draft_firsts, *self.draft_levels]

    def run(self, report: Callable[[float], None] = lambda share: None) -> None:
        """Measure until the surfaces are accurate or the time limit is reached. ``report`` is called with the share done."""
        started, limit = self._clock(), self.settings.time_limit_s
        self._deadline = started + limit

        def report_time() -> None:
            report(min(1.0, (self._clock() - started) / limit))

        while True:
            # A stage gets a quarter of the time, because precise samples do not make a coarse grid accurate.
            self._measure(min(self._deadline, self._clock() + limit / 4), report_time)
            if self._clock() >= self._deadline or not any([grid.refine() for grid in self.grids]):
                break
        self._measure(self._deadline, report_time)
        report(1.0)

    def _measure(self, until: float, report: Callable[[], None]) -> None:
        """Sample every size: at least the minimum number of times, and more if needed and there is time."""
        blocks: list[Block] = []
        for attempt in range(1 + self.settings.retries):
            while jobs := self._sweep(minimum_only=self._clock() >= until):
                for first in range(0, len(jobs), JOBS_PER_BLOCK):
                    blocks.append(self._run_block(jobs[first : first + JOBS_PER_BLOCK]))
                    report()
            drifted = [block for block in blocks if self._has_drifted(block)]
            count = sum(len(block.samples) for block in drifted)
            if attempt == self.settings.retries or self._clock() >= self._deadline:
                self.drifted_samples += count
                return
            self.remeasured_samples += count
            for block in drifted:
                for grid, size, ms in block.samples:
                    grid.samples[size].remove(ms)
            if not drifted:
                return
            blocks = [block for block in blocks if block not in drifted]

    def _has_drifted(self, block: Block) -> bool:
        """Whether a reference of the block is off by more than allowed, and by more than references usually vary."""
        usual = float(np.median(self._references))
        allowed = max(self.settings.max_drift * usual, 3 * robust_deviation(self._references))
        return any(abs(reference - usual) > allowed for reference in block.references)

    # ---------------------------------------------------------------------------------------------------------- jobs

    def _sweep(self, *, minimum_only: bool) -> list[Job]:
        """One sample of every size that needs more, in random order."""

        def shuffled(sizes: list[Size]) -> list[Size]:
            self._random.shuffle(sizes)
            return sizes

        rounds: list[tuple[int, Size | None, tuple[Size | None, ...]]] = []
        for draft, (first_grid, level_grid) in enumerate(zip(self.draft_firsts, self.draft_levels, strict=True)):
            draft_firsts = shuffled(first_grid.undersampled(minimum_only=minimum_only))
            levels = shuffled(level_grid.undersampled(minimum_only=minimum_only))
            groups = [tuple(levels[i : i + LEVELS_PER_ROUND]) for i in range(0, len(levels), LEVELS_PER_ROUND)]
            rounds += [(draft, size, group or (None,)) for size, group in zip_longest(draft_firsts, groups)]
        verify = self.verify.undersampled(minimum_only=minimum_only)
        # Verification is most of decoding, so rounds that need no size of it sample the noisiest ones once more.
        verify += self.verify.noisiest(len(rounds) - len(verify))
        rounds += [(number % len(self.benches), None, (None,)) for number in range(len(verify) - len(rounds))]
        jobs: list[Job] = [PlainSteps(m) for _, m in self.decode.undersampled(minimum_only=minimum_only)]
        jobs += [
            Round(draft, size, draft_first, draft_levels)
            for size, (draft, draft_first, draft_levels) in zip_longest(shuffled(verify), rounds)
        ]
        self._random.shuffle(jobs)
        return jobs

    def _run_block(self, jobs: list[Job]) -> Block:
        block = Block()
        block.references.append(self._reference_ms())
        for job in jobs:
            if isinstance(job, PlainSteps):
                times = plain_steps_ms(self.benches[0], job.kv_length)
                block.samples += [(self.decode, (1, job.kv_length), ms) for ms in times]
            else:
                self._run_round(job, block)
        block.references.append(self._reference_ms())
        self._references += block.references
        for grid, size, ms in block.samples:
            grid.samples.setdefault(size, []).append(ms)
        return block

    def _reference_ms(self) -> float:
        return float(np.median(plain_steps_ms(self.benches[0], self.settings.kv_lengths[0])))

    def _run_round(self, job: Round, block: Block) -> None:
        bench = self.benches[job.draft]
        self._time(block, self.verify, bench.verify_ms, job.verify)
        self._time(block, self.draft_firsts[job.draft], bench.draft_first_ms, job.draft_first)
        for size in job.draft_levels:
            self._time(block, self.draft_levels[job.draft], bench.draft_level_ms, size)

    def _time(self, block: Block, grid: AdaptiveGrid, time_ms: Callable[[int, int], float], size: Size | None) -> None:
        """Take a sample. The first one of a size is discarded, because it prepares the kernels."""
        tokens, kv_length = size or (self.settings.tokens[0], self.settings.kv_lengths[0])
        ms = time_ms(tokens, kv_length)
        if size is not None:
            if (grid, size) in self._warm:
                block.samples.append((grid, size, ms))
            self._warm.add((grid, size))
