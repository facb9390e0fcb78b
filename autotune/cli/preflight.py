"""Checks that need neither models nor measurements, made before torch, numba or scipy are imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.documents.published_settings import ABLATIONS, DEFAULTS
from autotune.errors import UserError, nearest
from autotune.files import read_json

if TYPE_CHECKING:
    from autotune.workloads.formats import Format

# The arms of autotune bench; a test compares them with those of evaluation/bench.py.
ARMS = ("ar", "hf", "hf-assisted", "prompt_lookup", *DEFAULTS, *ABLATIONS)


def require_profile(path: Path) -> None:
    """Check that a decoding profile can be read.

    Raises:
        UserError: no such file, no JSON, an unknown key or a value out of range.
    """
    read_json(path)
    from autotune.documents.decoding_profile import DecodingProfile

    DecodingProfile.load(path)


def workload_for(profile: Path, name: str | None, format: Format | None = None) -> str:
    """The workload that the user named, or that of the pair of a profile's target.

    Raises:
        UserError: see ``require_profile`` and ``require_workload``.
    """
    require_profile(profile)
    if name is None:
        from autotune.documents.decoding_profile import DecodingProfile
        from autotune.modeling.loading import default_workload

        return default_workload(DecodingProfile.load(profile).target.id)
    require_workload(name, format)
    return name


def require_workload(name: str, format: Format | None = None) -> None:
    """Check that a workload's file can be parsed. Its images are read later.

    Raises:
        UserError: no such file, a row that is not a prompt, or one of another format.
    """
    from autotune.workloads.formats import read_prompts
    from autotune.workloads.hub import local_file
    from autotune.workloads.workload import BUNDLED

    if name not in BUNDLED:
        read_prompts(local_file(name), format)


def require_arms(names: Sequence[str]) -> None:
    """Check the names of arms.

    Raises:
        UserError: an unknown arm.
    """
    for name in names:
        if name not in ARMS:
            raise UserError(f"--against {name}: no such arm; {nearest(name, ARMS)}")
