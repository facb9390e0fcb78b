"""Looks keep their error probability."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.evaluation.summary import is_significantly_slower, spent_share
from tests.evaluation.sample_runs import run


def slower(ms: np.ndarray, than: np.ndarray, risk: float) -> bool:
    first, second = ([run(float(x)) for x in times] for times in (ms, than))
    return is_significantly_slower(first, second, risk=risk)


def test_later_looks_may_spend_more() -> None:
    shares = [spent_share(look, 5) for look in range(5)]
    assert shares == sorted(shares) and sum(shares) == pytest.approx(1.0)


def test_the_test_is_a_paired_t_test_of_log_ratios() -> None:
    """Against SciPy's."""
    from scipy.stats import ttest_rel

    rng = np.random.default_rng(2)
    for count in (2, 8, 40):
        ms, than = rng.normal(1.02, 0.05, count), rng.normal(1, 0.05, count)
        p_value = ttest_rel(np.log(ms), np.log(than), alternative="greater").pvalue
        assert slower(ms, than, risk=p_value * 1.000001)
        assert not slower(ms, than, risk=p_value * 0.999999)
    assert slower(np.full(4, 2.0), np.ones(4), risk=0.001), "without a variance"
    assert not slower(np.ones(4), np.ones(4), risk=0.5)
    assert not slower(np.full(1, 2.0), np.ones(1), risk=0.5), "a single prompt proves nothing"


def test_times_are_per_token() -> None:
    """A shorter answer is no gain, and a prompt for which nothing was decoded does not count."""
    short = [run(10.0, tokens=6) for _ in range(8)]
    long = [run(15.0, tokens=11) for _ in range(8)]
    assert is_significantly_slower(short, long, risk=0.01) and not is_significantly_slower(long, short, risk=0.5)
    nothing = [run(0.0, tokens=1)] * 8
    assert not is_significantly_slower([*short, *nothing], [*short, *nothing], risk=0.5)
    assert not is_significantly_slower(nothing, long, risk=0.5)
