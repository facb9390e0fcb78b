"""Judging answers without a reference."""

from __future__ import annotations

import pytest

from autotune.workloads.code.judge import first_repetition, good_part, is_valid, repeats_itself

PROMPT = 'Complete the function.\n\n    x = 1\n\n    def f(self, a):\n        """Doc."""\n'


def test_a_completion_is_judged_with_its_function() -> None:
    assert is_valid(PROMPT, "        return a")
    assert not is_valid(PROMPT, "        return (a")
    assert not is_valid(PROMPT, "  return a")
    assert not is_valid(PROMPT, "")


RUN = [*range(8)]


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
    ],
)
def test_an_answer_has_the_form_of_its_task(task: str, answer: str, is_ended: bool, expected: bool) -> None:
    tokens = [*range(30)]
    assert good_part(task, PROMPT, answer, tokens, is_ended=is_ended) == 30 * expected
    assert good_part(task, PROMPT, answer, RUN * 3, is_ended=is_ended) == 0


def test_a_passage_is_good_up_to_where_it_repeats_itself() -> None:
    passage = [*range(48)]
    assert good_part("continue", PROMPT, "x", passage, is_ended=False) == 48
    assert good_part("continue", PROMPT, "x", [*passage, *passage[:7], 99], is_ended=False) == 56
    assert good_part("continue", PROMPT, "x", [*passage, *passage[:8], 99], is_ended=False) == 48
    assert good_part("continue", PROMPT, "x", passage[1:], is_ended=False) == 0
    assert good_part("continue", PROMPT, "x", passage, is_ended=True) == 0


def test_only_open_tasks_are_judged() -> None:
    with pytest.raises(KeyError):
        good_part("edit", PROMPT, "def f(): pass", [1], is_ended=True)


def test_an_answer_repeats_itself_if_a_run_of_tokens_occurs_three_times() -> None:
    assert repeats_itself([*RUN, 8, *RUN, 9, *RUN])
    assert not repeats_itself([*RUN, 8, *RUN, 9, *RUN[:7]])
    assert repeats_itself([5] * 10) and not repeats_itself([5] * 9)
    assert not repeats_itself([])
    assert first_repetition([5] * 9) == 1 and first_repetition([5] * 8) == 8
