"""Tasks on source code: the examples of a task are a pure function of the corpus, the split and an index."""

from __future__ import annotations

import ast
import functools
import keyword
import re
import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from autotune.workloads.code.corpus import CodeFile, CodeSplit, corpus
from autotune.workloads.code.edits import edit_function
from autotune.workloads.code.tables import fill_table
from autotune.workloads.code.tracebacks import explain_traceback

CodeTask = Literal["complete", "document", "edit", "continue", "fill", "explain"]
CODE_TASKS: tuple[CodeTask, ...] = ("complete", "document", "edit", "continue", "fill", "explain")
SPLIT_SEEDS = {"train": 0, "tune": 1, "evaluate": 2}
ATTEMPTS = 200  # draws until a function suits a task
CONTEXT_CHARS = 300  # of the file above a function that is completed
PASSAGE_CHARS = 300, 700  # prompt of ``continue``, and the text behind it
DOCSTRING_CHARS = 30, 300
EDIT_CHARS = 700
NUM_NAMES = 4000


@dataclass(frozen=True)
class CodeExample:
    """A request with its reference answer."""

    task: CodeTask
    prompt: str
    answer: str
    is_open: bool = False
    """The answer has no end (``continue``)."""
    is_prompt_text: bool = True
    """The prompt is real text of the corpus, which a language model learns from; made-up prompts are not."""


@functools.cache
def names() -> tuple[str, ...]:
    """The most frequent identifiers of the training split that are lower-case words, sorted."""
    counts: Counter[str] = Counter()
    for file in corpus("train"):
        counts.update(set(re.findall(r"\b[a-z]{3,}(?:_[a-z]{2,})?\b", file.text)))
    known = [
        name
        for name, _ in counts.most_common(2 * NUM_NAMES)
        if not keyword.iskeyword(name) and not keyword.issoftkeyword(name)
    ]
    return tuple(sorted(known[:NUM_NAMES]))


@functools.cache
def _functions(split: CodeSplit) -> tuple[tuple[CodeFile, ...], NDArray[np.int64]]:
    """Files of a split, and (file, first line, last line) of all functions, [functions, 3]."""
    files = corpus(split)
    return files, np.array([(i, *span) for i, file in enumerate(files) for span in file.functions], np.int64)


def random_window(split: CodeSplit, num_chars: int, rng: Generator) -> str:
    """Whole lines of a file, from a random line on, of at least ``num_chars`` if the file is as long; files by their lengths."""
    files, ends = _ends(split)
    file = files[int(np.searchsorted(ends, rng.integers(ends[-1]), side="right"))]
    first = int(rng.integers(max(1, len(file.text) - num_chars)))
    start = file.text.rfind("\n", 0, first) + 1
    return file.text[start : start + num_chars]


@functools.cache
def _ends(split: CodeSplit) -> tuple[tuple[CodeFile, ...], NDArray[np.int64]]:
    files = corpus(split)
    return files, np.cumsum([len(file.text) for file in files])


def make_example(split: CodeSplit, task: str, index: int) -> CodeExample:
    """The example ``index`` of a task.

    Raises:
        KeyError: the task is not one of CODE_TASKS.
    """
    if task not in CODE_TASKS:
        raise KeyError(task)
    rng = np.random.default_rng([CODE_TASKS.index(task), index, SPLIT_SEEDS[split]])
    if task == "fill":
        return CodeExample("fill", *fill_table(names(), rng), is_prompt_text=False)
    if task == "explain":
        return CodeExample("explain", *explain_traceback(names(), rng), is_prompt_text=False)
    if task == "continue":
        text = random_window(split, sum(PASSAGE_CHARS), rng)
        cut = text.rfind("\n", 0, PASSAGE_CHARS[0]) + 1 or PASSAGE_CHARS[0]
        return CodeExample("continue", f"Continue the file.\n\n{text[:cut]}", text[cut:], is_open=True)
    files, functions = _functions(split)
    for _ in range(ATTEMPTS):
        number, first, last = functions[rng.integers(len(functions))].tolist()
        found = _BUILDERS[task](files[number], first, last, rng)
        if found is not None:
            return CodeExample(task, *found)
    raise RuntimeError(f"no function of split {split!r} suits task {task!r} within {ATTEMPTS} draws")


def _parsed(lines: list[str]) -> tuple[str, ast.FunctionDef] | None:
    """A function's source without indentation, and its tree; None if it is not a plain function."""
    source = textwrap.dedent("\n".join(lines))
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return None
    return (source, body[0]) if len(body) == 1 and isinstance(body[0], ast.FunctionDef) else None


def _complete(file: CodeFile, first: int, last: int, rng: Generator) -> tuple[str, str] | None:
    """The signature and docstring below some lines of the file, and the body."""
    parsed = _parsed(file.lines[first : last + 1])
    if parsed is None:
        return None
    function = parsed[1]
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body or body[0].lineno == function.lineno or body[0].lineno < 2:
        return None
    begin = first + body[0].lineno - 1
    above = first
    while above > 0 and sum(map(len, file.lines[above - 1 : first])) <= CONTEXT_CHARS:
        above -= 1
    return "Complete the function.\n\n" + "\n".join(file.lines[above:begin]) + "\n", "\n".join(
        file.lines[begin : last + 1]
    )


def _document(file: CodeFile, first: int, last: int, rng: Generator) -> tuple[str, str] | None:
    """A function without its docstring, and the docstring's first paragraph in one line."""
    parsed = _parsed(file.lines[first : last + 1])
    if parsed is None:
        return None
    source, function = parsed
    docstring, statement = ast.get_docstring(function), function.body[0]
    if docstring is None or len(function.body) < 2 or statement.lineno == function.lineno:
        return None
    text = " ".join(docstring.split("\n\n")[0].split())
    lines = source.split("\n")
    del lines[statement.lineno - 1 : statement.end_lineno]
    if not DOCSTRING_CHARS[0] <= len(text) <= DOCSTRING_CHARS[1] or sum(map(len, lines)) > EDIT_CHARS:
        return None
    return "Write the docstring.\n\n" + "\n".join(lines), text


def _edit(file: CodeFile, first: int, last: int, rng: Generator) -> tuple[str, str] | None:
    """A function with an instruction, and the edited function."""
    source = textwrap.dedent("\n".join(file.lines[first : last + 1]))
    edit = edit_function(source, names(), rng) if len(source) <= EDIT_CHARS else None
    return None if edit is None else (f"{edit[0]}\n\n{source}", edit[1])


_BUILDERS = {"complete": _complete, "document": _document, "edit": _edit}
