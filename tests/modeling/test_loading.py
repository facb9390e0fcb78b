"""Loading of models and processors: random weights from a config alone, and tokenizers that name a processor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from autotune.cli.main import main
from autotune.cost.table import CostTable
from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import load_draft
from autotune.drafters.trainable import CONFIG
from autotune.errors import UserError
from autotune.modeling.loading import load_model, load_processor
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from tests.drafters.test_feature_draft import agreeing_draft
from tests.tiny_models import Inputs, Pair


def config_alone(folder: Path, new: Path) -> Path:
    new.mkdir()
    shutil.copy(folder / CONFIG, new)
    return new


@pytest.fixture
def star(pair: Pair, tmp_path: Path) -> Path:
    """The config of a star draft for the tiny target."""
    whole = tmp_path / "star"
    with torch.inference_mode():
        agreeing_draft("star", Target(pair.target), injection_layer=4).network.save(whole)  # type: ignore[operator]
    return config_alone(whole, tmp_path / "star-config")


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
    """Without a tokenizer of its own, the target reads the texts of the bundled one, and vocabularies are compared by size."""
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
    assert [costs.num_parameters is not None for costs in found.drafts] == [True, True, True]
    done = runner.invoke(main, ["doctor", *arguments, "--tokens", "8", "--json"])
    assert done.exit_code in (0, 1) and '"schema": "autotune.diagnosis/1"' in done.output, done.output


def test_what_random_weights_cannot_serve_is_refused(pair: Pair, tmp_path: Path) -> None:
    target = Target(pair.target)
    quantized = config_alone(pair.target_folder, tmp_path / "quantized")
    content = json.loads((quantized / CONFIG).read_text())
    (quantized / CONFIG).write_text(json.dumps({**content, "quantization_config": {"quant_method": "torchao"}}))
    with pytest.raises(UserError, match="weights of a quantized model cannot be made at random"):
        load_model(str(quantized), random_weights=True)
    eagle3 = tmp_path / "eagle3"
    eagle3.mkdir()
    (eagle3 / CONFIG).write_text(json.dumps({"draft_vocab_size": 8}))
    with pytest.raises(UserError, match="sizes of an EAGLE-3 head are read from its weights; leave --random-weights"):
        load_draft(str(eagle3), target, random_weights=True)


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
