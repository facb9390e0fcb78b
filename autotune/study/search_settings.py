"""Settings of ``autotune search``: the command line's options and the command recorded in a study come from the fields
here.

Checking them loads neither torch nor numba, so that a mistake is answered at once.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue, model_validator

from autotune.cost.roofline import datasheets, find_limits
from autotune.cost.table import shipped_tables
from autotune.documents.deployment import RUNTIME
from autotune.documents.execution import AUTO, check_capture_sizes
from autotune.documents.fingerprint import MOST_DEVICES, cards_name, split_cards
from autotune.documents.option_fields import option_name, setting
from autotune.documents.search_space import SearchSpace
from autotune.errors import UserError, nearest
from autotune.files import WORKSPACE, Document, require_writable
from autotune.machine.device import check_supported, choose_device, fingerprint, gpu_fault, local_devices, local_gpus
from autotune.modeling.loading import BUNDLED_TARGET, Dtype
from autotune.modeling.target_defaults import default_drafts, default_workload
from autotune.study.outputs import choose_output, settings_key
from autotune.study.spaces import space_path
from autotune.study.storage import PROFILE, STUDY, storage_url, study_folder
from autotune.workloads.formats import Format
from autotune.workloads.workload import Workload, WorkloadSplit, load_workload

OF_NO_RESULT = {"output", "table", "folder", "jobs", "storage", "wait_until_idle_s"}
"""Settings with which a search stays the same one."""


class SearchSettings(Document):
    """Settings of a search, as the user gives them."""

    gpu: str | None = setting(
        None,
        "Card to tune for, such as h100: measured if this machine has it, else estimated from its cost table or datasheet; 4xh100 estimates four cards that share the target.",
    )
    device: str = setting("auto", "Device of this machine: auto (the accelerator, or the CPU), cpu or cuda:N.")
    target: str = setting(
        BUNDLED_TARGET,
        "Target: a bundled name, a path, a Hugging Face id, or a GGUF file: its path, or OWNER/NAME:FILE.gguf of the hub.",
    )
    backends: tuple[str, ...] = setting(
        (),
        "Program to tune: runtime, llama.cpp or vllm, with =MODEL where it loads another file of the target; may be repeated, and the backends race each other; default: runtime.",
        option="backend",
    )
    dtype: Dtype | None = setting(
        None,
        "Data type of the target and its trained drafts; default: the checkpoint's, and for GGUF files bfloat16 where the device multiplies it natively.",
        rare=True,
    )
    drafts: tuple[str, ...] = setting(
        (),
        "Draft: a path, a Hugging Face id, a bundled name, one of these followed by :mtp for the multi-token prediction head of its checkpoint, or retrieval; may be repeated; default: the target's own head, heads of this target in the Hub's cache, and retrieval.",
        option="draft",
    )
    workload: str = setting(
        "",
        "Prompts: a file, which may be hf://datasets/... (our JSONL, or the file of a public benchmark), or shipped ones by name: chat,code,summarize,images; default: the shipped ones that the target can read.",
    )
    workload_format: Format | None = setting(
        None, "Format of the workload's file; default: found out from its first row.", option="format", rare=True
    )
    chat_template_kwargs: dict[str, JsonValue] | None = None
    """Variables of the chat template."""
    max_new_tokens: int | None = setting(None, "Longest answer; default: each prompt's own.", ge=1)
    temperature: float | None = setting(
        None,
        "Temperature of all prompts, each with its index as seed; 0 is greedy; default: each prompt's own.",
        ge=0,
        rare=True,
    )
    space: str = setting("quick", "Search space: a shipped name or a YAML file.")
    changes: tuple[str, ...] = setting(
        (),
        "NAME=VALUE or NAME=A,B: values of a dimension of the space, such as heads=0.5, keep=0.2, injection-layer=9, policy=sage or d_max=8; NAME:command=, NAME:url= or NAME:draft= of an engine. Repeatable.",
        option="set",
    )
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
        rare=True,
    )
    num_trials: int = setting(
        200, "Number of configurations that Optuna samples after the sweeps.", option="trials", ge=1, rare=True
    )
    storage: str | None = setting(
        None,
        "URL of a database that several workers share, postgresql://...; default: a file in the study's folder.",
        rare=True,
    )
    study: str | None = setting(
        None,
        "Study to resume or to keep separate: the name of its folder in .autotune/, or a path, which has a slash.",
        rare=True,
    )
    jobs: int | None = setting(
        None, "Number of parallel replays and recordings; default: one per core.", ge=1, rare=True
    )
    seed: int = setting(0, "Seed of the sweeps, of sampling and of the order of real runs.", rare=True)
    capture_sizes: tuple[int, ...] = setting(
        (), "Numbers of tokens that forward passes are padded to, such as 4,8,16,32,64; default: no padding.", rare=True
    )
    mode: Literal["auto", "eager", "cuda-graph", "compiled"] = setting(
        AUTO,
        "How forward passes run: eagerly, or as CUDA graphs; auto: graphs on a GPU where they pass a self-test, else eagerly.",
        rare=True,
    )
    output: Path | None = setting(
        None,
        "File for the decoding profile; default: profile.json, for an estimate profile-CARD.json, or the next free name, as profile-2.json, where that holds the result of another search.",
    )
    table: Path | None = setting(
        None, "Write a row for every replayed configuration to a .csv or .parquet file.", rare=True
    )
    has_default_drafts: bool = setting(False, "Whether drafts that do not fit the target are left out.", option=None)
    random_weights: bool = setting(
        False,
        "Price the models on the card that --gpu names, from their configs alone; what is accepted needs their weights.",
        rare=True,
    )
    num_tune_prompts: int = setting(48, "Number of prompts that choose the configuration.", option=None, ge=1)
    num_evaluate_prompts: int = setting(64, "Number of held-out prompts for the evaluation.", option=None, ge=1)
    loads: tuple[int, ...] = ()
    """Numbers of requests at once for which engines' depths are tuned."""
    any_weights: bool = setting(
        False,
        "Deploy the fastest backend even if its weights are not the target's at its precision, such as a quantized file.",
        rare=True,
    )
    folder: Path = setting(WORKSPACE, "Folder in which studies keep their documents.", option=None)

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_target(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Drafts and prompts that are not given are those that ``modeling.target_defaults`` finds for the target."""
        target = str(values.get("target") or BUNDLED_TARGET)
        backends = tuple(values.get("backends") or ())
        if len(backends) == 1 and backends[0].partition("=")[0] == RUNTIME:  # the same search as without the option
            target, backends = backends[0].partition("=")[2] or target, ()
        values = {**values, "target": target, "backends": backends}
        drafts, workload = values.get("drafts") or (), values.get("workload")
        is_of_runtime = not backends or any(name.partition("=")[0] == RUNTIME for name in backends)
        if is_of_runtime:
            drafts = drafts or default_drafts(target)
        workload = workload or default_workload(target, has_config=is_of_runtime)
        return {
            "has_default_drafts": not values.get("drafts"),
            **values,
            "gpu": values.get("gpu") and cards_name(*split_cards(values["gpu"])),  # 1xh100 is h100
            "drafts": tuple(drafts),
            "workload": workload,
        }

    @property
    def names_backends(self) -> bool:
        """Whether an option is given that is for backends."""
        return bool(self.backends or self.loads or self.any_weights) or any(map(is_of_backend, self.changes))

    def of_runtime(self, model: str, budget_s: float, output: Path) -> SearchSettings:
        """The settings of the runtime's part in a search of several backends."""
        values = self.model_dump(exclude={"backends", "loads", "any_weights", "has_default_drafts"})
        of_runtime = {
            "target": model,
            "drafts": () if self.has_default_drafts else self.drafts,
            "changes": tuple(change for change in self.changes if not is_of_backend(change)),
            "budget_s": budget_s,
            "output": output,
        }
        return SearchSettings(**values | of_runtime)

    def load_prompts(self, split: WorkloadSplit, count: int | None = None) -> Workload:
        """At most ``count`` prompts of a split, with the lengths, temperature and template variables of the settings.

        Raises:
            UserError: as ``load_workload``.
        """
        workload = load_workload(self.workload, split, num_prompts=count, format=self.workload_format)
        workload = workload.cut(len(workload.prompts), self.max_new_tokens).with_variables(self.chat_template_kwargs)
        return workload if self.temperature is None else workload.sampled(self.temperature)

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
            for text in value if name in ("drafts", "changes", "backends") else [texts.get(name, value)]:
                words += [f"--{option}", str(text)]
        return shlex.join(words)

    @property
    def key(self) -> str:
        """Hash of what determines the result: searches of other settings, prompts or spaces have other keys."""
        return settings_key(
            self.model_dump(mode="json", exclude_defaults=True, exclude=OF_NO_RESULT),
            self.workload,
            space_path(self.space),
        )


def check_settings(settings: SearchSettings) -> SearchSettings:
    """Refuse what cannot work before models are loaded. Returns the settings with their output.

    Raises:
        UserError: an unknown device or space, a database of an unknown kind, sizes out of range, or an output that
            cannot be written, or that holds anything but an earlier result of this search.
    """
    check_capture_sizes(settings.capture_sizes)
    changes = [change for change in settings.changes if not is_of_backend(change)]
    if settings.study is not None:
        require_writable(study_folder(settings.study, settings.folder) / STUDY, "--study")
    SearchSpace.load(space_path(settings.space)).changed(changes)
    if settings.storage is not None:
        storage_url(settings.storage)
    is_local = settings.gpu is None or settings.gpu in local_gpus()
    if settings.gpu is not None and not is_local:
        require_known(settings.gpu)
    default = PROFILE if is_local else f"profile-{settings.gpu}.json"
    return settings.model_copy(update={"output": choose_output(settings.output, default, settings.key)})


def is_of_backend(change: str) -> bool:
    """Whether a value of ``--set`` is an option of a backend, and not a dimension of the search space."""
    return ":" in change.partition("=")[0]


def device_for(gpu: str | None, device: str = "auto") -> str | None:
    """The local device to measure on: ``device``, or the one that is the card ``gpu``. None where this machine does not
    have that card, whose shipped table or datasheet is used.

    Raises:
        UserError: an unknown device or card, or one of this machine that torch cannot use.
    """
    if gpu is None:
        return choose_device(device)
    for device in local_devices():
        name = fingerprint(device).name
        if gpu in (name, split_cards(name)[1]):
            return device
    if gpu in local_gpus():
        fault = gpu_fault() or "CUDA_VISIBLE_DEVICES hides it from torch; unset that"
        raise UserError(f"--gpu {gpu}: {fault}, or name the GPU of another machine for an estimate")
    require_known(gpu)
    return None


def require_known(gpu: str) -> None:
    """Refuse a card without a cost table or datasheet."""
    _, name = split_cards(gpu)
    check_supported(name)
    known = {*shipped_tables(), *datasheets()}
    if gpu not in known and find_limits(gpu) is None:
        raise UserError(
            f"--gpu {gpu}: neither a card of this machine nor one with a shipped cost table or datasheet, nor 2 to "
            f"{MOST_DEVICES} of one; {nearest(name, known)}"
        )
