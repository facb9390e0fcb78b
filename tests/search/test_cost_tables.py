"""The cost table of a search is measured once and reused; tables of other models or devices are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.provenance import ModelReference
from autotune.errors import UserError
from autotune.measuring.jobs import JobLog, TimedJob
from autotune.search import cost_tables
from autotune.search.cost_tables import local_table, priced_variants
from autotune.search.model_pool import ModelPool
from autotune.search.space_files import load_space
from autotune.study.ledger import Ledger
from autotune.workloads.workload import Workload
from tests.sample_documents import cost_table
from tests.tiny_models import Pair


@pytest.fixture(scope="module")
def model_pool(pair: Pair) -> ModelPool:
    return ModelPool(str(pair.target_folder), [str(pair.draft_folder)], "cpu")


@pytest.fixture
def table(model_pool: ModelPool, evaluate: Workload, tmp_path: Path) -> Callable[..., CostTable]:
    """The table of a search in ``tmp_path``."""
    priced = priced_variants(model_pool.subnets(load_space("quick")))
    ledger = Ledger(tmp_path / "ledger.sqlite")
    return partial(local_table, model_pool, priced, evaluate, tmp_path, ledger, Console())


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

    monkeypatch.setattr(cost_tables, "measure_table", measure)
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
    whole = cost_tables.measure_table
    logs: list[JobLog] = []

    def interrupted(*arguments: Any) -> CostTable:
        log = arguments[-1]
        logs.append(log)
        if not log.is_begun:
            log.begin(2)
            log.append([job])
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(cost_tables, "measure_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        table()
    assert table() == measured[0]
    assert logs[1].threads == 2 and logs[1].jobs == [job]
    assert "cost table continued from 2 samples of an interrupted run" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.cost.jsonl"))


def test_table_is_measured_once(table: Callable[..., CostTable], measured: list[CostTable], tmp_path: Path) -> None:
    """It is reused from the folder or, if its file is gone, from the ledger; another time limit measures again."""
    first = table(time_limit_s=5.0)
    assert first == measured[0] == table(time_limit_s=5.0)
    (path,) = tmp_path.glob("*.cost.json")
    path.unlink()
    assert table(time_limit_s=5.0) == first and CostTable.load(path) == first and len(measured) == 1
    table()
    assert len(measured) == 2 and len(list(tmp_path.glob("*.cost.json"))) == 2


def test_table_of_another_model_device_or_precision_is_refused(
    table: Callable[..., CostTable], measured: list[CostTable], tmp_path: Path
) -> None:
    known = table()
    (path,) = tmp_path.glob("*.cost.json")
    changes: list[tuple[dict[str, object], str]] = [
        ({"target": ModelReference(id="tests/other", sha256="e" * 64)}, "this one is of 'tests/other'"),
        ({"device": cost_table().device}, "this one is of 'cpu/An abacus/1'"),
        ({"precision": "bfloat16"}, "this one is of bfloat16, not of float32"),
    ]
    for change, message in changes:
        known.model_copy(update=change).save(path)
        with pytest.raises(UserError, match=message) as refused:
            table()
        assert str(refused.value).startswith(f"{path}: ")


@pytest.mark.parametrize("mode", ["eager", "cuda-graph"])
def test_captured_steps_of_another_version_are_measured_again(
    model_pool: ModelPool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_pool, "mode", mode)
    key = model_pool.key
    monkeypatch.setattr("autotune.search.model_pool.STEPS_VERSION", 99)
    assert (model_pool.key != key) == (mode != "eager")
