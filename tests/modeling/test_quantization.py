"""Quantized models: names, refusals, real sizes, and decoding with every kind of draft. The kernels are those of
torchao and bitsandbytes, and of gptqmodel and auto-round where these are installed; the weights of compressed-tensors
and FP8 are made dense.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from autotune.documents.provenance import version_of
from autotune.drafters.draft import Draft
from autotune.drafters.eagle3 import Eagle3Network
from autotune.drafters.independent import IndependentDraft
from autotune.errors import UserError
from autotune.evaluation.divergence import first_divergence
from autotune.modeling import loading
from autotune.modeling.loading import load_model, load_processor
from autotune.modeling.quantization import (
    PACKAGES,
    num_parameters,
    quantization_of,
    quantization_versions,
    unquantized,
    weight_bytes,
)
from autotune.modeling.target import Target
from autotune.runtime.answer_batch import can_batch
from autotune.runtime.decoder import Decoder
from autotune.runtime.model_pool import ModelPool
from tests.drafters.test_feature_draft import agreeing_draft
from tests.tiny_models import Inputs, Pair, new_llama, sharpen

TREE = {"policy": "eagle2", "depth": 4, "k": 3, "budget": 10}
TORCHAO = ("int8", "int4")
KINDS = (*TORCHAO, "bitsandbytes 8-bit", "compressed int8", "compressed int4")
VISION = ["vision_tower", "multi_modal_projector"]


@pytest.fixture(scope="module")
def quantized(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the tiny target with weights of 8 and of 4 bits."""
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import AutoModelForImageTextToText, BitsAndBytesConfig, TorchAoConfig

    configs = {
        "int8": TorchAoConfig(torchao.Int8WeightOnlyConfig()),
        "int4": TorchAoConfig(torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4)),
        "bitsandbytes 8-bit": BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["lm_head", *VISION]),
    }
    folders = {name: tmp_path_factory.mktemp(name.replace(" ", "-")) for name in KINDS}
    for name, config in configs.items():
        model = AutoModelForImageTextToText.from_pretrained(pair.target_folder, quantization_config=config)
        model.save_pretrained(folders[name])
    for name, num_bits in (("compressed int8", 8), ("compressed int4", 4)):
        save_compressed(
            AutoModelForImageTextToText.from_pretrained(pair.target_folder), folders[name], num_bits=num_bits
        )
    for folder in folders.values():
        load_processor(str(pair.target_folder)).save_pretrained(folder)
    return folders


