"""Surfaces reproduce measured points, and interpolate with the model that predicts held-out points better."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.cost.surface import MODELS, Point, Surface
from autotune.errors import UserError
from tests.sample_documents import cost_table, surface

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
    for (tokens, kv_length), model in itertools.product(((9, 100), (1, 451), (9, 451)), MODELS):
        with pytest.raises(UserError) as refused:
            latency(small_surface(model=model), tokens, kv_length)
        assert "measured up to 8 tokens and a KV length of 300" in str(refused.value)
        assert f"got {tokens:.0f} tokens at {kv_length:.0f}; measure a larger grid" in str(refused.value)


def test_incomplete_grid_is_refused() -> None:
    incomplete = Surface(points=small_surface().points[:-1])
    with pytest.raises(UserError, match=r"full grid; got 5 points for 3 x 2; measure again"):
        latency(incomplete, 1, 100)


def test_latency_is_the_median() -> None:
    """An interrupted sample has no effect."""
    assert Point(tokens=1, kv_length=0, samples_ms=[1.0, 50.0, 1.2]).latency_ms == 1.2


def test_held_out_errors_by_hand() -> None:
    """Predicted 2.0 and 3.5, measured 2.5 and 2.8."""
    held_out = [Point(tokens=1, kv_length=200, samples_ms=[2.5]), Point(tokens=5, kv_length=100, samples_ms=[2.8])]
    np.testing.assert_allclose(small_surface(held_out=held_out).held_out_errors(), [-0.2, 0.25])
    assert small_surface().held_out_errors().tolist() == []


LENGTHS = (16, 256, 400)
OFF_GRID = [(12, 100), (16, 300), (20, 100), (24, 300), (40, 100)]


def kinked(n: int, m: int) -> float:
    """Latency increases up to 16 tokens only, which no line from 8 to 33 tokens follows."""
    return 3.0 + 0.25 * min(n, 16) + 0.002 * m


def wavy(n: int, m: int) -> float:
    """4 tokens are cheaper than 3, as with real kernels, which no increasing function follows."""
    return 5.0 + 0.02 * n + 0.001 * m - 2.0 * (n == 4)


def selected(
    latency_ms: Callable[[int, int], float], tokens: tuple[int, ...], held_out: list[tuple[int, int]]
) -> Surface:
    return surface(latency_ms, tokens=tokens, kv_lengths=LENGTHS, held_out=held_out).with_best_model()


def test_model_with_the_smaller_held_out_error_is_selected() -> None:
    """``steps`` for a kink, ``linear`` for a decreasing curve; the document has the errors of both."""
    steps = selected(kinked, (1, 2, 4, 8, 33, 65), OFF_GRID)
    assert steps.model == "steps" and steps.errors["steps"] < 0.02 < steps.errors["linear"]
    line = selected(wavy, (1, 2, 3, 4, 5, 8, 33, 65), [(4, 100), (4, 300), (3, 100)])
    assert line.model == "linear" and line.errors["linear"] < 1e-9 < 0.05 < line.errors["steps"]
    assert (steps.held_out_error, line.held_out_error) == (steps.errors["steps"], line.errors["linear"])
    for found in (steps, line):
        for model in MODELS:
            assert found.errors[model] == float(np.median(np.abs(found.held_out_errors(model))))


def test_linear_model_is_selected_without_held_out_points() -> None:
    found = small_surface(model="steps").with_best_model()
    assert found.model == "linear" and found.errors == {} and found.held_out_error is None


def test_linear_model_can_be_requested() -> None:
    """It is exact at the points of the grid."""
    steps = selected(kinked, (1, 2, 4, 8, 33, 65), OFF_GRID)
    tokens, lengths = np.array([1.0, 8, 65]), np.array(LENGTHS, float)
    exact = [[kinked(int(n), int(m)) for m in lengths] for n in tokens]
    np.testing.assert_array_equal(steps.latency_ms(tokens, lengths, model="linear"), exact)


def test_steps_model_is_increasing_and_not_negative() -> None:
    """Also when it is fitted to noise."""
    rng = np.random.default_rng(0)
    noisy = surface(lambda n, m: float(rng.uniform(0.1, 5.0)), tokens=(1, 2, 8, 33, 129), kv_lengths=LENGTHS)
    prices = noisy.latency_ms(np.arange(1.0, 130), np.arange(0.0, 600), model="steps")
    assert (np.diff(prices, axis=0) > -1e-9).all() and (np.diff(prices, axis=1) > -1e-9).all() and (prices >= 0).all()
    assert prices[0, 0] == prices[0, 16], "below the shortest KV length latency is constant"


def test_steps_model_is_fitted_to_examined_points() -> None:
    """A grid of 1, 8 and 129 tokens does not locate a jump between them; examined points do."""

    def jumping(n: int, m: int) -> float:
        return 3.0 + 2.0 * (n > 32) + 0.002 * m

    examined = [Point(tokens=n, kv_length=16, samples_ms=[jumping(n, 16)]) for n in (9, 17, 32, 33, 48, 65)]
    coarse = surface(jumping, tokens=(1, 8, 129), kv_lengths=LENGTHS)
    informed = coarse.model_copy(update={"examined": examined})
    errors = [abs(latency(found, 33, 256, model="steps") / jumping(33, 256) - 1) for found in (coarse, informed)]
    assert errors[1] < 0.01 < errors[0]


def test_loaded_table_has_the_same_latencies(tmp_path: Path) -> None:
    """Documents contain samples, not fitted numbers; a model fitted in another process is identical to the last bit."""
    table = cost_table(verify=selected(kinked, (1, 2, 4, 8, 33, 65), OFF_GRID))
    path = tmp_path / "pair.cost.json"
    table.save(path)
    tokens, lengths = np.arange(1.0, 66), np.arange(0.0, 400, 16)
    script = f"""
import sys
from pathlib import Path
import numpy as np
from autotune.cost.table import CostTable

path = Path({str(path)!r})
table = CostTable.load(path)
assert not {{"torch", "sklearn"}} & set(sys.modules), "imported before they are needed"
prices = table.verify.latency_ms(np.arange(1.0, 66), np.arange(0.0, 400, 16))
assert "torch" not in sys.modules
sys.stdout.buffer.write(prices.tobytes())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, cwd=REPOSITORY)
    assert table.verify.model == "steps"
    assert done.stdout == table.verify.latency_ms(tokens, lengths).tobytes()


def test_models_are_fitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = surface(lambda n, m: 1.0 + 0.1 * n + 0.01 * m, tokens=(1, 2, 8, 65))
    before = latency(found, 5, 100, model="steps")
    monkeypatch.setattr("sklearn.linear_model.LinearRegression", None)
    assert latency(found, 5, 100, model="steps") == before
    with pytest.raises(TypeError):  # other samples need another fit
        latency(surface(lambda n, m: 2.0 + 0.1 * n + 0.01 * m, tokens=(1, 2, 8, 65)), 5, 100, model="steps")
