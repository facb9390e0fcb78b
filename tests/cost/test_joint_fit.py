"""The joint fit against the formulas that it rearranges, and what observations of decoding change."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.cost.joint_fit import Posterior, SurfaceSteps, refitted
from autotune.cost.surface import Observation, Point, Surface
from autotune.cost.table import CostTable
from autotune.documents.subnet import Subnet
from tests.sample_documents import observed_table

SUBNETS = Subnet(), Subnet(heads=0.5), Subnet(heads=0.25, vocabulary=0.5)


def parts(seed: int, *, has_live: bool, is_exact: bool = False) -> list[SurfaceSteps]:
    """Random observations of three subnets and of another network, at some of their sizes."""
    rng = np.random.default_rng(seed)

    def observation() -> Observation:
        return Observation(
            ms=float(np.exp(rng.normal(0, 0.1))), error=0.0 if is_exact else float(rng.uniform(0.01, 0.2))
        )

    def point(tokens: int, kv_length: int) -> Point:
        timed, live = (observation() if rng.random() < share else None for share in (0.7, 0.3 * has_live))
        return Point(tokens=tokens, kv_length=kv_length, observed=timed, live=live)

    sizes = [(tokens, kv_length) for tokens in (1, 5, 40) for kv_length in (16, 300)]
    networks = [(1, 0, Subnet()), *((0, 1 + number, subnet) for number, subnet in enumerate(SUBNETS))]
    return [SurfaceSteps(1, *network, [point(*size) for size in sizes]) for network in networks]


def observations(of: list[SurfaceSteps]) -> list[tuple[int, int, str]]:
    """Part, point and kind of every observation, in the order of the fit."""
    return [
        (number, row, kind)
        for kind in ("observed", "live")
        for number, part in enumerate(of)
        for row, point in enumerate(part.points)
        if getattr(point, kind) is not None
    ]


def test_deviations_are_those_of_the_covariance() -> None:
    fit = Posterior(parts(1, has_live=True))
    np.testing.assert_allclose(np.concatenate(fit.deviations()) ** 2, np.diag(fit._covariance()), atol=1e-9)


@pytest.mark.parametrize("kind", ["observed", "live"])
def test_left_out_errors_are_those_of_fits_without_each_observation(kind: str) -> None:
    """With the prior means of all observations, which the rearranged formula keeps."""
    given = parts(2, has_live=kind == "live")
    whole = Posterior(given)
    residuals = np.linalg.solve(whole._inverse, whole._weights)
    prior_mean = whole._mean - whole._across @ whole._weights
    found, deviations = whole._left_out()
    known = observations(given)
    for number in [n for n, one in enumerate(known) if one[2] == kind][::5]:
        part, row, _ = known[number]
        point = given[part].points[row]
        others = [*given]
        points = [*given[part].points[:row], point.model_copy(update={kind: None}), *given[part].points[row + 1 :]]
        others[part] = given[part]._replace(points=points)
        left, at = Posterior(others), 6 * part + row
        mean = prior_mean[at] + left._across[at] @ left._inverse @ np.delete(residuals, number)
        seen = getattr(point, kind)
        assert found[number] == pytest.approx(float(mean - np.log(seen.ms)))
        expected = np.hypot(np.concatenate(left.deviations())[at], seen.error)
        assert deviations[number] == pytest.approx(float(expected))


def test_precise_observations_are_reproduced() -> None:
    """The parts have one subnet of each network, because several do not tell apart what they share."""
    given = parts(3, has_live=False, is_exact=True)[:2]
    points = [point for part in given for point in part.points]
    for point, mean in zip(points, Posterior(given)._mean, strict=True):
        assert point.observed is None or mean == pytest.approx(np.log(point.observed.ms), abs=1e-3)


def test_rounds_move_the_prices_of_a_draft_and_not_the_plain_step() -> None:
    """Rounds took a fifth longer than their steps, in plain steps: other sizes follow, drafts by a part, and plain
    decoding does not.
    """
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
