"""Judging answers without a reference."""

from __future__ import annotations

import pytest

from autotune.workloads.code.judge import is_good, is_valid, repeats_itself

PROMPT = 'Complete the function.\n\n    x = 1\n\n    def f(self, a):\n        """Doc."""\n'


def test_a_completion_is_judged_with_its_function() -> None:
    assert is_valid(PROMPT, "        return a")
    assert not is_valid(PROMPT, "        return (a")
    assert not is_valid(PROMPT, "  return a")
    assert not is_valid(PROMPT, "")


@pytest.mark.parametrize(
    ("task", "answer", "is_ended", "expected"),
    [
        ("complete", "        return a", True, True),
        ("complete", "        return a", False, False),
        ("complete", "        return (a", True, False),
        ("document", "Return the first argument.", True, True),
        ("document", "Return the first argument.", False, False),
        ("document", "Return.", True, False),
        ("document", "Return the first\nargument of it.", True, False),
        ("continue", "x = 2", False, True),
        ("continue", "x = 2", True, False),
    ],
)
def test_an_answer_has_the_form_of_its_task(task: str, answer: str, is_ended: bool, expected: bool) -> None:
    assert is_good(task, PROMPT, answer, [1, 2, 3], is_ended=is_ended) == expected
    assert not is_good(task, PROMPT, answer, [*range(8)] * 3, is_ended=is_ended)


def test_only_open_tasks_are_judged() -> None:
    with pytest.raises(KeyError):
        is_good("edit", PROMPT, "def f(): pass", [1], is_ended=True)


def test_an_answer_repeats_itself_if_a_run_of_tokens_occurs_three_times() -> None:
    run = [*range(8)]
    assert repeats_itself([*run, 8, *run, 9, *run])
    assert not repeats_itself([*run, 8, *run, 9, *run[:7]])
    assert repeats_itself([5] * 10) and not repeats_itself([5] * 9)
    assert not repeats_itself([])
