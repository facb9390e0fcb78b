"""Files of datasets on the Hugging Face Hub, named ``hf://datasets/OWNER/NAME[@REVISION]/PATH``, and local files."""

from __future__ import annotations

import functools
import posixpath
import re
from pathlib import Path
from typing import Any

from autotune.errors import UserError

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
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError

    answers = _hub_answers(match["repo"], match["revision"])
    options: dict[str, Any] = {"repo_type": "dataset", "revision": match["revision"], "local_files_only": not answers}
    try:
        path = hf_hub_download(match["repo"], match["file"], **options)
    except (OSError, EntryNotFoundError, HFValidationError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        reason = reason if answers else "the Hugging Face Hub does not answer"
        raise UserError(
            f"{address}: cannot be downloaded ({reason}); check the address and the network, or give a local copy of the file"
        ) from None
    return Path(path)


@functools.cache
def _hub_answers(repo: str, revision: str | None) -> bool:
    """Whether the Hub answers. It is asked once for a dataset: each download would try for half a minute and more."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().dataset_info(repo, revision=revision, timeout=TIMEOUT_S)
    except HfHubHTTPError:  # the download tells what is wrong
        return True
    except Exception:  # httpx2 and huggingface_hub raise many kinds
        return False
    return True


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
