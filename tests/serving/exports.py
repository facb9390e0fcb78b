"""Exports of a chain that are written by hand, without a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune.documents.decoding_profile import Predicted
from autotune.documents.provenance import ModelReference
from autotune.export.document import EXPORT, Export
from autotune.trees.chain import ChainPolicy
from tests.sample_documents import DEVICE, PROVENANCE

EXECUTABLE_VARIABLE = "AUTOTUNE_VLLM"
DEPTH = 3
"""Length of the chain."""


def write_export(
    folder: Path, target: ModelReference, draft: ModelReference, settings: dict[str, Any], *, command: str
) -> None:
    """Write the export of an independent draft."""
    predicted = Predicted(speedup=2.0, ms_per_token=1.0, tokens_per_round=2.0)
    Export(
        provenance=PROVENANCE,
        engine="vllm",
        engine_version="0.32.0",
        profile="profile.json",
        study=str(folder / "study"),
        target=target,
        draft=draft,
        kind="independent",
        workload="by hand",
        hardware=DEVICE,
        tuned=predicted,
        tree=ChainPolicy(depth=DEPTH),
        predicted=predicted,
        slowdown=0.0,
        file="settings.json",
        settings=settings,
        command=command,
        lossless="yes",
        notes=[],
    ).save(folder / EXPORT)
