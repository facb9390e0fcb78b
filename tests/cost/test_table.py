"""Prices are the measured latencies, linear between them, and refused where nothing was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.cost.table import KV_STEP, CostTable, Point, Surface, fit_prefill
from autotune.errors import UserError
from autotune.files import parse, read_json, write_document
from autotune.provenance import ModelReference
from autotune.subnet import Subnet
from tests.documents import DRAFT, cost_table, surface

# Latencies typed in: rows are 1, 2 and 8 tokens, columns KV lengths of 100 and 300.
GRID = {(1, 100): 1.0, (1, 300): 3.0, (2, 100): 2.0, (2, 300): 6.0, (8, 100): 5.0, (8, 300): 18.0}


def typed_in(**fields: Any) -> Surface:
    points = [Point(tokens=n, kv_length=m, samples_ms=[ms]) for (n, m), ms in GRID.items()]
    return Surface(points=points, **fields)


def latency(of: Surface, tokens: float, kv_length: float) -> float:
    return float(of.latency_ms(np.array([tokens]), np.array([kv_length]))[0, 0])


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
    assert f"{tokens:.0f} tokens at {kv_length:.0f} are asked for; profile a larger grid" in str(refused.value)


def test_a_grid_with_holes_is_refused() -> None:
    holed = Surface(points=typed_in().points[:-1])
    with pytest.raises(UserError, match=r"full grid; 5 points do not fill 3 x 2; profile again"):
        latency(holed, 1, 100)


def test_samples_count_by_their_median() -> None:
    """A reading that was interrupted does not move the price."""
    assert Point(tokens=1, kv_length=0, samples_ms=[1.0, 50.0, 1.2]).latency_ms == 1.2


def test_held_out_errors_by_hand() -> None:
    """Predicted 2.0 where 2.5 was measured, 3.5 where 2.8 was."""
    held_out = [Point(tokens=1, kv_length=200, samples_ms=[2.5]), Point(tokens=5, kv_length=100, samples_ms=[2.8])]
    np.testing.assert_allclose(typed_in(held_out=held_out).held_out_errors, [-0.2, 0.25])
    assert typed_in().held_out_errors.tolist() == []


def test_prefill_coefficients_are_recovered() -> None:
    """From samples that follow the formula exactly, and from noisy ones nearly."""
    rng = np.random.default_rng(0)
    sizes = [(int(n), int(i)) for n, i in zip(rng.integers(10, 500, 60), rng.integers(0, 2, 60), strict=True)]
    exact = fit_prefill([(n, i, 3.0 + 0.05 * n + 7.0 * i) for n, i in sizes])
    assert (exact.intercept_ms, exact.per_token_ms, exact.image_ms) == pytest.approx((3.0, 0.05, 7.0))
    noisy = fit_prefill([(n, i, 3.0 + 0.05 * n + 7.0 * i + rng.normal(0, 0.1)) for n, i in sizes])
    assert (noisy.intercept_ms, noisy.per_token_ms, noisy.image_ms) == pytest.approx((3.0, 0.05, 7.0), rel=0.1)
    priced = exact.ms(np.array([100, 100]), np.array([False, True]))
    np.testing.assert_allclose(priced, [8.0, 15.0])


def test_a_prefill_is_never_paid_back() -> None:
    """A line fitted to noise may cross zero."""
    fitted = fit_prefill([(100, 0, 1.0), (200, 0, 3.0)])
    assert fitted.ms(np.array([1, 150]), np.array([0, 0])).tolist() == [0.0, pytest.approx(2.0)]


# --------------------------------------------------------------------------------------------------------------- prices


def test_prices_are_read_off_the_surfaces() -> None:
    """[tokens, KV length // 16], the first row free, a bin priced at its middle."""
    table = cost_table()
    prices = table.prices(DRAFT, max_tokens=10, max_kv_length=100)
    num_bins = 100 // KV_STEP + 2  # the last one begins at 112
    assert prices.commit_ms.shape == prices.draft_ms.shape == prices.verify_ms.shape == (
        11,
        num_bins,
    ) and prices.decode_ms.shape == (num_bins,)
    assert prices.kv_step == KV_STEP == 16
    assert not prices.draft_ms[0].any() and not prices.verify_ms[0].any()
    # KV lengths 32 to 47 are priced at 40.
    assert prices.verify_ms[5, 2] == pytest.approx(1.0 + 0.02 * 5 + 0.001 * 40)
    assert prices.draft_ms[10, 2] == pytest.approx(0.2 + 0.01 * 10 + 0.0001 * 40)
    assert prices.commit_ms[10, 2] == pytest.approx(0.3 + 0.01 * 10 + 0.0001 * 40)
    assert prices.decode_ms[2] == pytest.approx(1.0 + 0.001 * 40)
    assert (prices.overhead_round_ms, prices.overhead_level_ms) == (0.05, 0.01)
    assert prices.draft_prefill == table.drafts[0].prefill


def test_a_prepared_size_costs_as_much_as_what_it_is_filled_up_to() -> None:
    table = cost_table().model_copy(update={"buckets": (3, 8)})
    rounded, exact = (t.prices(DRAFT, max_tokens=8, max_kv_length=200) for t in (table, cost_table()))
    for n in range(1, 9):
        size = 3 if n <= 3 else 8
        for prices in ("commit_ms", "draft_ms", "verify_ms"):
            assert getattr(rounded, prices)[n].tolist() == getattr(exact, prices)[size].tolist()
    assert rounded.decode_ms.tolist() == exact.decode_ms.tolist(), "a plain step is no forward of a tree"
    assert (rounded.verify_ms[1] > exact.verify_ms[1]).all()


def test_prices_beyond_the_table_are_refused() -> None:
    with pytest.raises(UserError, match="profile a larger grid"):
        cost_table().prices(DRAFT, max_tokens=66, max_kv_length=100)
    with pytest.raises(UserError, match="profile a larger grid"):
        cost_table().prices(DRAFT, max_tokens=8, max_kv_length=700)


@pytest.mark.parametrize(
    "unknown",
    [
        ModelReference(id="tests/other", sha256="f" * 64),
        ModelReference(id=DRAFT.id, sha256="f" * 64),  # the same name, other weights
        ModelReference(id=DRAFT.id, sha256=""),
    ],
)
def test_a_draft_that_was_not_measured_has_no_price(unknown: ModelReference) -> None:
    with pytest.raises(UserError, match=r"no draft '.*' with these weights; it has: tests/draft; profile that draft"):
        cost_table().costs_of(unknown)


def test_a_draft_is_known_by_its_weights() -> None:
    """The same weights under another name are the same draft; without a hash the name decides."""
    moved = ModelReference(id="elsewhere", sha256=DRAFT.sha256)
    assert cost_table().costs_of(moved) == cost_table().drafts[0]
    unhashed = [ModelReference(id=name, sha256="") for name in ("hub/one", "hub/two")]
    table = cost_table()
    table = table.model_copy(update={"drafts": [table.drafts[0].model_copy(update={"draft": d}) for d in unhashed]})
    assert table.costs_of(unhashed[1]).draft.id == "hub/two"


def test_subnets_are_told_apart_by_their_heads() -> None:
    """Visual tokens and the injection layer do not change what a step costs."""
    table = cost_table()
    (whole,) = table.drafts
    half = whole.model_copy(update={"heads": 0.5})
    table = table.model_copy(update={"drafts": [whole, half]})
    assert table.costs_of(whole.draft) == table.costs_of(whole.draft, Subnet(heads=1.0, visual_keep=0.1)) == whole
    assert table.costs_of(whole.draft, Subnet(heads=0.5, injection_layer=9)) == half
    assert table.costs_of(whole.draft, Subnet(heads=(0.5, 0.5, 0.5))) == half
    with pytest.raises(
        UserError, match=r"with these weights and heads 0\.25; it has: .*, .* \(heads 0\.5\); profile that"
    ):
        table.costs_of(whole.draft, Subnet(heads=0.25))


def test_a_table_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "pair.cost.json"
    table = cost_table()
    write_document(path, "cost-table", table)
    assert parse(CostTable, "cost-table", read_json(path), source=path) == table
    content = json.loads(path.read_text())
    content["verify"]["points"][0]["samples_ms"] = []
    with pytest.raises(UserError, match=r"verify\.points\.0\.samples_ms"):
        parse(CostTable, "cost-table", content, source=path)
