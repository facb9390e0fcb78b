"""Studies as data frames."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from autotune.documents.configuration import Configuration
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.files import append_line, write_table
from autotune.study.frames import Study
from autotune.study.ledger import Ledger
from autotune.study.storage import LEDGER, RUNS, STUDY
from tests.evaluation.sample_runs import run
from tests.study.test_document import study_document


def test_trials_and_runs_are_tables(tmp_path: Path) -> None:
    chain = Configuration(tree={"policy": "chain", "depth": 3}, draft="d/a", subnet=Subnet(visual_keep=0.5))
    static = Configuration(tree={"policy": "static", "paths": [[0], [0, 0]]}, draft="d/a")

    def trial(configuration: Configuration, ms: float) -> dict[str, object]:
        figures = {"ms_per_token": ms, "tokens_per_round": 2.0, "nodes_per_round": 3.0, "speedup": 6 / ms}
        return {"configuration": configuration.model_dump(mode="json"), **figures}

    ledger = Ledger(tmp_path / LEDGER)
    ledger.work("trees", {"a": lambda: {"fastest": [trial(chain, 4.0), trial(static, 3.0)]}})
    ledger.work("trees", {"b": lambda: {"fastest": [trial(chain, 4.0)]}, "other": lambda: {"fastest": "unread"}})
    with pytest.raises(UserError, match=r"no study\.json; give a folder that autotune search has written"):
        Study(tmp_path)
    study_document().save(tmp_path / STUDY)
    study = Study(tmp_path)

    trials = study.trials_dataframe()
    assert list(trials.columns[:4]) == ["key", "draft", "subnet", "ms_per_token"]
    assert trials.key.tolist() == [static.key, chain.key], "every configuration once, the fastest first"
    assert trials[["policy", "speedup"]].to_numpy().tolist() == [["static", 2.0], ["chain", 1.5]]
    assert trials.subnet.tolist() == ["", "keep=0.5"]
    assert trials.depth.isna().tolist() == [True, False] and trials.paths[0] == "[[0], [0, 0]]"

    assert study.runs_dataframe().empty
    lines = [run(2.0).model_dump(), {**run(1.0).model_dump(), "arm": chain.key}, run(3.0).model_dump()]
    append_line(tmp_path / RUNS, *({"comparison": "c", **line} for line in lines))
    runs = study.runs_dataframe()
    expected = [["x", "c", 2.0], ["x", "c", 3.0], [chain.key, "c", 1.0]]
    assert runs[["arm", "comparison", "decode_ms"]].to_numpy().tolist() == expected
    for frame in (trials, runs):
        for path, read in ((tmp_path / "t.parquet", pd.read_parquet), (tmp_path / "t.csv", pd.read_csv)):
            write_table(path, frame)  # in Parquet every column has one type
            assert len(read(path)) == len(frame)
