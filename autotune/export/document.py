"""The export document, and its summary for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from autotune.console import Console
from autotune.documents.decoding_profile import Predicted
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance
from autotune.files import Document
from autotune.trees.policy import Policy

EXPORT = "export.json"


class BatchPrediction(Document):
    """How many tokens to draft for batch sizes ``start`` to ``end``, both included; 0 draft tokens: plain decoding."""

    start: int
    end: int
    draft_tokens: int
    least_speedup: float
    """Over plain decoding; the smallest of the batch sizes in the range."""
    estimated: bool
    """Batches above one request are priced by steps of one request that read as many tokens."""


class Variant(Document):
    """One configuration that the engine can run."""

    name: str
    """``chain`` or ``tree``."""
    label: str
    tree: Policy
    predicted: Predicted
    slowdown: float
    """Predicted time per token relative to the profile's point, minus 1: the cost of the engine's restrictions."""
    by_batch: list[BatchPrediction] = Field(default_factory=list)
    file: str
    companions: list[str] = Field(default_factory=list)
    """Files that the settings name."""
    settings: dict[str, Any]
    command: str


class Export(Document, kind="export", made_by="autotune export"):
    """The exported variants, fastest first, and their limitations."""

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
    point: int
    workload: str
    hardware: Fingerprint
    """The device of the cost table."""
    tuned: Predicted
    """The profile's point on the same prompts."""
    variants: list[Variant]
    lossless: str
    notes: list[str]


def print_export(export: Export, folder: Path, console: Console) -> None:
    """Print the variants with their predictions, the notes and the files."""
    predictions = [("the profile's point", export.tuned, "-")]
    predictions += [(one.label, one.predicted, f"{100 * one.slowdown:+.0f} %") for one in export.variants]
    mark = " (estimated)" if export.tuned.estimated else ""
    console.table(
        f"Export to {export.engine} {export.engine_version}, predicted{mark}",
        ["configuration", "speedup", "M", "time per token"],
        [
            [label, f"{p.speedup:.2f}x", "-" if p.tokens_per_round is None else f"{p.tokens_per_round:.2f}", slowdown]
            for label, p, slowdown in predictions
        ],
    )
    for batches in (variant.by_batch for variant in export.variants if variant.by_batch):
        sizes = [f"{one.start} to {one.end}" if one.end > one.start else f"{one.end}" for one in batches]
        console.table(
            f"By batch size{' (estimated)' if any(one.estimated for one in batches) else ''}",
            ["requests", "draft tokens", "speedup, at least"],
            [
                [size, f"{one.draft_tokens}", f"{one.least_speedup:.2f}x"]
                for size, one in zip(sizes, batches, strict=True)
            ],
        )
    for note in (f"lossless: {export.lossless}", *export.notes):
        console.say(f"- {note}")
    files = [name for variant in export.variants for name in (variant.file, *variant.companions)]
    console.say(f"written to {folder}: {', '.join([*files, EXPORT])}")
