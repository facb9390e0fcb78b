"""Settings of ``autotune search``: the command line's options and the command recorded in a study come from the fields
here.

Checking them loads neither torch nor numba, so that a mistake is answered at once.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue, model_validator

from autotune.cost.roofline import datasheets, find_limits
from autotune.cost.table import shipped_tables
from autotune.device import check_supported, choose_device, fingerprint, gpu_fault, local_devices, local_gpus
from autotune.documents.subnet import Operator, Weights
from autotune.errors import UserError, nearest
from autotune.execution import AUTO, check_capture_sizes
from autotune.files import WORKSPACE, Document, require_writable
from autotune.modeling.loading import BUNDLED_TARGET, Dtype, default_drafts, default_workload
from autotune.option_fields import option_name, setting
from autotune.search.space import space_path
from autotune.study.storage import storage_url
from autotune.workloads.formats import Format

LOCAL = r"auto|cpu|cuda(:\d+)?"


class SearchSettings(Document):
    """Settings of a search, as the user gives them."""

    gpu: str = setting(
        "auto", "Device: auto (the accelerator, or the CPU), a local device, or the name of another one."
    )
    target: str = setting(
        BUNDLED_TARGET,
        "Target: a bundled name, a path, a Hugging Face id, or a GGUF file: its path, or OWNER/NAME:FILE.gguf of the hub.",
    )
    dtype: Dtype | None = setting(
        None,
        "Data type of the target and its trained drafts; default: the checkpoint's, and for GGUF files bfloat16 where the device multiplies it natively.",
    )
    drafts: tuple[str, ...] = setting(
        (),
        "Draft: a bundled name, a path, a Hugging Face id, one of these followed by :mtp for the multi-token prediction head of its checkpoint, or retrieval; may be repeated; default: all drafts bundled with the target's pair, and retrieval.",
        option="draft",
    )
    heads: float | None = setting(None, "Share of heads kept by the draft, instead of the space's shares.", gt=0, le=1)
    injection_layer: int | None = setting(
        None, "Layer of the target whose output the draft reads, instead of the space's layers."
    )
    operator: Operator | None = setting(
        None,
        "Operator of a specvlm draft's compressor, instead of the space's; default: the space's, or the gate's choice.",
    )
    operator_ratio: int | None = setting(None, "Visual tokens for each row that prune or pool leaves.", ge=1)
    vocabulary: float | None = setting(
        None, "Share of the vocabulary that the draft proposes, instead of the space's shares.", gt=0, le=1
    )
    weights: Weights | None = setting(
        None,
        "Data type of the weights of a draft that reads the target's features; default: the space's, or the target's.",
    )
    workload: str = setting(
        "",
        "Prompts: 'digits', 'smollm2', or a file, which may be hf://datasets/...: our JSONL, or the file of a public benchmark; default: the prompts of the target's pair.",
    )
    workload_format: Format | None = setting(
        None, "Format of the workload's file; default: found out from its first row.", option="format"
    )
    chat_template_kwargs: dict[str, JsonValue] | None = None
    """Variables of the chat template."""
    max_new_tokens: int | None = setting(None, "Longest answer; default: each prompt's own.", ge=1)
    temperature: float | None = setting(
        None, "Temperature of all prompts, each with its index as seed; 0 is greedy; default: each prompt's own.", ge=0
    )
    space: str = setting("quick", "Search space: a shipped name or a YAML file.")
    budget_s: float = setting(
        300.0,
        "Time in which the search ends once its models are loaded, such as 90s, 10m or 1h.",
        option="budget",
        unit="s",
        gt=0,
    )
    wait_until_idle_s: float | None = setting(
        None,
        "Longest time to wait, before anything is timed, until other processes use little of the machine, such as 2m.",
        option="wait-until-idle",
        unit="s",
        ge=0,
    )
    num_trials: int = setting(
        200, "Number of configurations that Optuna samples after the sweeps.", option="trials", ge=1
    )
    storage: str | None = setting(
        None, "URL of a database that several workers share, postgresql://...; default: a file in the study's folder."
    )
    study: str | None = setting(None, "Name of the study's folder in .autotune/, to resume it or to keep it separate.")
    jobs: int | None = setting(None, "Number of parallel replays and recordings; default: one per core.", ge=1)
    seed: int = setting(0, "Seed of the sweeps, of sampling and of the order of real runs.")
    capture_sizes: tuple[int, ...] = setting(
        (), "Numbers of tokens that forward passes are padded to, such as 4,8,16,32,64; default: no padding."
    )
    mode: Literal["auto", "eager", "cuda-graph", "compiled"] = setting(
        AUTO,
        "How forward passes run: eagerly, or as CUDA graphs; auto: graphs on a GPU where they pass a self-test, else eagerly.",
    )
    output: Path = setting(Path("profile.json"), "File for the decoding profile.")
    table: Path | None = setting(None, "Write a row for every replayed configuration to a .csv or .parquet file.")
    random_weights: bool = setting(
        False,
        "Price the models on the card that --gpu names, from their configs alone; what is accepted needs their weights.",
    )
    num_tune_prompts: int = setting(48, "Number of prompts that choose the configuration.", option=None, ge=1)
    num_evaluate_prompts: int = setting(64, "Number of held-out prompts for the evaluation.", option=None, ge=1)
    folder: Path = setting(WORKSPACE, "Folder in which studies keep their documents.", option=None)

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_target(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Drafts and prompts that are not given are taken from the target's pair."""
        target = str(values.get("target") or BUNDLED_TARGET)
        drafts = values.get("drafts") or default_drafts(target)
        workload = values.get("workload") or default_workload(target)
        return {**values, "drafts": tuple(drafts), "workload": workload}

    @property
    def command(self) -> str:
        """The command line that repeats this search, defaults included; a database's URL, which may hold a password, is
        left out.
        """
        words = ["autotune", "search"]
        for name, field in type(self).model_fields.items():
            option, value = option_name(name, field), getattr(self, name)
            if option is None or value is None or value is False or value == ():
                continue
            texts = {
                "budget_s": f"{self.budget_s:g}s",
                "wait_until_idle_s": f"{self.wait_until_idle_s or 0:g}s",
                "storage": "...",
                "chat_template_kwargs": json.dumps(self.chat_template_kwargs),
                "capture_sizes": ",".join(map(str, self.capture_sizes)),
            }
            for text in value if name == "drafts" else [texts.get(name, value)]:
                words += [f"--{option}", str(text)]
        return shlex.join(words)


