"""Files of datasets on the Hugging Face Hub, named ``hf://datasets/OWNER/NAME[@REVISION]/PATH``, and local files."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from autotune.errors import UserError, reading

SCHEME = "hf://"
TIMEOUT_S = 8.0  # for the Hub's first answer
_ADDRESS = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<file>.+)")


def local_file(address: str | Path) -> Path:
    """The path of a file; one on the Hub is downloaded into the Hugging Face cache, unless it is there.

    Raises:
        UserError: not the address of a file, or the file cannot be downloaded.
    """
    if not str(address).startswith(SCHEME):
        return Path(address)
    match = _ADDRESS.fullmatch(str(address))
    if match is None or ".." in match["file"].split("/"):
        raise UserError(
            f"{address}: a file on the Hub is hf://datasets/OWNER/NAME/PATH; complete the address, such as "
            "hf://datasets/owner/benchmark/question.jsonl"
        )
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    source: dict[str, Any] = {"repo_type": "dataset", "revision": match["revision"]}
    with reading(f"{address}: cannot be downloaded", "check the address and the network, or give a local copy"):
        path = try_to_load_from_cache(match["repo"], match["file"], **source)
        if isinstance(path, str):
            return Path(path)
        # Asked once: a download would repeat its requests for half a minute and more.
        HfApi().dataset_info(match["repo"], revision=match["revision"], timeout=TIMEOUT_S)
        return Path(hf_hub_download(match["repo"], match["file"], **source))


def sibling(address: str | Path, name: str) -> str | Path:
    """The address of a file that is named relative to another one.

    Raises:
        UserError: a file on the Hub names one outside of its folder, perhaps of this machine.
    """
    if str(address).startswith(SCHEME):
        if name.startswith("/") or ".." in name.split("/"):
            raise UserError(
                f"{address}: a file on the Hub names files below its own folder; got {name!r}; fix that line"
            )
        return posixpath.join(posixpath.dirname(str(address)), name)
    return Path(address).parent / name
