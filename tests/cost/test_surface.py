"""Surfaces reproduce the prices of their points, and interpolate between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from autotune.cost.surface import Point, Surface, standard_error
from autotune.errors import UserError
from tests.sample_documents import surface

REPOSITORY = Path(__file__).parents[2]
# Milliseconds by (tokens, KV length).
GRID = {(1, 100): 1.0, (1, 300): 3.0, (2, 100): 2.0, (2, 300): 6.0, (8, 100): 5.0, (8, 300): 18.0}


def small_surface(**fields: Any) -> Surface:
    points = [Point(tokens=n, kv_length=m, samples_ms=[ms]) for (n, m), ms in GRID.items()]
    return Surface(points=points, **fields)


def latency(of: Surface, tokens: float, kv_length: float, **options: Any) -> float:
    return float(of.latency_ms(np.array([tokens]), np.array([kv_length]), **options)[0, 0])


def test_grid_points_are_exact() -> None:
    for (n, m), ms in GRID.items():
        assert latency(small_surface(), n, m) == ms


def test_interpolation_is_linear() -> None:
    for tokens, kv_length, expected in (
        (1, 200, 2.0),  # halfway along the KV length
        (5, 100, 3.5),  # halfway along the tokens
        (5, 200, (3.5 + 12.0) / 2),  # both
        (3, 150, 0.75 * 2.5 + 0.25 * 8.0),  # a sixth and a quarter
        (1, 7, 1.0),  # below the shortest KV length
    ):
        assert latency(small_surface(), tokens, kv_length) == pytest.approx(expected)


def test_longer_kv_lengths_are_extrapolated() -> None:
    """8 tokens: 13 ms more per 200 cached tokens, up to 1.5 times the longest KV length."""
    assert latency(small_surface(), 8, 400) == pytest.approx(18 + 13 / 2)
    assert latency(small_surface(), 8, 450) == pytest.approx(18 + 13 * 0.75)


def test_extrapolation_never_decreases() -> None:
    """A longer KV cache is never cheaper: a negative slope is noise."""
    falling = surface(lambda n, m: 10 - 0.01 * m, tokens=(1,), kv_lengths=(100, 200))
    assert latency(falling, 1, 150) == pytest.approx(8.5)
    assert latency(falling, 1, 300) == pytest.approx(8.0)


def test_surface_with_one_kv_length_is_constant() -> None:
    flat = surface(lambda n, m: 2.0 * n, tokens=(1, 4), kv_lengths=(100,))
    assert latency(flat, 2, 50) == latency(flat, 2, 150) == pytest.approx(4.0)


def test_sizes_beyond_the_extrapolation_are_refused() -> None:
    for tokens, kv_length in ((9, 100), (1, 451), (9, 451)):
        with pytest.raises(UserError) as refused:
            latency(small_surface(), tokens, kv_length)
        assert "measured up to 8 tokens and a KV length of 300" in str(refused.value)
        assert f"got {tokens:.0f} tokens at {kv_length:.0f}; measure a larger grid" in str(refused.value)


def test_incomplete_grid_is_refused() -> None:
    incomplete = Surface(points=small_surface().points[:-1])
    with pytest.raises(UserError, match=r"full grid; got 5 of its 6 points; measure again"):
        latency(incomplete, 1, 100)


def test_latency_is_the_median() -> None:
    """An interrupted sample has no effect."""
    assert Point(tokens=1, kv_length=0, samples_ms=[1.0, 50.0, 1.2]).latency_ms == 1.2


def test_the_price_of_a_fit_counts_where_there_is_one() -> None:
    point = Point(tokens=1, kv_length=0, samples_ms=[1.0, 2.0, 3.0], fitted_ms=2.5)
    assert point.latency_ms == 2.5
    unmeasured = Surface(points=[Point(tokens=1, kv_length=0, fitted_ms=2.5)])
    assert latency(unmeasured, 1, 0) == 2.5 and unmeasured.measured == []
    with pytest.raises(ValidationError, match="every point has samples_ms or fitted_ms"):
        Surface.model_validate({"points": [{"tokens": 1, "kv_length": 0}]})


def test_standard_errors_by_hand() -> None:
    """The median absolute deviation of 1, 2, 3, 4, 5 is 1."""
    assert standard_error([1.0, 2, 3, 4, 5]) == pytest.approx(1.2533 * 1.4826 / 3 / 5**0.5)
    assert standard_error([1.0, 2, 3, 4, 500]) == standard_error([1.0, 2, 3, 4, 5]), "interruptions have no effect"
    assert standard_error([2.0, 2.0]) == 0.0
