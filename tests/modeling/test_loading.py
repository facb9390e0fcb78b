"""Loading of models and processors: random weights from a config alone, and tokenizers that name a processor."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import is_torchvision_available

from autotune.cli.main import main
from autotune.cost.table import CostTable
from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import load_draft
from autotune.errors import UserError
from autotune.modeling.loading import load_model, load_processor
from autotune.modeling.target import Target
from autotune.modeling.weight_files import CONFIG, WEIGHTS
from autotune.runtime.decoder import Decoder
from tests.drafters.test_feature_draft import agreeing_draft
from tests.families import FAMILIES
from tests.tiny_models import Inputs, Pair


def config_alone(folder: Path, new: Path) -> Path:
    new.mkdir()
    shutil.copy(folder / CONFIG, new)
    return new


@pytest.fixture(scope="module")
def star_folder(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A star draft for the tiny target."""
    folder = tmp_path_factory.mktemp("star")
    with torch.inference_mode():
        agreeing_draft("star", Target(pair.target), injection_layer=4).network.save(folder)  # type: ignore[operator]
    return folder


@pytest.fixture
def star(star_folder: Path, tmp_path: Path) -> Path:
    """Its config."""
    return config_alone(star_folder, tmp_path / "star-config")


def test_a_config_is_enough_for_random_weights(
    pair: Pair, prompts: dict[str, Inputs], star: Path, tmp_path: Path
) -> None:
    """The models have the sizes of their configs, and decoding with them is lossless."""
    target = Target(load_model(str(config_alone(pair.target_folder, tmp_path / "target")), random_weights=True))
    sizes = {name: tensor.shape for name, tensor in pair.target.state_dict().items()}
    assert {name: tensor.shape for name, tensor in target.model.state_dict().items()} == sizes
    independent = config_alone(pair.draft_folder, tmp_path / "draft")
    inputs = {**prompts["image"], "max_new_tokens": 12}
    expected = Decoder(target).generate(**inputs)
    for folder, subnet in ((independent, Subnet()), (star, Subnet(heads=0.5))):
        draft = load_draft(str(folder), target, subnet, random_weights=True)
        found = Decoder(target, draft, tree={"policy": "chain", "depth": 3}).generate(**inputs)
        assert torch.equal(found.sequences, expected.sequences)


def test_configs_are_profiled_and_examined(pair: Pair, star: Path, tmp_path: Path) -> None:
    """Without a tokenizer of its own, the target reads the texts of the bundled one, and vocabularies are compared by
    size.
    """
    config = json.loads((pair.target_folder / CONFIG).read_text())
    text = {
        **{key: value for key, value in config["text_config"].items() if key != "head_dim"},
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",  # for which transformers makes an empty tokenizer
        "vocab_size": 4096,
    }
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / CONFIG).write_text(json.dumps(text))
    table, runner = tmp_path / "pair.cost.json", CliRunner()
    drafts = ["--draft", str(tmp_path / "text"), "--draft", str(star), "--draft", "retrieval"]
    arguments = ["--target", str(tmp_path / "text"), "--random-weights", "--device", "cpu"]
    done = runner.invoke(main, ["measure", *arguments, *drafts, "--budget", "1s", "-o", str(table)])
    assert done.exit_code == 0, done.output
    found = CostTable.load(table)
    assert found.target_shape is not None and found.target_shape.num_layers == text["num_hidden_layers"]
    assert [costs.shape is not None for costs in found.drafts] == [True, True, True]
    done = runner.invoke(main, ["doctor", *arguments, "--tokens", "8", "--json"])
    assert done.exit_code in (0, 1) and '"schema": "autotune.diagnosis/1"' in done.output, done.output


def test_what_random_weights_cannot_serve_is_refused(pair: Pair, tmp_path: Path) -> None:
    quantized = config_alone(pair.target_folder, tmp_path / "quantized")
    content = json.loads((quantized / CONFIG).read_text())
    (quantized / CONFIG).write_text(json.dumps({**content, "quantization_config": {"quant_method": "torchao"}}))
    with pytest.raises(UserError, match="weights of a quantized model cannot be made at random"):
        load_model(str(quantized), random_weights=True)


