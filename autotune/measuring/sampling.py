"""Times the steps of a target and its drafts in the order of decoding.

A plain step is timed before and after every job. Samples are kept as multiples of the plain steps before and after them, because
another process, throttling or another clock slow both down equally; the median of all plain steps turns them into milliseconds.

A step is faster after steps of its own kind, which leave weights and code in the processor's caches: plain steps become up to
15 % faster within ten of them, a draft's forwards are 12 % slower after a plain step, and verifications become 4 % slower from
the second round after plain steps to the sixth. So rounds are timed in long rows, plain steps after plain steps, and the plain
steps that samples are multiples of always after a round. A verification also depends on the draft that ran before it.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest

import numpy as np

from autotune.cost.surface import Surface, robust_deviation
from autotune.cost.table import EVERY_ROW
from autotune.measuring.adaptive_grid import AdaptiveGrid
from autotune.measuring.block_log import Block, BlockLog, Samples, TimedJob
from autotune.measuring.jobs import SLOW_STEP_MS, Bench, Job, PlainSteps, Rounds, TimedRound, plain_steps_ms
from autotune.measuring.settings import CostSettings, Size

LEVELS_PER_ROUND = 4  # draft levels after the draft's first forward
ROUNDS_IN_A_ROW, SLOW_ROUNDS_IN_A_ROW = 8, 2  # timed, after untimed ones; of models with slow steps
UNTIMED_ROUNDS = 2
REFERENCE_STEPS = 3  # of which the last is the reference of the samples next to it
UNTIMED_TOKENS = 9, 2, 4  # of the verification, the first draft forward and the levels of untimed rounds
JOBS_PER_BLOCK = 12
WARM_UPS = 2  # untimed rounds of a draft after rounds of another
LEAST_VERIFICATIONS = 8  # of a draft, and LEAST_AT_A_SIZE of a size, that distinguish it from the other drafts
LEAST_AT_A_SIZE = 4
DISTURBANCE = 0.15  # relative difference of the plain steps before and after a job
DECODE, VERIFY = "decode", "verify"


class Sampler:
    """Measures the surfaces of a target and of several drafts; all drafts share the target's surfaces.

    Steps run in the order of decoding: every round is a verification, then a draft's first forward, then draft levels. The
    rounds of one draft follow each other, as in decoding, where its weights are still in the processor's caches from the
    round before. Drafts and sizes come in random order, so that a drifting clock favors none.

    Args:
        log: keeps every block of samples as soon as it is complete, and holds the blocks of an interrupted run.
        clock: seconds.
    """

    def __init__(
        self,
        benches: Sequence[Bench],
        settings: CostSettings,
        *,
        log: BlockLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.benches, self.settings, self._log, self._clock = benches, settings, log, clock
        self._random = random.Random(settings.seed)

        sizes = settings.coarse_tokens, settings.kv_lengths, settings.held_out
        held_out = [(1, kv_length) for kv_length in settings.held_out_kv_lengths]
        self.decode = AdaptiveGrid((1,), (1,), settings.kv_lengths, held_out, settings)
        every_row = EVERY_ROW if settings.every_row else ()
        self.verify = AdaptiveGrid(settings.verified_tokens, *sizes, settings, always_examined=every_row)
        self.draft_firsts = [AdaptiveGrid(settings.tokens, *sizes, settings) for _ in benches]
        self.draft_levels = [AdaptiveGrid(settings.tokens, *sizes, settings) for _ in benches]
        self.grids = {DECODE: self.decode, VERIFY: self.verify}
        for number in range(len(benches)):
            self.grids[_draft_first(number)] = self.draft_firsts[number]
            self.grids[_draft_level(number)] = self.draft_levels[number]
        self.jobs: list[TimedJob] = []
        self._warm: set[tuple[str, Size]] = set()
        self._latest_draft: int | None = None
        self._latest_plain_ms = 0.0
        self._untimed = _usual_round(settings)
        for block in () if log is None else log.blocks:
            self._add(block)

    # ------------------------------------------------------------------------------------------------------- results

    @property
    def plain_ms(self) -> float:
        """A plain step at the shortest KV length, as it usually is between other jobs."""
        return float(np.median([ms for job in self.jobs for ms in job.plain_ms]))

    def surface(self, grid: AdaptiveGrid) -> Surface:
        """The surface of one of the grids, in milliseconds."""
        return grid.surface(self.plain_ms)

    def verify_ratio(self, draft: int) -> float:
        """A verification between rounds of a draft, as a multiple of the surface, which pools all drafts; 1.0 where the samples
        do not distinguish the draft.
        """
        surface, plain_ms = self.surface(self.verify), self.plain_ms
        logs = []
        for job in self.jobs:
            for part, tokens, kv_length, ms in job.samples if job.draft == draft else ():
                if part == VERIFY and len(self.verify.samples[tokens, kv_length]) >= LEAST_AT_A_SIZE:
                    pooled_ms = surface.latency_ms(np.array([tokens], float), np.array([kv_length], float)).item()
                    logs.append(math.log(plain_ms * ms / job.reference_ms / pooled_ms))
        if len(logs) < LEAST_VERIFICATIONS:
            return 1.0
        median = float(np.median(logs))
        is_significant = abs(median) > 2 * robust_deviation(logs) / math.sqrt(len(logs))
        return math.exp(median) if is_significant else 1.0

    @property
    def disturbed_samples(self) -> int:
        """Samples during which the device's speed changed by more than it usually does from one plain step to the next."""
        changes = [math.log(job.plain_ms[1] / job.plain_ms[0]) for job in self.jobs]
        allowed = max(math.log(1 + DISTURBANCE), 3 * robust_deviation(changes)) if changes else 0.0
        return sum(len(job.samples) for job, change in zip(self.jobs, changes, strict=True) if abs(change) > allowed)

    # --------------------------------------------------------------------------------------------------- measurement

    def run(self, deadline: float, report: Callable[[float], None] = lambda share: None) -> None:
        """Measure until the surfaces are accurate or ``deadline`` of the clock is reached.

        The sizes of the coarse grids get ``settings.least_samples`` samples in any case. ``report`` is called with the share
        of the time that has passed.
        """
        started = self._clock()

        def report_time() -> None:
            report(min(1.0, (self._clock() - started) / max(deadline - started, 1e-9)))

        least, minimum = self.settings.least_samples, self.settings.min_samples
        self._measure(math.inf, report_time, lambda grid: grid.lacking(least, grid.coarse_sizes))
        while True:
            self._measure(deadline, report_time, lambda grid: grid.lacking(least))
            self._measure(deadline, report_time, lambda grid: grid.lacking(minimum))
            # A stage gets a quarter of the time, because precise samples do not make a coarse grid accurate.
            stage_end = min(deadline, self._clock() + (deadline - started) / 4)
            self._measure(stage_end, report_time, AdaptiveGrid.noisy)
            if self._clock() >= deadline or not any([grid.refine() for grid in self.grids.values()]):
                break
        self._measure(deadline, report_time, AdaptiveGrid.noisy)
        report(1.0)

    def _measure(self, until: float, report: Callable[[], None], wanted: Callable[[AdaptiveGrid], list[Size]]) -> None:
        """Sample the wanted sizes, one sample each in turn, until none is left or the time has come."""
        while self._clock() < until and (jobs := self._sweep(wanted)):
            for first in range(0, len(jobs), JOBS_PER_BLOCK):
                self._run_block(jobs[first : first + JOBS_PER_BLOCK], until)
                report()
                if self._clock() >= until:
                    return

    def _sweep(self, wanted: Callable[[AdaptiveGrid], list[Size]]) -> list[Job]:
        """One sample of every wanted size, in random order. The steps of a round have similar KV lengths and numbers of tokens,
        as in decoding, where the processor's caches hold keys, values and weights from the step before.
        """

        rounds: list[tuple[int, Size | None, tuple[Size | None, ...]]] = []
        for draft, (first_grid, level_grid) in enumerate(zip(self.draft_firsts, self.draft_levels, strict=True)):
            draft_firsts, levels = sorted(wanted(first_grid)), sorted(wanted(level_grid))
            for kv_length in sorted({size[1] for size in (*draft_firsts, *levels)}):
                sizes = [size for size in levels if size[1] == kv_length]
                chunks = [tuple(sizes[i : i + LEVELS_PER_ROUND]) for i in range(0, len(sizes), LEVELS_PER_ROUND)]
                firsts = [size for size in draft_firsts if size[1] == kv_length]
                rounds += [(draft, size, chunk or (None,)) for size, chunk in zip_longest(firsts, chunks)]
        verify = wanted(self.verify)
        # Verification is most of decoding, so rounds that need no size of it sample the noisiest ones once more.
        verify += self.verify.noisiest(len(rounds) - len(verify))
        rounds += [(number % len(self.benches), None, (None,)) for number in range(len(verify) - len(rounds))]
        rounds.sort(
            key=lambda sizes: max((size[::-1] for size in (sizes[1], *sizes[2]) if size is not None), default=(0, 0))
        )
        decode = wanted(self.decode)
        if rounds:  # every speedup is a multiple of plain steps: their share in a sweep does not fall with its progress
            lacking = self.decode.lacking(self.settings.max_samples, self.decode.coarse_sizes)
            decode += [size for size in lacking if size not in decode]
        of_drafts: list[list[TimedRound]] = [[] for _ in self.benches]
        for size, (draft, draft_first, draft_levels) in zip_longest(
            sorted(verify, key=lambda size: size[::-1]), rounds
        ):
            of_drafts[draft].append(TimedRound(size, draft_first, draft_levels))
        groups: list[list[Job]] = []
        for draft, own_rounds in enumerate(of_drafts):
            self._random.shuffle(own_rounds)
            in_a_row = SLOW_ROUNDS_IN_A_ROW if self._is_slow else ROUNDS_IN_A_ROW
            firsts_of_jobs = range(0, len(own_rounds), in_a_row)
            groups.append([Rounds(draft, tuple(own_rounds[i : i + in_a_row])) for i in firsts_of_jobs])
        # Among the rounds, so that the plain steps next to them are like the plain steps before and after rounds.
        for _, kv_length in decode:
            self._random.choice(groups).append(PlainSteps(kv_length))
        for group in groups:
            self._random.shuffle(group)
        self._random.shuffle(groups)
        return list(itertools.chain(*groups))

    # ---------------------------------------------------------------------------------------------------------- jobs

    def _run_block(self, jobs: list[Job], until: float) -> None:
        """Run jobs between plain steps; jobs and rounds that would begin after ``until`` are left out."""
        timed: list[TimedJob] = []
        before = self._plain_step_after_a_round()
        for job in jobs:
            if not isinstance(job, PlainSteps) and job.draft != self._latest_draft:
                before = self._begin_draft(job.draft)
            samples = self._samples(job, until)
            after = self._plain_step_ms() if isinstance(job, Rounds) else self._plain_step_after_a_round()
            draft = job.draft if isinstance(job, Rounds) else None
            timed.append(TimedJob(plain_ms=(before, after), samples=samples, draft=draft))
            before = after
            if self._clock() >= until:
                break
        block = Block(jobs=timed)
        self._add(block)
        if self._log is not None:
            self._log.append(block)

    def _add(self, block: Block) -> None:
        self.jobs += block.jobs
        for job in block.jobs:
            for part, tokens, kv_length, ms in job.samples:
                self.grids[part].samples.setdefault((tokens, kv_length), []).append(ms / job.reference_ms)

    def _begin_draft(self, draft: int) -> float:
        """Run small rounds of a draft after rounds of another; returns the plain step after them."""
        self._latest_draft = draft
        for _ in range(WARM_UPS - 1):
            self._run_untimed_round(draft)
        return self._plain_step_after_a_round()

    @property
    def _is_slow(self) -> bool:
        return self._latest_plain_ms > SLOW_STEP_MS

    def _run_untimed_round(self, draft: int) -> None:
        if not self._is_slow:
            self._round_samples(draft, self._untimed)

    def _plain_step_after_a_round(self) -> float:
        self._run_untimed_round(self._latest_draft or 0)
        return self._plain_step_ms()

    def _plain_step_ms(self) -> float:
        """The last of ``REFERENCE_STEPS`` plain steps: the first ones depend on the sizes of the round before."""
        for _ in range(REFERENCE_STEPS):
            self._latest_plain_ms = self.benches[0].decode_ms(self.settings.kv_lengths[0])
            if self._is_slow:
                break
        return self._latest_plain_ms

    def _samples(self, job: Job, until: float) -> Samples:
        if isinstance(job, PlainSteps):
            return [(DECODE, 1, job.kv_length, ms) for ms in plain_steps_ms(self.benches[0], job.kv_length)]
        for _ in range(UNTIMED_ROUNDS):
            self._run_untimed_round(job.draft)
        samples: Samples = []
        for of_job in job.rounds:
            samples += self._round_samples(job.draft, of_job)
            if self._clock() >= until:
                break
        return samples

    def _round_samples(self, draft: int, of_job: TimedRound) -> Samples:
        bench = self.benches[draft]
        samples: Samples = []
        timed = (size for size in (of_job.draft_first, *of_job.draft_levels, of_job.verify) if size is not None)
        small = self.settings.tokens[0], next(timed, (1, self.settings.kv_lengths[0]))[1]
        self._time(samples, VERIFY, bench.verify_ms, of_job.verify, small)
        self._time(samples, _draft_first(draft), bench.draft_first_ms, of_job.draft_first, small)
        for size in of_job.draft_levels:
            self._time(samples, _draft_level(draft), bench.draft_level_ms, size, small)
        return samples

    def _time(
        self, samples: Samples, part: str, time_ms: Callable[[int, int], float], size: Size | None, small: Size
    ) -> None:
        """Take a sample, or run a small step untimed. The first sample of a size in this process is discarded, because it
        prepares the kernels.
        """
        tokens, kv_length = size or small
        ms = time_ms(tokens, kv_length)
        if size is not None:
            if (part, size) in self._warm:
                samples.append((part, tokens, kv_length, ms))
            self._warm.add((part, size))


def _usual_round(settings: CostSettings) -> TimedRound:
    def size(tokens: int) -> Size:
        return min(settings.tokens, key=lambda n: abs(n - tokens)), settings.kv_lengths[0]

    verified, draft_first, draft_level = map(size, UNTIMED_TOKENS)
    return TimedRound(verified, draft_first, (draft_level, draft_level))


def _draft_first(draft: int) -> str:
    return f"draft_first {draft}"


def _draft_level(draft: int) -> str:
    return f"draft_level {draft}"
