"""Checkpoints in the form that an engine loads, and what an engine reads of a model's config."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from autotune.engines.model_files import (
    ModelFiles,
    find_model_files,
    read_weights,
    served_draft,
    served_target,
    text_part,
    write_weights,
)
from autotune.errors import UserError
from autotune.modeling.loading import BUNDLED_DRAFT, BUNDLED_TARGET
from tests.documents.test_draft_kinds import DFLASH, write_dflash


def bundled(name: str) -> ModelFiles:
    found = find_model_files(name)
    assert found is not None
    return found


def tensors(folder: Path) -> dict[str, Any]:
    """The weights of a folder as safetensors reads them."""
    from safetensors.torch import load_file

    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def model(**config: Any) -> ModelFiles:
    """A model of which only the config is here."""
    return ModelFiles(Path("nowhere"), config)


def test_text_part_equals_the_model_without_images(tmp_path: Path) -> None:
    """A checkpoint in two files, as large models are stored."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    whole, weights = bundled(BUNDLED_DRAFT), tensors(bundled(BUNDLED_DRAFT).folder)
    for number in (0, 1):
        save_file({name: weights[name] for name in sorted(weights)[number::2]}, tmp_path / f"{number}.safetensors")
    for path in whole.companions():
        shutil.copyfile(path, tmp_path / path.name)
    folder = text_part(ModelFiles(tmp_path, whole.config), tmp_path / "text", BUNDLED_DRAFT)
    assert not (folder / "processor_config.json").exists()
    options = {"dtype": torch.float32, "local_files_only": True}
    model = AutoModelForImageTextToText.from_pretrained(whole.folder, **options)
    text, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    tokens = torch.arange(5, 25)[None]
    with torch.inference_mode():
        assert torch.equal(text(tokens).logits, model(input_ids=tokens).logits)
    assert len(AutoTokenizer.from_pretrained(folder)) == len(AutoTokenizer.from_pretrained(whole.folder))


def test_long_vision_names_are_those_before_transformers_5_20(tmp_path: Path) -> None:
    """The weights are the same, transformers still loads them, and they are written once."""
    import torch
    from transformers import AutoModelForImageTextToText

    source = bundled(BUNDLED_TARGET)
    folder = served_target(source.folder, tmp_path)
    before, after = tensors(source.folder), tensors(folder)
    assert before.keys() == {name.replace("vision_tower.vision_model.", "vision_tower.") for name in after}
    assert any(name.startswith("vision_tower.vision_model.encoder.layers.0.") for name in after)
    for name, weight in after.items():
        assert torch.equal(before[name.replace("vision_tower.vision_model.", "vision_tower.")], weight), name
    options = {"dtype": torch.float32, "local_files_only": True}
    ours, theirs = (AutoModelForImageTextToText.from_pretrained(path, **options) for path in (source.folder, folder))
    assert all(torch.equal(weight, theirs.state_dict()[name]) for name, weight in ours.state_dict().items())
    written = (folder / "config.json").stat().st_mtime_ns
    assert served_target(source.folder, tmp_path) == folder == served_target(folder, tmp_path)
    assert (folder / "config.json").stat().st_mtime_ns == written and (folder / "processor_config.json").exists()


def test_weights_of_any_type_are_written_as_they_were_read(tmp_path: Path) -> None:
    """Each begins at a multiple of its elements' size, which safetensors needs."""
    import torch
    from safetensors.torch import load_file, save_file

    kinds = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.bool)
    random = {str(kind): torch.arange(15).reshape(5, 3).to(kind) for kind in kinds}
    random |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.0)}
    save_file(random, tmp_path / "before.safetensors")
    write_weights(tmp_path / "after.safetensors", read_weights(tmp_path / "before.safetensors"))
    after = load_file(tmp_path / "after.safetensors")
    assert after.keys() == random.keys()
    for name, tensor in random.items():
        read = after[name]
        assert read.dtype == tensor.dtype and read.shape == tensor.shape
        assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    (tmp_path / "before.safetensors").write_bytes((tmp_path / "before.safetensors").read_bytes()[:-1])
    with pytest.raises(UserError, match="truncated in the weights"):
        read_weights(tmp_path / "before.safetensors")


def test_a_complete_model_drafts_with_its_text_part(tmp_path: Path) -> None:
    kind, draft = served_draft(BUNDLED_DRAFT, BUNDLED_TARGET, tmp_path)
    assert kind == "draft_model" and "vision_config" not in bundled(str(draft)).config
    assert served_draft(BUNDLED_DRAFT, BUNDLED_TARGET, tmp_path) == (kind, draft)


@pytest.mark.parametrize("form", DFLASH)
def test_dflash_drafts_are_served_as_they_are(tmp_path: Path, form: str) -> None:
    folder = write_dflash(tmp_path / "draft", form)
    assert served_draft(str(folder), BUNDLED_TARGET, tmp_path) == ("dflash", folder)


def test_text_part_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for kind in ("llama", "odd"):
        with pytest.raises(UserError, match=f"d: vLLM takes the text part .* no text model of type '{kind}', or the"):
            text_part(model(vision_config={}, text_config={"model_type": kind}), tmp_path, "d")


def test_an_mtp_head_is_written_as_one_of_mimo(tmp_path: Path) -> None:
    """It reads the features before the embedding, and adds biases to queries, keys and values."""
    import torch

    kind, folder = served_draft("digits/mtp", BUNDLED_TARGET, tmp_path)
    assert kind == "mtp" and served_draft("digits/mtp", BUNDLED_TARGET, tmp_path) == (kind, folder)
    own = tensors(bundled("digits/mtp").folder)
    found = {name.removeprefix("model.mtp_layers.0."): tensor for name, tensor in tensors(folder).items()}
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
