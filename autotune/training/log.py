"""The training log, and the held-out agreement that it lets expect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autotune.files import read_lines

AGREEMENT_METRIC = "held_out_agreement"
EXPECTATION_ERRORS = ((0.5, 0.04), (0.25, 0.08))
"""Largest error of ``expected_agreement`` on the logs of the bundled drafts, by the least share of the steps that were
done.
"""
LEAST_AGREEMENT = 0.001  # so that the log-odds of no agreement are finite, and those of full agreement


def logged(log: Path) -> list[dict[str, Any]]:
    """The steps of a log in order. After a restart from a checkpoint, repeated steps replace the earlier ones."""
    steps: list[dict[str, Any]] = []
    for record in (line for line in read_lines(log) if {"stage", "step"} <= line.keys()):
        while steps and (steps[-1]["stage"], steps[-1]["step"]) >= (record["stage"], record["step"]):
            steps.pop()
        steps.append(record)
    return steps


def expected_agreement(log: Path, stage_steps: Sequence[int]) -> tuple[float, float] | None:
    """The held-out agreement to expect after the last step of a run, and the largest error of such expectations; None
    before a quarter of the steps. It follows a line through the run's own log-odds of agreement over the logarithm of
    the steps, so that it lies between 0 and 1.
    """
    total = sum(stage_steps)
    held_out = [record for record in logged(log) if AGREEMENT_METRIC in record]
    steps = [sum(stage_steps[: record["stage"]]) + record["step"] for record in held_out]
    errors = [error for share, error in EXPECTATION_ERRORS if len(steps) > 1 and steps[-1] >= share * total]
    if not errors:
        return None
    shares = np.clip([record[AGREEMENT_METRIC] for record in held_out], LEAST_AGREEMENT, 1 - LEAST_AGREEMENT)
    slope, start = np.polyfit(np.log(steps), np.log(shares / (1 - shares)), 1)
    return float(1 / (1 + np.exp(-start - slope * np.log(total)))), errors[0]
