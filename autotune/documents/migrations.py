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
_RULES: dict[str, dict[str, Any]] = {"sage": {"below_threshold": "drop"}, "wetap": {"nucleus": "all"}}


def with_its_rules(tree: Any) -> Any:
    """A tree of a document of version 2, with the rules that it followed."""
    return _RULES.get(str(tree.get("policy")), {}) | tree if isinstance(tree, dict) else tree


def keep_tree_rules(content: dict[str, Any]) -> None:
    """Migrate profiles of version 2: their trees keep the rules by which they were measured."""
    points = content.get("points")
    for point in points if isinstance(points, list) else ():
        if isinstance(point, dict):
            point["tree"] = with_its_rules(point.get("tree"))
