"""The power figures of the documentation with fewer repetitions, and thresholds that chance does not reach."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.evaluation.not_slower import Design
from benchmarks.check_power import BY_PAIR, EVERY_LAUNCH, SCENARIOS, Shares, noises, recorded, replayed, simulate

CHECKS = 200
UNLIKE_PROCESSES = SCENARIOS["unlike processes"].noise()


def shares(name: str, slowdown: float, design: Design | None = None, *, fixed_order: bool = False) -> Shares:
    return simulate(noises(fixed_order=fixed_order)[name], slowdown, design or Design(), num_checks=CHECKS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_few_false_alarms_and_slowdowns_are_detected(name: str) -> None:
    """1 % of 200 checks is 2 and 95 % is 190; the limits 5 and 180 allow for the random seed."""
    assert shares(name, 0.0).failed <= 5 / CHECKS
    assert shares(name, 0.05).failed >= 180 / CHECKS
    assert shares(name, 0.10).failed >= 198 / CHECKS


def test_a_fixed_order_raises_false_alarms() -> None:
    assert shares("hostile", 0.0, fixed_order=True).failed > shares("hostile", 0.0).failed + 0.02


@pytest.mark.parametrize("other", [EVERY_LAUNCH, BY_PAIR], ids=["every launch", "by pair"])
def test_error_probabilities_hold_at_their_limits_and_not_with_simpler_designs(other: Design) -> None:
    """A slowdown of exactly the tolerance fails, and one of exactly the limit passes, at most as often as stated.
    Analyses after every launch, or pairs treated as independent, do so several times as often.
    """
    ours, simpler = (simulate(UNLIKE_PROCESSES, 0.01, one, num_checks=1000).failed for one in (Design(), other))
    assert ours <= 0.01 < simpler
    ours, simpler = (simulate(UNLIKE_PROCESSES, 0.05, one, num_checks=1000).passed for one in (Design(), other))
    assert ours <= 0.05 < simpler


def test_recorded_noise_is_replayed_launch_by_launch() -> None:
    launches = [np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([6.0, 7.0, 8.0, 9.0, 10.0]), np.array([99.0])]
    drawn = replayed(launches)(np.random.default_rng(0), 30, 40)
    assert drawn.shape == (30, 40)
    found = {tuple(launch) for launch in np.abs(drawn.reshape(-1, 5))}
    assert found == {tuple(launch) for launch in launches[:2]}, "the incomplete launch is left out"
    assert (drawn < 0).any() and (np.sign(drawn.reshape(-1, 5)).std(axis=1) == 0).all()
    assert (replayed(launches, random_sign=False)(np.random.default_rng(0), 30, 40) > 0).all()


@pytest.mark.parametrize("name", recorded())
def test_recordings_raise_no_false_alarm(name: str) -> None:
    assert len(recorded()[name]) >= 8
    assert shares(f"recorded, {name}", 0.0).failed <= 5 / CHECKS
