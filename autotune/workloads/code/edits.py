"""Edits of functions whose results are certain: most of an answer is copied from the prompt, as in real editing."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence

from numpy.random import Generator

Edit = tuple[str, str]
"""(instruction, edited source)"""
LEVELS = ("debug", "info", "warning")
DEFAULTS = ("None", "True", "False", "0", "1", "()", '""')
RENAMES = ("Rename `{old}` to `{new}`.", "Change the name `{old}` to `{new}`.")
PARAMETERS = (
    "Add a parameter `{name}` with the default `{value}` to `{function}`.",
    "Give `{function}` a parameter `{name}={value}`.",
)


def rename(source: str, function: ast.FunctionDef, names: Sequence[str], rng: Generator) -> Edit | None:
    """Rename a variable or parameter. Only names that occur nowhere as an attribute, a keyword or in text are renamed."""
    used = [
        node.id if isinstance(node, ast.Name) else node.arg
        for node in ast.walk(function)
        if isinstance(node, ast.Name | ast.arg)
    ]
    own = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    own |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    certain = [
        name
        for name in sorted(own - {"self", "cls"})
        if used.count(name) >= 2 and len(re.findall(rf"\b{name}\b", source)) == used.count(name)
    ]
    new = str(rng.choice(list(names)))
    if not certain or re.search(rf"\b{new}\b", source):
        return None
    old = str(rng.choice(certain))
    return str(rng.choice(RENAMES)).format(old=old, new=new), re.sub(rf"\b{old}\b", new, source)


def add_parameter(source: str, function: ast.FunctionDef, names: Sequence[str], rng: Generator) -> Edit | None:
    """Add a parameter with a default behind the others. Functions with ``*`` parameters are left out."""
    arguments, name, value = function.args, str(rng.choice(list(names))), str(rng.choice(DEFAULTS))
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or re.search(rf"\b{name}\b", source):
        return None
    lines = source.split("\n")
    parts: list[ast.arg | ast.expr] = [*arguments.posonlyargs, *arguments.args, *arguments.defaults]
    if parts:
        line, column = max((part.end_lineno or 0, part.end_col_offset or 0) for part in parts)
        text = f", {name}={value}"
    else:
        line, column, text = function.lineno, lines[function.lineno - 1].index("(") + 1, f"{name}={value}"
    lines[line - 1] = lines[line - 1][:column] + text + lines[line - 1][column:]
    instruction = str(rng.choice(PARAMETERS)).format(name=name, value=value, function=function.name)
    return instruction, "\n".join(lines)


def insert_logging(source: str, function: ast.FunctionDef, names: Sequence[str], rng: Generator) -> Edit | None:
    """Log at the beginning of the body, or before every ``return`` that has a line of its own."""
    lines, level = source.split("\n"), str(rng.choice(LEVELS))
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if rng.integers(2):
        if not body:
            return None
        statement, where, at = (
            f'logger.{level}("{function.name} was called")',
            "at the beginning of the body",
            [body[0].lineno],
        )
    else:
        statement, where = f'logger.{level}("{function.name} returns")', "before every `return`"
        at = sorted(node.lineno for node in ast.walk(function) if isinstance(node, ast.Return))
        if not at or any(not lines[number - 1].lstrip().startswith("return") for number in at):
            return None
    for number in reversed(at):
        indent = len(lines[number - 1]) - len(lines[number - 1].lstrip())
        lines.insert(number - 1, " " * indent + statement)
    return f"Insert `{statement}` {where}.", "\n".join(lines)


KINDS: dict[str, Callable[[str, ast.FunctionDef, Sequence[str], Generator], Edit | None]] = {
    "rename": rename,
    "parameter": add_parameter,
    "logging": insert_logging,
}


def edit_function(source: str, names: Sequence[str], rng: Generator) -> Edit | None:
    """A random edit of a function whose source is not indented; None if the chosen kind does not apply to it.

    Args:
        source: the function, ASCII, beginning with ``def`` in column 0.
        names: identifiers that new names are drawn from.
        rng: decides the kind of edit and its names.
    """
    function = _function(source)
    if function is None:
        return None
    edit = KINDS[str(rng.choice([*KINDS]))](source, function, names, rng)
    if edit is None or edit[1] == source or _function(edit[1]) is None:
        return None
    return edit


def _function(source: str) -> ast.FunctionDef | None:
    """The only statement of a source, if it is a function."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return None
    return body[0] if len(body) == 1 and isinstance(body[0], ast.FunctionDef) else None
