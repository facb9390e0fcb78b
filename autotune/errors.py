"""Errors that the user can fix. The command line catches them in one place."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

EXTRAS = {
    **dict.fromkeys(("accelerate", "numba", "optuna", "safetensors", "sklearn", "sqlalchemy"), "runtime"),
    **dict.fromkeys(("tokenizers", "torch", "transformers"), "runtime"),
    **dict.fromkeys(("pandas", "pyarrow"), "parquet"),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn"), "serve"),
    **{"av": "video", "gguf": "gguf", "prometheus_client": "metrics", "psycopg": "postgresql"},
}  # that install a package which the core does not have, by import name; see pyproject.toml


def masked(text: str) -> str:
    """A text in which tokens of the Hugging Face Hub, and passwords of URLs, ``scheme://user:password@host`` and
    ``?password=...``, are asterisks.
    """
    text = re.sub(r"\bhf_\w{8,}", "hf_***", text)
    text = re.sub(r"(://[^\s:/?#@]*:)\S*@", r"\1***@", text)
    return re.sub(r"([?&]\w*password=)[^\s&'\")]*", r"\1***", text, flags=re.IGNORECASE)


MOST_CHARACTERS = 1500  # of a message, whatever value it shows


class UserError(Exception):
    """A mistake that the user can fix. The message is one line: the rule, the value that broke it, and the next step.
    Passwords of URLs in it are masked.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        message = masked(message)
        super().__init__(message if len(message) <= MOST_CHARACTERS else f"{message[:1000]} ... {message[-400:]}")


class NotComparable(UserError):
    """Two results are of different models, workloads or devices."""

    exit_code = 4


class ArmFailed(UserError):
    """A way to decode cannot go on, such as an engine that has ended: a race continues without it."""


def explained(error: Exception) -> Exception:
    """The error of an import that has failed, with the extra that installs the package; any other error as it is."""
    if not isinstance(error, ModuleNotFoundError) or (extra := EXTRAS.get(str(error.name))) is None:
        return error
    return UserError(
        f"{error.name} is not installed; this needs the extra {extra}: pip install 'autotune-speculative[{extra}]'"
    )


def require(package: str) -> None:
    """Refuse work that imports a package of an extra in the end.

    Raises:
        UserError: it is not installed.
    """
    if find_spec(package) is None:
        raise explained(ModuleNotFoundError(name=package))


def first_line(error: Exception) -> str:
    """Kind and first line of an error of a library."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


@contextmanager
def errors_about(source: str) -> Iterator[None]:
    """Put the file and line, or the prompt, that an error is about in front of its message."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{source}: {error}") from None


@contextmanager
def reading(rule: str, advice: str) -> Iterator[None]:
    """Turn any error of reading what another program may have written wrongly into one line, which names its source in
    ``rule``.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # readers of damaged files, and the libraries of the Hub, raise errors of any kind
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise UserError(f"{rule} ({' '.join(reason.split())[:200]}); {advice}") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` if a known word is similar, else ``known: x, y, z``."""
    known = sorted(known)
    similar = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {similar[0]!r}?" if similar else f"known: {', '.join(known)}"
