"""Packages that the core does not install, and the command that installs the extra of a missing one."""

from __future__ import annotations

from importlib.util import find_spec

from autotune.errors import UserError

EXTRAS = {
    **dict.fromkeys(("accelerate", "numba", "optuna", "safetensors", "sklearn", "sqlalchemy"), "runtime"),
    **dict.fromkeys(("tokenizers", "torch", "transformers"), "runtime"),
    **dict.fromkeys(("pandas", "pyarrow"), "parquet"),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn"), "serve"),
    **{"av": "video", "gguf": "gguf", "prometheus_client": "metrics", "psycopg": "postgresql"},
}
"""The extra of each import name, as in ``pyproject.toml``."""


def install_command(package: str) -> str:
    return f"pip install 'autotune-speculative[{EXTRAS[package]}]'"


def missing_extra(package: str | None) -> str | None:
    """The line for an import that has failed; None for a package that is of no extra."""
    if package not in EXTRAS:
        return None
    return f"{package} is not installed; this needs the extra {EXTRAS[package]}: {install_command(package)}"


def require(package: str) -> None:
    """Refuse work that would import a package in the end.

    Raises:
        UserError: the package of an extra is not installed.
    """
    if find_spec(package) is None:
        raise UserError(str(missing_extra(package)))
