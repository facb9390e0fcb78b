"""Migrations that documents of several kinds share. Imports no policies, so that cost tables load without numba."""

from __future__ import annotations

from typing import Any

from autotune.files import rename_keys


def rename_execution(content: dict[str, Any]) -> None:
    """Migrate how forwards run from its names in profiles of version 1 and cost tables of version 4."""
    rename_keys(content, {"runner": "mode", "buckets": "capture_sizes"})
    if content.get("mode") == "graph":
        content["mode"] = "cuda-graph"


# Rules that trees followed before they were hyperparameters, by policy.
_RULES: dict[str, dict[str, Any]] = {"wetap": {"nucleus": "all"}}


def keep_tree_rules(content: dict[str, Any]) -> None:
    """Migrate profiles of version 2: their trees keep the rules by which they were measured."""
    points = content.get("points")
    for point in points if isinstance(points, list) else ():
        tree = point.get("tree") if isinstance(point, dict) else None
        if isinstance(tree, dict):
            point["tree"] = _RULES.get(str(tree.get("policy")), {}) | tree
