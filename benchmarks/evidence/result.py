"""A result file: what a benchmark measured, where and how, and the values that figures, tables and numbers in the
documentation show.
"""

from __future__ import annotations

import json
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from autotune.documents.contention import Contention
from autotune.documents.provenance import version_of
from autotune.files import Document, content_key

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
WORK = ROOT / ".autotune" / "results"
"""Folder of intermediate files, one folder for each result: an interrupted measurement continues from there."""
Rows = list[dict[str, Any]]


class Result(Document, kind="benchmark-result", made_by="python -m benchmarks.measure"):
    """One measured set. Times are milliseconds unless a key says otherwise."""

    name: str
    """Also the name of the file."""
    source: Literal["measured", "counted", "diary"]
    """``measured``: timed on the machine. ``counted``: the same on every machine. ``diary``: transcribed from
    ``benchmarks/RESULTS.md``, without samples, until the set is measured again.
    """
    command: str
    machine: str
    """Processor and number of cores; for counts, ``any``."""
    commit: str
    date: str
    versions: dict[str, str] = Field(default_factory=dict)
    minutes: float | None = None
    contention: Contention | None = None
    note: str = ""
    """Facts that a reader must know to judge the values: other processes, budgets, cuts."""
    samples: dict[str, Rows] = Field(default_factory=dict)
    """Tables of raw samples, by name."""
    values: dict[str, Rows]
    """Tables that are computed from the samples (``derive``), by name."""

    def dump(self) -> str:
        """The document as JSON with a line for each row of a table."""
        rows: list[str] = []

        def number_of(row: dict[str, Any]) -> str:
            rows.append(json.dumps(row, allow_nan=False))
            return f"@{len(rows) - 1}@"

        content = {"schema": self.schema_id(), **self.model_dump(mode="json")}
        for tables in (content["samples"], content["values"]):
            tables.update({name: [number_of(row) for row in table] for name, table in tables.items()})
        return re.sub(r'"@(\d+)@"', lambda match: rows[int(match[1])], json.dumps(content, indent=1, allow_nan=False))

    @property
    def content_hash(self) -> str:
        """Short hash of the values, which figures carry."""
        return content_key([self.name, self.values])


def path_of(name: str) -> Path:
    return RESULTS / f"{name}.json"


def load_result(name: str) -> Result | None:
    """The result of this name; None if it has not been measured."""
    return Result.load(path_of(name)) if path_of(name).exists() else None


def load_all() -> dict[str, Result]:
    """All results by name."""
    return {path.stem: Result.load(path) for path in sorted(RESULTS.glob("*.json"))}


def machine_name() -> str:
    """This machine's processor and cores, without its host name."""
    from autotune.machine.device import fingerprint

    device = fingerprint("cpu")
    return f"{device.num_cores} cores of {device.model}"


def stamped(name: str, **fields: Any) -> Result:
    """A measured result of this machine, this commit and now; ``fields`` override."""
    known: dict[str, Any] = {
        "name": name,
        "source": "measured",
        "machine": machine_name(),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {package: version_of(package) for package in ("torch", "transformers", "numpy", "numba")},
    }
    return Result(**{**known, **fields})


def commit() -> str:
    """Short hash of the checked-out commit, with ``+`` where files of the package differ from it."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    changed = subprocess.run(
        ["git", "status", "--porcelain", "-uno", "autotune"], cwd=ROOT, capture_output=True, text=True
    )
    return (head.stdout.strip() or "unknown") + ("+" if changed.stdout.strip() else "")
