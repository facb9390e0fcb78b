"""Hooks of MkDocs: the JSON Schema of every document kind below ``schemas/``, and the Python API from docstrings."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File, Files

import autotune
from autotune.schemas import json_schemas

METHODS = {"Decoder": ("generate", "stream", "prepare", "configure")}


def on_files(files: Files, *, config: Any) -> Files:
    for kind, schema in json_schemas().items():
        files.append(File.generated(config, f"schemas/{kind}.json", content=json.dumps(schema, indent=1) + "\n"))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    return markdown.replace("<!-- api -->", "\n\n".join(_sections())) if page.file.src_uri == "api.md" else markdown


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
