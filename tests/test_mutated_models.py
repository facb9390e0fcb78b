"""Checkpoints of targets and of every kind of draft, whatever is damaged in config or weights: they are loaded and
decode, or are refused with one line; of damaged weights with the tensor's name.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from autotune.drafters.checkpoint import load_draft
from autotune.drafters.mtp import MtpNetwork
from autotune.errors import UserError
from autotune.modeling.loading import _check_runs, load_model
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from tests.drafters import test_eagle3, test_mtp
from tests.drafters.test_feature_draft import agreeing_draft
from tests.families import FAMILIES, HYBRIDS
from tests.mutations import damaged, json_bytes, mutate, nightly
from tests.tiny_models import TARGET_LAYERS, Pair

IDS = torch.arange(20, 32)[None]
FEW = 6
CONFIG, WEIGHTS = "model/config.json", "model/model.safetensors"
CLASSES = ("llama", "qwen3", "gemma3_text", "mistral_window", "llava", "qwen2_5_vl", "lfm2", "qwen3_next")
TREE = {"policy": "chain", "depth": 2}


DRAFTS = ("independent", "star", "dream", "specvlm", "eagle3", "eagle3 speculators", "mtp", ":mtp")
KINDS = (*CLASSES, *DRAFTS)


def checkpoint(kind: str, text_pair: Pair, folder: Path) -> Callable[[], Any]:
    """Write a checkpoint; returns the function that loads it and decodes."""
    torch.manual_seed(3)
    if kind in CLASSES:
        (FAMILIES | HYBRIDS)[kind].model(2).save_pretrained(folder)
        return lambda: decode(Decoder(load_model(str(folder))))
    model, name = text_pair.target, str(folder)
    match kind:
        case "independent":
            shutil.copytree(text_pair.draft_folder, folder)
        case "star" | "dream" | "specvlm":
            layer = TARGET_LAYERS if kind == "specvlm" else 4
            with torch.inference_mode():
                agreeing_draft(kind, Target(model), injection_layer=layer).network.save(folder)  # type: ignore[operator]
        case "mtp":
            MtpNetwork.new({}, Target(model), source="test").save(folder)
        case ":mtp":
            model, name = test_mtp.new_model("glm4_moe"), f"{folder}:mtp"
            test_mtp.write_checkpoint(folder, model, test_mtp.published(test_mtp.new_head(model), "glm4_moe"))
        case _:
            has_speculators = kind == "eagle3 speculators"
            forms = [
                n for n, c in test_eagle3.PUBLISHED.items() if ("transformer_layer_config" in c) is has_speculators
            ]
            test_eagle3.write_head(folder, min(forms))
    return lambda: decode(Decoder(model, load_draft(name, Target(model)), tree=TREE))


def decode(decoder: Decoder) -> None:
    decoder.generate(input_ids=IDS, max_new_tokens=4, temperature=0.0, eos_token_id=None)


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_every_family_passes_the_check_of_a_token(family: str) -> None:
    _check_runs((FAMILIES | HYBRIDS)[family].model(2).eval(), None, family)


def _is_used(kind: str, name: str) -> bool:
    """Whether a draft's loader reads a tensor."""
    if kind == ":mtp":
        return name.startswith(f"model.layers.{test_mtp.LAYERS}.") and not re.search(
            r"embed_tokens|shared_head.head", name
        )
    return not name.endswith("t2d")


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_weights_are_refused_by_name(kind: str, text_pair: Pair, tmp_path: Path) -> None:
    use, weights = checkpoint(kind, text_pair, tmp_path / "model"), tmp_path / WEIGHTS
    use()
    data, whole = weights.read_bytes(), load_file(weights)
    used = sorted(name for name in whole if _is_used(kind, name))
    for name in {used[0], used[len(used) // 2], used[-1]}:
        tensor = whole[name]
        changed = {
            "missing": None,
            "misshaped": tensor.new_zeros([size + 1 for size in tensor.shape] or [2]),
            "flat": tensor.reshape(-1, 1, 1).clone(),
        }
        if tensor.is_floating_point():
            for value in (float("nan"), float("inf")):
                changed[str(value)] = tensor.clone()
                changed[str(value)].view(-1)[-1] = value
        for what, other in changed.items():
            rest = {key: value for key, value in whole.items() if key != name}
            save_file(rest if other is None else rest | {name: other}, weights, {"format": "pt"})
            with pytest.raises(UserError, match=re.escape(_shown(name))):
                use()
                raise AssertionError(f"{name}, {what}: accepted")
    last = max(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).items(), key=_end)[0]
    weights.write_bytes(data[:-1])
    with pytest.raises(UserError, match=re.escape(last)):
        use()


def _end(entry: tuple[str, Any]) -> int:
    return entry[1]["data_offsets"][1] if entry[0] != "__metadata__" else -1


def _shown(name: str) -> str:
    """The end of a tensor's name, which no loader changes; experts are loaded together."""
    if "experts" in name:
        return "experts"
    return ".".join(name.split(".")[-2:]) if "." in name else name


@nightly
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints(
    kind: str, is_nightly: bool, text_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Config and bytes, on a machine with little memory, which a damaged size may not fill. Weights that are used are
    whole.
    """
    use, config, weights = checkpoint(kind, text_pair, tmp_path / "model"), tmp_path / CONFIG, tmp_path / WEIGHTS
    content, data = json.loads(config.read_text()), weights.read_bytes()
    shapes = {name: tensor.shape for name, tensor in load_file(weights).items() if _is_used(kind, name)}
    monkeypatch.setattr("autotune.machine.device.free_memory", lambda device: 1 << 28)

    def check(damage: tuple[bytes, bytes]) -> None:
        config.write_bytes(damage[0])
        weights.write_bytes(damage[1])
        use()
        if damage[1] != data:
            used = {name: tensor for name, tensor in load_file(weights).items() if name in shapes}
            assert {name: tensor.shape for name, tensor in used.items()} == shapes
            assert all(bool(tensor.isfinite().all()) for tensor in used.values())

    sound = st.just(json.dumps(content).encode())
    configs = st.tuples(json_bytes(content), st.just(data))
    mutate(FEW, st.one_of(configs, configs, st.tuples(sound, damaged(data))), check, is_nightly)


SIZES = (-1, 0, 3, 7, 2**31, 2**63, 10**30, 0.5, True, "4", None, [4], {"a": 1}, float("nan"))


@pytest.mark.parametrize("kind", ["llama", "llava", "lfm2", "star", "eagle3"])
def test_damaged_sizes_are_refused(kind: str, text_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of the config in turn: negative, zero, odd, huge, or of another type."""
    use, config = checkpoint(kind, text_pair, tmp_path / "model"), tmp_path / CONFIG
    content = json.loads(config.read_text())
    monkeypatch.setattr("autotune.machine.device.free_memory", lambda device: 1 << 28)
    parts = [content, *(value for value in content.values() if isinstance(value, dict))]
    numbers = [(part, key) for part in parts for key, value in part.items() if type(value) in (int, float)]
    for number, (part, key) in enumerate(numbers):
        before = part[key]
        for value in SIZES[number % 3 :: 3]:
            part[key] = value
            config.write_text(json.dumps(content))
            try:
                use()
            except UserError as error:
                assert "\n" not in str(error), (key, value)
            except Exception as error:
                raise AssertionError(f"{key} = {value!r}: {type(error).__name__}: {error}") from error
        part[key] = before
