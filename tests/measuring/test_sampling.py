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

from autotune.cost.surface import Surface, standard_error, uncertainty
from autotune.cost.table import TOKENS
from autotune.measuring.adaptive_grid import AdaptiveGrid
from autotune.measuring.block_log import BlockLog, LogHeader
from autotune.measuring.jobs import PLAIN_STEPS, PLAIN_WARM_UPS
from autotune.measuring.sampling import (
    LEVELS_PER_ROUND,
    REFERENCE_STEPS,
    ROUNDS_IN_A_ROW,
    UNTIMED_TOKENS,
    WARM_UPS,
    Sampler,
)
from autotune.measuring.settings import COARSE_TOKENS, HELD_OUT_TOKENS, CostSettings, Size
from tests.sample_documents import DRAFT, cost_table

SETTINGS = CostSettings(kv_lengths=(32, 64, 128), held_out_kv_length=48, time_limit_s=1000.0)
Latency = Callable[[int, int], float]


def straight(n: int, m: int) -> float:
    return 10 + 0.2 * n + 0.01 * m


def draft_level(n: int, m: int) -> float:
    return 2 + 0.05 * n + 0.001 * m


def stepping(n: int, m: int) -> float:
    """A kernel with blocks of 8 tokens: latency jumps at the 9th and the 17th token."""
    return 10 + 0.01 * m + 2.5 * (n > 8) + 3 * (n > 16) + 0.1 * n


class Bench:
    """A simulated target and draft: two latency functions, times ``speed(seconds)`` and noise, on a clock of their own."""

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


def samples_ms(sampler: Sampler, grid: AdaptiveGrid) -> dict[Size, list[float]]:
    """All samples of a grid, in milliseconds."""
    return {(p.tokens, p.kv_length): p.samples_ms for p in sampler.surface(grid).measured}


def tokens_of(surface: Surface) -> list[int]:
    return sorted({point.tokens for point in surface.points})


def lengths_of(surface: Surface) -> list[int]:
    return sorted({point.kv_length for point in surface.points})


def worst_error(surface: Surface, truth: Latency, lengths: Sequence[int] = (32, 100, 128)) -> float:
    """Largest relative error of the linear model over all numbers of tokens."""
    prices = surface.latency_ms(np.array(TOKENS, float), np.array(lengths, float), model="linear")
    expected = np.array([[truth(n, m) for m in lengths] for n in TOKENS])
    return float(np.abs(prices / expected - 1).max())


# ----------------------------------------------------------------------------------------------------------- the grid


def test_linear_surface_keeps_its_coarse_grid() -> None:
    sampler = measured(Bench())
    for grid, truth in ((sampler.verify, straight), (sampler.draft_levels[0], draft_level)):
        surface = sampler.surface(grid)
        assert tokens_of(surface) == list(COARSE_TOKENS) and lengths_of(surface) == [32, 128]
        assert worst_error(surface, truth) < 1e-9
        examined = {(p.tokens, p.kv_length) for p in surface.examined}
        assert (17, 32) in examined and (65, 32) in examined, "the first sizes after a kernel's block"
        assert {m for _, m in examined} == {32, 64}
    assert lengths_of(sampler.surface(sampler.decode)) == [32, 128]


def test_jumps_are_found() -> None:
    """Both sides of a jump join the grid, so that no interpolation crosses it."""
    sampler = measured(Bench(stepping))
    surface = sampler.surface(sampler.verify)
    assert {8, 9, 16, 17} <= set(tokens_of(surface))
    assert len(tokens_of(surface)) < len(TOKENS)
    assert worst_error(surface, stepping) < 0.02


