"""The plot of a training log, which the cards of drafts show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.evidence.training_curve import distilled_layers, draw_curve, logged


def test_training_log_is_plotted(tmp_path: Path) -> None:
    """The log may have one step or none, if the run has just started."""
    figures = {"loss": 1.0, "agreement": 0.5, "held_out_agreement": 0.4}
    for steps in ([(0, 1), (0, 2), (1, 1), (1, 3)], [(0, 1)], []):
        lines = [json.dumps({"stage": stage, "step": step, **figures}) + "\n" for stage, step in steps]
        (tmp_path / "a.jsonl").write_text("".join(lines))
        draw_curve(tmp_path / "a.jsonl", tmp_path / "training.png")
        with Image.open(tmp_path / "training.png") as image:
            assert image.size == (1200, 900)
            assert len(np.unique(np.asarray(image.convert("L")))) > 20


def test_distilled_layers_are_counted_over_the_log_and_plotted(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    lines: list[dict[str, Any]] = [
        {"step": 25, "distilled_layers": {"5": 1}},
        {"step": 50, "distilled_layers": {"5": 20, "11": 5}},
        {"step": 75, "distilled_layers": {"3": 25}},  # repeated after a restart
        {"step": 75, "distilled_layers": {"3": 1, "5": 24}},
    ]
    log.write_text("".join(json.dumps({"stage": 0, "loss": 1.0, **line}) + "\n" for line in lines))
    assert distilled_layers(logged(log)) == {3: 1, 5: 45, 11: 5}
    assert distilled_layers([]) == {}
    draw_curve(log, tmp_path / "training.png")
    with Image.open(tmp_path / "training.png") as image:
        assert image.size == (1200, 1200)
