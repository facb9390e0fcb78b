"""Checkpoints of targets and of every kind of draft, whatever is damaged in config or weights: they are loaded and
decode, or are refused with one line; of damaged weights with the tensor's name.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from autotune.drafters.checkpoint import load_draft
from autotune.errors import UserError
from autotune.modeling.loading import _check_runs, load_model
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from tests.drafters import test_eagle3, test_mtp
from tests.drafters.test_feature_draft import agreeing_draft, new_draft
from tests.families import FAMILIES, HYBRIDS
from tests.mutations import damaged, json_bytes, mutate, nightly
from tests.tiny_models import TARGET_LAYERS, Pair

IDS = torch.arange(20, 32)[None]
FEW = 6
CONFIG, WEIGHTS = "config.json", "model.safetensors"
CLASSES = ("llama", "qwen3", "gemma3_text", "mistral_window", "llava", "qwen2_5_vl", "lfm2", "qwen3_next")
TREE = {"policy": "chain", "depth": 2}


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    use: Callable[[], Any]
    """Loads it from ``folder``, and decodes."""

    @property
    def config(self) -> Path:
        return self.folder / CONFIG

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS


def _decode(decoder: Decoder) -> None:
    decoder.generate(input_ids=IDS, max_new_tokens=4, temperature=0.0, eos_token_id=None)


def _use_target(folder: Path) -> None:
    _decode(Decoder(load_model(str(folder))))


def _use_draft(name: str, target: Any) -> None:
    _decode(Decoder(target, load_draft(name, Target(target)), tree=TREE))


def _network(kind: str, target: Any, folder: Path) -> None:
    with torch.inference_mode():
        sizes = {"layers": [1, 2, 3]} if kind == "eagle3" else {}
        if kind in ("dream", "star"):
            draft = agreeing_draft(kind, Target(target), injection_layer=4)
        elif kind == "specvlm":
            draft = agreeing_draft(kind, Target(target), injection_layer=TARGET_LAYERS)
        else:
            draft = new_draft(kind, Target(target), **sizes)
        draft.network.save(folder)  # type: ignore[operator]


def _mtp(target: Any, folder: Path) -> None:
    from autotune.drafters.mtp import MtpNetwork

    torch.manual_seed(2)
    MtpNetwork.new({}, Target(target), source="test").save(folder)


DRAFTS: dict[str, Callable[[Any, Path], Any]] = {
    "independent": lambda target, folder: None,
    **{kind: partial(_network, kind) for kind in ("star", "dream", "specvlm")},
    "eagle3": lambda target, folder: test_eagle3.write_head(folder, sorted(test_eagle3.PUBLISHED)[0]),
    "eagle3 speculators": lambda target, folder: test_eagle3.write_head(
        folder, next(n for n, c in test_eagle3.PUBLISHED.items() if "transformer_layer_config" in c)
    ),
    "mtp": _mtp,
}


@pytest.fixture(scope="module")
def made(
    text_pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Callable[[Path], Any]]]:
    """Makes a checkpoint once, by its kind; returns its folder, and the function that loads a copy and decodes."""
    root, known = tmp_path_factory.mktemp("checkpoints"), dict[str, tuple[Path, Callable[[Path], Any]]]()

    def make(kind: str) -> tuple[Path, Callable[[Path], Any]]:
        folder, torch_seed = root / kind.replace(" ", "-"), torch.manual_seed(3)
        assert torch_seed is not None
        if kind in CLASSES:
            (FAMILIES | HYBRIDS)[kind].model(2).save_pretrained(folder)
            return folder, _use_target
        if kind == ":mtp":
            model = test_mtp.new_model("glm4_moe")
            test_mtp.write_checkpoint(folder, model, test_mtp.published(test_mtp.new_head(model), "glm4_moe"))
            return folder, lambda copy: _use_draft(f"{copy}:mtp", model)
        if kind == "independent":
            shutil.copytree(text_pair.draft_folder, folder)
        else:
            DRAFTS[kind](text_pair.target, folder)
        return folder, lambda copy: _use_draft(str(copy), text_pair.target)

    def get(kind: str) -> tuple[Path, Callable[[Path], Any]]:
        if kind not in known:
            known[kind] = make(kind)
        return known[kind]

    return get


def checkpoint(made: Any, kind: str, tmp_path: Path) -> Checkpoint:
    """A copy that a test may damage."""
    source, use = made(kind)
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    return Checkpoint(folder, lambda: use(folder))


KINDS = (*CLASSES, *DRAFTS, ":mtp")
OF_TARGET = re.compile(r"embed_tokens|lm_head|t2d|verifier_norm|inv_freq|token_frequencies|layers\.(\d+)\.")
"""Tensors that some draft's loader leaves out, because they are the target's."""


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
def test_damaged_weights_are_refused_by_name(kind: str, made: Any, tmp_path: Path) -> None:
    one = checkpoint(made, kind, tmp_path)
    one.use()
    data, whole = one.weights.read_bytes(), load_file(one.weights)
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
            save_file(rest if other is None else rest | {name: other}, one.weights, {"format": "pt"})
            with pytest.raises(UserError, match=re.escape(_shown(name))):
                one.use()
                raise AssertionError(f"{name}, {what}: accepted")
    last = max(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).items(), key=_end)[0]
    one.weights.write_bytes(data[:-1])
    with pytest.raises(UserError, match=re.escape(last)):
        one.use()


def _end(entry: tuple[str, Any]) -> int:
    return entry[1]["data_offsets"][1] if entry[0] != "__metadata__" else -1


def _shown(name: str) -> str:
    """The end of a tensor's name, which no loader changes; experts are loaded together."""
    if "experts" in name:
        return "experts"
    return ".".join(name.split(".")[-2:]) if "." in name else name


