"""Settings of ``autotune search``: the command line's options and the command recorded in a study come from the fields here.

Checking them loads neither torch nor numba, so that a mistake is answered at once.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo

from autotune.cost.roofline import datasheets
from autotune.cost.table import shipped_tables
from autotune.device import choose_device, fingerprint, local_devices
from autotune.errors import UserError, nearest
from autotune.execution import check_capture_sizes
from autotune.files import WORKSPACE, Document, describe, require_writable
from autotune.modeling.loading import BUNDLED_DRAFT, BUNDLED_TARGET
from autotune.search.space import space_path
from autotune.study.storage import storage_url
from autotune.workloads.workload import BUNDLED


def _setting(default: Any, description: str, *, option: str | None = "", **limits: Any) -> Any:
    """A field with its help text. ``option`` is the option's name where it is not the field's; None: there is no option."""
    return Field(default, description=description, json_schema_extra={"option": option}, **limits)


class SearchSettings(Document):
    """What the user asked of a search."""

    gpu: str = _setting(
        "auto", "Device: auto (the accelerator, or the CPU), a local device, or the name of another one."
    )
    target: str = _setting(BUNDLED_TARGET, "Target: a bundled name, a path or a Hugging Face id.")
    drafts: tuple[str, ...] = _setting(
        (BUNDLED_DRAFT,),
        "Draft: a bundled name, a path or a Hugging Face id; may be repeated.",
        option="draft",
        min_length=1,
    )
    heads: float | None = _setting(
        None, "Share of heads kept by the draft, in place of the space's shares.", gt=0, le=1
    )
    injection_layer: int | None = _setting(
        None, "Layer of the target whose output the draft reads, in place of the space's layers."
    )
    workload: str = _setting(BUNDLED, "Prompts: 'digits', or a JSONL file.")
    space: str = _setting("quick", "Search space: a shipped name or a YAML file.")
    budget_s: float = _setting(300.0, "Time to aim for, such as 90s, 10m or 1h.", option="budget", gt=0)
    num_trials: int = _setting(
        200, "Number of configurations that Optuna samples after the sweeps.", option="trials", ge=1
    )
    storage: str | None = _setting(
        None, "URL of a database that several workers share, postgresql://...; default: a file in the study's folder."
    )
    study: str | None = _setting(None, "Name of the study's folder in .autotune/, to resume it or to keep it apart.")
    measure: Literal["finalists", "all"] = _setting(
        "finalists", "What is run for real: the finalists, or also every subnet before its trees are searched."
    )
    max_round_ms: float | None = _setting(None, "Upper limit of a round's latency, in milliseconds.", ge=0)
    max_draft_mib: float | None = _setting(
        None, "Upper limit of the memory of a draft with its KV cache, in MiB.", ge=0
    )
    jobs: int | None = _setting(None, "Number of parallel replays and recordings; default: one per core.", ge=1)
    seed: int = _setting(0, "Seed of the sweeps, of sampling and of the order of real runs.")
    capture_sizes: tuple[int, ...] = _setting(
        (), "Numbers of tokens that forward passes are padded to, such as 4,8,16,32,64; default: no padding."
    )
    mode: Literal["eager", "compile", "cuda-graph"] = _setting(
        "eager", "How forward passes run: eagerly, compiled by torch.compile, or as CUDA graphs."
    )
    output: Path = _setting(Path("profile.json"), "File for the decoding profile.")

    num_tune_prompts: int = _setting(48, "Number of prompts that choose the configuration.", option=None, ge=1)
    num_evaluate_prompts: int = _setting(64, "Number of held-out prompts for the evaluation.", option=None, ge=1)
    folder: Path = _setting(WORKSPACE, "Folder in which studies keep their documents.", option=None)

    @property
    def command(self) -> str:
        """The command line that repeats this search, defaults included; a database's URL, which may hold a password, is left out."""
        words = ["autotune", "search"]
        for name, field in type(self).model_fields.items():
            option, value = option_name(name, field), getattr(self, name)
            if option is None or value is None or value == ():
                continue
            values = value if name == "drafts" else [value]
            for one in values:
                words += [f"--{option}", _text(name, one)]
        return shlex.join(words)


def option_name(name: str, field: FieldInfo) -> str | None:
    """The long option of a field, without its dashes; None: the command line has none."""
    extra = field.json_schema_extra
    option = extra.get("option", "") if isinstance(extra, dict) else ""
    return None if option is None else str(option or name.replace("_", "-"))


def _text(name: str, value: Any) -> str:
    if name == "budget_s":
        return f"{value:g}s"
    if name == "storage":
        return "..."
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def settings_from(**values: Any) -> SearchSettings:
    """Settings from values by field name.

    Raises:
        UserError: a value out of its range; the message names the option.
    """
    try:
        return SearchSettings(**values)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        option = option_name(name, SearchSettings.model_fields[name])
        raise UserError(f"--{describe(error, SearchSettings).replace(name, str(option), 1)}") from None


def check_settings(settings: SearchSettings) -> None:
    """Refuse what cannot work before models are loaded.

    Raises:
        UserError: an unknown device or space, a workload file that is missing, a database of an unknown kind, sizes out
            of range, or an output that cannot be written.
    """
    check_capture_sizes(settings.capture_sizes)
    space_path(settings.space)
    if settings.storage is not None:
        storage_url(settings.storage)
    if settings.workload != BUNDLED and not Path(settings.workload).exists():
        raise UserError(f"{settings.workload}: no such file; check the path")
    if settings.gpu not in {"auto", "cpu", *shipped_tables(), *datasheets()}:
        device_for(settings.gpu)
    require_writable(settings.output)


def device_for(gpu: str) -> str | None:
    """The local device to measure on, or None where ``gpu`` names another one, whose shipped table is used.

    Raises:
        UserError: neither a local device nor one with a shipped cost table or datasheet.
    """
    if gpu == "auto" or gpu in local_devices():
        return choose_device(gpu)
    for device in local_devices():
        if fingerprint(device).name == gpu:
            return device
    known = {*shipped_tables(), *datasheets()}
    if gpu not in known:
        hint = nearest(gpu, ["auto", *local_devices(), *known])
        raise UserError(
            f"--gpu {gpu}: neither a device of this machine nor one with a shipped cost table or datasheet; {hint}"
        )
    return None