def test_a_text_model_loads_with_its_tokenizer_whatever_processor_that_names(
    pair: Pair, text_pair: Pair, processor: Any, tmp_path: Path
) -> None:
    """As a language model that was taken out of a VLM, whose tokenizer still names the VLM's processor."""
    shutil.copy(text_pair.target_folder / CONFIG, tmp_path)
    processor.tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "processor_class": "LlavaProcessor"}))
    tokenizer = load_processor(str(tmp_path))
    assert tokenizer("one two")["input_ids"] == processor.tokenizer("one two")["input_ids"]
    assert not hasattr(tokenizer, "image_processor")
    assert hasattr(load_processor(str(pair.target_folder)), "image_processor")


# -------- damaged folders


def copy_of(folder: Path, new: Path) -> Path:
    """A copy whose files may be changed."""
    return Path(shutil.copytree(folder, new))


def change_config(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / CONFIG).read_text())
    text = {key: value for key, value in changes.items() if key not in ("dtype", "quantization_config")}
    content["text_config"] |= text
    (folder / CONFIG).write_text(json.dumps(content | changes))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def cut(folder: Path, size: int) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:size])


LAYER = "language_model.model.layers.1.mlp.gate_proj.weight"
DAMAGED_TARGETS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (
        lambda f: change_weights(f, lambda t: t.pop(LAYER)),
        "its checkpoint lacks 1 weights .*1.mlp.gate_proj",
    ),
    "shape": (
        lambda f: change_weights(f, lambda t: t.update({LAYER: t[LAYER][:3].clone()})),
        "has another shape of 1 weights",
    ),
    "NaN": (
        lambda f: change_weights(f, lambda t: t[LAYER][0, 0].fill_(torch.nan)),
        "gate_proj.weight are not finite; restore",
    ),
    "infinite": (
        lambda f: change_weights(f, lambda t: t[LAYER][0, 0].fill_(-torch.inf)),
        "gate_proj.weight are not finite",
    ),
    **{
        f"cut at {size}": (partial(cut, size=size), "transformers cannot load it|truncated in")
        for size in (0, 5, 100, 5000)
    },
    "pickle": (lambda f: (f / WEIGHTS).write_bytes(pickle.dumps({"a": 1})), "transformers cannot load it"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "transformers cannot load it"),
    "vocabulary": (
        lambda f: change_config(f, vocab_size=-1),
        "vocab_size is at most .*; got -1; restore its config.json",
    ),
    "layers": (
        lambda f: change_config(f, num_hidden_layers=2**40),
        "num_hidden_layers is at most 1000; got 1.09951e.12",
    ),
    "room": (lambda f: change_config(f, vocab_size=2**24, hidden_size=2**17), "weights"),
    "no heads": (lambda f: change_config(f, num_attention_heads=0), "transformers cannot load it"),
    "dtype": (lambda f: change_config(f, dtype="float99"), "transformers cannot load it"),
    "quantization": (lambda f: change_config(f, quantization_config={"quant_method": "none"}), "damaged"),
    "rope": (lambda f: change_config(f, rope_parameters={"rope_type": "round"}), "transformers cannot load it"),
    "config": (lambda f: (f / CONFIG).write_text("[]"), "transformers cannot load it"),
    "nested config": (lambda f: (f / CONFIG).write_text("[" * 3000), "it is nested too deeply"),
}


@pytest.mark.parametrize("damage", DAMAGED_TARGETS)
def test_damaged_targets_are_refused_by_name(damage: str, pair: Pair, tmp_path: Path) -> None:
    """Weights that are missing would be random, and those that are not finite would emit one token over and over."""
    change, message = DAMAGED_TARGETS[damage]
    change(folder := copy_of(pair.target_folder, tmp_path / "damaged"))
    with pytest.raises(UserError, match=message) as caught:
        load_model(str(folder))
    assert str(caught.value).startswith(str(folder)) and "\n" not in str(caught.value)


def test_processors_and_names_that_cannot_be_read(pair: Pair, tmp_path: Path) -> None:
    folder = copy_of(pair.target_folder, tmp_path / "damaged")
    for text in ("{", "[]", '{"model": 5}', "\0"):
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(UserError, match=r"its processor cannot be loaded .*; save it beside the model"):
            load_processor(str(folder))
    for name in ("a" * 5000, "x/" + "a" * 5000, "a\0b"):
        with pytest.raises(UserError, match=r"no such model|cannot load it") as caught:
            load_model(name)
        assert len(str(caught.value)) < 800


