"""Every benchmark explains itself."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


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
