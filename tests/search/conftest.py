"""Fixtures of searches."""

from __future__ import annotations

from tests.evaluation.conftest import evaluate

__all__ = ["evaluate"]
