"""The plot of a training log, which the cards of drafts show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.evidence.training_curve import distilled_layers, draw_curve, logged


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
