"""Every benchmark explains itself."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from autotune.cost.roofline import find_limits
from benchmarks import gpu_battery

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_constants_of_estimates_are_those_that_published_figures_give() -> None:
    """The median error of at least 20 pairs of at least three papers is below 20 %."""
    module = importlib.import_module("benchmarks.published_speedups")
    pairs, inputs = module.load()
    constants = find_limits("h100")
    assert len(pairs) == len(pairs.drop_duplicates()) >= 20 and pairs.paper.nunique() >= 3
    assert set(pairs.model) <= inputs["models"].keys()
    assert module.fit_layers_outside(pairs, inputs) == pytest.approx(constants.layers_outside, abs=0.1)
    times = module.plain_layer_ms(inputs)
    assert np.exp(np.log(times).mean()) == pytest.approx(constants.eager_layer_ms, abs=0.05)
    kernel_ms, host_ms = module.fit_captured(inputs)
    assert kernel_ms == pytest.approx(constants.kernel_ms, abs=1e-4)
    assert host_ms == pytest.approx(constants.host_ms, abs=0.01)
    assert module.captured_steps(inputs["measured_steps"], inputs).error.abs().median() < 0.1
    assert (
        module.captured_steps(inputs["captured_steps"], inputs).error.abs().median() < 0.15
    )  # nothing is fitted to these
    shared = module.captured_steps(inputs["shared_steps"], inputs)
    large = shared[shared.model.str.contains("70B|72B")].error
    assert len(large) == 9 and large.abs().median() < 0.15 and large.abs().max() < 0.65  # nor to these
    errors = np.abs(module.predictions(pairs, inputs, constants.layers_outside) / pairs.speedup - 1)
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


def battery(output: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """The output of a dry run, and the JSON of its stages."""
    done = CliRunner().invoke(gpu_battery.main, ["--output", str(output), "--dry", *options])
    logs = "".join(path.read_text()[-2000:] for path in output.glob("*.log"))
    assert done.exit_code == 0, done.output + logs
    return done.output, {path.stem: json.loads(path.read_text()) for path in output.glob("*.json")}


def assert_rounds(found: dict[str, Any], switches: set[str]) -> None:
    """Every arm was timed at both settings, and nothing was captured meanwhile."""
    assert all(row["captures"] > 0 for row in found["preparations"] if row["error"] is None)
    trees, settings = {"plain", "chain", "eagle2"}, {"greedy", "top-p"}
    arms = {(row["setting"], row["switch"], row["tree"]) for row in found["rounds"]}
    assert arms >= {(setting, switch, tree) for setting in settings for switch in switches for tree in trees}
    assert all(row["quartiles_ms"] == sorted(row["quartiles_ms"]) for row in found["rounds"])
    assert {row["levels"] for row in found["rounds"] if row["tree"] == "chain"} == {5}
    assert not any(row["captures"] for row in found["late captures"])


def test_a_stage_that_fails_or_is_late_ends_alone(tmp_path: Path) -> None:
    work, other = tmp_path / "work", tmp_path / "other/autotune"
    work.mkdir()
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise ValueError('of another folder')")
    options: dict[str, Any] = {"switches": [], "work": work, "dry": True}

    def ends(function: str, seconds: float, package: Path | None = None) -> str:
        stage = gpu_battery.Stage(function, seconds)
        return gpu_battery.run(stage, tmp_path / "stage.json", seconds=seconds, package=package, **options)

    assert ends("micro.operations", 0.2) == "late, ended after its 0 s"
    assert ends("micro.nothing", 600).startswith("failed (AttributeError")
    assert ends("micro.env", 600, other.parent) == "failed (ValueError: of another folder)"
    late = ["--output", str(tmp_path), "--stages", "env,micro", "--limit", "1"]
    done = CliRunner().invoke(gpu_battery.main, late)
    assert done.exit_code == 1 and done.output.count("skipped, no time is left") == 2
    for wrong in (["--stages", "env,nothing"], ["--switch", "base"]):
        assert CliRunner().invoke(gpu_battery.main, ["--output", str(tmp_path), *wrong]).exit_code == 2


def test_gaps_are_those_that_the_host_causes() -> None:
    from benchmarks.gpu.rounds import gaps

    spans = [(0, 10, "kernel"), (11, 4, "kernel"), (40, 5, "gpu_memcpy"), (20, 100, "cpu_op"), (100, 1, "kernel")]
    events = [{"ts": ts, "dur": dur, "cat": cat} for ts, dur, cat in spans] + [{"name": "of a thread"}]
    assert gaps(events) == {"busy_us": 20.0, "gaps": 2, "gap_quartiles_us": [32.5, 40.0, 47.5]}
    assert gaps([]) == {"busy_us": 0.0, "gaps": 0, "gap_quartiles_us": []}


@pytest.mark.nightly
def test_the_gpu_battery_runs_to_its_end_without_a_gpu(tmp_path: Path) -> None:
    from autotune.cost.table import CostTable
    from autotune.documents.decoding_profile import DecodingProfile
    from autotune.documents.execution import CUDA_GRAPH

    """With another package beside this one, which is this one again."""
    switches = ["--switch", "base,captured,masks,compiled,float8"]
    printed, found = battery(tmp_path, *switches, "--base", str(BENCHMARKS.parent))
    stages = [name for name in re.findall(r"^(\S+): done", printed, re.M) if not name.endswith("-base")]
    assert stages == [*gpu_battery.STAGES], printed
    assert set(found["env"]) == {"card", "versions", "copy_tb_s", "addition_ns"}
    assert_rounds(found["rounds-base"], {"base"})
    assert not re.search("errors", printed), printed
    assert_rounds(found["rounds"], {"captured", "masks", "compiled", "float8"})
    assert {(row["target"], row["prompt_tokens"]) for row in found["long"]["rounds"]} == {
        ("Llama-3.1-8B", 4000),
        ("Qwen2.5-VL-7B", 600),
    }
    assert {row["largest_difference"] < 0.05 for row in found["micro"]["attention"]} == {True}
    assert {path.name for path in tmp_path.glob("*.json.gz")} >= {"kernels.captured-eagle2.json.gz"}
    for name in ("Llama-3.1-8B", "Qwen2.5-VL-7B", "digits"):
        table = CostTable.load(tmp_path / "documents" / f"{name}.cost.json")
        assert (table.mode, table.device.key) == (CUDA_GRAPH, table.device.key) and table.drafts
    for name in ("smollm2", "Llama-3.1-8B"):
        assert DecodingProfile.load(tmp_path / "documents" / f"{name}.json").point
