"""Explanations agree with their tracebacks, and the failing lines fail as they say."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from autotune.workloads.code.tracebacks import FAILURES, explain_traceback

NAMES = tuple(
    f"{first}{second}" for first in ("red", "blue", "green", "dark") for second in ("box", "list", "key", "row")
)


def test_an_explanation_names_the_last_frame_the_error_and_all_calls() -> None:
    errors = set()
    for seed in range(60):
        prompt, answer = explain_traceback(NAMES, np.random.default_rng(seed))
        frames = re.findall(r'File "(\w+\.py)", line (\d+), in (.+)\n    (.+)', prompt)
        error = prompt.splitlines()[-1].partition(":")[0]
        file, line, function, text = frames[-1]
        assert answer.startswith(
            f"The function `{function}` fails in line {line} of {file}, at `{text}`. It raises {error} "
        )
        for caller, called in itertools.pairwise(frames):
            assert f"line {caller[1]} of {caller[0]} calls `{caller[3]}`" in answer
            assert caller[3].startswith(f"{called[2]}("), "a frame runs the function that the frame above calls"
        errors.add(error)
    assert len(errors) == len(FAILURES)


@pytest.mark.parametrize("failure", FAILURES)
def test_the_line_raises_the_error(failure) -> None:
    """With values that the cause describes."""
    found = failure("a", "b", "c", 7)
    values = {
        "KeyError": {"a": {}},
        "IndexError": {"a": []},
        "AttributeError": {"a": None},
        "NameError": {},
        "TypeError": {"b": None},
        "ZeroDivisionError": {"b": 1, "c": 0},
        "ValueError": {"b": "c"},
        "FileNotFoundError": {"b": "c.txt"},
    }[found.error]
    body = found.line + (" pass" if found.line.endswith(":") else "")
    if found.error == "TypeError":
        exec("def b():\n    pass", values)
    exec(f"def run():\n    {body}", values)
    with pytest.raises(eval(found.error)) as raised:
        values["run"]()
    assert str(raised.value) == found.message
