"""Files of models on this machine: what an engine reads of their configs, and checkpoints in the form that it loads."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.documents.draft_kinds import KINDS, is_dflash
from autotune.documents.speculation import ModelType
from autotune.errors import UserError
from autotune.files import content_key, known_sha256_of, read_json, write_bytes
from autotune.modeling.loading import resolve
from autotune.modeling.weight_files import check_whole

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "*.safetensors"
COPIED = (".json", ".jinja", ".model", ".txt")
"""Suffixes of a checkpoint's files next to its weights."""
OF_IMAGES = ("processor_config.json", "preprocessor_config.json")
"""Files that a text model does not have."""
DTYPES = ("dtype", "torch_dtype")
"""Keys of a vision-language model's config that hold for its text model too."""
TOWERS_RENAMED = ("clip_vision_model", "siglip_vision_model")
VISION_PREFIX, VISION_MODEL_PREFIX = "vision_tower.", "vision_tower.vision_model."
TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model.", "lm_head.": "lm_head."}
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
HEAD_BYTES = 8  # the length of the header of a safetensors file


class RawWeight(NamedTuple):
    """A weight as the bytes of a safetensors file, which needs no torch: numpy has no bfloat16."""

    dtype: str
    shape: list[int]
    content: NDArray[np.uint8]  # the elements row by row, [bytes]


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
        dtypes = (config.get(key) for config in (self.config, self.text_config) for key in DTYPES)
        return next((dtype for dtype in dtypes if isinstance(dtype, str)), "auto")

    @property
    def key(self) -> str:
        """Hash of the weights and the config."""
        return content_key([known_sha256_of(*sorted(self.folder.glob(WEIGHTS))), self.config])

    def weights(self) -> dict[str, RawWeight]:
        """All weights by name, mapped from their files."""
        return {name: weight for path in self.folder.glob(WEIGHTS) for name, weight in read_weights(path).items()}

    def companions(self, left_out: Sequence[str] = ()) -> list[Path]:
        """Files beside the weights and the config: of the tokenizer, the processor and the chat template."""
        others = [path for path in self.folder.iterdir() if path.name not in (CONFIG, INDEX, *left_out)]
        return [path for path in others if path.suffix in COPIED]


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


def read_weights(path: Path) -> dict[str, RawWeight]:
    """The weights of a safetensors file by name, mapped into memory.

    Raises:
        UserError: the file ends before a weight does.
    """
    check_whole(path)
    content = np.memmap(path, np.uint8, mode="r")
    begin = HEAD_BYTES + int.from_bytes(content[:HEAD_BYTES].tobytes(), "little")
    entries = json.loads(content[HEAD_BYTES:begin].tobytes())
    return {
        name: RawWeight(entry["dtype"], entry["shape"], content[begin:][slice(*entry["data_offsets"])])
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def write_weights(path: Path, weights: dict[str, RawWeight]) -> None:
    """Write a safetensors file. Weights of larger elements come first, so that each begins at a multiple of their
    size.
    """
    ordered = sorted(weights.items(), key=lambda entry: -len(entry[1].content) / max(1, math.prod(entry[1].shape)))
    ends = itertools.accumulate((len(weight.content) for _, weight in ordered), initial=0)
    entries = {
        name: {"dtype": weight.dtype, "shape": weight.shape, "data_offsets": span}
        for (name, weight), span in zip(ordered, itertools.pairwise(ends), strict=True)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % HEAD_BYTES)
    head = len(text).to_bytes(HEAD_BYTES, "little")
    write_bytes(path, b"".join([head, text, *(weight.content.data for _, weight in ordered)]))


def write_model(
    folder: Path, config: dict[str, Any], weights: dict[str, RawWeight], companions: Sequence[Path] = ()
) -> None:
    """Write a checkpoint in a form that an engine loads. Its config is written last, and says that it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder / "model.safetensors", weights)
    for path in companions:
        shutil.copyfile(path, folder / path.name)
    write_bytes(folder / CONFIG, (json.dumps(config, indent=1) + "\n").encode())


def text_part(source: ModelFiles, folder: Path, name: str) -> Path:
    """Write the text model of a vision-language model as a model of its own below ``folder``, unless it is there.

    Raises:
        UserError: there are no weights of a text model, or transformers has none of this type.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text, folder = source.text_config, folder / source.key
    if (folder / CONFIG).exists():
        return folder
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(text.get("model_type")))
    weights = {
        alone + name.removeprefix(inside): weight
        for inside, alone in TEXT_PREFIXES.items()
        for name, weight in source.weights().items()
        if name.startswith(inside)
    }
    if architecture is None or not weights:
        raise UserError(
            f"{name}: vLLM takes the text part of this draft, and transformers has no text model of type "
            f"{text.get('model_type')!r}, or the safetensors have no weights of it; choose another draft"
        )
    shared = {key: source.config[key] for key in DTYPES if key in source.config}
    is_tied = not any(weight.startswith("lm_head.") for weight in weights)
    config = {**shared, **text, "architectures": [architecture], "tie_word_embeddings": is_tied}
    write_model(folder, config, weights, source.companions(OF_IMAGES))
    return folder


