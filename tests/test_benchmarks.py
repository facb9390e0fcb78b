"""Every benchmark explains itself."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from autotune.cost import roofline

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_constants_of_estimates_are_those_that_published_figures_give() -> None:
    """The median error of at least 20 pairs of at least three papers is below 20 %."""
    module = importlib.import_module("benchmarks.published_speedups")
    pairs, inputs = module.load()
    assert len(pairs) == len(pairs.drop_duplicates()) >= 20 and pairs.paper.nunique() >= 3
    assert set(pairs.model) <= inputs["models"].keys()
    assert module.fit_layers_outside(pairs, inputs) == pytest.approx(roofline.LAYERS_OUTSIDE, abs=0.1)
    times = module.plain_layer_ms(inputs)
    assert np.exp(np.log(times).mean()) == pytest.approx(roofline.EAGER_LAYER_MS, abs=0.05)
    kernel_ms, host_ms = module.fit_captured(inputs)
    assert kernel_ms == pytest.approx(roofline.KERNEL_MS, abs=1e-4)
    assert host_ms == pytest.approx(roofline.HOST_MS, abs=0.01)
    assert module.captured_steps(inputs["measured_steps"], inputs).error.abs().median() < 0.1
    assert (
        module.captured_steps(inputs["captured_steps"], inputs).error.abs().median() < 0.15
    )  # nothing is fitted to these
    errors = np.abs(module.predictions(pairs, inputs, roofline.LAYERS_OUTSIDE) / pairs.speedup - 1)
    assert np.median(errors) < 0.2


def test_every_benchmark_has_help_and_says_what_it_measures_and_how_long_it_takes() -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    scripts = sorted(BENCHMARKS.glob("*.py"))
    assert scripts
    for script in scripts:
        module = importlib.import_module(f"benchmarks.{script.stem}")
        described = str(module.__doc__)
        assert f"python benchmarks/{script.name}" in described, script
        assert re.search(r"\b(takes|in) (about )?(\w+ )?(\d+ |a |half an )?(second|minute|hour)", described, re.I), (
            script
        )
        commands = [module.main, *getattr(module.main, "commands", {}).values()]
        for command in commands:
            assert isinstance(command, click.Command)
            done = CliRunner().invoke(command, ["--help"])
            assert done.exit_code == 0 and "Usage:" in done.output, script
