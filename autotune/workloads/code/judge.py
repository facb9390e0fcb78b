"""Judging answers to tasks on source code whose reference answer is not known."""

from __future__ import annotations

import ast
import textwrap
from collections import Counter
from collections.abc import Sequence

OPEN_TASKS = ("complete", "document", "continue")
"""Tasks with many good answers. The other tasks have one, the reference."""
RUN_LENGTH, MAX_RUNS = 8, 2  # an answer repeats itself if it contains the same 8 tokens more than twice
MIN_DOCSTRING = 15  # characters
MIN_PASSAGE = 48  # tokens


def good_part(task: str, prompt: str, answer: str, tokens: Sequence[int], *, is_ended: bool) -> int:
    """Number of tokens of an answer to one of the open tasks that have the right form; 0 if it is wrong.

    A completed function ends and is valid Python, a docstring ends and is one line, and neither repeats itself. A passage, which has
    no end, is good up to where it begins to repeat itself.

    Args:
        tokens: the answer's, without an end of text.
        is_ended: whether an end of text followed.

    Raises:
        KeyError: the task is not one of OPEN_TASKS.
    """
    if task not in OPEN_TASKS:
        raise KeyError(task)
    if task == "continue":
        length = first_repetition(tokens)
        return 0 if is_ended or length < MIN_PASSAGE else length
    is_docstring = "\n" not in answer and len(answer) >= MIN_DOCSTRING
    has_form = is_valid(prompt, answer) if task == "complete" else is_docstring
    return len(tokens) if has_form and is_ended and not repeats_itself(tokens) else 0


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
    return max(Counter(runs(tokens)).values(), default=0) > MAX_RUNS


def first_repetition(tokens: Sequence[int]) -> int:
    """Where a run of tokens begins that has occurred before; the number of tokens if there is none."""
    seen: set[tuple[int, ...]] = set()
    for start, run in enumerate(runs(tokens)):
        if run in seen:
            return start
        seen.add(run)
    return len(tokens)


def runs(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """All runs of RUN_LENGTH tokens, in order."""
    return [tuple(tokens[start : start + RUN_LENGTH]) for start in range(len(tokens) - RUN_LENGTH + 1)]
