"""The export document, and its summary for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.console import Console
from autotune.documents.decoding_profile import Predicted
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance
from autotune.files import Document
from autotune.trees.chain import ChainPolicy

EXPORT = "export.json"


class Export(Document, kind="export", version=3, made_by="autotune export"):
    """The exported chain with its settings, predictions and limitations."""

    provenance: Provenance
    engine: str
    engine_version: str
    """The version whose rules the settings were checked against."""
    profile: str
    study: str
    target: ModelReference
    draft: ModelReference
    kind: str
    """The draft's kind."""
    workload: str
    hardware: Fingerprint
    """The device of the cost table."""
    tuned: Predicted
    """The profile's point on the same prompts."""
    tree: ChainPolicy
    predicted: Predicted
    slowdown: float
    """Predicted time per token relative to the profile's point, minus 1: the cost of the engine's restrictions."""
    file: str
    settings: dict[str, Any]
    command: str
    lossless: str
    notes: list[str]


def print_export(export: Export, folder: Path, console: Console) -> None:
    """Print the chain with its predictions, the notes and the files."""
    predictions = (
        ("the profile's point", export.tuned, "-"),
        (export.tree.label, export.predicted, f"{100 * export.slowdown:+.0f} %"),
    )
    mark = " (estimated)" if export.tuned.estimated else ""
    console.table(
        f"Export to {export.engine} {export.engine_version}, predicted{mark}",
        ["configuration", "speedup", "M", "time per token"],
        [
            [label, f"{p.speedup:.2f}x", "-" if p.tokens_per_round is None else f"{p.tokens_per_round:.2f}", slowdown]
            for label, p, slowdown in predictions
        ],
    )
    for note in (f"lossless: {export.lossless}", *export.notes):
        console.say(f"- {note}")
    console.say(f"written to {folder}: {export.file}, {EXPORT}")