@nightly
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints(kind: str, is_nightly: bool, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Config and bytes, on a machine with little memory, which a damaged size may not fill. Weights that are used are
    whole.
    """
    one = checkpoint(made, kind, tmp_path)
    content, data = json.loads(one.config.read_text()), one.weights.read_bytes()
    shapes = {name: tensor.shape for name, tensor in load_file(one.weights).items() if _is_used(kind, name)}
    monkeypatch.setattr("autotune.machine.device.free_memory", lambda device: 1 << 28)

    def check(damage: tuple[bytes, bytes]) -> None:
        one.config.write_bytes(damage[0])
        one.weights.write_bytes(damage[1])
        one.use()
        if damage[1] != data:
            used = {name: tensor for name, tensor in load_file(one.weights).items() if name in shapes}
            assert {name: tensor.shape for name, tensor in used.items()} == shapes
            assert all(bool(tensor.isfinite().all()) for tensor in used.values())

    sound = st.just(json.dumps(content).encode())
    configs = st.tuples(json_bytes(content), st.just(data))
    mutate(FEW, st.one_of(configs, configs, st.tuples(sound, damaged(data))), check, is_nightly)


SIZES = (-1, 0, 3, 7, 2**31, 2**63, 10**30, 0.5, True, "4", None, [4], {"a": 1}, float("nan"))


@pytest.mark.parametrize("kind", ["llama", "llava", "lfm2", "star", "eagle3"])
def test_damaged_sizes_are_refused(kind: str, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of the config in turn: negative, zero, odd, huge, or of another type."""
    one = checkpoint(made, kind, tmp_path)
    content = json.loads(one.config.read_text())
    monkeypatch.setattr("autotune.machine.device.free_memory", lambda device: 1 << 28)
    parts = [content, *(value for value in content.values() if isinstance(value, dict))]
    numbers = [(part, key) for part in parts for key, value in part.items() if type(value) in (int, float)]
    for number, (part, key) in enumerate(numbers):
        before = part[key]
        for value in SIZES[number % 3 :: 3]:
            part[key] = value
            one.config.write_text(json.dumps(content))
            try:
                one.use()
            except UserError as error:
                assert "\n" not in str(error), (key, value)
            except Exception as error:
                raise AssertionError(f"{key} = {value!r}: {type(error).__name__}: {error}") from error
        part[key] = before
