"""Study folders, and the documents in them that belong to a decoding profile."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from autotune.documents.decoding_profile import DecodingProfile
from autotune.errors import UserError
from autotune.files import WORKSPACE
from autotune.study.document import load_study


def find_study(profile: DecodingProfile, source: Path) -> Path | None:
    """The study folder of a profile: its file's own folder, or one in ``.autotune`` next to the file or in the working
    directory. Of several that may be, it is the one with the closest study document, then the newest.

    Folders with documents that cannot be read are skipped.
    """
    roots = [source.parent / WORKSPACE, WORKSPACE]
    folders = {path.resolve(): path for root in roots if root.is_dir() for path in root.iterdir() if path.is_dir()}
    if any(source.parent.glob("study*.json")):
        folders[source.parent.resolve()] = source.parent
    found: dict[Path, tuple[bool, bool]] = {}
    for path in sorted(folders.values(), key=lambda path: (-path.stat().st_mtime, path.name)):
        with suppress(UserError):
            if (document := load_study(path, profile)) is not None:
                found[path] = document.likeness(profile)
    return max(found, key=found.__getitem__, default=None)
