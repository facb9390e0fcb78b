"""Drafts and prompts of a target where none are named, by configs alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from autotune.errors import UserError
from autotune.modeling import hub
from autotune.modeling.gguf import gguf_sizes
from autotune.modeling.target_defaults import default_drafts, default_workload, heads_near, sizes_of

LLAMA = {"model_type": "llama", "hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 4}
VLM = {"model_type": "qwen2_5_vl", "text_config": LLAMA, "vision_config": {"hidden_size": 8}}
HEAD = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, "vocab_size": 100, "draft_vocab_size": 32}
NAMING = {
    "speculators_model_type": "eagle3",
    "speculators_config": {"verifier": {"name_or_path": "meta/Llama"}},
    "transformer_layer_config": {"hidden_size": 16},
}
OWN = {"schema": "autotune.draft/1", "kind": "star", "hidden_size": 64, "num_target_layers": 4}
OTHERS: dict[str, Any] = {
    "other/size": HEAD | {"hidden_size": 128},
    "other/vocabulary": HEAD | {"vocab_size": 101},
    "other/verifier": NAMING | {"speculators_config": {"verifier": {"name_or_path": "meta/Other"}}},
    "other/dflash": NAMING | {"speculators_model_type": "dflash"},
    "other/eagle1": {"architectures": ["LlamaForCausalLMEagle"], "hidden_size": 64, "vocab_size": 100},
    "other/model": LLAMA,
    "other/list": [],
    "other/odd": {"draft_vocab_size": 1, "transformer_layer_config": 5, "speculators_config": []},
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    hub.repository.cache_clear()
    return tmp_path / "cache"


def keep(cache: Path, id: str, config: object, *, weights: str = "model.safetensors", **files: object) -> None:
    """Write a model into the Hub's cache as a download does."""
    folder = cache / f"models--{id.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    write(folder / "snapshots" / ("0" * 40), config, weights=weights, **files)


def write(folder: Path, config: object, *, weights: str = "model.safetensors", **files: object) -> None:
    folder.mkdir(parents=True)
    for name, content in {"config.json": config, **files}.items():
        (folder / name).write_text(json.dumps(content))
    if weights:
        (folder / weights).touch()


def index(*names: str) -> dict[str, object]:
    return {"model.safetensors.index.json": {"weight_map": dict.fromkeys(names, "model.safetensors")}}


@pytest.mark.parametrize("config", [LLAMA, VLM])
def test_heads_in_the_cache_that_name_a_target_or_have_its_sizes_compete(config: dict[str, Any], cache: Path) -> None:
    """All of them, with retrieval; heads of other targets, without weights or of kinds that are not run do not."""
    keep(cache, "meta/Llama", config)
    keep(cache, "one/sizes", HEAD)
    keep(cache, "two/names", NAMING, weights="pytorch_model.bin")
    keep(cache, "three/width", HEAD | {"hidden_size": 16, "target_hidden_size": 64})
    keep(cache, "four/config-alone", HEAD, weights="")
    for id, other in OTHERS.items():
        keep(cache, id, other)
    (cache / "models--five--damaged" / "refs").mkdir(parents=True)
    (cache / "models--five--damaged" / "refs" / "main").write_text("0" * 40)
    assert default_drafts("meta/Llama") == ("one/sizes", "three/width", "two/names", "retrieval")
    heads = {name: "eagle3" for name in ("one/sizes", "three/width", "two/names")}
    assert heads_near("meta/Llama", sizes_of("meta/Llama")[1]) == heads | {"other/dflash": "dflash"}
    images = ",images" if config is VLM else ""
    assert default_workload("meta/Llama") == f"chat,code,summarize{images}"


@pytest.mark.parametrize(
    ("config", "files", "has_head"),
    [
        (LLAMA, {}, False),
        (LLAMA | {"mtp_num_hidden_layers": 1}, {}, True),
        ({"text_config": LLAMA | {"num_nextn_predict_layers": 1}}, {}, True),
        (LLAMA | {"num_nextn_predict_layers": 0}, {}, False),
        (LLAMA | {"num_nextn_predict_layers": 1}, index("model.layers.3.norm", "model.layers.4.enorm.weight"), True),
        (LLAMA | {"num_nextn_predict_layers": 1}, index("model.layers.3.norm"), False),
        (LLAMA, index("model.layers.3.norm", "visual.layers.4.norm"), False),
        (LLAMA, index("mtp.fc.weight"), True),
    ],
)
def test_the_head_of_the_targets_own_checkpoint_competes(
    config: dict[str, Any], files: dict[str, object], has_head: bool, cache: Path
) -> None:
    keep(cache, "a/model", config, **files)
    assert default_drafts("a/model") == (("a/model:mtp",) if has_head else ()) + ("retrieval",)


def test_drafts_beside_a_target_of_this_machine_compete(cache: Path) -> None:
    write(Path("models/Llama"), LLAMA)
    write(Path("models/head"), HEAD)
    write(Path("models/names"), NAMING)
    write(Path("models/own"), OWN)
    write(Path("models/of-another"), OWN | {"num_target_layers": 5})
    keep(cache, "one/sizes", HEAD)
    beside = ("models/head", "models/names", "models/own")
    assert default_drafts("models/Llama") == ("one/sizes", *beside, "retrieval")


def test_the_sizes_of_a_gguf_file_choose_its_heads(cache: Path) -> None:
    """The header alone is read: the file has no weights."""
    gguf = pytest.importorskip("gguf", reason="pip install autotune-speculative[gguf]")
    path = Path("model.gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(64)
    writer.add_block_count(4)
    writer.add_token_list([f"{number}" for number in range(100)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert gguf_sizes(path) == {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 100}
    keep(cache, "one/head", HEAD)
    assert default_drafts(str(path)) == ("one/head", "retrieval")
    assert default_workload(str(path)) == "chat,code,summarize"


def test_bundled_targets_keep_their_drafts_and_unknown_ones_are_refused(cache: Path) -> None:
    assert default_workload("digits/target") == "digits" and "digits/star" in default_drafts("digits/target")
    assert default_workload("smollm2") == "smollm2" and default_drafts("smollm2")[-1] == "retrieval"
    write(Path("damaged"), [])
    for name in ("no/such", "nowhere", "damaged"):
        for choose in (default_drafts, default_workload):
            with pytest.raises(UserError, match=f"^{name}: "):
                choose(name)
