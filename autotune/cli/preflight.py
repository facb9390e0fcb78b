"""Checks that need neither models nor measurements, made before torch, numba or scipy are imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from autotune.cli.options import require_options_of
from autotune.files import read_json
from autotune.modeling.hub import profile_file

if TYPE_CHECKING:
    from autotune.documents.decoding_profile import DecodingProfile
    from autotune.workloads.formats import Format


def require_profile(path: Path) -> DecodingProfile:
    """Read a decoding profile of this machine or of the Hub (``profile_file``), whose models may lie beside it, or
    refuse what is none, and options of the command that its backend does not have.
    """
    path = profile_file(path)
    read_json(path)
    from autotune.documents.decoding_profile import DecodingProfile

    profile = DecodingProfile.load(path).located(path)
    require_options_of(profile.backend)
    return profile


def workload_for(profile: Path, name: str | None, format: Format | None = None) -> str:
    """The workload that the user named, or the one that a profile was tuned on, see ``workload_beside``."""
    document = require_profile(profile)
    if name is not None:
        require_workload(name, format)
        return name
    from autotune.documents.provenance import workload_beside

    return workload_beside(profile_file(profile), document.workload.name)


def require_workload(name: str, format: Format | None = None, *, both_splits: bool = False) -> None:
    """Check that a workload's file can be parsed and has the prompts of a search, or is there if it is bundled.
    Images are read later.
    """
    from autotune.workloads.formats import read_prompts
    from autotune.workloads.hub import local_file
    from autotune.workloads.workload import (
        BUNDLED,
        WorkloadSplit,
        bundled_file,
        by_split,
        shipped_files,
        without_prompts,
    )

    if name in BUNDLED:
        bundled_file(name)
    elif not shipped_files(name):
        known, rows = read_prompts(local_file(name), format)
        missing = [split for split in get_args(WorkloadSplit) if both_splits and not by_split(rows)[split]]
        if missing:
            raise without_prompts(name, missing[0], known)


def require_models(target: str, drafts: Sequence[str]) -> None:
    """Check that models of the Hub are there, and download their configs and tokenizers. Others are looked for when
    they are loaded.
    """
    from autotune.modeling.hub import cached_models, is_id
    from autotune.modeling.loading import MTP_SUFFIX, resolve

    for name in (given.removesuffix(MTP_SUFFIX) for given in (target, *drafts)):
        if is_id(name) and (name == target or name.partition("@")[0] not in cached_models()):
            resolve(name, weights=False)
