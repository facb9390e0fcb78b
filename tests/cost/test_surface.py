"""Surfaces price what was measured; between the points by the model that predicts held-out points best."""

from __future__ import annotations

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
# Latencies typed in: rows are 1, 2 and 8 tokens, columns KV lengths of 100 and 300.
GRID = {(1, 100): 1.0, (1, 300): 3.0, (2, 100): 2.0, (2, 300): 6.0, (8, 100): 5.0, (8, 300): 18.0}


def typed_in(**fields: Any) -> Surface:
    points = [Point(tokens=n, kv_length=m, samples_ms=[ms]) for (n, m), ms in GRID.items()]
    return Surface(points=points, **fields)


def latency(of: Surface, tokens: float, kv_length: float, **options: Any) -> float:
    return float(of.latency_ms(np.array([tokens]), np.array([kv_length]), **options)[0, 0])


def test_grid_points_cost_what_was_measured() -> None:
    for (n, m), ms in GRID.items():
        assert latency(typed_in(), n, m) == ms


@pytest.mark.parametrize(
    ("tokens", "kv_length", "expected"),
    [
        (1, 200, 2.0),  # halfway along the KV length
        (5, 100, 3.5),  # halfway along the tokens
        (5, 200, (3.5 + 12.0) / 2),  # both
        (3, 150, 0.75 * 2.5 + 0.25 * 8.0),  # a sixth, and a quarter
        (1, 7, 1.0),  # shorter than measured: as the shortest
    ],
)
def test_between_grid_points_it_is_linear(tokens: float, kv_length: float, expected: float) -> None:
    assert latency(typed_in(), tokens, kv_length) == pytest.approx(expected)


def test_a_longer_cache_goes_on_with_the_last_slope() -> None:
    """8 tokens rise by 13 ms over 200 cached tokens; they go on so to one and a half times the longest length."""
    assert latency(typed_in(), 8, 400) == pytest.approx(18 + 13 / 2)
    assert latency(typed_in(), 8, 450) == pytest.approx(18 + 13 * 0.75)


def test_a_falling_slope_is_noise() -> None:
    """A longer cache is never cheaper, so a price does not fall below the last one measured."""
    falling = surface(lambda n, m: 10 - 0.01 * m, tokens=(1,), kv_lengths=(100, 200))
    assert latency(falling, 1, 150) == pytest.approx(8.5)
    assert latency(falling, 1, 300) == pytest.approx(8.0)


def test_one_kv_length_serves_all_within_reach() -> None:
    flat = surface(lambda n, m: 2.0 * n, tokens=(1, 4), kv_lengths=(100,))
    assert latency(flat, 2, 50) == latency(flat, 2, 150) == pytest.approx(4.0)


@pytest.mark.parametrize(("tokens", "kv_length"), [(9, 100), (1, 451), (9, 451)])
def test_beyond_what_was_measured_it_refuses(tokens: float, kv_length: float) -> None:
    with pytest.raises(UserError) as refused:
        latency(typed_in(), tokens, kv_length)
    assert "measured up to 8 tokens and a KV length of 300" in str(refused.value)
    assert f"got {tokens:.0f} tokens at {kv_length:.0f}; profile a larger grid" in str(refused.value)


def test_a_grid_with_holes_is_refused() -> None:
    holed = Surface(points=typed_in().points[:-1])
    with pytest.raises(UserError, match=r"full grid; got 5 points for 3 x 2; profile again"):
        latency(holed, 1, 100)


def test_samples_count_by_their_median() -> None:
    """A reading that was interrupted does not move the price."""
    assert Point(tokens=1, kv_length=0, samples_ms=[1.0, 50.0, 1.2]).latency_ms == 1.2


def test_held_out_errors_by_hand() -> None:
    """Predicted 2.0 where 2.5 was measured, 3.5 where 2.8 was."""
    held_out = [Point(tokens=1, kv_length=200, samples_ms=[2.5]), Point(tokens=5, kv_length=100, samples_ms=[2.8])]
    np.testing.assert_allclose(typed_in(held_out=held_out).held_out_errors(), [-0.2, 0.25])
    assert typed_in().held_out_errors().tolist() == []


# --------------------------------------------------------------------------------------------------------------- models

LENGTHS = (16, 256, 400)
OFF_GRID = [(12, 100), (16, 300), (20, 100), (24, 300), (40, 100)]


def kinked(n: int, m: int) -> float:
    """A kernel fills up to 16 tokens: no line from 8 to 33 follows that."""
    return 3.0 + 0.25 * min(n, 16) + 0.002 * m


def wavy(n: int, m: int) -> float:
    """4 tokens are cheaper than 3, as kernels have it: no function that only grows does that."""
    return 5.0 + 0.02 * n + 0.001 * m - 2.0 * (n == 4)


