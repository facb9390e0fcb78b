"""Surfaces reproduce the prices of their points, and interpolate between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autotune.cost.surface import Point, Surface, standard_error
from autotune.errors import UserError
from tests.sample_documents import surface

# Milliseconds by (tokens, KV length).
GRID = {(1, 100): 1.0, (1, 300): 3.0, (2, 100): 2.0, (2, 300): 6.0, (8, 100): 5.0, (8, 300): 18.0}


def small_surface(**fields: Any) -> Surface:
    points = [Point(tokens=n, kv_length=m, samples_ms=[ms]) for (n, m), ms in GRID.items()]
    return Surface(points=points, **fields)


def latency(of: Surface, tokens: float, kv_length: float, **options: Any) -> float:
    return float(of.latency_ms(np.array([tokens]), np.array([kv_length]), **options)[0, 0])


FALLING = surface(lambda n, m: 10 - 0.01 * m, tokens=(1,), kv_lengths=(100, 200))
FLAT = surface(lambda n, m: 2.0 * n, tokens=(1, 4), kv_lengths=(100,))
PRICES: list[tuple[str, Surface, float, float, float]] = [
    *(("a point of the grid", small_surface(), n, m, ms) for (n, m), ms in GRID.items()),
    ("halfway along the KV length", small_surface(), 1, 200, 2.0),
    ("halfway along the tokens", small_surface(), 5, 100, 3.5),
    ("a sixth and a quarter", small_surface(), 3, 150, 0.75 * 2.5 + 0.25 * 8.0),
    ("below the shortest KV length", small_surface(), 1, 7, 1.0),
    ("13 ms more per 200 cached tokens, up to 1.5 times the longest KV length", small_surface(), 8, 450, 18 + 9.75),
    ("a negative slope is noise", FALLING, 1, 300, 8.0),
    ("one KV length", FLAT, 2, 150, 4.0),
    ("an interrupted sample", Surface(points=[Point(tokens=1, kv_length=0, samples_ms=[1.0, 50.0, 1.2])]), 1, 0, 1.2),
]


@pytest.mark.parametrize(("_", "of", "tokens", "kv_length", "expected"), PRICES)
def test_prices_by_hand(_: str, of: Surface, tokens: float, kv_length: float, expected: float) -> None:
    assert latency(of, tokens, kv_length) == pytest.approx(expected)


@pytest.mark.parametrize(("tokens", "kv_length"), [(9, 100), (1, 451), (9, 451)])
def test_sizes_beyond_the_extrapolation_are_refused(tokens: float, kv_length: float) -> None:
    rule = f"up to 8 tokens and a KV length of 300; got {tokens} tokens at {kv_length}; measure a larger grid"
    with pytest.raises(UserError, match=rule):
        latency(small_surface(), tokens, kv_length)


def test_the_price_of_a_fit_counts_where_there_is_one() -> None:
    point = Point(tokens=1, kv_length=0, samples_ms=[1.0, 2.0, 3.0], fitted_ms=2.5)
    assert point.latency_ms == 2.5
    unmeasured = Surface(points=[Point(tokens=1, kv_length=0, fitted_ms=2.5)])
    assert latency(unmeasured, 1, 0) == 2.5 and unmeasured.measured == []


def test_standard_errors_by_hand() -> None:
    """The median absolute deviation of 1, 2, 3, 4, 5 is 1."""
    assert standard_error([1.0, 2, 3, 4, 5]) == pytest.approx(1.2533 * 1.4826 / 3 / 5**0.5)
    assert standard_error([1.0, 2, 3, 4, 500]) == standard_error([1.0, 2, 3, 4, 5]), "interruptions have no effect"
    assert standard_error([2.0, 2.0]) == 0.0
