"""Cost tables: fits, prices, held-out errors, and tables of another target, device or precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.cost.request_costs import FACTOR, Overhead, PrefillCost, fit_costs
from autotune.cost.table import KV_STEP, DensePrices, shipped_tables
from autotune.documents.provenance import ModelReference
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from tests.sample_documents import DRAFT, cost_table, surface


def fit_prefill(samples: list[tuple[int, int, float]]) -> PrefillCost:
    """Fit samples of (tokens, patches, ms)."""
    (cost,) = fit_costs(PrefillCost, [[(n, int(patches > 0), patches, ms) for n, patches, ms in samples]])
    return cost


def fit_overhead(samples: list[tuple[int, int, int, int, float]]) -> Overhead:
    (overhead,) = fit_costs(Overhead, [samples])
    return overhead


def test_prefill_coefficients_are_recovered() -> None:
    """Exactly from exact samples, approximately from noisy ones."""
    rng = np.random.default_rng(0)
    sizes = rng.integers((10, 0), (500, 4), (60, 2)) * (1, 600)  # of no image to OneVision's largest
    line = [(int(n), int(p), 3.0 + 0.05 * n + 7.0 * (p > 0) + 0.02 * p) for n, p in sizes]
    exact = fit_prefill(line)
    found = [getattr(exact, name) for name in PrefillCost.names()]
    assert found == pytest.approx([3.0, 0.05, 7.0, 0.02])
    noisy = fit_prefill([(n, p, ms + rng.normal(0, 0.1)) for n, p, ms in line])
    assert [getattr(noisy, name) for name in PrefillCost.names()] == pytest.approx(found, rel=0.1)
    np.testing.assert_allclose(exact.ms(np.array([100, 100, 100]), np.array([0, 600, 7290])), [8.0, 27.0, 160.8])


def test_prefill_costs_are_not_negative() -> None:
    """The line through these two samples has an intercept of -1 ms."""
    fitted = fit_prefill([(100, 0, 1.0), (200, 0, 3.0)])
    assert min(fitted.intercept_ms, fitted.per_token_ms, fitted.image_ms) >= 0
    assert (fitted.ms(np.array([1, 100, 150]), np.array([0, 0, 0])) > 0).all()


def test_prefill_error_is_cross_validated() -> None:
    """The error is 0 for samples on a line, large for others, and None for a single size."""
    line = [(n, 0, 3.0 + 0.05 * n) for n in (50, 100, 150, 200)]
    assert fit_prefill(line).held_out_error == pytest.approx(0.0, abs=1e-9)
    bent = fit_prefill([(50, 0, 5.5), (100, 0, 16.0), (150, 0, 10.5), (200, 0, 26.0)])
    assert bent.held_out_error is not None and bent.held_out_error > 0.2
    assert fit_prefill(line[:1]).held_out_error is None


def test_overhead_coefficients_are_recovered() -> None:
    # levels and nodes of a round, and whether it has retrieval
    shapes = ((1, 1, 0), (8, 8, 0), (6, 30, 0), (3, 12, 1))
    counts = [(n, n * depth, n * nodes, n * second) for n in (5, 12, 20) for depth, nodes, second in shapes]
    fitted = fit_overhead([(r, d, n, s, 0.3 * r + 0.05 * d + 0.01 * n + 0.07 * s) for r, d, n, s in counts])
    found = fitted.round_ms, fitted.level_ms, fitted.node_ms, fitted.retrieval_ms
    assert found == pytest.approx((0.3, 0.05, 0.01, 0.07), abs=1e-9)
    assert fitted.held_out_error == pytest.approx(0.0, abs=1e-9)
    assert [run[:4] for run in fitted.samples] == counts


def test_overhead_error_is_cross_validated() -> None:
    """Each of two runs, of 1 and 2 ms per round, is predicted from the other."""
    fitted = fit_overhead([(10, 0, 0, 0, 10.0), (10, 0, 0, 0, 20.0)])
    assert fitted.held_out_error == pytest.approx((1.0 + 0.5) / 2)
    assert fit_overhead([(10, 0, 0, 0, 10.0)]).held_out_error is None
    assert fit_overhead([]) == Overhead(round_ms=0, level_ms=0)


def test_prices_by_hand() -> None:
    """Indexed by [tokens, KV length // 16]; 0 tokens cost nothing; a bin has the price of its middle."""
    table = cost_table()
    prices = table.prices(DRAFT, max_tokens=10, max_kv_length=100)
    num_bins = 100 // KV_STEP + 2  # the last one begins at 112
    for ms in (prices.draft_first_ms, prices.draft_level_ms, prices.verify_ms):
        assert ms.shape == (11, num_bins)
    assert prices.decode_ms.shape == (num_bins,)
    assert prices.kv_step == KV_STEP == 16
    assert not prices.draft_level_ms[0].any() and not prices.verify_ms[0].any()
    # KV lengths 32 to 47 are priced at 40.
    assert prices.verify_ms[5, 2] == pytest.approx(1.0 + 0.02 * 5 + 0.001 * 40)
    assert prices.draft_level_ms[10, 2] == pytest.approx(0.2 + 0.01 * 10 + 0.0001 * 40)
    assert prices.draft_first_ms[10, 2] == pytest.approx(0.3 + 0.01 * 10 + 0.0001 * 40)
    assert prices.decode_ms[2] == pytest.approx(1.0 + 0.001 * 40)
    assert prices.overhead == Overhead(round_ms=0.05, level_ms=0.01)
    assert prices.draft_prefill == table.drafts[0].prefill


def test_prices_of_padded_inputs() -> None:
    table = cost_table().model_copy(update={"capture_sizes": (3, 8)})
    rounded, exact = (t.prices(DRAFT, max_tokens=8, max_kv_length=200) for t in (table, cost_table()))
    for n in range(1, 9):
        size = 3 if n <= 3 else 8
        for prices in ("draft_first_ms", "draft_level_ms", "verify_ms"):
            assert getattr(rounded, prices)[n].tolist() == getattr(exact, prices)[size].tolist()
    assert rounded.decode_ms.tolist() == exact.decode_ms.tolist(), "plain steps are not padded"
    assert (rounded.verify_ms[1] > exact.verify_ms[1]).all()


def test_prices_of_short_contexts_reach_no_further_than_the_longest() -> None:
    """The middle of the last KV step, 56, is beyond what a table of 36 tokens can be extrapolated to."""
    short = surface(lambda n, m: 1.0 + 0.001 * m, tokens=(1,), kv_lengths=(20, 36))
    prices = cost_table(decode=short).prices(DRAFT, max_tokens=8, max_kv_length=36)
    assert prices.decode_ms[-1] == pytest.approx(1.0 + 0.001 * 36)


def test_drafts_are_found_by_weights_and_by_what_changes_the_cost_of_a_step() -> None:
    """Visual tokens and the injection layer do not change it; names are compared where there are no hashes."""
    (whole,) = cost_table().drafts
    half, other = whole.model_copy(update={"subnet": Subnet(heads=0.5)}), ModelReference(id="hub/two", sha256="")
    table = cost_table(drafts=[whole, half, whole.model_copy(update={"draft": other})])
    moved = ModelReference(id="elsewhere", sha256=DRAFT.sha256)
    assert table.costs_of(moved) == table.costs_of(DRAFT, Subnet(heads=1.0, visual_keep=0.1)) == whole
    assert table.costs_of(DRAFT, Subnet(heads=0.5, injection_layer=9)) == half
    assert table.costs_of(DRAFT, Subnet(heads=(0.5, 0.5, 0.5))) == half
    assert table.costs_of(other).draft == other
    for draft, subnet, message in (
        (
            ModelReference(id=DRAFT.id, sha256="f" * 64),
            None,
            "no draft 'tests/draft' with these weights; it has: tests",
        ),
        (
            DRAFT,
            Subnet(heads=0.25),
            r"with these weights and heads=0\.25; it has: .* heads-0\.5, .*; measure that draft",
        ),
    ):
        with pytest.raises(UserError, match=message):
            table.costs_of(draft, subnet)


def test_unequal_shares_are_priced_between_equal_ones() -> None:
    """At the mean share: a third of the way from a half of the heads to all of them, and exactly where the table has
    them.
    """
    table = cost_table()
    (whole,) = table.drafts
    cheap = {"draft_first": surface(lambda n, m: 0.1 + 0.01 * n), "draft_level": surface(lambda n, m: 0.05 + 0.004 * n)}
    prefill = whole.prefill.model_copy(update={"intercept_ms": 3.0})
    half = whole.model_copy(update={"subnet": Subnet(heads=0.5), "prefill": prefill, **cheap})
    table = table.model_copy(update={"drafts": [whole, half]})

    def prices(heads: Any) -> DensePrices:
        return table.prices(whole.draft, max_tokens=8, max_kv_length=300, subnet=Subnet(heads=heads))

    found, low, high = prices((0.5, 1.0, 0.5)), prices(0.5), prices(1.0)
    for name in ("draft_first_ms", "draft_level_ms"):
        expected = (2 * getattr(low, name) + getattr(high, name)) / 3
        np.testing.assert_allclose(getattr(found, name), expected)
        assert (getattr(low, name)[1:] < getattr(found, name)[1:]).all()
    assert found.draft_prefill.intercept_ms == pytest.approx(2.0 + whole.prefill.intercept_ms / 3)
    np.testing.assert_array_equal(found.verify_ms, low.verify_ms)
    own = half.model_copy(update={"subnet": Subnet(heads=(0.5, 1.0, 0.5))})
    table = table.model_copy(update={"drafts": [whole, half, own]})
    np.testing.assert_array_equal(prices((0.5, 1.0, 0.5)).draft_level_ms, low.draft_level_ms)
    table = table.model_copy(update={"drafts": [whole, half]})
    for outside in ((0.25, 0.25, 0.5), 0.75):
        with pytest.raises(UserError, match="measure that draft first"):
            prices(outside)


def test_drafts_with_few_samples_have_the_overhead_of_the_others() -> None:
    """The runtime's work is the same for all drafts: a run that took three times as long moves its draft by a part of
    that.
    """
    runs = [(n, n * depth, n * nodes, 0) for n in (5, 12, 20) for depth, nodes in ((1, 1), (8, 8), (6, 30))]
    rng = np.random.default_rng(0)
    exact = [0.3 * rounds + 0.05 * levels + 0.01 * nodes for rounds, levels, nodes, _ in runs]
    usual = [(*counts, ms * float(np.exp(rng.normal(0, 0.3)))) for counts, ms in zip(runs, exact, strict=True)]
    slow = [(*runs[4], 3 * exact[4])]
    twice = [(*row[:4], 2 * row[4]) for row in usual]
    known, other, slower = fit_costs(Overhead, [usual, slow, twice])
    assert known.round_ms < slower.round_ms < 2.1 * known.round_ms
    assert known.round_ms < other.round_ms < 0.9 * 3 * known.round_ms
    assert known.uncertainty is not None and other.uncertainty is not None
    assert known.uncertainty < other.uncertainty <= FACTOR


def test_subnets_share_the_line_of_a_prefill() -> None:
    """Two prompts tell the scale of a subnet, not its own intercept."""
    whole = [(n, 0, 0, 2.0 + 0.02 * n) for n in (50, 100, 150, 200) for _ in range(3)]
    half = [(n, 0, 0, 0.7 * (2.0 + 0.02 * n)) for n in (100, 150) for _ in range(3)]
    both = fit_costs(PrefillCost, [whole, half])
    assert both[1].per_token_ms / both[0].per_token_ms == pytest.approx(both[1].intercept_ms / both[0].intercept_ms)
    assert both[1].per_token_ms == pytest.approx(0.7 * 0.02, rel=0.05)


def test_dataframe_has_a_row_for_every_measured_point() -> None:
    (costs,) = cost_table().drafts
    tested = surface(lambda n, m: 1.0 + n)
    table = cost_table(verify=tested, drafts=[costs.model_copy(update={"subnet": Subnet(heads=0.5)})])
    frame = table.to_dataframe()
    assert list(frame.columns) == ["part", "tokens", "kv_length", "ms"]
    of_draft = [f"tests/draft heads-0.5: {part}" for part in ("draft_first", "draft_level")]
    assert list(frame.part.unique()) == ["decode", "verify", *of_draft]
    (row,) = frame[(frame.part == "verify") & (frame.tokens == 8) & (frame.kv_length == 256)].itertuples()
    assert row.ms == 9.0
    assert len(frame) == len(table.decode.points) + len(tested.points) + 2 * len(costs.draft_first.points)


def test_shipped_tables_are_found_by_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.cost.table.data_root", lambda: tmp_path)
    assert shipped_tables() == {}
    for name in ("h100/a.cost.json", "h100/b.cost.json", "cpu/a.cost.json", "cpu/a.decode.json", "devices/h100.yaml"):
        path = tmp_path / "profiles" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    names = {device: [path.name for path in paths] for device, paths in shipped_tables().items()}
    assert names == {"cpu": ["a.cost.json"], "h100": ["a.cost.json", "b.cost.json"]}
