"""The study document of a search, which is saved after every stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autotune.cost.table import CostTable
from autotune.documents.provenance import stamp
from autotune.search.tuning import Tuning
from autotune.study.document import StudyDocument, StudyDraft


class StudyFile:
    """Collects the fields of a study document; those of the search itself come with the cost table."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.content: dict[str, Any] = {}
        self.stage_seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Time a stage, and save the study after it. Yields the content, to which the stage adds its results."""
        started = time.monotonic()
        yield self.content
        self.stage_seconds[name] = time.monotonic() - started
        path = self.tuning.folder / f"study-{self.tuning.key}.json"
        is_of_ended = path.exists() and '"profile": ""' not in path.read_text()
        if "profile" in self.content or not is_of_ended:  # which is kept until this run ends, too
            records = self.tuning.ledger.used_keys
            StudyDocument(**self.content, records=records, stage_seconds=self.stage_seconds).save(path)


def described(tuning: Tuning, table: CostTable) -> dict[str, Any]:
    """The fields of a study document that say what is searched."""
    pool = tuning.pool
    return {
        "provenance": stamp(settings_key=tuning.settings_key),
        "command": tuning.settings.command,
        "target": pool.target_reference,
        "target_shape": pool.target.shape,
        "drafts": [
            StudyDraft(kind=pool.kind(id), reference=known, shape=pool.draft(id).shape)
            for id, known in pool.references.items()
        ],
        "hardware": table.device,
        "workload": tuning.settings.workload,
        "tune_sha256": tuning.tune.sha256,
        "space": tuning.space.name,
        "cost_table": table.content_hash,
    }
