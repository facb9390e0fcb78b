"""What can be said about an answer to a task on source code without knowing the reference answer."""

from __future__ import annotations

import ast
import textwrap
from collections import Counter
from collections.abc import Sequence

OPEN_TASKS = ("complete", "document", "continue")
"""Tasks with many good answers. The other tasks have one, the reference."""
RUN_LENGTH, MAX_RUNS = 8, 2  # an answer repeats itself if it contains the same 8 tokens more than twice
MIN_DOCSTRING = 15  # characters


def is_good(task: str, prompt: str, answer: str, tokens: Sequence[int], *, is_ended: bool) -> bool:
    """Whether an answer to one of the open tasks has the right form: it ends where an answer of its task has an end, it does not repeat
    itself, and a completed function is valid Python.

    Args:
        tokens: the answer's.
        is_ended: whether an end of text followed.

    Raises:
        KeyError: the task is not one of OPEN_TASKS.
    """
    has_form = {
        "complete": lambda: is_ended and is_valid(prompt, answer),
        "document": lambda: is_ended and "\n" not in answer and len(answer) >= MIN_DOCSTRING,
        "continue": lambda: not is_ended,
    }
    return has_form[task]() and not repeats_itself(tokens)


def is_valid(prompt: str, body: str) -> bool:
    """Whether the function at the end of a prompt is valid Python with a body that is not empty."""
    lines = prompt.partition("\n\n")[2].splitlines()
    start = max(number for number, line in enumerate(lines) if line.lstrip().startswith(("def ", "async def ")))
    try:
        parsed = ast.parse(textwrap.dedent("\n".join([*lines[start:], body]))).body
    except (SyntaxError, ValueError):
        return False
    return bool(body.strip()) and isinstance(parsed[0], ast.FunctionDef | ast.AsyncFunctionDef)


def repeats_itself(tokens: Sequence[int]) -> bool:
    """Whether the same run of tokens occurs more often than a text for people would have it."""
    runs = Counter(tuple(tokens[start : start + RUN_LENGTH]) for start in range(len(tokens) - RUN_LENGTH + 1))
    return max(runs.values(), default=0) > MAX_RUNS