def save_compressed(model: Any, folder: Path, *, num_bits: int) -> None:
    """Save a model as llm-compressor does: weights of the language model's linear layers, one scale for each row."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization import apply_quantization_config as apply
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = QuantizationArgs(num_bits=num_bits, type="int", symmetric=True, strategy="channel")
    ignored = ["lm_head", *(f"re:.*{name}.*" for name in VISION)]
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    apply(model, QuantizationConfig(config_groups={"weights": scheme}, ignore=ignored))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            rows = module.weight.data
            scale, _ = calculate_qparams(rows.amin(1, keepdim=True), rows.amax(1, keepdim=True), weights)
            module.weight_scale.data.copy_(scale)
            module.weight_zero_point.data.zero_()
    compressor = ModelCompressor.from_pretrained_model(
        model, quantization_format="int-quantized" if num_bits == 8 else "pack-quantized"
    )
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["quantization_config"]["ignore"] = ignored  # names of saved modules are not those of loaded ones
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq 4-bit"),
        ({"quant_method": "awq", "bits": 4}, "awq 4-bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes 4-bit nf4"),
        ({"load_in_8bit": True}, "bitsandbytes 8-bit"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors pack-quantized"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {"group_size": None}}}}, "torchao Int8WeightOnly"),
    ],
)  # fmt: skip
def test_a_quantization_is_named_by_method_and_variant(settings: dict[str, Any], label: str) -> None:
    assert quantization_of(SimpleNamespace(quantization_config=settings)) == label
    assert quantization_of(SimpleNamespace(quantization_config=SimpleNamespace(to_dict=lambda: settings))) == label
    assert [version.split()[0] for version in quantization_versions(label)][:1] != []
    assert quantization_of(SimpleNamespace()) is None and quantization_versions(None) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "aqlm"}, "quantized with aqlm, which cannot run on cpu with the installed packages .*; pip install aqlm, or give the checkpoint without"),
        ({"quant_method": "auto-round", "bits": 4}, "; pip install auto-round, or give the checkpoint without"),
        ({"quant_method": "awq", "bits": 4}, "; pip install gptqmodel, or give the checkpoint without"),
        ({"quant_method": "gptq", "bits": 4}, "; pip install gptqmodel optimum, or give the checkpoint without"),
        ({"quant_method": "hqq", "quant_config": {}}, "; pip install hqq, or give the checkpoint without"),
        ({"quant_method": "quanto", "weights": "int8"}, "; pip install optimum-quanto, or give the checkpoint without"),
        ({"quant_method": "nonsense"}, "Unknown quantization type.*; give the checkpoint without quantization, or another device$"),
    ],
)  # fmt: skip
def test_a_quantization_that_cannot_run_here_is_refused(
    pair: Pair, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    """With the packages to install, none of which is a requirement of these tests."""
    installed = [name for name in PACKAGES.get(settings["quant_method"], ()) if version_of(name) != "unknown"]
    if installed:
        pytest.skip(f"{', '.join(installed)} is installed")
    folder = tmp_path / "target"
    shutil.copytree(pair.target_folder, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    with pytest.raises(UserError, match=message) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", TORCHAO)
def test_the_sizes_of_a_quantized_model_are_those_of_its_memory(
    pair: Pair, quantized: dict[str, Path], kind: str
) -> None:
    plain, target = Target(pair.target), Target(load_model(str(quantized[kind])))
    assert num_parameters(target.model) == num_parameters(plain.model) == plain.model.num_parameters()
    shape, whole = target.shape, plain.shape
    assert whole.bytes_per_parameter == 4 and 1 < shape.bytes_per_parameter < 4
    changes = {"bytes_per_parameter": shape.bytes_per_parameter, "device_numbers": (1,), "divided_parameters": 0}
    assert shape == whole.model_copy(update=changes), "the weights are smaller, and one device holds them"
    linears = [module for module in target.text.layers[0].modules() if type(module) is torch.nn.Linear]
    rows = sum(linear.weight.shape[0] for linear in linears)
    numbers = sum(linear.weight.numel() for linear in linears)
    assert weight_bytes(torch.nn.ModuleList(linears)) in range(numbers + 4 * rows, numbers + 13 * rows)
    assert weight_bytes(target.model) < 0.7 * weight_bytes(plain.model)
    assert all(parameter.is_meta for parameter in unquantized(target.model).parameters())


@pytest.mark.parametrize(
    ("kind", "least", "most"), [("bitsandbytes 8-bit", 1, 3), ("compressed int8", 4, 4.5), ("compressed int4", 4, 4.5)]
)
def test_bytes_per_parameter_are_those_of_decoding(
    quantized: dict[str, Path], kind: str, least: float, most: float
) -> None:
    """They include the head, which is not quantized. compressed-tensors decompresses its weights before the
    first step.
    """
    target = Target(load_model(str(quantized[kind])))
    bytes_per_parameter = target.shape.bytes_per_parameter
    assert least < bytes_per_parameter < most
    with torch.inference_mode():
        target.model(input_ids=torch.tensor([[1, 2]]))
    assert target.shape.bytes_per_parameter == bytes_per_parameter


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_quantized_target_decodes_its_own_tokens_with_every_draft(
    pair: Pair, quantized: dict[str, Path], prompts: dict[str, Inputs], kind: str
) -> None:
    """Apart from near ties, whose margin lies within the measured noise, these are the tokens of its own
    ``generate``.
    """
    target = Target(load_model(str(quantized[kind])))
    drafts: list[Draft] = [IndependentDraft(pair.draft), agreeing_draft("star", target, injection_layer=4)]
    drafts.append(IndependentDraft(target.model))
    num_identical = 0
    for inputs in prompts.values():
        expected = target.model.generate(**inputs, max_new_tokens=14, do_sample=False)
        length = inputs["input_ids"].shape[1]
        for draft in drafts:
            found = Decoder(target, draft, tree=TREE).generate(**inputs, max_new_tokens=14).sequences
            num_identical += torch.equal(found, expected)
            own, other = found[0, length:].tolist(), expected[0, length:].tolist()
            divergence = first_divergence(target, inputs, own, other)
            assert divergence is None or divergence.is_near_tie, divergence
    assert num_identical > 0


@torch.inference_mode()
def test_4_bit_weights_of_bitsandbytes(tmp_path: Path) -> None:
    """Rows are as long as a block of weights with one scale, 64."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    torch.manual_seed(1)
    model = new_llama(4, hidden_size=64, intermediate_size=128)
    sharpen(model, model.model.layers, num_strong_layers=2)
    model.save_pretrained(tmp_path / "dense")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    quantized.save_pretrained(tmp_path / "target")
    target = Target(load_model(str(tmp_path / "target")))
    assert target.text.precision == "float32, bitsandbytes 4-bit nf4"
    decodes_its_own_tokens(target, agreeing_draft("star", target, injection_layer=4))
    assert target.shape.bytes_per_parameter < 2.5, "embedding and head have 4 bytes"


