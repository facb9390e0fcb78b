"""The forecast of a search names what the search then does, without loading weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune.cli.main import main
from autotune.console import Console
from autotune.machine.device import gib
from autotune.modeling.quantization import weight_bytes
from autotune.runtime.model_pool import ModelPool, variants_of
from autotune.search import forecast as forecasts
from autotune.search.forecast import forecast
from autotune.search.thresholds import STAGES
from autotune.study.search_settings import SearchSettings
from autotune.study.spaces import load_space
from tests.drafters.test_eagle3 import PUBLISHED, write_head
from tests.sample_documents import write_workload
from tests.tiny_models import Pair


@pytest.fixture(autouse=True)
def _bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecasts, "copy_gb_per_second", lambda device: 20.0)


def forecast_of(settings: SearchSettings) -> list[str]:
    return forecast(settings, Console())


@pytest.fixture
def settings(pair: Pair, tmp_path: Path) -> dict[str, Any]:
    lines = [{"prompt": f"Count {n}.", "max_new_tokens": 32} for n in range(24)]
    models = {"target": str(pair.target_folder), "drafts": (str(pair.draft_folder), "retrieval")}
    return {**models, "workload": str(write_workload(tmp_path, lines)), "device": "cpu"}


def test_a_forecast_is_of_the_models_that_a_search_loads(settings: dict[str, Any]) -> None:
    lines = forecast_of(SearchSettings(**settings))
    pool = ModelPool(settings["target"], settings["drafts"], "cpu")
    variants = variants_of(pool, load_space("quick").without_images())
    assert f"tried: {len(variants)} choices of drafts, of which 2 get a search of their trees" in lines
    drafts = sum(pool.draft(name).weight_bytes for name in pool.references)
    (memory,) = (line for line in lines if line.startswith("memory on cpu: "))
    assert f"target {gib(weight_bytes(pool.target.model))}, drafts {gib(drafts)}, caches of " in memory
    stages = [line.strip().partition(":") for line in lines if line.startswith("  ")]
    assert [name for name, _, _ in stages] == list(STAGES)
    assert sum(float(text.removesuffix("s")) for _, _, text in stages) == pytest.approx(300, abs=5)
    assert all(len(line) <= 80 for line in lines if " " in line) and any(
        line.startswith("8 prompts decide") for line in lines
    )
    assert any("12 to tune and 12 to judge" in line for line in lines) and any(
        "rough estimate" in line for line in lines
    )


def test_a_forecast_loads_no_weights(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The models have configs only."""
    for number, name in enumerate((settings["target"], settings["drafts"][0])):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.json").write_text((Path(name) / "config.json").read_text())
    models = {"target": str(tmp_path / "0"), "drafts": (str(tmp_path / "1"),)}
    estimate = forecast_of(
        SearchSettings(**{**settings, **models, "gpu": "h100", "changes": ("policy=chain", "depth=2")})
    )
    assert "space: quick, with the policies chain" in estimate
    assert [line.split(":")[0].strip() for line in estimate if line.startswith("  ")] == [
        "screening",
        "traces",
        "tree search",
    ]


def test_plan_prints_the_forecast_and_starts_nothing(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    words = ["--target", settings["target"], "--draft", settings["drafts"][0], "--workload", settings["workload"]]
    done = CliRunner().invoke(main, ["search", "--plan", *words])
    assert done.exit_code == 0 and done.stdout.split()[:2] == ["target:", settings["target"]], done.output
    assert done.stdout.endswith("nothing was started; leave --plan out to search\n")
    assert any(line[1:].startswith(" prompts decide between") for line in done.stdout.splitlines()), "of its own"
    assert not any(Path().iterdir())
    done = CliRunner().invoke(main, ["search", "--plan", *words, "--budget", "0.1s"])
    assert done.exit_code == 2 and "give --budget" in done.stderr and done.stdout == ""


def test_a_head_of_a_target_is_read_for_its_sizes(pair: Pair, settings: dict[str, Any], tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", next(iter(PUBLISHED)))
    lines = forecast_of(SearchSettings(**{**settings, "drafts": (str(head),)}))
    pool = ModelPool(settings["target"], [str(head)], "cpu")
    assert f"draft: {head}, {len(variants_of(pool, load_space('quick').without_images()))} choice of it" in " ".join(
        lines
    )


def test_a_quantized_target_has_a_forecast(settings: dict[str, Any], tmp_path: Path) -> None:
    """Its weights are not there; the sizes are of weights that are not packed."""
    config = json.loads((Path(settings["target"]) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
    shutil.copytree(settings["target"], tmp_path / "packed", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    whole = forecast_of(SearchSettings(**{**settings, "drafts": ("retrieval",)}))
    packed = forecast_of(SearchSettings(**{**settings, "drafts": ("retrieval",), "target": str(tmp_path / "packed")}))
    first = "draft: retrieval, 1 choice of it"
    found = [[line for line in lines[lines.index(first) :] if "are free" not in line] for lines in (packed, whole)]
    assert found[0] == found[1]
