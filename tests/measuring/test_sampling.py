"""Sampling with a simulated bench and clock, so that no test depends on real times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.cost.surface import Surface
from autotune.cost.table import TOKENS
from autotune.documents.subnet import Subnet
from autotune.measuring.jobs import PLAIN_STEPS, PLAIN_WARM_UPS, JobLog
from autotune.measuring.sampling import (
    LEVELS_PER_ROUND,
    REFERENCE_STEPS,
    ROUNDS_IN_A_ROW,
    UNTIMED_TOKENS,
    WARM_UPS,
    Sampler,
)
from autotune.measuring.settings import COARSE_TOKENS, CostSettings, Size
from tests.sample_documents import DRAFT, cost_table

SETTINGS = CostSettings(kv_lengths=(32, 64, 128), time_limit_s=20.0)
Latency = Callable[[int, int], float]


def straight(n: int, m: int) -> float:
    return 10 + 0.2 * n + 0.01 * m


def draft_level(n: int, m: int) -> float:
    return 2 + 0.05 * n + 0.001 * m


def stepping(n: int, m: int) -> float:
    """A kernel with blocks of 8 tokens: latency jumps at the 9th and the 17th token."""
    return 10 + 0.01 * m + 2.5 * (n > 8) + 3 * (n > 16) + 0.1 * n


class Bench:
    """A simulated target and draft: two latency functions, times ``speed(seconds)`` and noise, on a clock of
    their own.
    """

    def __init__(
        self,
        verify: Latency = straight,
        draft_level: Latency = draft_level,
        *,
        speed: Callable[[float], float] = lambda seconds: 1.0,
        noise: Callable[[], float] = lambda: 0.0,
        log: list[tuple[Any, ...]] | None = None,
        name: str = "draft",
    ) -> None:
        self.verify, self.draft_level, self.speed, self.noise = verify, draft_level, speed, noise
        self.log: list[tuple[Any, ...]] = [] if log is None else log
        self.name = name
        self.seconds = 0.0

    def _take(self, ms: float, *what: Any) -> float:
        self.log.append(what)
        ms *= self.speed(self.seconds) * (1 + self.noise())
        self.seconds += ms / 1e3
        return ms

    def decode_ms(self, kv_length: int) -> float:
        return self._take(self.verify(1, kv_length), "decode", 1, kv_length)

    def verify_ms(self, tokens: int, kv_length: int) -> float:
        return self._take(self.verify(tokens, kv_length), "verify", tokens, kv_length)

    def draft_first_ms(self, tokens: int, kv_length: int) -> float:
        return self._take(1.5 * self.draft_level(tokens, kv_length), "draft_first", tokens, kv_length, self.name)

    def draft_level_ms(self, tokens: int, kv_length: int) -> float:
        return self._take(self.draft_level(tokens, kv_length), "draft_level", tokens, kv_length, self.name)


def measured(*benches: Bench, **changes: Any) -> Sampler:
    """A sampler after its run, on the sum of the benches' clocks."""
    settings = replace(SETTINGS, **changes)
    sampler = Sampler(benches, settings, clock=lambda: sum(bench.seconds for bench in benches))
    sampler.run(settings.time_limit_s)
    return sampler


def samples_ms(sampler: Sampler, part: str) -> dict[Size, list[float]]:
    """All samples of a part, in milliseconds."""
    return {size: [sampler.plain_ms * one for one in samples] for size, samples in sampler.samples[part].items()}


def worst_error(surface: Surface, truth: Latency, tokens: Sequence[int] = TOKENS) -> float:
    """Largest relative error of the prices."""
    lengths = (32, 100, 128)
    prices = surface.latency_ms(np.array(tokens, float), np.array(lengths, float))
    expected = np.array([[truth(n, m) for m in lengths] for n in tokens])
    return float(np.abs(prices / expected - 1).max())


def errors_of(sampler: Sampler, truths: dict[str, Latency], tokens: Sequence[int]) -> list[float]:
    """Relative errors of the prices of parts, in plain steps."""
    surfaces, unit_ms = sampler.surfaces(), straight(1, 32) / sampler.plain_ms
    return [
        abs(unit_ms * float(surfaces[part].latency_ms(np.array([float(n)]), np.array([64.0]))[0, 0]) / truth(n, 64) - 1)
        for part, truth in truths.items()
        for n in tokens
    ]


