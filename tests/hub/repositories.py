"""All repositories of the stand-in: published ids with tiny weights, and repositories with odd files."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import families
from tests.drafters.test_eagle3 import write_head
from tests.hub import published, tiny

LLAMA, QWEN = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3.5-27B"
PLAIN = "HuggingFaceTB/SmolLM2-135M-Instruct"
GATED = "meta-llama/Llama-3.1-405B-Instruct"
PT = {"format": "pt"}
RENAMED = {"HuggingFaceTB/SmolLM2-135M-instruct-old": PLAIN}


def _plain(folder: Path) -> dict[str, torch.Tensor]:
    """Write the plain repository; returns its weights."""
    tiny.save(PLAIN, folder)
    return dict(load_file(folder / "model.safetensors"))


def _sharded(folder: Path) -> None:
    weights = _plain(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {f"model-0000{n + 1}-of-00002.safetensors": names[n::2] for n in range(2)}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, folder / file, {"format": "pt"})
    where = {name: file for file, held in parts.items() for name in held}
    size = sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _without_a_shard(folder: Path) -> None:
    _sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _bin_alone(folder: Path) -> None:
    weights = _plain(folder)
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def _consolidated(folder: Path) -> None:
    """Mistral's repositories hold the weights twice, and Meta's have a folder ``original``."""
    weights = _plain(folder)
    _sharded(folder)
    save_file(weights, folder / "consolidated.safetensors")
    (folder / "original").mkdir()
    torch.save(weights, folder / "original" / "consolidated.00.pth")
    (folder / "params.json").write_text("{}")


def _adapter(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": PLAIN, "r": 4}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
    save_file({"base_model.model.lora_A.weight": torch.zeros(4, 32)}, folder / "adapter_model.safetensors")


def _adapter_beside(folder: Path) -> None:
    _plain(folder)
    _adapter(folder)


def _remote_code(folder: Path) -> None:
    _plain(folder)
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoModelForCausalLM": "modeling_odd.OddForCausalLM", "AutoConfig": "configuration_odd.OddConfig"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "odd", "auto_map": code}))
    (folder / "modeling_odd.py").write_text("raise RuntimeError('code of a repository ran')\n")


def _without_config(folder: Path) -> None:
    _plain(folder)
    (folder / "config.json").unlink()


def _eagle3(folder: Path) -> None:
    """A head for the tiny Llama 3.1 in the published format: the first layer of its target over embeddings alone."""
    from autotune.drafters.eagle3 import Eagle3Network
    from autotune.modeling.target import Target

    tiny.save(LLAMA, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    spoken = torch.tensor(sorted(AutoTokenizer.from_pretrained(folder).get_vocab().values()))
    shutil.rmtree(folder)
    config, first = model.config, model.model.layers[0].state_dict()
    heads = {"num_heads": config.num_attention_heads, "num_kv_heads": config.num_key_value_heads}
    sizes = heads | {"head_size": config.head_dim, "mlp_size": config.intermediate_size}
    head = Eagle3Network.new(sizes, Target(model), source=LLAMA)
    with torch.no_grad():
        for name, weight in head.layer.named_parameters():
            if name in first:  # the features beside the embedding get no weight
                weight.copy_(pad(first[name], (0, weight.shape[-1] - first[name].shape[-1])))
        head.fc.weight.zero_()
    head.keep_tokens(spoken, head.lm_head.weight[spoken])
    head.save(folder)


def _own_mtp(folder: Path) -> None:
    """A Qwen 3.5 whose checkpoint has the head that its config promises: its last layer over embedding and features."""
    tiny.save(QWEN, folder)
    weights, last = load_file(folder / "model.safetensors"), f"model.layers.{tiny.NUM_LAYERS - 1}."
    head = {f"mtp.layers.0.{key.removeprefix(last)}": weights[key] for key in weights if key.startswith(last)}
    norm = weights["model.norm.weight"]
    head |= {f"mtp.{key}.weight": norm for key in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    head["mtp.fc.weight"] = torch.cat([torch.eye(len(norm))] * 2, -1)
    save_file({key: weight.clone() for key, weight in (weights | head).items()}, folder / "model.safetensors", PT)


def _gguf(folder: Path) -> None:
    """A GGUF file, and no other file."""
    from tests.modeling.test_gguf import write_gguf
    from tests.tiny_models import new_tokenizer

    folder.mkdir(parents=True)
    write_gguf(folder / "SmolLM2-135M-Instruct-Q8_0.gguf", new_tokenizer())


def _draft_head(architecture: str, **config: object) -> Callable[[Path], None]:
    """A head with the config that engines read; its weights are not there, since it is only recognised."""

    def write(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        content = {"architectures": [architecture], "model_type": "llama", "num_hidden_layers": 1, **config}
        (folder / "config.json").write_text(json.dumps(content))

    return write


def _vision_head(folder: Path) -> None:
    """The EAGLE-3 head of Qwen2.5-VL-7B with its published config, random weights and the sizes of the tiny target."""
    text = families.FAMILIES["qwen2_5_vl"].model(tiny.NUM_LAYERS).config.get_text_config()
    write_head(
        folder,
        "SpecForge/qwen2-5-vl-7b",
        SimpleNamespace(text=SimpleNamespace(config=text), vocab_size=text.vocab_size),
        bos_token_id=None,  # the published ones are not in the small vocabulary
        eos_token_id=None,
    )


ODD: dict[str, Callable[[Path], None]] = {
    "odd/sharded": _sharded,
    "odd/without-a-shard": _without_a_shard,
    "odd/bin-alone": _bin_alone,
    "odd/consolidated": _consolidated,
    "odd/adapter": _adapter,
    "odd/adapter-beside": _adapter_beside,
    "odd/remote-code": _remote_code,
    "odd/without-config": _without_config,
    QWEN: _own_mtp,
    "bartowski/SmolLM2-135M-Instruct-GGUF": _gguf,
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": _eagle3,
    "Rayzl/qwen2.5-vl-7b-eagle3-sgl": _vision_head,
    "z-lab/Qwen3-8B-DFlash-b16": _draft_head("DFlashDraftModel", block_size=16, model_type="qwen3"),
    GATED: lambda folder: tiny.save("meta-llama/Llama-3.1-70B-Instruct", folder),
}
IDS = {*published.IDS, *ODD}


class Folders(Mapping[str, Path]):
    """The folders of all repositories by id, each written when it is first asked for."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self._lock = threading.Lock()

    def __contains__(self, name: object) -> bool:
        return name in IDS

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(IDS))

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, name: str) -> Path:
        if name not in IDS:
            raise KeyError(name)
        folder = self.parent / name.replace("/", "--")
        with self._lock:
            if not folder.exists():
                begun = folder.with_suffix(".begun")
                shutil.rmtree(begun, ignore_errors=True)
                ODD.get(name, lambda path: tiny.save(name, path))(begun)
                begun.rename(folder)
        return folder