def test_any_number_of_tokens_may_be_a_step_of_a_quantized_kernel() -> None:
    """Steps next to the blocks of 8 tokens, which the grid of other targets does not look for."""

    def odd(n: int, m: int) -> float:
        return straight(n, m) + 4 * (n > 13) + 4 * (n > 21)

    every, some = (measured(Bench(odd), every_row=is_quantized) for is_quantized in (True, False))
    tokens = tokens_of(every.surface(every.verify))
    assert {13, 14, 21, 22} <= set(tokens)
    prices = every.surface(every.verify).latency_ms(np.arange(1.0, 34.0), np.array([32.0]), model="linear")[:, 0]
    assert np.abs(prices / [odd(n, 32) for n in range(1, 34)] - 1).max() < 0.02
    assert not {13, 14, 21, 22} & set(tokens_of(some.surface(some.verify)))
    assert tokens_of(every.surface(every.draft_levels[0])) == list(COARSE_TOKENS)


def test_odd_numbers_of_tokens_that_take_longer_are_found() -> None:
    """As on some CPUs: a tree that knows it has one node more."""

    def uneven(n: int, m: int) -> float:
        return straight(n, m) * (1.05 if n % 2 else 1.0)

    sampler = measured(Bench(uneven), every_row=True)
    prices = sampler.surface(sampler.verify).latency_ms(np.arange(1.0, 34.0), np.array([32.0]), model="linear")[:, 0]
    odd, even_after = prices[10:30:2], prices[11:31:2]  # of 11 and 12 tokens, 13 and 14, ...
    assert (odd > even_after).sum() == sum(uneven(n, 32) > uneven(n + 1, 32) for n in range(11, 31, 2)) > 5


def test_surface_that_is_not_linear_in_kv_length_gets_the_middle_length() -> None:
    def bent(n: int, m: int) -> float:
        return straight(n, m) * (1.5 if m >= 64 else 1.0)

    sampler = measured(Bench(bent))
    surface = sampler.surface(sampler.verify)
    assert lengths_of(surface) == [32, 64, 128]
    assert len(surface.points) == 3 * len(tokens_of(surface)), "a full grid"


def test_differences_within_the_noise_are_not_refined() -> None:
    """An interpolation error of 4 % refines the grid without noise, but not with 10 % noise."""

    def off(n: int, m: int) -> float:
        return straight(n, m) * (1.04 if n == 65 else 1.0)

    grid = AdaptiveGrid(TOKENS, COARSE_TOKENS, SETTINGS.kv_lengths, [], SETTINGS)
    for spread, expected in ((0.0, True), (0.1, False)):
        grid = AdaptiveGrid(TOKENS, COARSE_TOKENS, SETTINGS.kv_lengths, [], SETTINGS)
        for _ in range(2):
            for n, m in grid.sizes:
                grid.samples[n, m] = [off(n, m) * (1 + spread * (k - 3)) for k in range(7)]
            grid.refine()
        assert (65 in tokens_of(_filled(grid, off))) == expected


def test_errors_of_latencies_far_below_a_plain_step_are_not_refined() -> None:
    """The same errors, of a lookup instead of a forward pass: 1 % of a plain step."""

    def off(n: int, m: int) -> float:
        return 1.05 if n == 65 else 1.0

    for plain_steps, expected in ((1.0, True), (0.01, False)):
        grid = AdaptiveGrid(TOKENS, COARSE_TOKENS, SETTINGS.kv_lengths, [], SETTINGS)
        for _ in range(2):
            for n, m in grid.sizes:
                grid.samples[n, m] = [plain_steps * off(n, m) * (1 + 0.002 * (k - 3)) for k in range(7)]
            grid.refine()
        assert (65 in tokens_of(_filled(grid, lambda n, m, unit=plain_steps: unit * off(n, m)))) == expected  # type: ignore[misc]
        for size in grid.sizes:
            grid.samples[size] = [plain_steps * (1 + 0.05 * (k - 3)) for k in range(7)]
        assert (len(grid.noisy()) > 0) == (len(grid.noisiest(1)) > 0) == expected


def _filled(grid: AdaptiveGrid, truth: Latency) -> Surface:
    for n, m in grid.sizes:
        grid.samples.setdefault((n, m), [truth(n, m)])
    return grid.surface()


