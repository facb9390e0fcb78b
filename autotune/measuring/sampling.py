"""Times the steps of a target and its drafts in the order of decoding.

A plain step is timed before and after every job. Samples are kept as multiples of the plain steps before and after
them, because another process, throttling or another clock slow both down equally; the median of all plain steps turns
them into milliseconds.

A step is faster after steps of its own kind, which leave weights and code in the processor's caches: plain steps become
up to 15 % faster within ten of them, a draft's forwards are 12 % slower after a plain step, and verifications become 4
% slower from the second round after plain steps to the sixth. So rounds are timed in long rows, plain steps after plain
steps, and the plain steps that samples are multiples of always after a round. A verification also depends on the draft
that ran before it.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import numpy as np

from autotune.cost.joint_fit import FIRST, LEVEL, PLAIN_STEPS, TARGET, VERIFICATIONS, Posterior, SurfaceSteps
from autotune.cost.surface import Observation, Point, Surface, robust_deviation
from autotune.documents.subnet import Subnet
from autotune.measuring.jobs import (
    ITERATIONS,
    SLOW_STEP_MS,
    Bench,
    Job,
    JobLog,
    Key,
    Observations,
    Samples,
    TimedJob,
    TimedRound,
    observe,
    plain_steps_ms,
)
from autotune.measuring.settings import CostSettings, Size

LEVELS_PER_ROUND = 4  # draft levels after the draft's first forward
ROUNDS_IN_A_ROW = 8  # timed, after untimed ones
SLOW_ROUNDS_IN_A_ROW = 2  # of models with slow steps
UNTIMED_ROUNDS = 2
REFERENCE_STEPS = 3  # of which the last is the reference of the samples next to it
UNTIMED_TOKENS = 9, 2, 4  # of the verification, the first draft forward and the levels of untimed rounds
JOBS_PER_BLOCK = 12
WARM_UPS = 2  # untimed rounds of a draft after rounds of another
DISTURBANCE = 0.15  # relative difference of the plain steps before and after a job
DECODE, VERIFY, DRAFT_FIRST, DRAFT_LEVEL = "decode", "verify", "draft_first", "draft_level"
# Steps of a typical round, and the number of tokens over which they become rarer by a factor of e: what an error of a
# price costs.
USE = {DECODE: (1.0, 1.0), VERIFY: (1.0, 24.0), DRAFT_FIRST: (1.0, 8.0), DRAFT_LEVEL: (3.0, 12.0)}
LEAST_USE = 0.05  # of sizes that are rare
VERIFIED_IN_A_SWEEP = 16  # sizes
DRAFTS_OF_A_SWEEP = 3  # one of so many drafts is in a sweep


class Sampler:
    """Measures the surfaces of a target and of several drafts; all drafts share the target's surfaces.

    Steps run in the order of decoding: every round is a verification, then a draft's first forward, then draft levels.
    The rounds of one draft follow each other, as in decoding, where its weights are still in the processor's caches
    from the round before. Drafts and sizes come in random order, so that a drifting clock favors none.

    The first samples are of a coarse grid. The next ones go where they decide: to sizes whose error, by the joint fit
    (``autotune.cost.joint_fit``), changes the time of a typical round most, and to those that contradict the fit.

    Args:
        subnets: of each bench, its network and subnet: subnets of one network share what they can. Default: all are
            different networks.
        log: keeps timed jobs, a block at a time, and holds those of an interrupted run.
        clock: seconds.
    """

    def __init__(
        self,
        benches: Sequence[Bench],
        settings: CostSettings,
        *,
        subnets: Sequence[tuple[int, Subnet]] | None = None,
        log: JobLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.benches, self.settings, self._log, self._clock = benches, settings, log, clock
        self._random = random.Random(settings.seed)
        subnets = subnets or [(number, Subnet()) for number in range(len(benches))]
        tokens, lengths = settings.tokens, settings.kv_lengths
        ends = sorted({lengths[0], lengths[-1]})
        self.sizes: dict[str, list[Size]] = {
            DECODE: [(1, m) for m in lengths],
            VERIFY: list(itertools.product(settings.verified_tokens, lengths)),
        }
        """All sizes of every part, which are the points of its surface."""
        coarse = list(itertools.product(settings.coarse_tokens, ends))
        self.coarse: dict[str, list[Size]] = {DECODE: [(1, m) for m in ends], VERIFY: coarse}
        """Sizes that are measured first: of a network's further subnets a few, which tell how far they differ from the
        first.
        """
        self.least: dict[str, list[Size]] = {DECODE: self.coarse[DECODE][:1], VERIFY: coarse[:: len(ends)]}
        """Sizes that are measured even past the deadline: no network is without a sample."""
        self._members: dict[str, tuple[int, int, int, Subnet]] = {
            DECODE: (TARGET, PLAIN_STEPS, PLAIN_STEPS, Subnet()),
            VERIFY: (TARGET, VERIFICATIONS, VERIFICATIONS, Subnet()),
        }
        for number, (network, subnet) in enumerate(subnets):
            is_first = network not in [other for other, _ in subnets[:number]]
            few = settings.coarse_tokens[:: max(1, len(settings.coarse_tokens) // 2)]
            for part, kind in ((_draft_first(number), FIRST), (_draft_level(number), LEVEL)):
                self.sizes[part] = list(itertools.product(tokens, lengths))
                some = list(zip(few, itertools.cycle(ends), strict=False))
                self.coarse[part] = coarse if is_first else some
                self.least[part] = some if is_first else []
                self._members[part] = kind, network, number, subnet
        self.samples: dict[str, dict[Size, list[float]]] = {part: {} for part in self.sizes}
        """In plain steps."""
        self.jobs: list[TimedJob] = []
        self._warm: set[tuple[str, Size]] = set()
        self._latest_draft: int | None = None
        self._latest_plain_ms = 0.0
        self._untimed = _usual_round(settings)
        self._add([] if log is None else log.jobs)

    # -------- results

    @property
    def plain_ms(self) -> float:
        """A plain step at the shortest KV length, as it usually is between other jobs."""
        return float(np.median([ms for job in self.jobs for ms in job.plain_ms]))

    def surfaces(self, observations: Observations | None = None) -> dict[str, Surface]:
        """The surface of every part, in milliseconds, by ``observations`` (None: all that there are)."""
        by_size = (observations or self.observations()).by_size
        return dict(zip(self.sizes, self._posterior(by_size, self.plain_ms).surfaces(), strict=True))

    def observations(self, iterations: int = ITERATIONS) -> Observations:
        """Latencies by the samples, in plain steps."""
        return observe(self.jobs, self._predict, verify=VERIFY, iterations=iterations)

    def _predict(self, by_size: dict[Key, Observation]) -> dict[Key, float]:
        """Prices of all sizes by the joint fit of observations."""
        logs = self._posterior(by_size).log_ms()
        return {
            (part, size): math.exp(log)
            for (part, sizes), of_part in zip(self.sizes.items(), logs, strict=True)
            for size, log in zip(sizes, of_part.tolist(), strict=True)
        }

    def _posterior(self, by_size: Mapping[Key, Observation], unit_ms: float = 1.0) -> Posterior:
        """The joint fit of observations, which are in plain steps of ``unit_ms``."""

        def point(part: str, size: Size) -> Point:
            observed, samples = by_size.get((part, size)), self.samples[part].get(size, [])
            return Point(
                tokens=size[0],
                kv_length=size[1],
                samples_ms=[unit_ms * sample for sample in samples],
                observed=observed and Observation(ms=unit_ms * observed.ms, error=observed.error),
            )

        return Posterior(
            [
                SurfaceSteps(*self._members[part], [point(part, size) for size in sizes])
                for part, sizes in self.sizes.items()
            ]
        )

    @property
    def disturbed_samples(self) -> int:
        """Samples during which the device's speed changed by more than it usually does from one plain step to
        the next.
        """
        changes = [math.log(job.plain_ms[1] / job.plain_ms[0]) for job in self.jobs]
        allowed = max(math.log(1 + DISTURBANCE), 3 * robust_deviation(changes)) if changes else 0.0
        return sum(len(job.samples) for job, change in zip(self.jobs, changes, strict=True) if abs(change) > allowed)

    # -------- measurement

    def run(self, deadline: float, report: Callable[[float], None] = lambda share: None) -> None:
        """Measure until the prices are as precise as the settings ask, or ``deadline`` of the clock is reached.

        The least sizes get a sample in any case, then the coarse ones ``settings.least_samples``. ``report`` is called
        with the share of the time that has passed.
        """
        started = self._clock()

        def measure(wanted: Mapping[str, Sequence[Size]], until: float) -> None:
            jobs = self._sweep(wanted)
            for first in range(0, len(jobs), JOBS_PER_BLOCK):
                self._run_block(jobs[first : first + JOBS_PER_BLOCK], until)
                report(min(1.0, (self._clock() - started) / max(deadline - started, 1e-9)))
                if self._clock() >= until:
                    return

        while lacking := self._lacking(self.least, 1):
            measure(lacking, math.inf)
        while self._clock() < deadline and (lacking := self._lacking(self.coarse, self.settings.least_samples)):
            measure(lacking, deadline)
        while self._clock() < deadline and (wanted := self._decisive()):
            measure(wanted, deadline)
        report(1.0)

    def _lacking(self, sizes: Mapping[str, Sequence[Size]], count: int) -> dict[str, list[Size]]:
        """The sizes that have fewer than ``count`` samples."""
        lacking = {
            part: [size for size in of_part if len(self.samples[part].get(size, ())) < count]
            for part, of_part in sizes.items()
        }
        return {part: of_part for part, of_part in lacking.items() if of_part}

    def _decisive(self) -> dict[str, list[Size]]:
        """The sizes whose next samples change the time of a typical round most, and those that contradict the joint
        fit; none where all prices are precise enough.
        """
        posterior = self._posterior(self.observations(iterations=1).by_size)
        ranked: dict[str, list[Size]] = {}
        largest: dict[str, float] = {}
        for (part, sizes), logs, deviations, contradictions in zip(
            self.sizes.items(), posterior.log_ms(), posterior.deviations(), posterior.contradictions(), strict=True
        ):
            steps, scale = USE[part.partition(" ")[0]]
            tokens = np.array([n for n, _ in sizes])
            counts = np.array([len(self.samples[part].get(size, ())) for size in sizes])
            use = steps * np.maximum(np.exp(-tokens / scale), LEAST_USE) * np.exp(logs)
            # What contradicts the fit is measured again before it is believed.
            errors = use * np.maximum(deviations, contradictions) * (counts < self.settings.max_samples)
            largest[part] = float(errors.max())
            # A sample tells about other KV lengths too: each number of tokens once, at the length that was sampled
            # least.
            order = np.lexsort((counts, -np.round(np.log(np.maximum(errors, 1e-12)), 1)))
            by_tokens = {sizes[row][0]: row for row in reversed(order.tolist()) if errors[row] > 0}
            ranked[part] = [sizes[row] for row in order.tolist() if row in by_tokens.values()]
        if max(largest.values()) <= self.settings.target_error:
            return {}
        # Rounds of a few drafts, so that many of one follow each other.
        drafts = sorted(
            range(len(self.benches)), key=lambda draft: -max(largest[_draft_first(draft)], largest[_draft_level(draft)])
        )
        wanted = {DECODE: ranked[DECODE][:1], VERIFY: ranked[VERIFY][:VERIFIED_IN_A_SWEEP]}
        for draft in drafts[: math.ceil(len(drafts) / DRAFTS_OF_A_SWEEP)]:
            wanted[_draft_first(draft)] = ranked[_draft_first(draft)][: ROUNDS_IN_A_ROW // 2]
            wanted[_draft_level(draft)] = ranked[_draft_level(draft)][: ROUNDS_IN_A_ROW // 2 * LEVELS_PER_ROUND]
        return wanted

    def _sweep(self, wanted: Mapping[str, Sequence[Size]]) -> list[Job]:
        """One sample of every wanted size, in random order. The steps of a round have similar KV lengths and numbers of
        tokens, as in decoding, where the processor's caches hold keys, values and weights from the step before.
        """
        rounds: list[tuple[int, Size | None, tuple[Size | None, ...]]] = []
        for draft in range(len(self.benches)):
            draft_firsts, levels = (sorted(wanted.get(part, ())) for part in (_draft_first(draft), _draft_level(draft)))
            for kv_length in sorted({size[1] for size in (*draft_firsts, *levels)}):
                sizes = [size for size in levels if size[1] == kv_length]
                chunks = [tuple(sizes[i : i + LEVELS_PER_ROUND]) for i in range(0, len(sizes), LEVELS_PER_ROUND)]
                firsts = [size for size in draft_firsts if size[1] == kv_length]
                rounds += [(draft, size, chunk or (None,)) for size, chunk in zip_longest(firsts, chunks)]
        verify = list(wanted.get(VERIFY, ()))
        # Verification is most of decoding, so rounds that need no size of it sample some once more.
        pool = verify or self.coarse[VERIFY]
        verify += self._random.choices(pool, k=max(0, len(rounds) - len(verify)))
        drafts = sorted({draft for draft, *_ in rounds}) or range(len(self.benches))
        rounds += [(drafts[number % len(drafts)], None, (None,)) for number in range(len(verify) - len(rounds))]
        rounds.sort(
            key=lambda sizes: max((size[::-1] for size in (sizes[1], *sizes[2]) if size is not None), default=(0, 0))
        )
        decode = wanted.get(DECODE) or self.coarse[DECODE][:1]  # every speedup is a multiple of plain steps
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
            groups.append([Job(draft, tuple(own_rounds[i : i + in_a_row])) for i in firsts_of_jobs])
        # Among the rounds, so that the plain steps next to them are like the plain steps before and after rounds.
        for _, kv_length in decode:
            self._random.choice(groups).append(Job(kv_length=kv_length))
        for group in groups:
            self._random.shuffle(group)
        self._random.shuffle(groups)
        return list(itertools.chain(*groups))

    # -------- jobs

    def _run_block(self, jobs: list[Job], until: float) -> None:
        """Run jobs between plain steps; jobs and rounds that would begin after ``until`` are left out."""
        timed: list[TimedJob] = []
        before = self._plain_step_after_a_round()
        for job in jobs:
            if job.draft is not None and job.draft != self._latest_draft:
                before = self._begin_draft(job.draft)
            samples = self._samples(job, until)
            after = self._plain_step_after_a_round() if job.draft is None else self._plain_step_ms()
            timed.append(TimedJob(plain_ms=(before, after), samples=samples, draft=job.draft))
            before = after
            if self._clock() >= until:
                break
        self._add(timed)
        if self._log is not None:
            self._log.append(timed)

    def _add(self, jobs: Sequence[TimedJob]) -> None:
        self.jobs += jobs
        for job in jobs:
            for part, tokens, kv_length, ms in job.samples:
                self.samples[part].setdefault((tokens, kv_length), []).append(ms / job.reference_ms)

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
        if job.draft is None:
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
        """Take a sample, or run a small step untimed. The first sample of a size in this process is discarded, because
        it prepares the kernels.
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
    return f"{DRAFT_FIRST} {draft}"


def _draft_level(draft: int) -> str:
    return f"{DRAFT_LEVEL} {draft}"
