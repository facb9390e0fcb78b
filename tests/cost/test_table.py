"""Prices are read off the surfaces; every part knows its error; a table of something else is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from autotune.cost.table import KV_STEP, CostTable, Overhead, fit_overhead, fit_prefill, shipped_tables
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from tests.sample_documents import DEVICE, DRAFT, TARGET, cost_table, surface


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
    """A free line through these two would begin at -1 ms."""
    fitted = fit_prefill([(100, 0, 1.0), (200, 0, 3.0)])
    assert min(fitted.intercept_ms, fitted.per_token_ms, fitted.image_ms) >= 0
    assert (fitted.ms(np.array([1, 100, 150]), np.array([0, 0, 0])) > 0).all()


def test_one_interrupted_prefill_moves_nothing() -> None:
    """Sizes count by their medians."""
    samples = [(n, 0, 3.0 + 0.05 * n) for n in (50, 100, 150, 200) for _ in range(3)]
    fitted = fit_prefill([(50, 0, 5000.0), *samples[1:]])
    assert (fitted.intercept_ms, fitted.per_token_ms) == pytest.approx((3.0, 0.05))


def test_prefills_are_tested_by_sizes_left_out() -> None:
    """Nothing of a size helps to predict it: what lies on one line does so exactly, what lies off it does not."""
    line = [(n, 0, 3.0 + 0.05 * n) for n in (50, 100, 150, 200)]
    assert fit_prefill(line).held_out_error == pytest.approx(0.0, abs=1e-9)
    bent = fit_prefill([(50, 0, 5.5), (100, 0, 16.0), (150, 0, 10.5), (200, 0, 26.0)])
    assert bent.held_out_error is not None and bent.held_out_error > 0.2
    assert fit_prefill(line[:1]).held_out_error is None


def test_the_only_prompt_with_an_image_is_not_predicted_without_it() -> None:
    """The others say nothing of images, which is no error of theirs."""
    fitted = fit_prefill([*((n, 0, 3.0 + 0.05 * n) for n in (50, 100, 150)), (200, 1, 20.0)])
    assert fitted.image_ms == pytest.approx(7.0)
    assert fitted.held_out_error == pytest.approx(0.0, abs=1e-9)


# ------------------------------------------------------------------------------------------------------------ overhead


def test_overhead_coefficients_are_recovered() -> None:
    shapes = ((1, 1), (8, 8), (6, 30))  # levels and nodes of a round
    counts = [(rounds, rounds * depth, rounds * nodes) for rounds in (5, 12, 20) for depth, nodes in shapes]
    fitted = fit_overhead([(r, d, n, 0.3 * r + 0.05 * d + 0.01 * n) for r, d, n in counts])
    assert (fitted.round_ms, fitted.level_ms, fitted.node_ms) == pytest.approx((0.3, 0.05, 0.01), abs=1e-9)
    assert fitted.held_out_error == pytest.approx(0.0, abs=1e-9)
    assert [run[:3] for run in fitted.samples] == counts


def test_overheads_are_tested_by_runs_left_out() -> None:
    """One run of two is predicted by the other: 2 ms a round by 1, and 1 by 2."""
    fitted = fit_overhead([(10, 0, 0, 10.0), (10, 0, 0, 20.0)])
    assert fitted.held_out_error == pytest.approx((1.0 + 0.5) / 2)
    assert fit_overhead([(10, 0, 0, 10.0)]).held_out_error is None
    assert fit_overhead([]) == Overhead(round_ms=0, level_ms=0)


# --------------------------------------------------------------------------------------------------------------- prices


def test_prices_are_read_off_the_surfaces() -> None:
    """[tokens, KV length // 16], the first row free, a bin priced at its middle."""
    table = cost_table()
    prices = table.prices(DRAFT, max_tokens=10, max_kv_length=100)
    num_bins = 100 // KV_STEP + 2  # the last one begins at 112
    assert prices.draft_first_ms.shape == prices.draft_ms.shape == prices.verify_ms.shape == (
        11,
        num_bins,
    ) and prices.decode_ms.shape == (num_bins,)
    assert prices.kv_step == KV_STEP == 16
    assert not prices.draft_ms[0].any() and not prices.verify_ms[0].any()
    # KV lengths 32 to 47 are priced at 40.
    assert prices.verify_ms[5, 2] == pytest.approx(1.0 + 0.02 * 5 + 0.001 * 40)
    assert prices.draft_ms[10, 2] == pytest.approx(0.2 + 0.01 * 10 + 0.0001 * 40)
    assert prices.draft_first_ms[10, 2] == pytest.approx(0.3 + 0.01 * 10 + 0.0001 * 40)
    assert prices.decode_ms[2] == pytest.approx(1.0 + 0.001 * 40)
    assert (prices.overhead_round_ms, prices.overhead_level_ms, prices.overhead_node_ms) == (0.05, 0.01, 0.0)
    assert prices.draft_prefill == table.drafts[0].prefill


def test_a_prepared_size_costs_as_much_as_what_it_is_filled_up_to() -> None:
    table = cost_table().model_copy(update={"capture_sizes": (3, 8)})
    rounded, exact = (t.prices(DRAFT, max_tokens=8, max_kv_length=200) for t in (table, cost_table()))
    for n in range(1, 9):
        size = 3 if n <= 3 else 8
        for prices in ("draft_first_ms", "draft_ms", "verify_ms"):
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


# ---------------------------------------------------------------------------------------------------- held-out errors


def test_every_part_has_its_error_under_its_name() -> None:
    """Those that were tested; heads tell subnets apart."""
    tested = surface(lambda n, m: 1.0 + n, held_out=[(5, 100)]).with_best_model()
    (costs,) = cost_table().drafts
    half = costs.model_copy(update={"heads": 0.5, "draft_first": tested, "draft_level": tested})
    overhead = {"overhead": Overhead(round_ms=1, level_ms=0, held_out_error=0.25)}
    costs, half = costs.model_copy(update=overhead), half.model_copy(update=overhead)
    table = cost_table(verify=tested, drafts=[costs, half])
    assert list(table.held_out_errors) == [
        "verify",
        "tests/draft: overhead",
        "tests/draft heads-0.5: draft_first",
        "tests/draft heads-0.5: draft_level",
    ], "an overhead is that of all subnets"
    assert table.held_out_errors["tests/draft: overhead"] == 0.25
    assert cost_table().held_out_errors == {}


def test_samples_of_steps_are_counted() -> None:
    """4 sizes x 3 KV lengths: verifications, first forwards, levels; 3 plain steps."""
    assert cost_table().num_samples == 3 * 12 + 3


# ------------------------------------------------------------------------------------------------- tables of other things


def test_a_table_of_this_target_device_and_precision_is_accepted() -> None:
    """Under whatever name the target lies here."""
    cost_table().check_is_of(TARGET, DEVICE, "float32", source="x")
    moved = ModelReference(id="elsewhere", sha256=TARGET.sha256)
    cost_table().check_is_of(moved, DEVICE, "float32", source="x")
    unhashed = ModelReference(id="hub/model", sha256="")
    cost_table(target=unhashed).check_is_of(unhashed, DEVICE, "float32", source="x")


@pytest.mark.parametrize(
    ("target", "device", "precision", "message"),
    [
        (
            ModelReference(id="tests/other", sha256="e" * 64),
            DEVICE,
            "float32",
            r"valid for the model that it was measured with; this one is of 'tests/target' \(aaaaaaaa\), not of "
            r"'tests/other' \(eeeeeeee\)",
        ),
        (
            ModelReference(id=TARGET.id, sha256=""),
            DEVICE,
            "float32",
            r"'tests/target' \(aaaaaaaa\), not of 'tests/target' \(no hash\)",
        ),
        (
            TARGET,
            DEVICE.model_copy(update={"num_cores": 8}),
            "float32",
            r"valid for the device that it was measured with; this one is of 'cpu/An abacus/1', not of 'cpu/An abacus/8'",
        ),
        (
            TARGET,
            DEVICE,
            "bfloat16",
            r"valid for the precision that it was measured with; this one is of float32, not of bfloat16",
        ),
    ],
)
def test_a_table_of_something_else_is_refused(
    target: ModelReference, device: Fingerprint, precision: str, message: str
) -> None:
    """In one line that names the file, the rule, both values and what to do."""
    with pytest.raises(UserError, match=message) as refused:
        cost_table().check_is_of(target, device, precision, source="some/file.cost.json")
    text = str(refused.value)
    assert text.startswith("some/file.cost.json: a cost table is valid for") and "\n" not in text
    assert re.search(r"; delete it, or run autotune profile for this (model|device|precision)$", text)


# ------------------------------------------------------------------------------------------------------ other forms


def test_dataframe_has_a_row_for_every_measured_point() -> None:
    (costs,) = cost_table().drafts
    tested = surface(lambda n, m: 1.0 + n, held_out=[(5, 100)])
    table = cost_table(verify=tested, drafts=[costs.model_copy(update={"heads": 0.5})])
    frame = table.to_dataframe()
    assert list(frame.columns) == ["part", "tokens", "kv_length", "ms"]
    assert list(frame.part.unique()) == [
        "decode",
        "verify",
        "tests/draft heads-0.5: draft_first",
        "tests/draft heads-0.5: draft_level",
    ]
    (row,) = frame[(frame.part == "verify") & (frame.tokens == 5)].itertuples()
    assert (row.kv_length, row.ms) == (100, 6.0)
    assert len(frame) == len(table.decode.points) + len(tested.points) + 1 + 2 * len(costs.draft_first.points)


def test_a_table_survives_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "pair.cost.json"
    table = cost_table()
    table.save(path)
    assert CostTable.load(path) == table
    content = json.loads(path.read_text())
    content["verify"]["points"][0]["samples_ms"] = []
    with pytest.raises(UserError, match=r"verify\.points\.0\.samples_ms"):
        CostTable.parse(content, source=path)


def test_a_table_of_a_schema_without_migration_names_the_command(tmp_path: Path) -> None:
    path = tmp_path / "old.cost.json"
    path.write_text(cost_table().dump().replace("cost-table/5", "cost-table/1"))
    with pytest.raises(UserError, match=r"cost-table/1' is older .*; make the file again with autotune profile"):
        CostTable.load(path)


def test_shipped_tables_are_found_by_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.cost.table.data_root", lambda: tmp_path)
    assert shipped_tables() == {}
    for name in ("h100/a.cost.json", "h100/b.cost.json", "cpu/a.cost.json", "cpu/a.decode.json", "devices/h100.yaml"):
        path = tmp_path / "profiles" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    names = {device: [path.name for path in paths] for device, paths in shipped_tables().items()}
    assert names == {"cpu": ["a.cost.json"], "h100": ["a.cost.json", "b.cost.json"]}