def served_target(path: Path, folder: Path) -> Path:
    """The folder of a target that vLLM loads: itself, or, for a CLIP or SigLIP tower with the names of transformers
    5.20 and later, ``vision_tower.encoder...``, a copy below ``folder`` with the earlier ones,
    ``vision_tower.vision_model...``.
    """
    files = find_model_files(str(path))
    vision = files.config.get("vision_config") if files is not None else None
    if files is None or not isinstance(vision, dict) or vision.get("model_type") not in TOWERS_RENAMED:
        return path
    weights = files.weights()
    names = [name for name in weights if name.startswith(VISION_PREFIX)]
    if not names or any(name.startswith(VISION_MODEL_PREFIX) for name in names):
        return path
    if not (folder / files.key / CONFIG).exists():
        for name in names:
            weights[name.replace(VISION_PREFIX, VISION_MODEL_PREFIX, 1)] = weights.pop(name)
        write_model(folder / files.key, files.config, weights, files.companions())
    return folder / files.key


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
    if is_dflash(draft.config):
        return "dflash", draft.folder.resolve()
    if "draft_vocab_size" in draft.config or draft.config.get("speculators_model_type") == "eagle3":
        return "eagle3", draft.folder.resolve()
    if (kind := KINDS.get(str(draft.config.get("kind")))) and kind.is_target_layer:
        return "mtp", _as_mimo(draft, served, folder).resolve()
    if draft.vocab_size is None or draft.vocab_size != served.vocab_size:
        raise UserError(
            f"--draft {name}: vLLM drafts with complete models of the target's {served.vocab_size} tokens, EAGLE-3 heads and mtp heads; this "
            f"is {draft.config.get('kind') or f'a model of {draft.vocab_size} tokens'}; choose another draft"
        )
    positions = [draft.text_config.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    if any("mrope_section" in settings for settings in positions):  # of several axes: time, height, width
        raise UserError(
            f"--draft {name}: has M-RoPE positions, which vLLM's draft_model does not run; choose a draft without"
        )
    if "vision_config" in draft.config:
        return "draft_model", text_part(draft, folder, name).resolve()
    return "draft_model", draft.folder.resolve()


def _as_mimo(draft: ModelFiles, target: ModelFiles, folder: Path) -> Path:
    """The folder of a head in the form of MiMo's checkpoints, which is written unless it is there."""
    config = target.text_config
    if (kind := config.get("model_type")) not in ("llama", "qwen2"):
        raise UserError(
            f"--draft {draft.folder}: vLLM runs mtp heads of Llama and Qwen2 targets, not of {kind}; choose another draft"
        )
    folder = folder / content_key([draft.key, config])
    if (folder / CONFIG).exists():
        return folder
    tensors = {name: tensor for name, tensor in draft.weights().items() if name != FREQUENCIES}
    joined = tensors["eh_proj.weight"]  # columns of the embedding, then of the features, which MiMo's reads first
    tensors["eh_proj.weight"] = joined._replace(
        content=joined.content.reshape(joined.shape[0], 2, -1)[:, ::-1].reshape(-1)
    )
    for name in filter(QUERY.search, list(tensors)):
        weight = tensors[name]
        tensors[name.replace("weight", "bias")] = weight._replace(
            shape=weight.shape[:1], content=np.zeros(len(weight.content) // weight.shape[1], np.uint8)
        )
    weights = {
        f"model.mtp_layers.0.{MIMO_NAMES.get(name, name.removeprefix('layer.'))}": tensor
        for name, tensor in tensors.items()
    }
    head = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 1}
    write_model(folder, config | head | {"num_nextn_predict_layers": 1}, weights)
    return folder
