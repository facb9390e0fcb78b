"""``study.json`` is read as it was written, also by the next version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.documents.configuration import Configuration
from autotune.errors import UserError
from autotune.study.document import MeasuredConfiguration, StudyDocument, load_study
from autotune.study.ledger import Ledger
from autotune.study.storage import STUDY
from tests.sample_documents import DEVICE, PROVENANCE, TARGET


def study_document() -> StudyDocument:
    shape = {"num_layers": 1, "hidden_size": 8, "text_parameters": 9, "vision_parameters": 0}
    finalist = {"predicted_speedup": 2.2, "speedup": 2.0, "interval90": (2.0, 2.4), "ci95": (1.9, 2.1), "num_runs": 8}
    return StudyDocument(
        provenance=PROVENANCE,
        command="autotune search",
        target=TARGET,
        target_shape={**shape, "kv_bytes_per_token": 4, "bytes_per_parameter": 4},  # type: ignore[arg-type]
        drafts=[],
        hardware=DEVICE,
        workload="digits",
        tune_sha256="c" * 64,
        space="quick",
        cost_table="0123",
        records={"trees": ["a", "b"]},
        optuna_study="trees-0",
        finalists=[
            MeasuredConfiguration(configuration=Configuration(tree={"policy": "chain"}), is_eliminated=True, **finalist)
        ],
    )


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    study = study_document()
    assert load_study(tmp_path) is None
    study.save(tmp_path / STUDY)
    assert load_study(tmp_path) == study
    content = json.loads((tmp_path / STUDY).read_text())
    (tmp_path / STUDY).write_text(json.dumps({**content, "comand": "x"}))
    with pytest.raises(UserError, match="unknown key 'comand'; did you mean 'command'"):
        load_study(tmp_path)


def test_a_ledger_knows_which_records_were_used(tmp_path: Path) -> None:
    """The records that this worker's calls returned, whichever worker computed them."""
    ledger, other = Ledger(tmp_path / "l"), Ledger(tmp_path / "l")
    other.work("trees", {"z": lambda: {}, "a": lambda: {}})
    ledger.work("trees", {"a": lambda: {}, "m": lambda: {}})
    ledger.work("subnets", {"s": lambda: {}})
    assert ledger.used_keys == {"trees": ["a", "m"], "subnets": ["s"]}


def test_trees_of_no_policy_are_refused(tmp_path: Path) -> None:
    content = json.loads(study_document().dump())
    for tree in ({}, {"policy": "<script>"}, {"policy": "chain", "depth": -1}, {"policy": "chain", "more": [[]]}):
        content["finalists"][0]["configuration"]["tree"] = tree
        with pytest.raises(UserError, match=r"^study: finalists.0.configuration.tree: tree: "):
            StudyDocument.parse(content, source="study")
