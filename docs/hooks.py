"""Hooks of MkDocs: the JSON Schema of every document kind below ``schemas/``, the command line from its
options, and the Python API from docstrings.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from copy import copy
from typing import Any

import click
from mkdocs.structure.files import File, Files

import autotune
from autotune.cli.main import VERBS, main
from autotune.cli.verb import GROUPS, in_group, options_of
from autotune.schemas import json_schemas

METHODS = {"Decoder": ("generate", "stream", "prepare", "configure")}


def on_files(files: Files, *, config: Any) -> Files:
    for kind, schema in json_schemas().items():
        files.append(File.generated(config, f"schemas/{kind}.json", content=json.dumps(schema, indent=1) + "\n"))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    made = {"api.md": ("<!-- api -->", _sections), "cli.md": ("<!-- cli -->", cli_sections)}
    if page.file.src_uri not in made:
        return markdown
    marker, sections = made[page.file.src_uri]
    return markdown.replace(marker, "\n\n".join(sections()))


def cli_sections() -> Iterator[str]:
    """A section for every verb, with a table of each group of its options, and one of its rare options."""
    for verb in VERBS:
        command = main.get_command(click.Context(main), verb)
        assert command is not None
        context = click.Context(command, info_name=f"autotune {verb}")
        yield f"## {verb}"
        yield f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```"
        yield inspect.cleandoc(command.help or "")
        options = options_of(command)
        for group in GROUPS:
            yield _option_table(group, [one for one in in_group(options, group) if not one.hidden], context)
        yield _option_table("Rare options, which the help only names", [one for one in options if one.hidden], context)


def _option_table(title: str, options: list[click.Option], context: click.Context) -> str:
    """Options with their values and their help, which ends with the default."""
    if not options:
        return ""
    lines = [f"**{title}**", "", "| option | |", "|---|---|"]
    for option in options:
        visible = copy(option)
        visible.hidden = False
        record = visible.get_help_record(context)
        assert record is not None
        names, text = (part.replace("|", "\\|") for part in record)
        lines.append(f"| `{names}` | {text} |")
    return "\n".join(lines)


def _sections() -> Iterator[str]:
    """A section for every public name, with those of its methods that users call."""
    for name in autotune.__all__:
        try:
            entity = getattr(autotune, name)
        except ImportError:  # of an optional package
            continue
        yield from _section(f"autotune.{name}", entity, 2)
        for method in METHODS.get(name, ()):
            yield from _section(f"{name}.{method}", getattr(entity, method), 3)


def _section(name: str, entity: Any, level: int) -> Iterator[str]:
    yield f"{'#' * level} `{name}`"
    fields = _fields(entity) if inspect.isclass(entity) else []
    if not fields and not (inspect.isclass(entity) and issubclass(entity, Exception)):
        shown = []
        for parameter in inspect.signature(entity).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
                shown.append("*")
            text = re.sub(r": '([^']*)'", r": \1", str(parameter))
            shown.append(re.sub(r" = <.*>", " = ...", text))
        lines = ",\n".join(f"    {text}" for text in shown if text != "self")
        yield f"```text\n{name}(\n{lines},\n)\n```"
    yield _described(inspect.getdoc(entity) or "")
    if fields:
        yield "\n".join(f"* `{field}: {kind}`" + (f" - {text}" if text else "") for field, kind, text in fields)


def _described(docstring: str) -> str:
    """Google's sections as lists, and double backquotes as single ones."""
    text = docstring.replace("``", "`")
    for title in ("Args", "Raises"):
        before, found, after = text.partition(f"\n{title}:\n")
        if found:
            block, _, rest = after.partition("\n\n")
            items = re.sub(r"\n {8,}", " ", "\n" + block)
            lines = re.sub(r"\n {4}([\w, ]+): ", r"\n* `\1`: ", items)
            text = f"{before}\n\n**{title}**\n{lines}\n\n{rest}"
    return text


def _fields(cls: type) -> list[tuple[str, str, str]]:
    """Annotated fields of a dataclass with their types and the strings that follow them."""
    if not hasattr(cls, "__dataclass_fields__"):
        return []
    body = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    fields = []
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            value = (
                getattr(getattr(following, "value", None), "value", None) if isinstance(following, ast.Expr) else None
            )
            text = " ".join(value.split()).replace("``", "`") if isinstance(value, str) else ""
            fields.append((node.target.id, ast.unparse(node.annotation), text))
    return fields
