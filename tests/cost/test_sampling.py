"""Sampling with a simulated bench and clock, so that no test depends on real times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from autotune.cost.adaptive_grid import AdaptiveGrid, standard_error
from autotune.cost.sampling import Sampler
from autotune.cost.settings import COARSE_TOKENS, HELD_OUT_TOKENS, ProfileSettings, Size
from autotune.cost.surface import Surface
from autotune.cost.table import TOKENS

SETTINGS = ProfileSettings(kv_lengths=(32, 64, 128), held_out_kv_length=48, time_limit_s=1000.0)
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
    sampler = Sampler(benches, replace(SETTINGS, **changes), clock=lambda: sum(bench.seconds for bench in benches))
    sampler.run()
    return sampler


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
        surface = grid.surface()
        assert tokens_of(surface) == list(COARSE_TOKENS) and lengths_of(surface) == [32, 128]
        assert worst_error(surface, truth) < 1e-9
        examined = {(p.tokens, p.kv_length) for p in surface.examined}
        assert (17, 32) in examined and (65, 32) in examined, "the first sizes after a kernel's block"
        assert {m for _, m in examined} == {32, 64}
    assert lengths_of(sampler.decode.surface()) == [32, 128]


def test_jumps_are_found() -> None:
    """Both sides of a jump join the grid, so that no interpolation crosses it."""
    surface = measured(Bench(stepping)).verify.surface()
    assert {8, 9, 16, 17} <= set(tokens_of(surface))
    assert len(tokens_of(surface)) < len(TOKENS)
    assert worst_error(surface, stepping) < 0.02


def test_surface_that_is_not_linear_in_kv_length_gets_the_middle_length() -> None:
    def bent(n: int, m: int) -> float:
        return straight(n, m) * (1.5 if m >= 64 else 1.0)

    surface = measured(Bench(bent)).verify.surface()
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

    surface = measured(Bench(doubled_there)).verify.surface()
    assert {(p.tokens, p.kv_length) for p in surface.held_out} == outside
    assert tokens_of(surface) == list(COARSE_TOKENS)
    assert surface.errors["linear"] == pytest.approx(0.5), "half of the measured latency"


def test_only_capture_sizes_are_measured() -> None:
    log: list[tuple[Any, ...]] = []
    sampler = measured(Bench(stepping, log=log), capture_sizes=(4, 9, 24))
    surface = sampler.verify.surface()
    assert tokens_of(surface) == [4, 9, 24] and {p.tokens for p in surface.held_out} == {4, 9, 24}
    assert {entry[1] for entry in log if entry[0] != "decode"} == {4, 9, 24}


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
        assert all(len(grid.surface().points) == 12 for grid in (*sampler.draft_firsts, *sampler.draft_levels))
    assert counts[0] == counts[1]


def test_sizes_and_drafts_come_in_random_order() -> None:
    log: list[tuple[Any, ...]] = []
    benches = [Bench(log=log, name=name) for name in "ab"]
    sampler = Sampler(benches, SETTINGS, clock=lambda: 0.0)
    sampler.run()
    draft_firsts = [entry for entry in log if entry[0] == "draft_first"]
    first = [entry[1:3] for entry in draft_firsts if entry[3] == "a"][: len(COARSE_TOKENS) * 2]
    assert first != sorted(first) and len(set(first)) == len(first), "a sweep visits no size twice"
    turns = [entry[3] for entry in draft_firsts][:30]
    assert turns != sorted(turns) and 5 < turns.count("a") < 25


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

    sampler = measured(Cold(), min_samples=1, max_samples=1)
    for grid, truth in ((sampler.verify, straight), (sampler.draft_levels[0], draft_level)):
        for (n, m), samples in grid.samples.items():
            assert samples == pytest.approx([truth(n, m)] * len(samples))


# ----------------------------------------------------------------------------------------------------- how many samples


def test_noisy_sizes_get_more_samples_up_to_a_limit() -> None:
    rng = np.random.default_rng(0)
    still, noisy, wild = (
        measured(Bench(noise=lambda sd=sd: sd * rng.standard_normal())).verify for sd in (0.0, 0.05, 0.5)
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


def test_after_the_time_limit_sizes_get_the_minimum_number_of_samples() -> None:
    rng = np.random.default_rng(0)
    sampler = measured(Bench(stepping, noise=lambda: 0.2 * rng.standard_normal()), time_limit_s=1e-3)
    surface = sampler.verify.surface()
    assert tokens_of(surface) == list(COARSE_TOKENS) and not surface.examined
    assert {len(p.samples_ms) for p in (*surface.points, *surface.held_out)} == {SETTINGS.min_samples}


def test_sampling_leaves_time_for_refining() -> None:
    """Noise that could use all of the time does not keep the grid coarse."""
    rng = np.random.default_rng(0)
    bench = Bench(stepping, noise=lambda: 0.03 * rng.standard_normal())
    surface = measured(bench, target_error=0.0, max_samples=10**6, time_limit_s=100.0).verify.surface()
    assert {8, 9, 17} <= set(tokens_of(surface))
    assert bench.seconds < 130


def test_progress_ends_at_one() -> None:
    reports: list[float] = []
    bench = Bench()
    Sampler([bench], replace(SETTINGS, time_limit_s=10.0), clock=lambda: bench.seconds).run(reports.append)
    assert reports == sorted(reports) and reports[-1] == 1.0 and reports[0] < 0.5


# ------------------------------------------------------------------------------------------------------------- drifting


def throttled(begin: float, end: float, factor: float) -> Callable[[float], float]:
    return lambda seconds: factor if begin < seconds < end else 1.0


def test_throttled_samples_are_measured_again() -> None:
    """For two seconds all steps take 50 % longer; no such sample is kept."""
    sampler = measured(Bench(speed=throttled(1.0, 3.0, 1.5)))
    for grid, truth in ((sampler.verify, straight), (sampler.draft_levels[0], draft_level)):
        for (n, m), samples in grid.samples.items():
            assert max(samples) < 1.4 * truth(n, m), (n, m)
            assert len(samples) >= SETTINGS.min_samples
    assert sampler.remeasured_samples > 50 and sampler.drifted_samples == 0


def test_throttled_samples_are_measured_again_after_the_time_of_a_stage() -> None:
    """A stage without time takes no additional samples, but replaces drifted ones."""
    rng = np.random.default_rng(0)
    bench = Bench(speed=throttled(1.0, 2.0, 1.5), noise=lambda: 0.03 * rng.standard_normal())
    sampler = measured(bench, target_error=0.0, max_samples=10**6, time_limit_s=20.0)
    assert sampler.remeasured_samples > 20
    for (n, m), samples in sampler.verify.samples.items():
        assert max(samples) < 1.3 * straight(n, m), (n, m)


def test_a_cold_start_is_measured_again() -> None:
    """Steps that are faster than usual drift too."""
    sampler = measured(Bench(speed=throttled(-1.0, 0.5, 0.6)))
    assert sampler.remeasured_samples > 0
    for (n, m), samples in sampler.verify.samples.items():
        assert min(samples) > 0.9 * straight(n, m)


def test_small_drifts_are_ignored() -> None:
    sampler = measured(Bench(speed=throttled(1.0, 3.0, 1.1)))
    assert sampler.remeasured_samples == sampler.drifted_samples == 0


def test_retries_are_limited() -> None:
    """Drifted samples that are kept are counted."""
    speeds = iter(range(10**9))

    def unsteady(_: float) -> float:
        return 2.0 if next(speeds) // 300 % 3 == 0 else 1.0  # every third run of 300 steps

    sampler = measured(Bench(speed=unsteady))
    assert sampler.remeasured_samples > 0 and sampler.drifted_samples > 0
    kept = Counter({size: len(samples) for size, samples in sampler.verify.samples.items()})
    assert min(kept.values()) >= SETTINGS.min_samples
    none = measured(Bench(speed=unsteady), retries=0)
    assert none.remeasured_samples == 0 and none.drifted_samples > 0


def test_noise_of_the_references_is_no_drift() -> None:
    """If references usually vary by a third, a third is no drift."""
    rng = np.random.default_rng(0)
    sampler = measured(Bench(noise=lambda: 0.3 * float(rng.uniform(-1, 1))))
    total = sum(len(samples) for grid in sampler.grids for samples in grid.samples.values())
    assert sampler.remeasured_samples < 0.1 * total


def test_the_same_seed_visits_the_same_sizes() -> None:
    def visited(seed: int) -> list[Size]:
        bench = Bench()
        measured(bench, seed=seed)
        return [entry[1:3] for entry in bench.log]

    assert visited(1) == visited(1) != visited(2)
