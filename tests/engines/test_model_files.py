"""Checkpoints in the form that an engine loads, and what an engine reads of a model's config."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from autotune.engines.model_files import (
    INDEX,
    ModelFiles,
    find_model_files,
    has_short_vision_names,
    served_draft,
    served_target,
    text_part,
)
from autotune.errors import UserError
from autotune.modeling.loading import BUNDLED_DRAFT, BUNDLED_TARGET
from tests.documents.test_draft_kinds import DFLASH, write_dflash


def bundled(name: str) -> ModelFiles:
    found = find_model_files(name)
    assert found is not None
    return found


def model(**config: Any) -> ModelFiles:
    """A model of which only the config is here."""
    return ModelFiles(Path("nowhere"), config)


# -------- checkpoints


def split(source: ModelFiles, folder: Path) -> ModelFiles:
    """The checkpoint in two files, as large models are stored."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, half in halves.items():
        save_file({name: tensors[name].bfloat16() for name in half}, folder / file, metadata={"format": "pt"})
    return ModelFiles(folder, source.config)


@pytest.mark.parametrize("is_split", [False, True])
def test_text_part_equals_the_model_without_images(tmp_path: Path, is_split: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    source = bundled(BUNDLED_DRAFT)
    if is_split:
        source = split(source, tmp_path / "split")
    folder = text_part(source, tmp_path / "text", BUNDLED_DRAFT)
    assert (folder / INDEX).exists() == is_split and not (folder / "processor_config.json").exists()
    options = {"dtype": torch.float32, "local_files_only": True}
    if is_split:
        (source.folder / INDEX).write_bytes((folder / INDEX).read_bytes())  # only the files' names count
    whole = AutoModelForImageTextToText.from_pretrained(source.folder, **options)
    text, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    tokens = torch.arange(5, 25)[None]
    with torch.inference_mode():
        assert torch.equal(text(tokens).logits, whole(input_ids=tokens).logits)
    assert len(AutoTokenizer.from_pretrained(folder)) == len(AutoTokenizer.from_pretrained(source.folder))


def test_long_vision_names_are_those_before_transformers_5_20(tmp_path: Path) -> None:
    """The weights are the same, and transformers still loads them."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForImageTextToText

    source = bundled(BUNDLED_TARGET)
    assert has_short_vision_names(source)
    folder = served_target(source.folder, tmp_path)
    assert not has_short_vision_names(ModelFiles(folder, source.config))
    before, after = load_file(source.folder / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == {name.replace("vision_tower.vision_model.", "vision_tower.") for name in after}
    assert any(name.startswith("vision_tower.vision_model.encoder.layers.0.") for name in after)
    for name, weight in after.items():
        assert torch.equal(before[name.replace("vision_tower.vision_model.", "vision_tower.")], weight), name
    options = {"dtype": torch.float32, "local_files_only": True}
    ours, theirs = (AutoModelForImageTextToText.from_pretrained(path, **options) for path in (source.folder, folder))
    assert all(torch.equal(weight, theirs.state_dict()[name]) for name, weight in ours.state_dict().items())
    assert (folder / "processor_config.json").exists()


def test_a_vision_language_pair_is_served_from_copies_that_are_written_once(tmp_path: Path) -> None:
    target = served_target(bundled(BUNDLED_TARGET).folder, tmp_path)
    kind, draft = served_draft(BUNDLED_DRAFT, BUNDLED_TARGET, tmp_path)
    assert kind == "draft_model" and "vision_config" not in bundled(str(draft)).config
    assert not has_short_vision_names(bundled(str(target))) and {*tmp_path.iterdir()} == {target, draft}
    times = [(path / "model.safetensors").stat().st_mtime_ns for path in (target, draft)]
    assert served_target(bundled(BUNDLED_TARGET).folder, tmp_path) == target == served_target(target, tmp_path)
    assert served_draft(BUNDLED_DRAFT, BUNDLED_TARGET, tmp_path) == (kind, draft)
    assert times == [(path / "model.safetensors").stat().st_mtime_ns for path in (target, draft)]


@pytest.mark.parametrize("form", DFLASH)
def test_dflash_drafts_are_named_as_those_of_vllm(tmp_path: Path, form: str) -> None:
    with pytest.raises(UserError, match=r'vLLM.s own --speculative-config .\{"method": "dflash"'):
        served_draft(str(write_dflash(tmp_path / "draft", form)), BUNDLED_TARGET, tmp_path)


def test_only_clip_and_siglip_towers_are_renamed(tmp_path: Path) -> None:
    """Other towers never had the longer names."""
    source = bundled(BUNDLED_TARGET)
    vision = {**source.config["vision_config"], "model_type": "pixtral"}
    assert not has_short_vision_names(ModelFiles(source.folder, {**source.config, "vision_config": vision}))


def test_text_part_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    cases = (
        (model(vision_config={}, text_config={"model_type": "llama"}), "its weights are not on this machine"),
        (model(vision_config={}, text_config={"model_type": "odd"}), "transformers has no text model of type 'odd'"),
    )
    for source, reason in cases:
        with pytest.raises(UserError, match=f"d: the engine takes the text part of this draft, .*: {reason}"):
            text_part(source, tmp_path, "d")


# -------- configs


def test_what_configs_say() -> None:
    mrope = {"rope_type": "default", "mrope_section": [16, 24, 24]}
    assert model(text_config={"rope_parameters": mrope}).has_mrope and model(rope_scaling=mrope).has_mrope
    assert not model(rope_parameters={"rope_type": "default"}).has_mrope
    assert model(text_config={"vocab_size": 7}).vocab_size == 7 and model().vocab_size is None


def test_models_that_are_not_here_are_not_known(tmp_path: Path) -> None:
    assert find_model_files("nobody/never-downloaded") is None and find_model_files(str(tmp_path / "no:folder")) is None


def test_an_mtp_head_is_written_as_one_of_mimo(tmp_path: Path) -> None:
    """It reads the features before the embedding, and adds biases to queries, keys and values."""
    import torch
    from safetensors.torch import load_file

    kind, folder = served_draft("digits/mtp", BUNDLED_TARGET, tmp_path)
    assert kind == "mtp" and served_draft("digits/mtp", BUNDLED_TARGET, tmp_path) == (kind, folder)
    own = load_file(bundled("digits/mtp").folder / "model.safetensors")
    found = {
        name.removeprefix("model.mtp_layers.0."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    embedding, features = torch.randn(2, 5, len(own["enorm.weight"]))
    expected = torch.cat([embedding, features], -1) @ own["eh_proj.weight"].float().t()
    actual = torch.cat([features, embedding], -1) @ found["input_proj.weight"].float().t()
    torch.testing.assert_close(actual, expected)
    norms = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "final_layernorm": "norm"}
    assert all(torch.equal(found[f"{name}.weight"], own[f"{other}.weight"]) for name, other in norms.items())
    layer = {name.removeprefix("layer."): tensor for name, tensor in own.items() if name.startswith("layer.")}
    assert all(torch.equal(found[name], tensor) for name, tensor in layer.items())
    biases = {f"self_attn.{part}_proj.bias" for part in "qkv"}
    assert all(not found[name].any() for name in biases)
    assert set(found) == {*layer, *biases, "input_proj.weight", *(f"{name}.weight" for name in norms)}
    config = bundled(str(folder)).config
    assert config["architectures"] == ["MiMoForCausalLM"] and config["num_nextn_predict_layers"] == 1
    assert config["hidden_size"] == bundled(BUNDLED_TARGET).text_config["hidden_size"]
