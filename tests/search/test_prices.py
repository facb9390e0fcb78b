"""The cost table of a search is measured once and reused; tables of other models or devices are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from autotune.cost.table import CostTable
from autotune.documents.provenance import ModelReference
from autotune.measuring.jobs import JobLog, TimedJob
from autotune.measuring.tables import priced_variants
from autotune.runtime.model_pool import ModelPool, variants_of
from autotune.search import prices
from autotune.search.prices import local_table, table_for_gpu
from autotune.study.spaces import load_space
from autotune.workloads.workload import Workload
from tests.sample_documents import cost_table
from tests.search.conftest import SPACE, tuning_of
from tests.tiny_models import Pair


@pytest.fixture(scope="module")
def model_pool(pair: Pair) -> ModelPool:
    return ModelPool(str(pair.target_folder), [str(pair.draft_folder)], "cpu")


@pytest.fixture
def table(model_pool: ModelPool, evaluate: Workload, tmp_path: Path) -> Callable[..., CostTable]:
    """The table of a search in ``tmp_path``, by its time limit."""
    return partial(local_table, tuning_of(model_pool, evaluate, tmp_path, SPACE), evaluate)


@pytest.fixture
def measured(model_pool: ModelPool, monkeypatch: pytest.MonkeyPatch) -> list[CostTable]:
    """Tables that were measured; each has fixed numbers for these models on this device."""
    found: list[CostTable] = []

    def measure(*_: object) -> CostTable:
        known = cost_table()
        draft = known.drafts[0].model_copy(update={"draft": next(iter(model_pool.references.values()))})
        here = {"target": model_pool.target_reference, "device": model_pool.device, "drafts": [draft]}
        found.append(known.model_copy(update=here))
        return found[-1]

    monkeypatch.setattr(prices, "measure_table", measure)
    return found


def test_an_interrupted_measurement_continues(
    table: Callable[..., CostTable],
    measured: list[CostTable],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The samples of the first run are given to the second, and are deleted with the table in place."""
    job = TimedJob(plain_ms=(1.0, 1.0), samples=[("verify", 1, 16, 2.0), ("verify", 2, 16, 2.5)])
    whole = prices.measure_table
    logs: list[JobLog] = []

    def interrupted(*arguments: Any) -> CostTable:
        log = arguments[-1]
        logs.append(log)
        if not log.is_begun:
            log.begin(2)
            log.append([job])
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(prices, "measure_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        table(90.0)
    assert table(90.0) == measured[0]
    assert logs[1].threads == 2 and logs[1].jobs == [job]
    assert "cost table continued from 2 samples of an interrupted run" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.cost.jsonl"))


def test_table_is_measured_once(table: Callable[..., CostTable], measured: list[CostTable], tmp_path: Path) -> None:
    """It is reused from the ledger, and kept in the folder; another time limit measures again."""
    first = table(5.0)
    assert first == measured[0] == table(5.0)
    (path,) = tmp_path.glob("*.cost.json")
    path.unlink()
    assert table(5.0) == first and CostTable.load(path) == first and len(measured) == 1
    table(90.0)
    assert len(measured) == 2 and len(list(tmp_path.glob("*.cost.json"))) == 2


def test_a_shipped_table_prices_other_weights_of_the_same_sizes(
    model_pool: ModelPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was measured with random weights. One line names the property by which a table differs."""
    priced = priced_variants(variants_of(model_pool, load_space("quick")))
    estimate = table_for_gpu("h100", model_pool, priced, "cuda-graph")
    other, shape = ModelReference(id="random/weights", sha256="0" * 64), model_pool.target.shape
    drafts = [costs.model_copy(update={"draft": other}) for costs in estimate.drafts]
    decode = estimate.decode.model_copy(
        update={"points": [point.model_copy(update={"samples_ms": [7.0]}) for point in estimate.decode.points]}
    )
    measured = estimate.model_copy(update={"estimated": False, "target": other, "drafts": drafts, "decode": decode})
    path = tmp_path / "random.cost.json"
    monkeypatch.setattr(prices, "shipped_tables", lambda: {"h100": [path]})

    def found(asked: str = "auto", **changes: Any) -> tuple[CostTable, list[str]]:
        measured.model_copy(update=changes).save(path)
        said: list[str] = []
        return table_for_gpu("h100", model_pool, priced, asked, say=said.append), said

    table, said = found()
    assert said == [] and not table.estimated and table.decode == decode
    assert table.target == model_pool.target_reference
    assert {costs.draft for costs in table.drafts} == {model_pool.references[draft] for draft, _ in priced}
    larger = shape.model_copy(update={"num_layers": shape.num_layers + 1})
    foreign = shape.model_copy(update={"architecture": "another"})
    no_draft = [costs.model_copy(update={"shape": larger}) for costs in drafts]
    for mode, changes, reason in (
        ("auto", {"precision": "bfloat16"}, "it is of bfloat16, not of float32"),
        ("eager", {}, "it is of mode cuda-graph, not of eager"),
        ("auto", {"mode": "eager", "capture_sizes": ()}, "it is of mode eager, not of cuda-graph"),
        ("auto", {"capture_sizes": (1, 64)}, "it has capture sizes (1, 64), not (1, 2,"),
        ("auto", {"device": cost_table().device}, "it is of abacus, not of h100"),
        ("auto", {"steps_version": 1}, "its captured steps have version 1, these 2"),
        ("auto", {"target_shape": larger}, "random/weights has another architecture or other sizes than"),
        ("auto", {"target_shape": foreign}, "random/weights has another architecture or other sizes than"),
        ("auto", {"drafts": no_draft}, "it has no draft of the kind and sizes of"),
    ):
        table, said = found(mode, **changes)
        assert table.estimated and len(said) == 1
        assert said[0].startswith(f"random.cost.json does not price this search: {reason}"), said
    table, said = found("eager", mode="eager", capture_sizes=(), steps_version=1)
    assert said == [] and not table.estimated, "eager steps have not changed"


@pytest.mark.parametrize("mode", ["eager", "cuda-graph"])
def test_captured_steps_of_another_version_are_measured_again(
    model_pool: ModelPool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_pool, "mode", mode)
    key = model_pool.key
    monkeypatch.setattr("autotune.runtime.model_pool.STEPS_VERSION", 99)
    assert (model_pool.key != key) == (mode != "eager")
