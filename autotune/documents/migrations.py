"""Migrations that documents of several kinds share. Imports no policies, so that cost tables load without numba."""

from __future__ import annotations

from typing import Any

from autotune.files import rename_keys


def rename_execution(content: dict[str, Any]) -> None:
    """Migrate how forwards run from its names in profiles of version 1 and cost tables of version 4."""
    rename_keys(content, {"runner": "mode", "buckets": "capture_sizes"})
    if content.get("mode") == "graph":
        content["mode"] = "cuda-graph"