@torch.inference_mode()
def test_weights_of_fp8_are_dense_on_a_cpu(text_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is planned for the dense weights, not for those of the file, and outputs are those of the dense model."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    settings = FineGrainedFP8Config(weight_block_size=(16, 16), modules_to_not_convert=["lm_head"])
    text_pair.target.save_pretrained(tmp_path)
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    path = tmp_path / "model.safetensors"
    weights: dict[str, torch.Tensor] = {}
    for name, value in load_file(path).items():
        weights |= quantize.convert({name: value}) if "proj" in name else {name: value}
    save_file(weights, path, metadata={"format": "pt"})
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": settings.to_dict()}))
    planned: list[int] = []
    monkeypatch.setattr(loading, "check_room", lambda device, needs, **kwargs: planned.append(needs["weights"]))
    target = Target(load_model(str(tmp_path)))
    assert path.stat().st_size < 0.6 * planned[0] and planned == [4 * num_parameters(target.model)]
    assert target.text.precision == "float32" and target.text.is_exact
    weight = text_pair.target.model.layers[0].mlp.up_proj.weight
    error = (target.model.model.layers[0].mlp.up_proj.weight - weight).abs() / weight.abs()
    assert 0 < error.median() < 2**-4, "three bits of the mantissa"
    decodes_its_own_tokens(target, IndependentDraft(text_pair.draft))


def decodes_its_own_tokens(target: Target, draft: Draft) -> None:
    """Check that greedy trees give the tokens of ``generate``, whatever the checkpoint's generation config says."""
    for ids in ([5, 6, 7, 8], [11, 30, 40], [90, 3, 200, 17, 17]):
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        options = {"max_new_tokens": 24, "do_sample": False}
        expected = target.model.generate(**inputs, **options)
        found = Decoder(target, draft, tree=TREE).generate(**inputs, **options).sequences
        own, other = found[0, len(ids) :].tolist(), expected[0, len(ids) :].tolist()
        divergence = first_divergence(target, inputs, own, other)
        assert divergence is None or divergence.is_near_tie, divergence
        assert divergence is None or not target.text.is_exact


def test_a_quantized_target_is_neither_exact_nor_batched(quantized: dict[str, Path], pair: Pair) -> None:
    plain, target = Target(pair.target), Target(load_model(str(quantized["int8"])))
    assert (plain.text.precision, plain.text.is_exact) == ("float32", True)
    assert (target.text.precision, target.text.is_exact) == ("float32, torchao Int8WeightOnly", False)
    request: Any = SimpleNamespace(sampler=SimpleNamespace(is_greedy=True), call=SimpleNamespace(stops=[]))
    assert can_batch(plain, request) and not can_batch(target, request)


def test_documents_of_a_quantized_target_have_keys_of_their_own(quantized: dict[str, Path], pair: Pair) -> None:
    pools = [ModelPool(str(folder), ["retrieval"], "cpu") for folder in (pair.target_folder, *quantized.values())]
    assert len({pool.key for pool in pools}) == 1 + len(KINDS)
    assert [pool.target.text.precision for pool in pools] == [
        "float32",
        "float32, torchao Int8WeightOnly",
        "float32, torchao IntxWeightOnly int4",
        "float32, bitsandbytes 8-bit",
        "float32, compressed-tensors int-quantized",
        "float32, compressed-tensors pack-quantized",
    ]


def test_a_quantized_head_is_neither_cut_nor_copied(quantized: dict[str, Path]) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    target = Target(load_model(str(quantized["int8"])))
    target.model.lm_head.weight = torch.nn.Parameter(target.model.lm_head.weight.clone(), requires_grad=False)
    torchao.quantize_(target.model, torchao.Int8WeightOnlyConfig(), lambda module, name: name == "lm_head")
    with pytest.raises(UserError, match="this one is quantized with torchao Int8WeightOnly; leave vocabulary out"):
        target.text.with_vocabulary(torch.arange(8))
    sizes = {"num_heads": 2, "head_size": 8, "mlp_size": 16, "layers": [1, 2, 3]}
    with pytest.raises(UserError, match=r"recipe: an eagle3 head begins with a copy of .* quantized with torchao"):
        Eagle3Network.new(sizes, target, source="recipe")
