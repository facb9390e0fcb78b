"""What an export says of itself, to programs and to people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from autotune.console import Console
from autotune.documents.configuration import Configuration
from autotune.documents.decoding_profile import Predicted
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance
from autotune.files import Document
from autotune.trees.policy import TreePolicy

EXPORT = "export.json"


class BatchPrediction(Document):
    """Of batch sizes ``start`` to ``end``: how many tokens to draft, and the least speedup over plain decoding there."""

    start: int
    end: int
    draft_tokens: int
    least_speedup: float
    estimated: bool
    """Beyond one request: priced by steps of one request that read as many tokens."""


class Variant(Document):
    """One way in which the engine can decode."""

    name: str
    """``chain`` or ``tree``."""
    tree: TreePolicy
    """In this project's words."""
    predicted: Predicted
    slowdown: float
    """Predicted time a token over that of the profile's point, minus 1: what the engine's restrictions cost."""
    by_batch: list[BatchPrediction] = Field(default_factory=list)
    file: str
    settings: dict[str, Any]
    command: str


class Export(Document):
    """What was exported, fastest variant first, and how far to trust it."""

    provenance: Provenance
    engine: str
    profile: str
    study: str
    target: ModelReference
    draft: ModelReference
    kind: str
    """Of the draft."""
    point: int
    workload: str
    hardware: Fingerprint
    """Whose prices they are."""
    tuned: Predicted
    """The profile's point, on the same prompts."""
    variants: list[Variant]
    lossless: str
    notes: list[str]


def print_export(export: Export, folder: Path, console: Console) -> None:
    """For people: what was chosen, what it costs, where it lies."""
    rows = [["the profile's point", f"{export.tuned.speedup:.2f}x", _two_digits(export.tuned.tokens_per_round), "-"]]
    for variant in export.variants:
        tree = Configuration(tree=variant.tree.model_dump(), draft=export.draft.id).label
        found = variant.predicted
        rows.append(
            [tree, f"{found.speedup:.2f}x", _two_digits(found.tokens_per_round), f"{100 * variant.slowdown:+.0f} %"]
        )
    mark = " (estimated)" if export.tuned.estimated else ""
    console.table(
        f"Export to {export.engine}, predicted{mark}", ["configuration", "speedup", "M", "time a token"], rows
    )
    for variant in export.variants:
        batches = [
            [
                f"{one.start} to {one.end}" if one.end > one.start else f"{one.end}",
                f"{one.draft_tokens}",
                f"{one.least_speedup:.2f}x",
            ]
            for one in variant.by_batch
        ]
        if batches:
            console.table("By batch size (estimated)", ["requests", "draft tokens", "speedup, at least"], batches)
    for note in (f"lossless: {export.lossless}", *export.notes):
        console.say(f"- {note}")
    console.say(f"written to {folder}: {', '.join([*(variant.file for variant in export.variants), EXPORT])}")


def _two_digits(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"