def check_settings(settings: SearchSettings) -> None:
    """Refuse what cannot work before models are loaded.

    Raises:
        UserError: an unknown device or space, a database of an unknown kind, sizes out of range, or an output that
            cannot be written.
    """
    check_capture_sizes(settings.capture_sizes)
    if settings.study is not None and (settings.study in (".", "..") or not re.fullmatch(r"[^/\\\0]+", settings.study)):
        raise UserError(
            f"--study names a folder in {settings.folder}; got {settings.study!r}; give a name without slashes"
        )
    space_path(settings.space)
    if settings.storage is not None:
        storage_url(settings.storage)
    if not re.fullmatch(LOCAL, settings.gpu) and settings.gpu not in local_gpus():
        _require_known(settings.gpu)
    require_writable(settings.output)


def device_for(gpu: str) -> str | None:
    """The local device to measure on, or None where ``gpu`` names another one, whose shipped table is used.

    Raises:
        UserError: neither a local device nor one with a shipped cost table or datasheet, or a local one that torch
            cannot use.
    """
    if re.fullmatch(LOCAL, gpu):
        return choose_device(gpu)
    for device in local_devices():
        if fingerprint(device).name == gpu:
            return device
    if gpu in local_gpus():
        fault = gpu_fault() or "CUDA_VISIBLE_DEVICES hides it from torch; unset that"
        raise UserError(f"--gpu {gpu}: {fault}, or name the GPU of another machine for an estimate")
    _require_known(gpu)
    return None


def _require_known(gpu: str) -> None:
    """Refuse a device without a cost table or datasheet."""
    check_supported(gpu)
    known = {*shipped_tables(), *datasheets()}
    if gpu not in known and find_limits(gpu) is None:
        raise UserError(
            f"--gpu {gpu}: neither a device of this machine nor one with a shipped cost table or datasheet; "
            f"{nearest(gpu, ['auto', 'cpu', *known])}"
        )
