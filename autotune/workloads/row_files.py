"""Rows of workload files: JSONL of documents of one kind, and JSON, JSONL and Parquet of any rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from autotune.errors import UserError
from autotune.files import describe, read_text
from autotune.strict_parsing import parse_json

M = TypeVar("M", bound=BaseModel)


def read_jsonl(path: Path, kind_of: type[M]) -> list[tuple[int, M]]:
    """Parse the non-empty lines of a file, with their line numbers. Images are not loaded.

    Raises:
        UserError: missing or empty file, or an invalid line.
    """
    records = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            parse_json(line)
            records.append((number, kind_of.model_validate_json(line)))
        except ValidationError as error:
            raise UserError(f"{path}:{number}: {describe(error, kind_of)}") from None
        except ValueError as error:
            raise UserError(f"{path}:{number}: every line must be a JSON object ({error}); fix that line") from None
    if not records:
        raise UserError(
            f'{path}: the file is empty; add a line such as {{"prompt": "What is this?", "images": ["photo.png"]}}'
        )
    return records


def read_rows(path: Path) -> list[tuple[int, Any]] | None:
    """The rows of a Parquet, JSON or JSONL file with their numbers, from 1 on; None if it is none of these."""
    if path.suffix == ".parquet":
        return list(enumerate(_parquet_rows(path), start=1))
    text = read_text(path)
    try:
        if text.lstrip().startswith("["):
            return list(enumerate(parse_json(text), start=1))
        return [(number, parse_json(line)) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    except ValueError:
        return None  # our own reader names the line


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"{path}: Parquet files need pyarrow; pip install pyarrow, or give a JSONL file") from None
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except Exception as error:  # pyarrow's own errors are of many kinds
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"{path}: not a readable Parquet file ({reason}); download it again") from None
    return rows