def test_no_code_of_a_checkpoint_is_asked_for(text_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ask on a terminal whether to run it."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    folder = copy_of(text_pair.target_folder, tmp_path / "custom")
    content = json.loads((folder / CONFIG).read_text())
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": "code.Tokenizer"}
    (folder / CONFIG).write_text(json.dumps({**content, "model_type": "custom", "auto_map": names}))
    (folder / "code.py").write_text("raise SystemExit('run')")
    with pytest.raises(UserError, match="need code of their repository, which is not run"):
        load_model(str(folder))
    # Depending on what was loaded before, transformers finds a tokenizer class without the config; the code runs in
    # neither case.
    with suppress(UserError):
        assert type(load_processor(str(folder))).__module__.startswith("transformers.")


DAMAGED_DRAFTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    **{
        f"cut at {size}": (partial(cut, size=size), "no tensors can be read|truncated in") for size in (0, 5, 100, 5000)
    },
    "pickle": (lambda f: (f / WEIGHTS).write_bytes(pickle.dumps({"a": 1})), "no tensors can be read from it"),
    "no weights": (
        lambda f: (f / WEIGHTS).unlink(),
        "is read from model.safetensors or pytorch_model.bin; there is none",
    ),
    "missing": (lambda f: change_weights(f, lambda t: t.pop("norm.weight")), "Missing key.*norm.weight"),
    "other": (lambda f: change_weights(f, lambda t: t.update(other=torch.ones(1))), "Unexpected key.*other"),
    "shape": (
        lambda f: change_weights(f, lambda t: t.update({"norm.weight": torch.ones(3)})),
        r"size mismatch for norm.weight",
    ),
    "NaN": (lambda f: change_weights(f, lambda t: t["norm.weight"].fill_(torch.nan)), "norm.weight are not finite"),
    **{
        f"{key} {value}": (
            lambda f, key=key, value=value: (f / CONFIG).write_text(
                json.dumps(json.loads((f / CONFIG).read_text()) | {key: value})
            ),
            ".",
        )
        for key in ("num_heads", "head_size", "mlp_size", "hidden_size", "num_target_layers")
        for value in (2**62, 2**40, 2, 2**63)
    },
}


@pytest.mark.parametrize("damage", DAMAGED_DRAFTS)
def test_damaged_drafts_are_refused_by_name(damage: str, star_folder: Path, pair: Pair, tmp_path: Path) -> None:
    change, message = DAMAGED_DRAFTS[damage]
    change(folder := copy_of(star_folder, tmp_path / "damaged"))
    with pytest.raises(UserError, match=message) as caught:
        load_draft(str(folder), Target(pair.target))
    assert "\n" not in str(caught.value)


VIDEO_FAMILIES = ("llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm")


@pytest.mark.skipif(
    is_torchvision_available(), reason="transformers loads all processors where torchvision is installed"
)
@pytest.mark.parametrize("name", [*VIDEO_FAMILIES, "llava_pixtral", "mistral3", "llava"])
def test_processors_read_images_without_torchvision(name: str, tmp_path: Path) -> None:
    """The published files name a video processor, which needs torchvision: it is left out, and the classes are
    transformers' own.
    """
    family = FAMILIES[name]
    made = family.processor()
    made.save_pretrained(tmp_path)
    family.model(1).config.save_pretrained(tmp_path)
    path = tmp_path / "processor_config.json"
    settings = json.loads(path.read_text())
    if name in VIDEO_FAMILIES:
        settings["video_processor"] = {"video_processor_type": "Qwen2VLVideoProcessor"}
    path.write_text(json.dumps(settings))
    if name in VIDEO_FAMILIES:
        with pytest.raises(ImportError, match=r"(?i)torchvision"):
            hf.AutoProcessor.from_pretrained(tmp_path)
    loaded = load_processor(str(tmp_path))
    assert type(loaded).__mro__[name in VIDEO_FAMILIES].__module__.startswith("transformers.models.")
    assert type(loaded).__name__ == settings["processor_class"]
    assert getattr(loaded, "video_processor", None) is None
    text, image = f"{family.placeholders['image']} What is this?", Image.new("RGB", (70, 40), "red")
    found, expected = (p(text=text, images=[image], return_tensors="pt") for p in (loaded, made))
    assert found.keys() == expected.keys() and found["pixel_values"].numel()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]
    template = "{% for part in messages[0].content %}{{ part.text or '<here>' }}{% endfor %}"
    assert loaded.apply_chat_template(chat, chat_template=template, tokenize=False) == "<here>What is this?"
    loaded.save_pretrained(tmp_path / "again")
    shutil.copy(tmp_path / CONFIG, tmp_path / "again")
    assert load_processor(str(tmp_path / "again")).tokenizer.get_vocab() == loaded.tokenizer.get_vocab()
