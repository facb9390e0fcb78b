"""The command class of all verbs: help in groups, and options from a file and from environment variables."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import click

from autotune.errors import UserError, nearest
from autotune.files import read_yaml

MODELS, SETTINGS, OUTPUT = "Models, prompts and device", "Settings", "Output and files"
GROUPS = {
    MODELS: ("target", "draft", "prompt", "image", "workload", "whole", "prompts", "backend", "gpu", "device"),
    SETTINGS: (),
    OUTPUT: ("output", "table", "junit", "github", "plan", "config", "verbose", "json", "help"),
}
"""Options by the groups of ``--help``. Those that are not named here are settings."""


class Verb(click.Command):
    """A command with ``--config FILE``, and with the environment variable ``AUTOTUNE_VERB_OPTION`` for every option.

    Options with ``hidden`` are rare: ``--help`` names them and does not describe them.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.params.append(
            click.Option(
                ["--config"],
                type=click.Path(path_type=Path),
                is_eager=True,
                expose_value=False,
                callback=_read_options,
                help="YAML file with options, such as 'budget: 10m'; options of the command line come first.",
            )
        )

    def make_context(self, info_name: str | None, *arguments: Any, **settings: Any) -> click.Context:
        for option in options_of(self):
            option.envvar = option.envvar or f"autotune_{info_name}_{word_of(option)}".upper().replace("-", "_")
        return super().make_context(info_name, *arguments, **settings)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        for group in GROUPS:
            entries = [option.get_help_record(ctx) for option in in_group(options, group)]
            if records := [record for record in entries if record is not None]:
                with formatter.section(group):
                    formatter.write_dl(records)
        if rare := ", ".join(f"--{word_of(option)}" for option in options_of(self) if option.hidden):
            text = f"Rare options, also accepted here and as lines of --config (docs/cli.md): {rare}."
            formatter.write(f"\n{textwrap.fill(text, formatter.width, break_on_hyphens=False)}\n")


def options_of(command: click.Command) -> list[click.Option]:
    """The options of a command in the order of its help, without ``--help``."""
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def word_of(option: click.Option) -> str:
    """The name of an option without its dashes."""
    return next(name for name in option.opts if name.startswith("--"))[2:]


def in_group(options: list[click.Option], group: str) -> list[click.Option]:
    """The options of a group of the help, in its order."""
    words = [word for known in GROUPS.values() for word in known]
    if not GROUPS[group]:
        return [option for option in options if word_of(option) not in words]
    return sorted(
        (option for option in options if word_of(option) in GROUPS[group]),
        key=lambda option: words.index(word_of(option)),
    )


def _read_options(context: click.Context, config: click.Parameter, path: Path | None) -> None:
    """Make the options in a file the defaults of a command.

    Raises:
        UserError: the file cannot be read, or names an option that the command does not have.
    """
    if path is None:
        return
    others = [option for option in options_of(context.command) if option is not config]
    known = {name[2:]: option for option in others for name in option.opts if name.startswith("--")}
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: a file of options has lines such as 'budget: 10m'; got no keys; add them")
    for name in content:
        if name not in known:
            raise UserError(f"{path}: {context.info_name} has no option {name!r}; {nearest(name, known)}")
    given = {known[name]: value for name, value in content.items() if value is not None}
    context.default_map = {str(option.name): _as_given(option, value) for option, value in given.items()}


def _as_given(option: click.Option, value: Any) -> str | list[str]:
    """A value of a file as the command line would have it."""
    if not option.multiple:
        return ",".join(map(_text, value)) if isinstance(value, list) else _text(value)
    if isinstance(value, dict):
        return [f"{name}={_text(entry)}" for name, entry in value.items()]
    return [_text(entry) for entry in (value if isinstance(value, list) else [value])]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
