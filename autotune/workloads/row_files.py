"""Rows of workload files: Parquet, JSON and JSONL, parsed as documents of one kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from autotune.errors import UserError, reading
from autotune.files import describe, read_text
from autotune.strict_parsing import parse_json

M = TypeVar("M", bound=BaseModel)
P = TypeVar("P", bound=BaseModel)
Row = tuple[int, Any]
"""A row's number in its file, from 1 on, and its content."""


def read_jsonl(path: Path, kind_of: type[M]) -> list[tuple[int, M]]:
    """The rows of a file as documents, with their numbers. Images are not loaded.

    Raises:
        UserError: missing or empty file, or an invalid row.
    """
    return parse_rows(path, read_rows(path), kind_of, lambda row: row)


def parse_rows(
    path: Path, rows: Sequence[Row], kind_of: type[M], convert: Callable[[M], P | None]
) -> list[tuple[int, P]]:
    """Convert rows of one kind, and leave those out of which ``convert`` makes nothing."""
    parsed = []
    for number, content in rows:
        try:
            document = convert(kind_of.model_validate(content))
        except ValidationError as error:
            raise UserError(f"{path}:{number}: {describe(error, kind_of)}") from None
        except ValueError as error:
            raise UserError(f"{path}:{number}: {error}") from None
        if document is not None:
            parsed.append((number, document))
    return parsed


def read_rows(path: Path) -> list[Row]:
    """The rows of a Parquet, JSON or JSONL file.

    Raises:
        UserError: missing or empty file, or a line that is no JSON.
    """
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        with reading(f"{path}: not a readable Parquet file", "check the path, or download it again"):
            return list(enumerate(parquet.read_table(path).to_pylist(), start=1))
    text, rows = read_text(path), list[Row]()
    if text.lstrip().startswith("["):
        with suppress(ValueError):
            return list(enumerate(parse_json(text), start=1))
    for number, line in enumerate(text.split("\n"), start=1):
        with reading(f"{path}:{number}: every line must be a JSON object", "fix that line"):
            rows += [(number, parse_json(line))] if line.strip() else []
    if not rows:
        raise UserError(
            f'{path}: the file is empty; add a line such as {{"prompt": "What is this?", "images": ["photo.png"]}}'
        )
    return rows
