"""Tasks on source code, made from a small corpus, and the stored prompts."""

from __future__ import annotations

import ast
import textwrap

import pytest

from autotune.workloads.code import examples
from autotune.workloads.code.corpus import CodeFile
from autotune.workloads.code.examples import CODE_TASKS, make_example
from autotune.workloads.workload import code_prompts, load_workload

TEXT = (
    '''
import math

LIMIT = 10


class Shape:
    """A shape with a name and an area that may be unknown."""

    def scaled(self, factor, origin=None):
        """Return a copy that is scaled about an origin, or about zero without one."""
        start = origin if origin is not None else 0.0
        moved = [start + factor * (point - start) for point in self.points]
        return Shape(moved)


def distance(first, second):
    """Return the Euclidean distance between two points of any dimension."""
    total = 0.0
    for a, b in zip(first, second):
        total += (a - b) ** 2
    return math.sqrt(total)
'''.lstrip()
    * 3
)
SPANS = ((8, 12), (15, 20))


@pytest.fixture(autouse=True)
def corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file in place of the installed packages; nothing is cached."""
    files = (CodeFile("package", "shape.py", TEXT, SPANS),)
    monkeypatch.setattr(examples, "corpus", lambda split: files)
    for cached in (examples.names, examples._functions, examples._ends):
        monkeypatch.setattr(examples, cached.__name__, cached.__wrapped__)
    monkeypatch.setattr(examples, "names", lambda: tuple(f"name{letter}" for letter in "abcdefghijklm"))


def test_an_example_is_a_function_of_split_task_and_index() -> None:
    for task in CODE_TASKS:
        once, again = (make_example("train", task, 7) for _ in range(2))
        assert once == again and once.task == task
        others = {make_example(split, task, index).prompt for split in ("train", "tune") for index in range(8)}
        assert len(others) > 1, task
    with pytest.raises(KeyError):
        make_example("train", "juggle", 0)


def test_a_completed_function_is_the_file() -> None:
    for index in range(6):
        example = make_example("train", "complete", index)
        given = example.prompt.removeprefix("Complete the function.\n\n")
        assert given + example.answer in TEXT and given.endswith('"""\n')
        (definition,) = [line for line in given.splitlines() if "def " in line][-1:]
        source = textwrap.dedent(definition + given.rpartition(definition)[2] + example.answer)
        assert isinstance(ast.parse(source).body[0], ast.FunctionDef)


def test_a_docstring_is_taken_out_of_its_function() -> None:
    for index in range(6):
        example = make_example("train", "document", index)
        source = example.prompt.removeprefix("Write the docstring.\n\n")
        (function,) = ast.parse(source).body
        assert isinstance(function, ast.FunctionDef) and ast.get_docstring(function) is None
        assert f'"""{example.answer}"""' in TEXT


def test_an_edit_is_of_a_function_of_the_file() -> None:
    for index in range(6):
        example = make_example("train", "edit", index)
        source = example.prompt.partition("\n\n")[2]
        assert textwrap.indent(source, "    ") in TEXT or source in TEXT
        assert example.answer != source and ast.parse(example.answer)


def test_a_passage_is_continued_where_it_ends() -> None:
    example = make_example("train", "continue", 0)
    assert example.is_open and example.prompt.removeprefix("Continue the file.\n\n") + example.answer in TEXT


def test_stored_prompts_are_balanced_and_apart() -> None:
    lines = [line for _, line in code_prompts()]
    assert {line.split for line in lines} == {"tune", "evaluate"}
    for split in ("tune", "evaluate"):
        workload = load_workload("code", split, num_prompts=2 * len(CODE_TASKS))
        assert workload.tasks == list(CODE_TASKS) and len(workload.prompts) == 2 * len(CODE_TASKS)
    assert len({line.prompt for line in lines}) == len(lines), "no prompt is in both splits"
    for line in lines:
        assert line.answer and line.max_new_tokens <= 250
        if line.task == "edit":
            assert ast.parse(line.answer)