# -------- where samples go


def uneven(n: int, m: int) -> float:
    """Odd numbers of tokens take longer, as on some CPUs: a tree that knows it has one node more."""
    return straight(n, m) * (1.05 if n % 2 else 1.0)


@pytest.mark.parametrize(
    ("truth", "every_row", "tokens"),
    [(straight, False, TOKENS), (stepping, False, (1, 4, 8, 9, 16, 17, 24, 33)), (uneven, True, (3, 4, 5, 6, 7, 8))],
)
def test_prices_without_noise_are_those_of_the_steps(truth: Latency, every_row: bool, tokens: tuple[int, ...]) -> None:
    """Sizes on both sides of a jump are sampled, because each number of tokens has kernels of its own."""
    surfaces = measured(Bench(truth), every_row=every_row).surfaces()
    assert worst_error(surfaces["verify"], truth, tokens) < 0.03
    assert worst_error(surfaces["draft_level 0"], draft_level, (1, 2, 4, 9, 17, 33)) < 0.03


def test_most_samples_are_of_sizes_that_typical_rounds_have() -> None:
    rng = np.random.default_rng(0)
    sampler = measured(Bench(noise=lambda: 0.1 * float(rng.standard_normal())), time_limit_s=8.0)
    counts = {
        n: sum(len(s) for (k, _), s in sampler.samples["draft_level 0"].items() if k == n) for n in (1, 2, 4, 129)
    }
    assert min(counts[n] for n in (1, 2, 4)) > counts[129] > 0


def test_subnets_of_a_network_tell_about_each_other() -> None:
    """Three subnets with few samples each: half of the heads is not slower than three quarters, and errors are smaller
    than those of subnets that are measured alone.
    """
    shares = (1.0, 0.75, 0.5)
    truths: dict[str, Latency] = {
        f"draft_level {number}": lambda n, m, share=share: draft_level(n, m) * (0.6 + 0.4 * share)
        for number, share in enumerate(shares)
    }
    together, alone = [], []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        benches = [
            Bench(draft_level=truth, noise=lambda rng=rng: 0.1 * float(rng.standard_normal()))
            for truth in truths.values()
        ]
        sampler = measured(*benches, time_limit_s=5.0)
        alone += errors_of(sampler, truths, (1, 2, 4, 9))
        joint = Sampler(benches, SETTINGS, subnets=[(0, Subnet(heads=share)) for share in shares])
        joint._add(sampler.jobs)
        together += errors_of(joint, truths, (1, 2, 4, 9))
        surfaces, sizes = joint.surfaces(), (np.array(TOKENS, float), np.array([32.0, 64.0, 128.0]))
        prices = [surfaces[part].latency_ms(*sizes) for part in truths]
        assert (prices[0] >= prices[1]).all() and (prices[1] >= prices[2]).all()
    assert np.mean(together) < 0.8 * np.mean(alone)


