"""Files of results: the settings that one is of, and that nothing else replaces it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.files import content_key, require_writable, sha256_of
from autotune.machine.container import num_cores
from autotune.machine.device import cpu_fingerprint, local_gpus


def settings_key(settings: Mapping[str, Any], *files: str | Path) -> str:
    """Hash of settings, of the contents of those ``files`` that exist, and of this machine, which together determine a
    result: it is the ``settings_key`` of the result's provenance.
    """
    contents = [sha256_of(path) for path in map(Path, files) if path.is_file()]
    return content_key([dict(settings), contents, cpu_fingerprint(num_cores()).key, local_gpus()])


def choose_output(given: Path | None, default: str, key: str) -> Path:
    """The file for the result of settings with this key: the given one, or the first of ``profile.json``,
    ``profile-2.json``, ... that holds nothing else.

    Raises:
        UserError: the given file holds anything else, or cannot be written.
    """
    stem, suffix = default.split(".", 1)
    names = (f"{stem}{'' if number == 1 else f'-{number}'}.{suffix}" for number in itertools.count(1))
    given = given or next(path for path in map(Path, names) if not _is_kept(path, key))
    require_replaceable(given, "-o", key)
    return given


def require_replaceable(path: Path, option: str, key: str | None = None) -> None:
    """Refuse a file that cannot be written, or that holds anything but a result of settings with this key. Without a
    key, for pages and tables, only documents of this program are kept.
    """
    require_writable(path, option)
    if _is_kept(path, key):
        raise UserError(f"{path}: holds another result, which is not replaced; delete it, or give another {option}")


def _is_kept(path: Path, key: str | None) -> bool:
    content = path.read_bytes() if path.is_file() else b""
    if key is None:
        return b'"schema": "autotune.' in content[:200]
    return bool(content) and f'"settings_key": "{key}"'.encode() not in content
