"""Models and profiles of the Hugging Face Hub. An id becomes a folder of the Hub's cache here; all other modules read
folders.
"""

from __future__ import annotations

import difflib
import functools
import glob
import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.modeling.known_models import KNOWN_MODELS

ID = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]*\w)(@(?P<revision>[\w./-]+))?", re.ASCII)
DESCRIPTIONS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Files of a repository's top folder that describe a model and its tokenizer; its weights are named apart."""
PROFILE = "profile.json"
"""The file of a repository's decoding profile."""
LONGEST_ID = 200  # characters
TIMEOUT_S = 8.0  # for the Hub's first answer, so that a machine without network is told within ten seconds


def is_id(name: str) -> bool:
    """Whether a name has the form of an id, ``OWNER/NAME`` or ``OWNER/NAME@REVISION``."""
    return len(name) <= LONGEST_ID and ID.fullmatch(name) is not None


class Repository:
    """A repository of the Hub by its id, or its copy in the cache where the Hub does not answer.

    Raises:
        UserError: there is no such repository or revision, or the Hub does not answer and the cache has no copy.
    """

    def __init__(self, name: str, *, local_only: bool = False) -> None:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import RevisionNotFoundError

        match = ID.fullmatch(name)
        assert match is not None, name
        self.name, self.id, self.revision = name, match["repository"], match["revision"]
        self._snapshot = functools.partial(snapshot_download, self.id, revision=self.revision)
        self._is_local = local_only
        try:
            if local_only:
                raise ConnectionError("it was not asked")
            timeout = float(os.environ.get("HF_HUB_ETAG_TIMEOUT", TIMEOUT_S))
            found = HfApi().model_info(self.id, revision=self.revision, timeout=timeout)
            self.files = {file.rfilename for file in found.siblings or ()}
        except Exception as error:  # httpx2 and huggingface_hub raise many kinds
            try:
                folder = Path(self._snapshot(local_files_only=True, allow_patterns=[]))
            except Exception:
                folder = None
            if folder is None or isinstance(error, RevisionNotFoundError):
                raise UserError(_reason(self, error)) from None
            self._is_local = True
            self.files = {str(path.relative_to(folder)) for path in folder.rglob("*")}

    def download(self, files: Collection[str], *, is_told: bool = False) -> Path:
        """Bring files into the cache, unless they are there; returns the folder that holds them.

        Args:
            is_told: name what is downloaded, and show the progress on a terminal.

        Raises:
            UserError: the files cannot be downloaded, such as those of a gated model.
        """
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.utils.tqdm import tqdm

        kept = [try_to_load_from_cache(self.id, file, revision=self.revision) for file in files]
        is_needed = is_told and not self._is_local and not all(isinstance(path, str) for path in kept)

        class Progress(tqdm):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                is_hidden = not (is_needed and sys.stderr.isatty())
                super().__init__(*arguments, **options | {"disable": is_hidden, "leave": False})

        if is_needed:
            from autotune.console import Console

            Console().say(
                f"{self.name}: downloading {len(files)} file{'s' * (len(files) > 1)} from the Hugging Face Hub"
            )
        try:
            return Path(
                self._snapshot(
                    local_files_only=self._is_local, allow_patterns=list(map(glob.escape, files)), tqdm_class=Progress
                )
            )
        except Exception as error:
            raise UserError(_reason(self, error)) from None

    def model(self, *, weights: bool) -> Path:
        """The folder of the model: its descriptions, and its weights where they are asked for."""
        files = [
            file
            for file in self.files
            if "/" not in file.removeprefix("additional_chat_templates/")
            and any(Path(file).match(pattern) for pattern in DESCRIPTIONS)
        ]
        folder = self.download(files)
        return self.download(files + weight_names(folder, self.files), is_told=True) if weights else folder


repository = functools.cache(Repository)
"""``Repository``, which asks the Hub once in a process."""


