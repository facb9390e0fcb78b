"""Files of models on this machine: what an engine reads of their configs, and checkpoints in the form that it loads."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.documents.draft_kinds import KINDS, refuse_dflash
from autotune.documents.speculation import ModelType
from autotune.errors import UserError
from autotune.files import content_key, known_sha256_of, read_json, write_bytes
from autotune.modeling.loading import resolve
from autotune.modeling.weight_files import save_tensors

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "*.safetensors"
COPIED = ("*.json", "*.jinja", "*.model", "*.txt")
"""Files of a checkpoint next to its config and weights."""
NOT_OF_TEXT = (CONFIG, INDEX, "processor_config.json", "preprocessor_config.json")
"""Files that a text model does not have, or that are rewritten."""
SHARED_KEYS = ("dtype", "torch_dtype")
"""Keys of a vision-language model's config that hold for its text model too."""
TOWERS_RENAMED = ("clip_vision_model", "siglip_vision_model")
VISION_PREFIX, VISION_MODEL_PREFIX = "vision_tower.", "vision_tower.vision_model."
TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
"""Prefixes of a text model's weights inside a vision-language model, with the prefix that it has alone."""

FREQUENCIES = "token_frequencies"
QUERY = re.compile(r"[qkv]_proj\.weight$")
MIMO_NAMES = {
    "enorm.weight": "token_layernorm.weight",
    "hnorm.weight": "hidden_layernorm.weight",
    "norm.weight": "final_layernorm.weight",
    "eh_proj.weight": "input_proj.weight",
}
"""Names of an mtp head's weights in MiMo's checkpoints, which have the others without ``layer.``."""


@dataclass(frozen=True)
class ModelFiles:
    folder: Path
    config: dict[str, Any]

    @property
    def text_config(self) -> dict[str, Any]:
        """The config of the text model: a part of a vision-language model's config."""
        config = self.config.get("text_config")
        return config if isinstance(config, dict) else self.config

    @property
    def vocab_size(self) -> int | None:
        size = self.text_config.get("vocab_size", self.config.get("vocab_size"))
        return size if isinstance(size, int) else None

    @property
    def dtype(self) -> str:
        """The precision of the weights; ``auto`` where the config does not say."""
        found = (config.get(key) for config in (self.config, self.text_config) for key in SHARED_KEYS)
        return next((dtype for dtype in found if isinstance(dtype, str)), "auto")

    @property
    def has_mrope(self) -> bool:
        """Whether positions have several axes (time, height, width)."""
        settings = (self.text_config.get("rope_parameters") or {}, self.text_config.get("rope_scaling") or {})
        return any(isinstance(setting, dict) and "mrope_section" in setting for setting in settings)


def find_model_files(name: str, *, local_only: bool = True, weights: bool = False) -> ModelFiles | None:
    """The files of a bundled model, of a folder, or of a model of the Hugging Face Hub, as ``resolve`` finds them; None
    where there are none, and for a GGUF file.

    Raises:
        UserError: a model of the Hub that may be downloaded, and is not to be had.
    """
    try:
        folder = Path(resolve(name, weights=weights, local_only=local_only))
    except UserError:
        if local_only or Path(name).exists():
            return None
        raise
    config = read_json(folder / CONFIG) if folder.is_dir() else None
    return ModelFiles(folder, config) if isinstance(config, dict) else None


def write_checkpoint(
    source: ModelFiles,
    folder: Path,
    config: dict[str, Any],
    rename: Callable[[str], str | None],
    left_out: Sequence[str] = NOT_OF_TEXT,
) -> Path:
    """Write a checkpoint in a form that an engine loads, file by file, unless it is there.

    Args:
        rename: the new name of a weight; None leaves it out.

    Returns:
        ``folder``.
    """
    from safetensors import safe_open

    if (folder / CONFIG).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, str] = {}  # file by weight
    for path in sorted(source.folder.glob(WEIGHTS)):
        with safe_open(path, "pt") as file:
            names = {name: new for name in file.keys() if (new := rename(name)) is not None}  # noqa: SIM118
            weights = {new: file.get_tensor(name) for name, new in names.items()}
        if weights:
            save_tensors(folder / path.name, weights, {"format": "pt"})
            parts |= dict.fromkeys(weights, path.name)
    if len(set(parts.values())) > 1:
        write_bytes(folder / INDEX, json.dumps({"metadata": {}, "weight_map": parts}, indent=1).encode())
    for path in (path for pattern in COPIED for path in source.folder.glob(pattern)):
        if path.name not in left_out:
            shutil.copyfile(path, folder / path.name)
    write_bytes(folder / CONFIG, (json.dumps(config, indent=1) + "\n").encode())
    return folder


