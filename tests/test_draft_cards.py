"""Recipes of ablations, and the sections of cards that compare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from autotune.files import data_root, parse_kind
from autotune.training.recipe import Recipe

torch = pytest.importorskip("torch", exc_type=ImportError)

from autotune.drafters.checkpoint import CONFIGS, load_network  # noqa: E402
from autotune.drafters.dream import DreamConfig, DreamNetwork  # noqa: E402
from benchmarks.evidence.training_curve import distilled_layers, draw_curve, logged  # noqa: E402

DREAM = data_root() / "drafts" / "digits" / "dream"


def test_ablations_of_dream_differ_from_their_baseline_in_one_setting(tmp_path: Path) -> None:
    """Blocks as in DREAM's table 2, layers as in its figure 4a. Their weights can be saved and loaded."""
    recipes = {path.stem: Recipe.load(path) for path in (DREAM / "ablations").glob("*.yaml")}
    baseline = recipes.pop("baseline")
    found = {}
    for name, recipe in recipes.items():
        common = {"name": "", "description": ""}
        draft = {key: value for key, value in recipe.draft.items() if key != "blocks"}
        (stage,), (whole,) = recipe.stages, baseline.stages
        same = recipe.model_copy(update={**common, "draft": draft, "stages": [whole]})
        assert same == baseline.model_copy(update=common), name
        assert stage.model_copy(update={"distillation": whole.distillation}) == whole, name
        sizes = {"hidden_size": 16, "num_target_layers": 12, "num_heads": 2, "head_size": 4, "mlp_size": 8}
        config = parse_kind(
            {**recipe.draft, **sizes, "kind": "dream"}, CONFIGS, key="kind", what="kind of draft", source=name
        )
        assert isinstance(config, DreamConfig)
        network = DreamNetwork(config)
        network.save(tmp_path)
        assert load_network(tmp_path).config == config
        found[name] = [block.has_cross_attention for block in network.blocks], stage.distillation
    full = [False, True, False]
    assert baseline.stages[0].distillation == "entropy"
    assert found == {
        "without-initial": ([True, False], "entropy"),
        "without-crossing": ([False, False], "entropy"),
        "without-final": ([False, True], "entropy"),
        "two-crossings": ([False, True, True, False], "entropy"),
        "without-distillation": (full, "none"),
        "static-25": (full, 12 // 4),
        "static-50": (full, 12 // 2),
        "static-75": (full, 12 * 3 // 4),
    }


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
