"""The sequential test: exact p-values, dependence within launches, and error probabilities that are shared, not
exceeded.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import wilcoxon

from autotune.evaluation.not_slower import Design, estimate, hodges_lehmann, launches_of, p_value

BY_PAIR = Design(analyses=(20, 40, 80, 160, 240))


def test_independent_pairs_give_wilcoxons_test() -> None:
    x = np.random.default_rng(0).normal(0.01, 0.05, (20, 40))
    expected = [wilcoxon(row, alternative="greater", method="exact").pvalue for row in x]
    np.testing.assert_allclose(p_value(x, np.arange(40)), expected)


def test_launches_are_tested_exactly() -> None:
    """Compared with all 2^8 assignments of signs to the launches."""
    rng = np.random.default_rng(1)
    for _ in range(5):
        x = rng.normal(0.02, 0.05, 40) + np.repeat(rng.normal(0.0, 0.03, 8), 5)
        launches = launches_of(40)

        def statistic(x: np.ndarray) -> float:
            signed = np.sign(x) * (np.abs(x).argsort().argsort() + 1)
            sums = signed.reshape(8, 5).sum(1) + 1e-3 * x.reshape(8, 5).sum(1)
            return float((np.abs(sums).argsort().argsort() + 1)[sums > 0].sum())

        flipped = [statistic(x * np.repeat(signs, 5)) for signs in itertools.product((1, -1), repeat=8)]
        expected = np.mean(np.array(flipped) >= statistic(x))
        assert p_value(x, launches) == pytest.approx(expected, abs=1e-12)


def test_analyses_share_the_error_probabilities() -> None:
    design = Design()
    assert sum(design.share(number) for number in range(len(design.analyses))) == pytest.approx(1.0)
    assert sum(BY_PAIR.share(number) for number in range(5)) == pytest.approx(1.0)
    assert [BY_PAIR.share(number) * 15 for number in range(5)] == pytest.approx([1, 2, 3, 4, 5])
    shared = Design(num_workloads=3)
    assert sum(shared.share(number) for number in range(len(shared.analyses))) == pytest.approx(1 / 3)


def test_every_analysis_can_decide() -> None:
    """The smallest possible p-value suffices to pass and to fail at the first analysis, with two workloads too. One
    launch fewer would not suffice, and with 20 pairs nothing could be decided.
    """
    design = Design(num_workloads=2)
    for number, num_pairs in enumerate(design.analyses):
        least = 0.5 ** (num_pairs // 5)
        assert least <= min(design.pass_risk, design.fail_risk) * design.share(number)
    assert design.fail_risk * design.share(0) < 0.5 ** (design.analyses[0] // 5 - 1)
    assert BY_PAIR.pass_risk * BY_PAIR.share(0) < 0.5 ** (20 // 5)


def test_the_estimate_is_the_median_of_means_and_its_interval_holds_it() -> None:
    assert hodges_lehmann(np.array([1.0, 2.0, 10.0])) == 3.75  # median of 1, 1.5, 2, 5.5, 6, 10
    x = np.random.default_rng(6).normal(math.log1p(0.05), 0.02, 240)
    slowdown, (low, high) = estimate(x, launches_of(240))
    assert low < slowdown < high and low < 0.05 < high and high - low < 0.012


def test_confidence_intervals_have_their_coverage() -> None:
    """With pairs that are correlated within launches: 95 of 100 intervals are expected to contain the truth, +- 2."""
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(100):
        x = rng.normal(0.02, 0.01, 80) + np.repeat(rng.normal(0.0, 0.02, 16), 5)
        _, (low, high) = estimate(x, launches_of(80))
        held += low <= math.expm1(0.02) <= high
    assert 88 <= held <= 100


def test_few_launches_give_the_widest_interval() -> None:
    x = np.random.default_rng(8).normal(0.0, 0.02, 10)
    _, (low, high) = estimate(x, launches_of(10))
    assert low == pytest.approx(math.expm1(x.min()), abs=1e-6) and high == pytest.approx(math.expm1(x.max()), abs=1e-6)
    assert estimate(np.zeros(40), launches_of(40)) == (0.0, (0.0, 0.0))
