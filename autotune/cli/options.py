"""Options that several verbs share, their value types, and options made from settings models."""

from __future__ import annotations

import json
import os
import re
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from autotune.documents.deployment import RUNTIME
from autotune.documents.execution import check_capture_sizes
from autotune.documents.option_fields import extra_of, option_name
from autotune.errors import UserError, require
from autotune.modeling.loading import DEVICE_MAP, SHARD_DRAFT, Dtype
from autotune.strict_parsing import parse_json
from autotune.study.outputs import require_replaceable
from autotune.workloads.chat import check_variables
from autotune.workloads.formats import FORMATS

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

ENGINES = "engines"
MOST_LOAD = 4096  # clients of one program
BACKENDS_OF = {
    **dict.fromkeys(("device", "dtype", "shard_draft", "bench draft", "export draft_tokens", "export models"), RUNTIME),
    **dict.fromkeys(("report study", "report storage", "report workload"), RUNTIME),
    **dict.fromkeys(("serve max_waiting", "serve max_model_len", "serve drain_s"), RUNTIME),
    "serve chat_template_kwargs": RUNTIME,  # an engine takes them from each request
    **dict.fromkeys(("engine_command", "loads"), ENGINES),
}
"""Options that only the runtime has, or only engines, in every verb or in one. All others hold for both."""


def require_options_of(backend: str) -> None:
    """Refuse the given options of the running command that the backend of its profile does not have."""
    if (context := click.get_current_context(silent=True)) is None:
        return
    known = RUNTIME if backend == RUNTIME else ENGINES
    for option in context.command.params:
        is_given = context.get_parameter_source(option.name) is not ParameterSource.DEFAULT
        names = option.name, f"{context.command.name} {option.name}"
        if is_given and any(BACKENDS_OF.get(name, known) != known for name in names):
            raise UserError(f"{option.opts[-1]}: not an option for a profile of {backend}; leave it out")


# -------- value types