def test_captured_steps_are_priced_at_capture_sizes_and_real_kv_lengths() -> None:
    def step(n: int, m: int) -> float:
        return 5.0 + 0.001 * m + 0.1 * n

    sampler = measured(Bench(step, step), mode="cuda-graph", capture_sizes=(1, 8, 32), kv_lengths=(512, 1024, 2048))
    decode, verify, draft_first, draft_level = sampler.surfaces().values()
    costs = cost_table().drafts[0].model_copy(update={"draft_first": draft_first, "draft_level": draft_level})
    table = cost_table(mode="cuda-graph", capture_sizes=(1, 8, 32), decode=decode, verify=verify, drafts=[costs])
    prices = table.prices(DRAFT, max_tokens=20, max_kv_length=1500)
    assert [prices.decode_ms[kv // 16] for kv in (600, 1016, 1496)] == pytest.approx([5.7, 6.116, 6.596], rel=0.01)
    assert prices.verify_ms[20, 1000 // 16] == pytest.approx(9.2, rel=0.01), "padded to 32 tokens"
    assert prices.draft_level_ms[5, 1000 // 16] == pytest.approx(6.8, rel=0.02)


# -------- rounds


def test_steps_run_in_the_order_of_decoding() -> None:
    """A draft's first forward follows a verification, and its levels follow the first forward."""
    log: list[tuple[Any, ...]] = []
    measured(*(Bench(log=log, name=name) for name in ("a", "b")))
    for before, now in pairwise(log):
        if now[0] == "draft_first":
            assert before[0] == "verify"
        if now[0] == "draft_level":
            assert before[0] in ("draft_first", "draft_level") and before[3] == now[3]
    assert {now[3] for before, now in pairwise(log) if now[0] == "draft_first"} == {"a", "b"}


def test_sizes_and_drafts_come_in_random_order() -> None:
    """The rounds of one draft follow each other, after small steps that warm its weights up."""
    log: list[tuple[Any, ...]] = []
    benches = [Bench(log=log, name=name) for name in "abc"]
    sampler = Sampler(benches, SETTINGS, clock=lambda: 0.0)
    sampler.run(1.0)
    draft_firsts = [entry for entry in log if entry[0] == "draft_first"]
    turns = [(name, list(entries)) for name, entries in groupby(draft_firsts, key=itemgetter(3))]
    turns = [(name, entries) for name, entries in turns if len(entries) > WARM_UPS]
    num_sizes, untimed = 2 * len(COARSE_TOKENS) - 1, (UNTIMED_TOKENS[1], 32)
    for _, entries in turns[6:9]:  # the first ones are of the least sizes
        sizes = [entry[1:3] for entry in entries]
        assert sizes[:WARM_UPS] == [untimed] * WARM_UPS
        visited = [size for size in sizes if size != untimed][:num_sizes]
        assert visited != sorted(visited) and len(set(visited)) == num_sizes, "a sweep visits no size twice"
    names = [name for name, _ in turns]
    assert {tuple(names[i : i + 3]) for i in range(0, 30, 3)} > {("a", "b", "c")} or names[:3] != ["a", "b", "c"]


def test_steps_of_a_round_have_similar_sizes() -> None:
    """So that the caches hold what they hold in decoding."""
    log: list[tuple[Any, ...]] = []
    measured(Bench(log=log))
    rounds: list[list[tuple[Any, ...]]] = []
    for entry in log:
        if entry[0] == "verify":
            rounds.append([])
        if entry[0] != "decode":
            rounds[-1].append(entry)
    lengths = [{entry[2] for entry in steps if entry[0] != "verify"} for steps in rounds]
    assert all(len(one) == 1 for one in lengths)
    verified = [{entry[2] for entry in steps} for steps in rounds]
    assert sum(len(one) == 1 for one in verified) > 0.5 * len(verified)


def test_first_sample_of_a_size_is_discarded() -> None:
    """It prepares kernels: here it is a hundred times slower."""

    class Cold(Bench):
        def __init__(self) -> None:
            super().__init__()
            self.seen: set[tuple[Any, ...]] = set()

        def _take(self, ms: float, *what: Any) -> float:
            is_cold = what[0] != "decode" and what not in self.seen
            self.seen.add(what)
            return super()._take(100 * ms if is_cold else ms, *what)

    sampler = measured(Cold(), least_samples=1, max_samples=1)
    for part, truth in (("verify", straight), ("draft_level 0", draft_level)):
        for (n, m), samples in samples_ms(sampler, part).items():
            assert samples == pytest.approx([truth(n, m)] * len(samples))


# -------- how many samples


def test_noise_asks_for_more_samples_up_to_a_limit() -> None:
    rng = np.random.default_rng(0)
    counts = []
    for deviation in (0.0, 0.1, 0.4):
        sampler = measured(
            Bench(noise=lambda sd=deviation: np.expm1(sd * rng.standard_normal())), target_error=0.01, time_limit_s=60.0
        )
        samples = [len(one) for of_part in sampler.samples.values() for one in of_part.values()]
        counts.append(sum(samples))
        assert max(len(one) for one in sampler.samples["draft_level 0"].values()) <= SETTINGS.max_samples
    assert counts[0] < counts[1] and counts[0] < counts[2]


# -------- the time limit


def test_without_time_the_least_sizes_get_a_sample() -> None:
    rng = np.random.default_rng(0)
    sampler = measured(Bench(stepping, noise=lambda: 0.2 * rng.standard_normal()), time_limit_s=1e-3)
    assert {n for n, _ in sampler.samples["verify"]} == set(COARSE_TOKENS)
    for part in ("draft_first 0", "draft_level 0"):
        assert set(sampler.samples[part]) == set(sampler.least[part]) and len(sampler.least[part]) == 2
    assert all(surface.points for surface in sampler.surfaces().values())


@pytest.mark.parametrize("limit_s", [20.0, 40.0, 80.0])
def test_slow_models_keep_the_time_limit(limit_s: float) -> None:
    """A step takes a tenth of a second, and noise asks for many samples. A round may end after the limit."""
    rng = np.random.default_rng(0)
    bench = Bench(
        lambda n, m: 10 * stepping(n, m) / 1.3,
        lambda n, m: 10 * draft_level(n, m),
        noise=lambda: 0.05 * rng.standard_normal(),
    )
    sampler = measured(bench, time_limit_s=limit_s)
    assert limit_s < bench.seconds < limit_s + 1.0
    assert set(COARSE_TOKENS) <= {n for n, _ in sampler.samples["verify"]}


# -------- contention


def throttled(begin: float, end: float, factor: float) -> Callable[[float], float]:
    return lambda seconds: factor if begin < seconds < end else 1.0


@pytest.mark.parametrize("factor", [0.6, 1.5, 4.0])
def test_a_change_of_speed_moves_no_sample(factor: float) -> None:
    """For two seconds all steps take another time; only jobs during which the speed changes are off, by half of it."""
    sampler = measured(Bench(speed=throttled(1.0, 3.0, factor)))
    for part, truth in (("verify", straight), ("draft_level 0", draft_level)):
        off = [
            ms
            for (n, m), samples in samples_ms(sampler, part).items()
            for ms in samples
            if ms != pytest.approx(truth(n, m))
        ]
        assert len(off) <= 2 * ROUNDS_IN_A_ROW * LEVELS_PER_ROUND, "the jobs at the beginning and at the end"
        surface = sampler.surfaces()[part]
        for n in (1, 2, 4, 9, 33):
            assert surface.latency_ms(np.array([float(n)]), np.array([64.0]))[0, 0] == pytest.approx(
                truth(n, 64), rel=0.03
            )
    assert 0 < sampler.disturbed_samples <= 2 * ROUNDS_IN_A_ROW * (2 + LEVELS_PER_ROUND)


def test_every_job_lies_between_plain_steps() -> None:
    log: list[tuple[Any, ...]] = []
    sampler = measured(Bench(log=log))
    assert sampler.jobs
    for is_plain, steps in groupby(log, key=lambda entry: entry[0] == "decode"):
        kinds = [entry[0] for entry in steps]
        if is_plain:
            assert len(kinds) in (REFERENCE_STEPS, REFERENCE_STEPS + PLAIN_WARM_UPS + PLAIN_STEPS)
        else:
            assert kinds.count("verify") <= 1 + ROUNDS_IN_A_ROW + WARM_UPS, "the plain steps are near"
    assert all(len(job.plain_ms) == 2 for job in sampler.jobs)


class Caches(Bench):
    """Steps are slower after steps of another kind: plain steps for six of them, draft forwards for one round."""

    def __init__(self) -> None:
        super().__init__()
        self.plain_steps_in_a_row, self.is_draft_warm = 0, False

    def _take(self, ms: float, *what: Any) -> float:
        if what[0] == "decode":
            ms *= 1 + 0.15 * max(0, 6 - self.plain_steps_in_a_row) / 6
            self.plain_steps_in_a_row += 1
            self.is_draft_warm = False
        elif what[0] == "verify":
            self.plain_steps_in_a_row = 0
        elif not self.is_draft_warm:
            ms *= 1.12
            self.is_draft_warm = what[0] == "draft_level"
        return super()._take(ms, *what)


def test_steps_have_the_prices_of_decoding_where_caches_matter() -> None:
    """The table holds what plain decoding and consecutive rounds take, not what steps take after steps of
    another kind.
    """
    sampler = measured(Caches())
    plain, level = (samples_ms(sampler, part) for part in ("decode", "draft_level 0"))
    verified = samples_ms(sampler, "verify")
    for ms, truth in (
        (np.median(plain[1, 128]), straight(1, 128)),
        (np.median(level[9, 128]), draft_level(9, 128)),
        (np.median(verified[9, 128]), straight(9, 128)),
    ):
        assert ms == pytest.approx(truth)


def test_verifications_are_told_apart_by_draft() -> None:
    """The surface is the mean over drafts; the ratio of each leads back to its own verifications."""
    rng = np.random.default_rng(0)

    def noise() -> float:
        return float(rng.normal(0, 0.02))

    sampler = measured(Bench(noise=noise), Bench(lambda n, m: 1.08 * straight(n, m), noise=noise))
    ratios = [sampler.observations().verify_ratios[draft][0] for draft in (0, 1)]
    assert 1.04 < ratios[1] / ratios[0] < 1.1, "pooled towards the mean"
    verified = sampler.surfaces()["verify"].latency_ms(np.array([9.0]), np.array([128.0]))[0, 0]
    truth = 1.08 * straight(9, 128) / straight(1, 32)
    assert ratios[1] * verified / sampler.plain_ms == pytest.approx(truth, rel=0.05)


def test_usual_noise_disturbs_no_sample() -> None:
    """If plain steps usually vary by a third, a third is no change of the speed."""
    rng = np.random.default_rng(0)
    sampler = measured(Bench(noise=lambda: 0.3 * float(rng.uniform(-1, 1))))
    assert sampler.disturbed_samples < 0.05 * sum(len(job.samples) for job in sampler.jobs)


# -------- resuming


class Killed(Exception):
    pass


@pytest.mark.parametrize("lives", [1, 5])
def test_an_interrupted_run_continues(tmp_path: Path, lives: int) -> None:
    """No sample that was kept is taken again, however often the run is killed; the machine is slower every time."""
    path = tmp_path / "table.jsonl"
    settings = replace(SETTINGS, max_samples=4)
    benches = [Bench(speed=lambda seconds, life=life: 1.0 + life) for life in range(lives + 1)]
    for life, bench in enumerate(benches):
        log = JobLog(path)
        assert log.is_begun == (life > 0)
        if not log.is_begun:
            log.begin(1)
        num_kept, reports = len(log.jobs), 0

        def kill(share: float) -> None:
            nonlocal reports
            reports += 1
            if reports == 3:
                raise Killed

        sampler = Sampler([bench], settings, log=log, clock=lambda bench=bench: bench.seconds)
        if life < lives:
            with pytest.raises(Killed):
                sampler.run(1000.0, kill)
            assert len(JobLog(path).jobs) > num_kept
        else:
            sampler.run(1000.0)
    for part in ("draft_first 0", "draft_level 0"):
        assert all(len(samples) <= 4 for samples in sampler.samples[part].values())
    assert JobLog(path).threads == 1
    ratio = sampler.surfaces()["verify"].latency_ms(np.array([9.0]), np.array([128.0]))[0, 0] / sampler.plain_ms
    assert ratio == pytest.approx(straight(9, 128) / straight(1, 32), rel=0.01)


def test_a_torn_log_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    log, bench = JobLog(path), Bench()
    log.begin(None)
    Sampler([bench], SETTINGS, log=log, clock=lambda: bench.seconds).run(1.0)
    whole = JobLog(path).jobs
    path.write_bytes(path.read_bytes()[:-20] + b'\n{"threads": "many"}\n{"other": 1}\n')
    assert JobLog(path).jobs == whole[:-1]


def test_the_same_seed_visits_the_same_sizes() -> None:
    def visited(seed: int) -> list[Size]:
        bench = Bench()
        measured(bench, seed=seed)
        return [entry[1:3] for entry in bench.log]

    assert visited(1) == visited(1) != visited(2)
