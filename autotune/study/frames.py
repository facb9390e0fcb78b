"""Studies as pandas data frames."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.documents.configuration import Configuration
from autotune.documents.decoded import runs_dataframe
from autotune.errors import UserError, reading
from autotune.files import read_lines
from autotune.study.document import load_study
from autotune.study.ledger import Ledger
from autotune.study.storage import LEDGER, RUNS, STUDY

if TYPE_CHECKING:
    from pandas import DataFrame

    from autotune.documents.decoding_profile import DecodingProfile


class Study:
    """A search's results as data frames: ``Study(".autotune/NAME").trials_dataframe()``. It is the folder's newest
    search, or the one that made a profile. ``storage`` is the database of the ledger, if workers shared one.

    Raises:
        UserError: the folder holds no study, or the storage does not answer.
    """

    def __init__(
        self, folder: Path | str, profile: DecodingProfile | None = None, *, storage: str | None = None
    ) -> None:
        self.folder = Path(folder)
        document = load_study(self.folder, profile)
        if document is None:
            raise UserError(f"{folder}: no {STUDY}; give a folder that autotune search has written")
        self.document = document
        self.ledger = Ledger(storage or self.folder / LEDGER, must_exist=storage is not None)

    def trials_dataframe(self) -> DataFrame:
        """A row for every replayed configuration in the ledger, the fastest first.

        Columns: key, draft, subnet, policy, hyperparameters (NaN where a policy has no such hyperparameter), and the
        predicted ``speedup``, ``ms_per_token``, ``tokens_per_round`` and ``nodes_per_round``. Each work unit of the
        search keeps its fastest configurations only.
        """
        import pandas as pd

        rows = {}
        with self.ledger.reading():
            for record in self.ledger.records(self.document.records.get("trees", [])).values():
                for trial in record.get("fastest", ()):
                    configuration = Configuration.model_validate(trial["configuration"], strict=False)
                    tree = {
                        name: json.dumps(value) if isinstance(value, list) else value
                        for name, value in configuration.tree.items()
                        if not isinstance(value, dict)  # prices and calibration
                    }
                    rows[configuration.key] = {
                        "key": configuration.key,
                        "draft": configuration.draft,
                        "subnet": configuration.subnet.label,
                        **{name: float(value) for name, value in trial.items() if name != "configuration"},
                        **tree,
                    }
        frame = pd.DataFrame(list(rows.values()))
        return frame if frame.empty else frame.sort_values(["ms_per_token", "key"], ignore_index=True)

    def runs_dataframe(self) -> DataFrame:
        """A row for every real run of the study, as in ``documents.decoded.runs_dataframe``.

        ``arm`` is the key of a configuration (as in ``trials_dataframe``) or the name of another arm. Runs of one
        ``comparison`` are interleaved; only these may be compared.
        """
        runs: dict[str, list[dict[str, object]]] = {}
        with reading(f"{self.folder / RUNS}: a run is damaged", "remove its line"):
            for line in read_lines(self.folder / RUNS):
                runs.setdefault(str(line["arm"]), []).append(line)
            return runs_dataframe(runs)