def judged(
    latency_ms: Callable[[int, int], float], tokens: tuple[int, ...], held_out: list[tuple[int, int]]
) -> Surface:
    return surface(latency_ms, tokens=tokens, kv_lengths=LENGTHS, held_out=held_out).with_best_model()


def test_the_model_with_the_smaller_held_out_error_is_kept() -> None:
    """Steps where a line cuts corners, a line where the curve falls; the errors of both are in the document."""
    steps = judged(kinked, (1, 2, 4, 8, 33, 65), OFF_GRID)
    assert steps.model == "steps" and steps.errors["steps"] < 0.02 < steps.errors["linear"]
    line = judged(wavy, (1, 2, 3, 4, 5, 8, 33, 65), [(4, 100), (4, 300), (3, 100)])
    assert line.model == "linear" and line.errors["linear"] < 1e-9 < 0.05 < line.errors["steps"]
    assert (steps.held_out_error, line.held_out_error) == (steps.errors["steps"], line.errors["linear"])
    for found in (steps, line):
        for model in MODELS:
            assert found.errors[model] == float(np.median(np.abs(found.held_out_errors(model))))


def test_without_a_test_the_line_is_kept() -> None:
    found = typed_in(model="steps").with_best_model()
    assert found.model == "linear" and found.errors == {} and found.held_out_error is None


def test_a_line_is_to_be_had_whatever_is_kept() -> None:
    """Exact at the points of the grid."""
    steps = judged(kinked, (1, 2, 4, 8, 33, 65), OFF_GRID)
    tokens, lengths = np.array([1.0, 8, 65]), np.array(LENGTHS, float)
    exact = [[kinked(int(n), int(m)) for m in lengths] for n in tokens]
    np.testing.assert_array_equal(steps.latency_ms(tokens, lengths, model="linear"), exact)


def test_steps_never_fall_and_are_never_negative() -> None:
    """Whatever noise they were fitted to: a larger step or a longer cache costs no less."""
    rng = np.random.default_rng(0)
    noisy = surface(lambda n, m: float(rng.uniform(0.1, 5.0)), tokens=(1, 2, 8, 33, 129), kv_lengths=LENGTHS)
    prices = noisy.latency_ms(np.arange(1.0, 130), np.arange(0.0, 600), model="steps")
    assert (np.diff(prices, axis=0) > -1e-9).all() and (np.diff(prices, axis=1) > -1e-9).all() and (prices >= 0).all()
    assert prices[0, 0] == prices[0, 16], "a cache shorter than measured costs what the shortest does"


def test_steps_learn_from_points_off_the_grid() -> None:
    """A grid of 1, 8 and 129 tokens says nothing about the place of a jump between them; what was examined there does."""

    def jumping(n: int, m: int) -> float:
        return 3.0 + 2.0 * (n > 32) + 0.002 * m

    examined = [Point(tokens=n, kv_length=16, samples_ms=[jumping(n, 16)]) for n in (9, 17, 32, 33, 48, 65)]
    coarse = surface(jumping, tokens=(1, 8, 129), kv_lengths=LENGTHS)
    informed = coarse.model_copy(update={"examined": examined})
    errors = [abs(latency(found, 33, 256, model="steps") / jumping(33, 256) - 1) for found in (coarse, informed)]
    assert errors[1] < 0.01 < errors[0]


def test_steps_refuse_what_lines_refuse() -> None:
    steps = typed_in(model="steps")
    with pytest.raises(UserError, match="profile a larger grid"):
        latency(steps, 9, 100)
    with pytest.raises(UserError, match="profile a larger grid"):
        latency(steps, 1, 451)


def test_a_kept_model_is_made_again_from_the_document(tmp_path: Path) -> None:
    """Which holds samples and a name, no fitted numbers: in another process the prices are the same to the last bit."""
    table = cost_table(verify=judged(kinked, (1, 2, 4, 8, 33, 65), OFF_GRID))
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
assert not {{"torch", "sklearn"}} & set(sys.modules), "loaded before it is asked for"
prices = table.verify.latency_ms(np.arange(1.0, 66), np.arange(0.0, 400, 16))
assert "torch" not in sys.modules
sys.stdout.buffer.write(prices.tobytes())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, cwd=REPOSITORY)
    assert table.verify.model == "steps"
    assert done.stdout == table.verify.latency_ms(tokens, lengths).tobytes()


def test_a_model_is_fitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = surface(lambda n, m: 1.0 + 0.1 * n + 0.01 * m, tokens=(1, 2, 8, 65))
    before = latency(found, 5, 100, model="steps")
    monkeypatch.setattr("sklearn.linear_model.LinearRegression", None)
    assert latency(found, 5, 100, model="steps") == before
    with pytest.raises(TypeError):  # other samples are another fit
        latency(surface(lambda n, m: 2.0 + 0.1 * n + 0.01 * m, tokens=(1, 2, 8, 65)), 5, 100, model="steps")