def test_held_out_points_do_not_change_the_grid() -> None:
    """However large the error at the held-out points, the grid is not refined there."""
    outside = {(n, SETTINGS.held_out_kv_lengths[i % 2]) for i, n in enumerate(HELD_OUT_TOKENS)}
    assert SETTINGS.held_out_kv_lengths == (48, 112)

    def doubled_there(n: int, m: int) -> float:
        return straight(n, m) * (2.0 if (n, m) in outside else 1.0)

    sampler = measured(Bench(doubled_there))
    surface = sampler.surface(sampler.verify)
    assert {(p.tokens, p.kv_length) for p in surface.held_out} == outside
    assert tokens_of(surface) == list(COARSE_TOKENS)
    assert surface.errors["linear"] == pytest.approx(0.5), "half of the measured latency"


def test_only_capture_sizes_are_measured() -> None:
    log: list[tuple[Any, ...]] = []
    sampler = measured(Bench(stepping, log=log), capture_sizes=(4, 9, 24))
    surface = sampler.surface(sampler.verify)
    assert tokens_of(surface) == [4, 9, 24] and {p.tokens for p in surface.held_out} == {4, 9, 24}
    assert {entry[1] for entry in log if entry[0] != "decode"} == {4, 9, 24}


def test_captured_steps_are_priced_at_the_kv_length_that_they_are_padded_to() -> None:
    """A plain step after 1,023 tokens attends to 1,024, the next one to 2,048, and with its tokens a verification does so earlier."""
    stairs = {512: 5.0, 1024: 6.0, 2048: 11.0}

    def step(n: int, m: int) -> float:
        return stairs[m] + 0.1 * n  # no other KV length is measured

    sampler = measured(Bench(step, step), mode="cuda-graph", capture_sizes=(1, 8, 32), kv_lengths=tuple(stairs))
    surfaces = map(sampler.surface, (sampler.decode, sampler.verify, *sampler.draft_firsts, *sampler.draft_levels))
    decode, verify, draft_first, draft_level = surfaces
    costs = cost_table().drafts[0].model_copy(update={"draft_first": draft_first, "draft_level": draft_level})
    table = cost_table(mode="cuda-graph", capture_sizes=(1, 8, 32), decode=decode, verify=verify, drafts=[costs])
    prices = table.prices(DRAFT, max_tokens=20, max_kv_length=1500)
    assert [prices.decode_ms[kv // 16] for kv in (300, 1023, 1024, 1500)] == pytest.approx([5.1, 6.1, 11.1, 11.1])
    assert [prices.verify_ms[20, kv // 16] for kv in (960, 1000)] == pytest.approx([9.2, 14.2]), "padded to 32 tokens"
    assert [prices.draft_level_ms[5, kv // 16] for kv in (1000, 1024)] == pytest.approx([6.8, 11.8])


# -------------------------------------------------------------------------------------------------------------- rounds


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


def test_spare_rounds_verify_noisy_sizes() -> None:
    """Seven drafts need more rounds than the target's surface; noisy sizes of the target use the rest."""
    rng = np.random.default_rng(0)
    sampler = measured(*(Bench(noise=lambda: 0.3 * float(rng.uniform())) for _ in range(7)))
    most, verified = SETTINGS.max_samples, sampler.verify.samples.values()
    assert all(len(samples) >= most or standard_error(samples) <= SETTINGS.target_error for samples in verified)
    assert np.mean([len(samples) for samples in verified]) > 1.5 * most
    assert all(len(samples) <= most for grid in sampler.draft_firsts for samples in grid.samples.values())


def test_drafts_share_the_measurement_of_the_target() -> None:
    """With seven drafts the target gets as many samples as with one."""
    counts = []
    for num_drafts in (1, 7):
        sampler = measured(*(Bench() for _ in range(num_drafts)))
        counts.append({size: len(samples) for size, samples in sampler.verify.samples.items()})
        assert all(len(sampler.surface(grid).points) == 12 for grid in (*sampler.draft_firsts, *sampler.draft_levels))
    assert counts[0] == counts[1]


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
    for _, entries in turns[:3]:
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

    sampler = measured(Cold(), least_samples=1, min_samples=1, max_samples=1)
    for grid, truth in ((sampler.verify, straight), (sampler.draft_levels[0], draft_level)):
        for (n, m), samples in samples_ms(sampler, grid).items():
            assert samples == pytest.approx([truth(n, m)] * len(samples))


# ----------------------------------------------------------------------------------------------------- how many samples


def test_noisy_sizes_get_more_samples_up_to_a_limit() -> None:
    rng = np.random.default_rng(0)
    still, noisy, wild = (
        measured(Bench(noise=lambda sd=sd: np.expm1(sd * rng.standard_normal()))).draft_levels[0]
        for sd in (0.0, 0.05, 0.5)
    )
    counts = [np.mean([len(samples) for samples in grid.samples.values()]) for grid in (still, noisy, wild)]
    assert counts[0] == SETTINGS.min_samples < counts[1] < counts[2] <= SETTINGS.max_samples
    for samples in noisy.samples.values():
        assert len(samples) == SETTINGS.max_samples or standard_error(samples) <= SETTINGS.target_error


def test_standard_errors_by_hand() -> None:
    """The median absolute deviation of 1, 2, 3, 4, 5 is 1."""
    assert standard_error([1.0, 2, 3, 4, 5]) == pytest.approx(1.2533 * 1.4826 / 3 / 5**0.5)
    assert standard_error([1.0, 2, 3, 4, 500]) == standard_error([1.0, 2, 3, 4, 5]), "interruptions have no effect"
    assert standard_error([2.0, 2.0]) == 0.0


def test_uncertainty_by_hand() -> None:
    """Two sizes with errors of 3 % and 4 %, and a held-out error of 2 %."""
    sizes = [[1 + shift * error for shift in (-2, -1, 0, 1, 2)] for error in (0.03, 0.04)]
    errors = [standard_error(samples) for samples in sizes]
    assert errors == pytest.approx([1.2533 * 1.4826 * error / 5**0.5 for error in (0.03, 0.04)])
    spread = float(np.mean(np.square(errors)))
    assert uncertainty(sizes, 0.02) == pytest.approx((spread + (1.4826 * 0.02) ** 2) ** 0.5)
    assert uncertainty(sizes, None) == pytest.approx(spread**0.5)
    assert uncertainty([[1.0]], 0.1) == pytest.approx(0.14826)
    assert uncertainty([[1.0]], None) is None


# -------------------------------------------------------------------------------------------------------- the time limit


def test_without_time_the_coarse_grid_gets_the_least_samples() -> None:
    rng = np.random.default_rng(0)
    sampler = measured(Bench(stepping, noise=lambda: 0.2 * rng.standard_normal()), time_limit_s=1e-3)
    for grid in (sampler.verify, sampler.draft_firsts[0], sampler.draft_levels[0]):
        surface = sampler.surface(grid)
        assert tokens_of(surface) == list(COARSE_TOKENS) and lengths_of(surface) == [32, 128]
        assert not surface.examined and not surface.held_out and surface.held_out_error is None
        assert min(len(point.samples_ms) for point in surface.points) == SETTINGS.least_samples


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
    surface = sampler.surface(sampler.verify)
    assert set(COARSE_TOKENS) <= set(tokens_of(surface))
    assert surface.latency_ms(np.array([6.0]), np.array([60.0])).shape == (1, 1), "a full grid"


def test_more_time_gives_more_samples() -> None:
    rng = np.random.default_rng(0)
    counts = []
    for limit_s in (2.0, 6.0, 18.0):
        sampler = measured(Bench(stepping, noise=lambda: 0.1 * rng.standard_normal()), time_limit_s=limit_s)
        counts.append(sampler.surface(sampler.verify).num_samples)
    assert counts[0] < counts[1] < counts[2]


def test_sampling_leaves_time_for_refining() -> None:
    """Noise that could use all of the time does not keep the grid coarse."""
    rng = np.random.default_rng(0)
    bench = Bench(stepping, noise=lambda: 0.03 * rng.standard_normal())
    sampler = measured(bench, target_error=0.0, max_samples=10**6, time_limit_s=100.0)
    assert {8, 9, 17} <= set(tokens_of(sampler.surface(sampler.verify)))
    assert bench.seconds < 101


def test_progress_ends_at_one() -> None:
    reports: list[float] = []
    bench = Bench()
    Sampler([bench], SETTINGS, clock=lambda: bench.seconds).run(10.0, reports.append)
    assert reports == sorted(reports) and reports[-1] == 1.0 and reports[0] < 0.5


# -------------------------------------------------------------------------------------------------------------- contention


def throttled(begin: float, end: float, factor: float) -> Callable[[float], float]:
    return lambda seconds: factor if begin < seconds < end else 1.0


@pytest.mark.parametrize("factor", [0.6, 1.5, 4.0])
def test_a_change_of_speed_moves_no_sample(factor: float) -> None:
    """For two seconds all steps take another time; only jobs during which the speed changes are off, by half of it."""
    sampler = measured(Bench(speed=throttled(1.0, 3.0, factor)))
    for grid, truth in ((sampler.verify, straight), (sampler.draft_levels[0], draft_level)):
        off = [
            ms
            for (n, m), samples in samples_ms(sampler, grid).items()
            for ms in samples
            if ms != pytest.approx(truth(n, m))
        ]
        assert len(off) <= 2 * ROUNDS_IN_A_ROW * LEVELS_PER_ROUND, "the jobs at the beginning and at the end"
        for n, m in grid.coarse_sizes:
            assert np.median(samples_ms(sampler, grid)[n, m]) == pytest.approx(truth(n, m))
    assert 0 < sampler.disturbed_samples <= 2 * ROUNDS_IN_A_ROW * (2 + LEVELS_PER_ROUND)


def bursts(seconds: float) -> float:
    """Another process halves the speed in every second second."""
    return 2.0 if seconds % 2 < 1 else 1.0


def test_bursts_bias_unscaled_samples_only() -> None:
    """Many of the few samples of a size may lie in bursts: scaled by the plain steps before and after them, they agree. A plain step takes
    3 to 4 ms.
    """
    sampler = measured(Bench(speed=lambda seconds: 0.3 * bursts(seconds)), time_limit_s=4.0)
    unscaled: dict[Size, list[float]] = {}
    for job in sampler.jobs:
        for part, tokens, kv_length, ms in job.samples:
            if part == "verify":
                unscaled.setdefault((tokens, kv_length), []).append(ms)
    scaled = samples_ms(sampler, sampler.verify)

    def spread(samples: dict[Size, list[float]]) -> float:
        """Deviation of the sizes' medians over the truth: a factor common to all cancels in speedups."""
        return float(
            np.std([np.median(found) / (0.3 * straight(*size)) for size, found in samples.items() if size in scaled])
        )

    assert spread(unscaled) > 0.1 and spread(scaled) < 0.02


def test_plain_steps_scale_the_table_to_their_usual_time() -> None:
    """A quarter of the time is twice as slow: the table holds milliseconds of the other three quarters."""
    sampler = measured(Bench(speed=lambda seconds: 2.0 if seconds % 2 < 0.5 else 1.0))
    assert sampler.plain_ms == pytest.approx(straight(1, 32))
    assert np.median(samples_ms(sampler, sampler.verify)[9, 128]) == pytest.approx(straight(9, 128))


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
    """The table holds what plain decoding and consecutive rounds take, not what steps take after steps of another kind."""
    sampler = measured(Caches())
    plain, level = (samples_ms(sampler, grid) for grid in (sampler.decode, sampler.draft_levels[0]))
    verified = samples_ms(sampler, sampler.verify)
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
    ratios = [sampler.verify_ratio(draft) for draft in (0, 1)]
    assert 1.04 < ratios[1] / ratios[0] < 1.1, (
        "the medians of sizes that one draft has most samples of hide a part of it"
    )
    verified = sampler.surface(sampler.verify).latency_ms(np.array([9.0]), np.array([128.0]))[0, 0]
    truth = 1.08 * straight(9, 128) / straight(1, 32)
    assert ratios[1] * verified / sampler.plain_ms == pytest.approx(truth, rel=0.05)


def test_equal_verifications_are_not_told_apart() -> None:
    sampler = measured(Bench(), Bench())
    assert [sampler.verify_ratio(draft) for draft in (0, 1)] == [1.0, 1.0]


def test_small_changes_disturb_no_sample() -> None:
    assert measured(Bench(speed=throttled(1.0, 3.0, 1.1))).disturbed_samples == 0


def test_usual_noise_disturbs_no_sample() -> None:
    """If plain steps usually vary by a third, a third is no change of the speed."""
    rng = np.random.default_rng(0)
    sampler = measured(Bench(noise=lambda: 0.3 * float(rng.uniform(-1, 1))))
    assert sampler.disturbed_samples < 0.05 * sum(len(job.samples) for job in sampler.jobs)


# ------------------------------------------------------------------------------------------------------------- resuming


class Killed(Exception):
    pass


@pytest.mark.parametrize("lives", [1, 5])
def test_an_interrupted_run_continues(tmp_path: Path, lives: int) -> None:
    """No sample that was kept is taken again, however often the run is killed; the machine is slower every time."""
    path = tmp_path / "table.jsonl"
    settings = replace(SETTINGS, max_samples=SETTINGS.min_samples)
    benches = [Bench(speed=lambda seconds, life=life: 1.0 + life) for life in range(lives + 1)]
    for life, bench in enumerate(benches):
        log = BlockLog(path)
        assert (log.header is None) == (life == 0)
        if log.header is None:
            log.begin(LogHeader(threads=1))
        num_kept, reports = sum(len(block.jobs) for block in log.blocks), 0

        def kill(share: float) -> None:
            nonlocal reports
            reports += 1
            if reports == 3:
                raise Killed

        sampler = Sampler([bench], settings, log=log, clock=lambda bench=bench: bench.seconds)
        if life < lives:
            with pytest.raises(Killed):
                sampler.run(1000.0, kill)
            assert sum(len(block.jobs) for block in BlockLog(path).blocks) > num_kept
        else:
            sampler.run(1000.0)
    for grid in (sampler.verify, sampler.draft_firsts[0], sampler.draft_levels[0]):
        for samples in grid.samples.values():
            assert SETTINGS.min_samples <= len(samples) <= SETTINGS.min_samples + 1
    assert BlockLog(path).header == LogHeader(threads=1)
    surface = sampler.surface(sampler.verify)
    ratio = surface.latency_ms(np.array([9.0]), np.array([128.0]))[0, 0] / sampler.plain_ms
    assert ratio == pytest.approx(straight(9, 128) / straight(1, 32))


def test_a_torn_log_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    log, bench = BlockLog(path), Bench()
    log.begin(LogHeader(threads=None))
    Sampler([bench], SETTINGS, log=log, clock=lambda: bench.seconds).run(1.0)
    whole = BlockLog(path).blocks
    path.write_bytes(path.read_bytes()[:-20] + b'\n{"threads": "many"}\n{"other": 1}\n')
    assert BlockLog(path).blocks == whole[:-1]


def test_the_same_seed_visits_the_same_sizes() -> None:
    def visited(seed: int) -> list[Size]:
        bench = Bench()
        measured(bench, seed=seed)
        return [entry[1:3] for entry in bench.log]

    assert visited(1) == visited(1) != visited(2)