class Value(click.ParamType[Any]):
    """A value that a function reads from its text. The function raises ValueError for other texts."""

    def __init__(self, name: str, kind: str, advice: str, read: Callable[[str], Any]) -> None:
        self.name, self.kind, self.advice, self.read = name, kind, advice, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.read(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(f"{value!r} is not {self.kind} ({error}); {self.advice}", param, ctx)


def _seconds(text: str) -> float:
    if (match := re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*([smh]?)", text.strip())) is None:
        raise ValueError("a number and a unit are needed")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def _fraction(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    if match is None or (float(match[1]) >= 1 and not match[2]):
        raise ValueError("the sign % or a fraction below 1 is needed")
    return float(match[1]) / (100 if match[2] else 1)


def _sizes(text: str) -> tuple[int, ...]:
    return check_capture_sizes([int(size) for size in text.split(",") if size.strip()])


def _loads(text: str) -> tuple[int, ...]:
    loads = sorted({int(load) for load in text.split(",")})
    if not 1 <= loads[0] <= loads[-1] <= MOST_LOAD:
        raise ValueError(f"from 1 to {MOST_LOAD:,}")
    return tuple(loads)


def _variables(text: str) -> dict[str, Any]:
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError("an object has braces")
    return check_variables(content)


def _table_file(text: str) -> Path:
    packages = {".csv": "pandas", ".parquet": "pyarrow"}
    if (suffix := Path(text).suffix) not in packages:
        raise ValueError("its suffix names no format")
    require(packages[suffix])  # before the work, after which the table is written
    require_replaceable(Path(text), "--table")
    return Path(text)


DURATION = Value("duration", "a duration", "write for example 90s, 10m or 1h", _seconds)
PERCENT = Value("percent", "a percentage", "write for example 5% or 0.05", _fraction)
CAPTURE_SIZES = Value("sizes", "a list of sizes", "write for example 4,8,16,32,64", _sizes)
LOADS = Value("loads", "a list of requests at once", "write for example 1,4,16,64", _loads)
JSON_OBJECT = Value("json", "an object of JSON", "write '{\"enable_thinking\": false}'", _variables)
TABLE_FILE = Value("file", "a file of a table", "give a name that ends in .csv or .parquet", _table_file)


# -------- shared options

workload = click.option(
    "--workload",
    default=None,
    show_default="those of the profile, or of the target",
    help="Prompts: a file, which may be hf://datasets/... (our JSONL, or the file of a public benchmark), or shipped ones by name: chat,code,summarize,images.",
)
workload_format = click.option(
    "--format",
    "workload_format",
    type=click.Choice(FORMATS),
    hidden=True,
    default=None,
    show_default="found out from the first row",
    help="Format of the workload's file.",
)
chat_template_kwargs = click.option(
    "--chat-template-kwargs",
    hidden=True,
    type=JSON_OBJECT,
    default=None,
    show_default="the profile's, if there is one",
    help="Variables of the chat template, such as '{\"enable_thinking\": false}'; those of a workload's line come first.",
)
device = click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda:N.")


def _set_variable(name: str, _context: click.Context, _option: click.Parameter, value: Any) -> None:
    if value:
        os.environ[name] = str(value)  # the processes that a verb starts load models likewise


device_map = click.option(
    "--device-map",
    hidden=True,
    type=click.Choice(["auto"]),
    expose_value=False,
    callback=partial(_set_variable, DEVICE_MAP),
    help="auto: spread the layers of the target over all GPUs, one after the other, where torchrun is not used.",
)
shard_draft = click.option(
    "--shard-draft",
    hidden=True,
    is_flag=True,
    expose_value=False,
    callback=partial(_set_variable, SHARD_DRAFT),
    help="Under torchrun: divide an independent draft among the processes, as the target is.",
)
random_weights = click.option(
    "--random-weights",
    is_flag=True,
    help="Make weights at random, from a config alone: latency does not depend on them.",
)
profile_dtype = click.option(
    "--dtype",
    type=click.Choice(get_args(Dtype)),
    default=None,
    show_default="the profile's",
    help="Data type of the target.",
)
engine_command = click.option(
    "--engine-command",
    hidden=True,
    default=None,
    help="For engine profiles: executable of the engine with further arguments, in one word.  [default: the profile's]",
)
loads = click.option(
    "--load",
    "loads",
    type=LOADS,
    default=(),
    help="For serving engines: numbers of requests at once, such as 1,4,16,64, for each of which drafts are measured.",
)
verbose = click.option("--verbose", "is_verbose", is_flag=True, help="Print details: uncertainties, errors, overheads.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")


def num_prompts(default: int) -> Decorator:
    return click.option(
        "--prompts",
        "num_prompts",
        type=click.IntRange(min=1),
        default=default,
        show_default=True,
        help="Number of prompts.",
    )


def output(default: str | None, help_text: str) -> Decorator:
    return click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path),
        default=None if default is None else Path(default),
        show_default=True,
        help=help_text,
    )


def table(contents: str) -> Decorator:
    return click.option("--table", type=TABLE_FILE, default=None, help=f"Write {contents} to a .csv or .parquet file.")


# -------- options of settings models


def settings_options(model: type[BaseModel], *names: str) -> Decorator:
    """Add an option for every field of a settings model that has one, or for the named fields, in their order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(names or tuple(model.model_fields)):
            field = model.model_fields[name]
            if field.description is not None and option_name(name, field) is not None:
                command = _option(name, field)(command)
        return command

    return decorate


def _option(name: str, field: FieldInfo) -> Decorator:
    unit, annotation, default = extra_of(field).get("unit"), field.annotation, field.default
    if get_origin(annotation) in (Union, types.UnionType):  # an optional value
        annotation = next(member for member in get_args(annotation) if member is not type(None))
    options: dict[str, Any] = {
        "default": default,
        "help": field.description,
        "type": annotation,
        "hidden": bool(extra_of(field).get("rare")),
        "show_default": default not in (None, (), "") and annotation is not bool,
    }
    names = [f"--{option_name(name, field)}", *(["--model"] * (name == "target"))]
    if annotation is bool:
        options |= {"is_flag": True, "type": None}
    elif annotation is Path:
        options["type"] = TABLE_FILE if name == "table" else click.Path(path_type=Path)
        names += ["-o"] * (name == "output")
    elif get_origin(annotation) is Literal:
        options["type"] = click.Choice(get_args(annotation))
    elif annotation == tuple[int, ...]:
        options["type"] = CAPTURE_SIZES
    elif get_origin(annotation) is tuple:
        options |= {"type": get_args(annotation)[0], "multiple": True}
    elif unit == "fraction":
        options |= {"type": PERCENT, "default": f"{100 * default:g}%"}
    elif unit == "s":
        options |= {"type": DURATION}
        if default is not None:
            options["default"] = f"{default:g}s" if default % 60 else f"{default / 60:g}m"
    return click.option(*names, name, **options)


# -------- output


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, allow_nan=False))
