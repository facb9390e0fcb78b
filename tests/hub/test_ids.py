"""The ids of the stand-in: those that people and the documentation name, and repositories with odd files."""

from __future__ import annotations

import csv
import re

import pytest

from autotune.errors import UserError
from autotune.modeling.known_models import KNOWN_MODELS
from autotune.modeling.loading import load_model, load_processor
from tests.hub import published, repositories
from tests.hub.server import Hub
from tests.imports import ROOT

OWNERS = "meta-llama|Qwen|google|mistralai|mistral-labs|microsoft|HuggingFaceTB|llava-hf|openai|deepseek-ai|yuhuili|Rayzl|z-lab"
LOADED = ("odd/sharded", "odd/bin-alone", "odd/consolidated", *repositories.RENAMED)
REFUSED = {
    "odd/without-a-shard": "model-00002-of-00002.safetensors",
    "odd/adapter": "LORA adapter.*merge_and_unload",
    "odd/adapter-beside": "LORA adapter.*merge_and_unload",
    "odd/remote-code": "code",
    "odd/without-config": "config.json",
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": "--draft",
    "z-lab/Qwen3-8B-DFlash-b16": "--speculative-config",
    "moonshotai/Kimi-K2-Instruct": "code",
    repositories.GATED: "gated.*accept.*hf auth login.*HF_TOKEN",
    "meta-llama/Llama-3.1-8B-Instruct@v9": "no revision v9",
    "meta-llama/Llama-3.1-8B-Instuct": "did you mean 'meta-llama/Llama-3.1-8B-Instruct'",
    "Qwen2.5-7B-Instruct": "did you mean 'Qwen/Qwen2.5-7B-Instruct'",
}


def documented_ids() -> set[str]:
    """Ids that README and docs name."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    return {name for page in pages for name in re.findall(rf"\b(?:{OWNERS})/[\w.-]*\w", page.read_text())}


def test_every_id_of_the_documentation_is_served() -> None:
    assert len(documented_ids()) > 3 and documented_ids() <= repositories.IDS | repositories.RENAMED.keys()
    assert {name for name in KNOWN_MODELS if not name.endswith("-GGUF")} <= repositories.IDS


def test_every_published_file_names_its_source() -> None:
    with (published.FOLDER / "sources.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    named = {f"{row['model'].replace('/', '--')}/{row['file']}" for row in rows if row["package"]}
    held = {str(path.relative_to(published.FOLDER)) for path in published.FOLDER.glob("*/*")}
    assert held <= named and {row["model"] for row in rows} == set(published.IDS)
    assert {row["licence"].split()[0] for row in rows if row["package"]} <= {"Apache-2.0", "MIT"}


@pytest.mark.parametrize("name", LOADED)
def test_a_repository_with_odd_files_is_loaded(name: str, public_hub: Hub) -> None:
    processor, model = load_processor(name), load_model(name)
    assert processor.chat_template == published.template_of(repositories.PLAIN) and model.config.model_type == "llama"
    downloaded = {
        path.rpartition("/")[2] for path in public_hub.requests if path.startswith("GET") and "/resolve/" in path
    }
    assert downloaded.isdisjoint({"consolidated.safetensors", "consolidated.00.pth", "params.json.index"})


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_loaded_is_one_line(name: str, public_hub: Hub) -> None:
    with pytest.raises(UserError, match=REFUSED[name]) as caught:
        load_model(name)
    assert "\n" not in str(caught.value)
