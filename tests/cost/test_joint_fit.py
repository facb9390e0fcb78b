"""The joint fit against the formulas that it rearranges, and what observations of decoding change."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.cost.joint_fit import JointFit, Steps
from autotune.cost.posterior import refitted
from autotune.cost.surface import Observation, Surface
from autotune.cost.table import CostTable
from tests.sample_documents import observed_table


def steps(count: int, seed: int) -> Steps:
    rng = np.random.default_rng(seed)
    group = rng.integers(0, 4, count)
    return Steps(
        kind=group % 2,
        group=group,
        member=10 * group + rng.integers(0, 2, count),
        tokens=rng.integers(1, 130, count),
        kv_length=rng.integers(16, 400, count),
        choice=rng.uniform(0, 0.75, (count, 2)),
        is_live=rng.random(count) < 0.3,
    )


def fit(seed: int, rows: slice | np.ndarray = slice(None)) -> JointFit:
    rng = np.random.default_rng(seed)
    observed, log_ms, errors = steps(30, seed), rng.normal(0, 1, 30), rng.uniform(0.01, 0.2, 30)
    chosen = np.arange(30)[rows]
    return JointFit(observed.select(chosen), log_ms[chosen], errors[chosen])


def test_deviations_are_those_of_the_covariance() -> None:
    at = steps(20, 7)
    np.testing.assert_allclose(fit(1).deviations(at), np.sqrt(np.diag(fit(1).covariance(at))), atol=1e-9)


def test_left_out_errors_are_those_of_fits_without_each_observation() -> None:
    """With the prior means of all observations, which the rearranged formula keeps."""
    whole, observed = fit(2), steps(30, 2)
    rng = np.random.default_rng(2)
    log_ms, errors = rng.normal(0, 1, 30), rng.uniform(0.01, 0.2, 30)
    found, deviations = whole.left_out()
    for number in range(0, 30, 7):
        others = np.arange(30) != number
        left = fit(2, others)
        left._groups, left._means = whole._groups, whole._means
        of_others = np.searchsorted(whole._groups, observed.group[others])
        left._weights = left._solve(log_ms[others] - whole._means[of_others])
        one = observed.select(np.array([number]))
        assert found[number] == pytest.approx(float(left.mean(one)[0]) - log_ms[number])
        expected = np.hypot(left.deviations(one)[0], errors[number])
        assert deviations[number] == pytest.approx(float(expected))


def test_precise_observations_are_reproduced() -> None:
    rng = np.random.default_rng(3)
    observed, log_ms = steps(30, 3), rng.normal(0, 1, 30)
    exact = JointFit(observed, log_ms, np.zeros(30))
    np.testing.assert_allclose(exact.mean(observed), log_ms, atol=1e-3)


def test_rounds_move_the_prices_of_a_draft_and_not_the_plain_step() -> None:
    """Rounds took a fifth longer than their steps, in plain steps: other sizes follow, drafts by a part, and plain decoding does not."""
    table = observed_table(error=0.01)

    def slower(of: Surface) -> Surface:
        points = [
            p.model_copy(update={"live": Observation(ms=1.2 * p.latency_ms, error=0.02)}) if p.tokens == 8 else p
            for p in of.points
        ]
        return of.model_copy(update={"points": points})

    def ms(of: CostTable, part: str, tokens: float) -> float:
        return float(of.surfaces[part].latency_ms(np.array([tokens]), np.array([256.0]))[0, 0])

    after = refitted(table.model_copy(update={"verify": slower(table.verify)}))
    assert ms(after, "decode", 1) == pytest.approx(ms(table, "decode", 1), rel=0.01)
    for part, tokens, least in (("verify", 8, 1.15), ("verify", 2, 1.15), ("tests/draft: draft_level", 2, 1.03)):
        assert least < ms(after, part, tokens) / ms(table, part, tokens) < 1.22