def profile_file(name: str | Path) -> Path:
    """The file of a profile on this machine, or the one of a repository ``OWNER/NAME``, which is brought into the cache
    with the folders beside it, such as its draft.

    Raises:
        UserError: as ``Repository``, or the repository holds no profile.
    """
    path = Path(name)
    if path.exists() or path.suffix in (".json", ".yaml", ".yml") or not is_id(str(path)):
        return path
    source = repository(str(path))
    if PROFILE not in source.files:
        raise UserError(f"{path}: its repository holds no {PROFILE}; give one that autotune push made, or a file")
    return source.download([PROFILE, *(file for file in source.files if "/" in file)], is_told=True) / PROFILE


def push(name: str, files: Mapping[str, bytes | Path], *, is_private: bool = False) -> str:
    """Write files into a repository in one commit; it is made unless it is there.

    Returns:
        The address of the repository.

    Raises:
        UserError: the name is not ``OWNER/NAME``, there is no token, or the Hub refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    if not is_id(name) or "@" in name:
        raise UserError(f"{name}: a repository of the Hugging Face Hub is named OWNER/NAME; give such a name")
    api, operations = HfApi(token=True), [CommitOperationAdd(file, content) for file, content in files.items()]
    try:
        address = str(api.create_repo(name, private=is_private or None, exist_ok=True))
        api.create_commit(name, operations, commit_message="Upload a decoding profile with autotune push")
    except Exception as error:  # httpx2 and huggingface_hub raise many kinds
        reason = str(getattr(error, "server_message", None) or error).replace(get_token() or "***", "***")
        raise UserError(
            f"{name}: the Hugging Face Hub does not take it ({' '.join(reason.split())[:300]}); check the network, the name, and that the "
            "token of hf auth login, or HF_TOKEN, may write there"
        ) from None
    return address


def weight_names(folder: Path, files: Collection[str]) -> list[str]:
    """The names of the files from which transformers reads a model's weights, of ``files``; an index is read from
    ``folder``. Other formats beside them, such as ``consolidated.safetensors``, are left out.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        if name in files:
            return [name]
        if (index := f"{name}.index.json") in files:
            return sorted(set(json.loads((folder / index).read_text())["weight_map"].values()))
    return []


def weight_files(folder: Path) -> list[Path]:
    """The files from which transformers reads the weights in a model's folder; some may be missing."""
    return [folder / file for file in weight_names(folder, os.listdir(folder))]


def cached_models() -> dict[str, Path]:
    """The folders of the models in the Hub's cache, of their main revision, by id."""
    from huggingface_hub import constants

    folders = sorted(path.parents[1] for path in Path(constants.HF_HUB_CACHE).glob("models--*--*/refs/main"))
    return {
        folder.name.removeprefix("models--").replace("--", "/", 1): folder
        / "snapshots"
        / (folder / "refs/main").read_text()
        for folder in folders
    }


def suggestion(name: str) -> str:
    """``did you mean 'OWNER/NAME'?`` for an id in the cache or the documentation that is similar; else empty."""
    known = {*KNOWN_MODELS, *cached_models()} - {name}
    names = {word.lower(): id for id in sorted(known) for word in (id, id.partition("/")[2])}
    similar = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.75)
    return f"did you mean {names[similar[0]]!r}?" if similar else ""


def _reason(source: Repository, error: Exception) -> str:
    """One line for what the Hub refuses; it never shows a token."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, login = source.name, "log in with hf auth login, or set HF_TOKEN"
    page = f"https://huggingface.co/{source.id}"
    if isinstance(error, GatedRepoError):
        return (
            f"{name}: its model is gated, and this account has no access; accept its conditions at {page}, and {login}"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{name}: its repository has no revision {source.revision or 'main'}; choose one of {page}/commits"
    similar = "" if source.id in KNOWN_MODELS else suggestion(source.id)
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{name}: no such file or folder, and no such repository on the Hugging Face Hub; "
            f"{similar or f'check the spelling, or {login} for a private one'}"
        )
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None else error
    line = next(iter(str(cause).strip().splitlines()), type(cause).__name__)[:200].rstrip(".")
    return (
        f"{name}: the Hugging Face Hub does not answer ({line}), and its cache lacks files of it; "
        f"{similar or 'connect to the network, or give a file or folder of this machine'}"
    )


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first names in one line."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