def text_part(source: ModelFiles, folder: Path, name: str) -> Path:
    """The folder of the text model of a vision-language model as a model of its own.

    Raises:
        UserError: the weights are not here, or transformers has no text model of this type.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = source.text_config
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(text.get("model_type")))
    reason = None
    if architecture is None:
        reason = f"transformers has no text model of type {text.get('model_type')!r}"
    elif not any(source.folder.glob(WEIGHTS)):
        reason = "its weights are not on this machine"
    if reason is not None:
        raise UserError(
            f"{name}: the engine takes the text part of this draft, which cannot be written: {reason}; choose another draft"
        )
    shared = {key: source.config[key] for key in SHARED_KEYS if key in source.config}
    is_tied = not any((_text_name(weight) or "").startswith("lm_head.") for weight in _weight_names(source))
    config = {**shared, **text, "architectures": [architecture], "tie_word_embeddings": is_tied}
    return write_checkpoint(source, folder, config, _text_name)


def has_short_vision_names(model: ModelFiles) -> bool:
    """Whether the weights of a CLIP or SigLIP tower have the names of transformers 5.20 and later,
    ``vision_tower.encoder...``.
    """
    vision = model.config.get("vision_config")
    if not isinstance(vision, dict) or vision.get("model_type") not in TOWERS_RENAMED:
        return False
    names = [name for name in _weight_names(model) if name.startswith(VISION_PREFIX)]
    return bool(names) and not any(name.startswith(VISION_MODEL_PREFIX) for name in names)


def served_target(path: Path, folder: Path) -> Path:
    """The folder of a target that vLLM loads: itself, or a copy below ``folder`` with the names of a vision tower
    before transformers 5.20, ``vision_tower.vision_model...``.
    """
    files = find_model_files(str(path))
    if files is None or not has_short_vision_names(files):
        return path

    def rename(name: str) -> str:
        return name.replace(VISION_PREFIX, VISION_MODEL_PREFIX, 1) if name.startswith(VISION_PREFIX) else name

    return write_checkpoint(files, folder / _key(files), files.config, rename, left_out=(CONFIG, INDEX))


def _key(model: ModelFiles) -> str:
    """Hash of a model's weights and config."""
    return content_key([known_sha256_of(*sorted(model.folder.glob(WEIGHTS))), model.config])


def served_draft(name: str, target: str, folder: Path) -> tuple[ModelType, Path]:
    """How vLLM drafts with a model: the type of its speculation, and the folder that it loads. Below ``folder``, an
    ``mtp`` head of this project is written as one of MiMo, whose layer and norms are the same, and the text part of a
    vision-language draft as a model.

    Raises:
        UserError: vLLM does not draft with it for this target.
    """
    draft, served = find_model_files(name, local_only=False, weights=True), find_model_files(target, local_only=False)
    if draft is None or served is None:
        raise UserError(
            f"--draft {name} with {target}: no model of safetensors; give a complete model, an EAGLE-3 head or an mtp head"
        )
    refuse_dflash(name, draft.config)
    if "draft_vocab_size" in draft.config or draft.config.get("speculators_model_type") == "eagle3":
        return "eagle3", draft.folder.resolve()
    if (kind := KINDS.get(str(draft.config.get("kind")))) and kind.is_target_layer:
        return "mtp", _as_mimo(draft, served, folder).resolve()
    if draft.vocab_size is None or draft.vocab_size != served.vocab_size:
        raise UserError(
            f"--draft {name}: vLLM drafts with complete models of the target's {served.vocab_size} tokens, EAGLE-3 heads and mtp heads; this "
            f"is {draft.config.get('kind') or f'a model of {draft.vocab_size} tokens'}; choose another draft"
        )
    if draft.has_mrope:
        raise UserError(
            f"--draft {name}: has M-RoPE positions, which vLLM's draft_model does not run; choose a draft without"
        )
    if "vision_config" in draft.config:
        return "draft_model", text_part(draft, folder / _key(draft), name).resolve()
    return "draft_model", draft.folder.resolve()


def _as_mimo(draft: ModelFiles, target: ModelFiles, folder: Path) -> Path:
    """The folder of a head in the form of MiMo's checkpoints, which is written unless it is there."""
    import torch
    from safetensors.torch import load_file

    config, source = target.text_config, draft.folder / "model.safetensors"
    if (kind := config.get("model_type")) not in ("llama", "qwen2"):
        raise UserError(
            f"--draft {draft.folder}: vLLM runs mtp heads of Llama and Qwen2 targets, not of {kind}; choose another draft"
        )
    head = folder / content_key([known_sha256_of(source), config])
    if (head / CONFIG).exists():
        return head
    tensors, size = load_file(source), config["hidden_size"]
    tensors["eh_proj.weight"] = tensors["eh_proj.weight"].roll(size, 1)  # MiMo's reads the features first
    biases = {
        name.replace("weight", "bias"): torch.zeros_like(t[:, 0]) for name, t in tensors.items() if QUERY.search(name)
    }
    names = {old: f"model.mtp_layers.0.{MIMO_NAMES.get(old, old.removeprefix('layer.'))}" for old in (biases | tensors)}
    head.mkdir(parents=True, exist_ok=True)
    weights = {names[old]: tensor for old, tensor in (biases | tensors).items() if old != FREQUENCIES}
    save_tensors(head / "model.safetensors", weights, {"format": "pt"})
    own: dict[str, Any] = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 1}
    own["num_nextn_predict_layers"] = 1
    write_bytes(head / CONFIG, (json.dumps(config | own, indent=1) + "\n").encode())
    return head


def _text_name(name: str) -> str | None:
    """The name of a weight in the text model alone; None for weights of other parts."""
    for prefix, replacement in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name if name.startswith("lm_head.") else None


def _weight_names(model: ModelFiles) -> Iterator[str]:
    from safetensors import safe_open

    for path in sorted(model.folder.glob(WEIGHTS)):
        with safe_open(path, "np") as file:
            yield from file.keys()
