"""Checks that need neither models nor measurements, made before torch, numba or scipy are imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from autotune.cli.options import PROMPT_CHOICES
from autotune.files import read_json

if TYPE_CHECKING:
    from autotune.documents.decoding_profile import DecodingProfile
    from autotune.evaluation.bench_settings import EvaluationPrompts
    from autotune.workloads.chat import Variables
    from autotune.workloads.formats import Format


def require_profile(path: Path) -> DecodingProfile:
    """Read a decoding profile, whose models may lie beside it, or refuse what is none."""
    read_json(path)
    from autotune.documents.decoding_profile import DecodingProfile

    return DecodingProfile.load(path).located(path)


def is_engine_profile(path: Path) -> bool:
    """Whether a file is the profile of a serving engine, made by ``autotune search --engine``."""
    from autotune.documents.engine_profile import EngineProfile

    content, kind = read_json(path), f"autotune.{EngineProfile.schema_kind}/"
    return isinstance(content, dict) and str(content.get("schema")).startswith(kind)


def template_variables(profile: Path, given: Variables | None) -> Variables:
    """Variables of the chat template: those of the command line or, without any, those of a profile."""
    if given is not None or is_engine_profile(profile):
        return given or {}
    return require_profile(profile).chat_template_kwargs


def workload_for(profile: Path, name: str | None, format: Format | None = None) -> str:
    """The workload that the user named, or the one that a profile was tuned on, see ``workload_beside``."""
    document = None if is_engine_profile(profile) else require_profile(profile)
    if name is not None:
        require_workload(name, format)
        return name
    from autotune.documents.engine_profile import EngineProfile
    from autotune.documents.provenance import workload_beside

    own = EngineProfile.load(profile).workload if document is None else document.workload.name
    return workload_beside(profile, own)


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
    from autotune.modeling.hub import is_cached, is_id
    from autotune.modeling.loading import MTP_SUFFIX, resolve

    for name in (given.removesuffix(MTP_SUFFIX) for given in (target, *drafts)):
        if is_id(name) and (name == target or not is_cached(name)):
            resolve(name, weights=False)


def evaluation_prompts(profile: Path, choices: dict[str, Any]) -> tuple[EvaluationPrompts, dict[str, Any]]:
    """The prompts that the options of ``options.prompt_options`` choose for a profile, and the other choices."""
    workload = workload_for(profile, choices["workload"], choices["workload_format"])

    from autotune.evaluation.bench_settings import EvaluationPrompts

    workload_format = choices["workload_format"]
    choices["chat_template_kwargs"] = template_variables(profile, choices["chat_template_kwargs"])
    chosen = {name: choices[name] for name in PROMPT_CHOICES}
    settings = {name: choices[name] for name in choices.keys() - chosen.keys() - {"workload", "workload_format"}}
    return EvaluationPrompts(workload, workload_format, **chosen), settings
