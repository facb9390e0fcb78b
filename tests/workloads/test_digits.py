"""Answers of the bundled workload are correct: each is parsed and recomputed from the digits in the image."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import pytest
from numpy.typing import NDArray

from autotune.workloads.digits import (
    BLANK,
    CELL_SIZE,
    DIGIT_SIZE,
    FIRST_HELD_OUT_SCAN,
    IMAGE_SIZE,
    NUM_CELLS,
    TASKS,
    DigitsExample,
    Split,
    _passages,
    _scan_bank,
    make_example,
)

Grid = NDArray[np.int64]
GRID_TASKS = [task for task in TASKS if task != "continue"]
EXAMPLES = 8


def grid_of(example: DigitsExample) -> Grid:
    """The grid of digits, from the classes of the squares of the board."""
    assert example.cells is not None and example.cells.shape == (2 * NUM_CELLS, 2 * NUM_CELLS)
    board = example.cells[::2, ::2]
    rows, columns = (np.flatnonzero((board != BLANK).any(axis)) for axis in (1, 0))
    grid = board[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    assert (grid != BLANK).all() and grid.size == (board != BLANK).sum(), "one grid without holes"
    assert (example.cells != BLANK).sum() == grid.size, "a digit covers only the first of the four squares of its cell"
    return grid


def examples(task: str, split: Split = "held-out") -> list[tuple[Grid, str]]:
    made = [make_example(split, task, index) for index in range(EXAMPLES)]
    return [(grid_of(example), example.answer) for example in made]


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def row_sentences(answer: str, pattern: str) -> list[list[int]]:
    """The numbers in every sentence "Row n ...". Rows must be in order, each once."""
    sentences = re.findall(rf"Row (\d+){pattern}\.", answer)
    assert [int(row) for row, _ in sentences] == list(range(1, len(sentences) + 1))
    return [numbers(rest) for _, rest in sentences]


def as_number(row: Grid) -> int:
    return int("".join(str(digit) for digit in row))


# -------------------------------------------------------------------------------------------------------------- answers


def test_read() -> None:
    for grid, answer in examples("read"):
        assert row_sentences(answer, r" reads ([^.]*)") == grid.tolist()
        assert answer.startswith(f"The grid has {len(grid)} rows and {grid.shape[1]} columns.")
        assert answer.endswith(f"That makes {grid.size} digits in all.")


def test_count() -> None:
    """Cells are named by a letter for the row and a number for the column, each cell once."""
    for grid, answer in examples("count"):
        rebuilt = np.full(grid.shape, BLANK)
        for digit, cells, count in re.findall(r"Digit (\d) is at ([a-f0-9, ]+): (\d+)\.", answer):
            for name in cells.split(", "):
                cell = "abcdef".index(name[0]), int(name[1:]) - 1
                assert rebuilt[cell] == BLANK
                rebuilt[cell] = int(digit)
            assert len(cells.split(", ")) == int(count)
        np.testing.assert_array_equal(rebuilt, grid)
        nowhere = [int(digit) for digit in re.findall(r"Digit (\d) is nowhere: 0\.", answer)]
        assert nowhere == [digit for digit in range(10) if digit not in grid]


def test_sum() -> None:
    """Every step is correct, and the digits added are those of the row."""
    for grid, answer in examples("sum"):
        rows = row_sentences(answer, r": ([^.]*)")
        assert len(rows) == len(grid)
        for row, (total, *rest) in zip(grid, rows, strict=True):
            steps = np.array(rest).reshape(-1, 2)
            assert [total, *steps[:, 0]] == row.tolist()
            for digit, claimed in steps:
                total += digit
                assert claimed == total
        assert numbers(answer.split("All rows make")[1]) == [grid.sum()]


def test_sort() -> None:
    for grid, answer in examples("sort"):
        assert row_sentences(answer, r" in order: ([^.]*)") == np.sort(grid, axis=1).tolist()
        assert answer.endswith(f"Smallest {grid.min()}, largest {grid.max()}.")


def test_add() -> None:
    """Pairs of different rows, each named once."""
    for grid, answer in examples("add"):
        additions = re.findall(r"Rows (\d) and (\d) make (\d+)\.", answer)
        assert len({(a, b) for a, b, _ in additions}) == len(additions) >= 5
        assert " ".join(f"Rows {a} and {b} make {n}." for a, b, n in additions) == answer
        for a, b, claimed in additions:
            assert int(a) < int(b)
            assert int(claimed) == as_number(grid[int(a) - 1]) + as_number(grid[int(b) - 1])


def test_multiply() -> None:
    for grid, answer in examples("multiply"):
        products = re.findall(r"Row (\d) times (\d) makes (\d+)\.", answer)
        assert len(products) == 2 * len(grid)
        for number, (row, factor, claimed) in enumerate(products):
            digits = grid[number // 2]
            assert (int(row), int(factor)) == (number // 2 + 1, digits[0] if number % 2 == 0 else digits[-1])
            assert int(claimed) == as_number(digits) * int(factor)


WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


def test_describe() -> None:
    """All ten stated facts are recognized and true."""
    for grid, answer in examples("describe"):
        text = answer.lower()
        assert numbers(text.split(" digits")[0])[-1] == grid.size
        num_facts = 0
        for up, side, digit in corners(text):
            num_facts += 1
            assert grid[-1 if up in ("lower", "bottom") else 0, -1 if side == "right" else 0] == digit
        for row, end, word in re.findall(rf"the ({'|'.join(ORDINALS)}) row (\w+) (?:with|on) (\w+)", text):
            num_facts += 1
            is_first = end in ("starts", "begins", "opens")
            assert grid[ORDINALS.index(row), 0 if is_first else -1] == WORDS.index(word)
        for most, column, digit in re.findall(r"the (\w+) digit of column (\d) is (\d)", text):
            num_facts += 1
            values = grid[:, int(column) - 1]
            assert int(digit) == (values.max() if most in ("largest", "biggest", "highest") else values.min())
        for row, total in re.findall(r"row (\d) (?:sums to|adds up to|has a total of|comes to) (\d+)", text):
            num_facts += 1
            assert grid[int(row) - 1].sum() == int(total)
        for count, word in re.findall(r"(\d+) (?:cells|places|squares) with (\w+)", text):
            num_facts += 1
            assert (grid == WORDS.index(word)).sum() == int(count)
        assert num_facts == 10


def corners(text: str) -> list[tuple[str, str, int]]:
    where = r"(lower|bottom|upper|top) (left|right)"
    phrasings = (rf"in the {where} corner we find a (\d)", rf"the {where} corner holds a (\d)")
    facts = [(up, side, int(digit)) for pattern in phrasings for up, side, digit in re.findall(pattern, text)]
    return [*facts, *((up, side, int(d)) for d, up, side in re.findall(rf"a (\d) sits at the {where}", text))]


def test_continue() -> None:
    """Prompt and answer together are one text that begins like a passage of the split."""
    passages = _passages("held-out")
    for index in range(EXAMPLES):
        example = make_example("held-out", "continue", index)
        assert example.image is None and example.cells is None
        prompt = example.prompt.removeprefix("Continue: ").split(" ")
        assert 10 <= len(prompt) < 20
        words = [*prompt, *example.answer.split(" ")]
        assert len(words) == 140
        assert any(" ".join(words).startswith(passage[:200]) for passage in passages)


def test_training_scans_are_distorted() -> None:
    """Variant 0 is the enlarged scan; another variant differs from it, in the range of ink, and keeps its digit's ink roughly."""
    bank, scans_of_digit = _scan_bank.__wrapped__("train", 2)
    assert bank.shape == (FIRST_HELD_OUT_SCAN, 2, DIGIT_SIZE, DIGIT_SIZE) and sum(map(len, scans_of_digit)) == len(bank)
    assert bank.min() >= 0.0 and bank.max() <= 1.0
    plain, distorted = bank[:, 0].reshape(len(bank), -1), bank[:, 1].reshape(len(bank), -1)
    assert (np.abs(plain - distorted).mean(1) > 0.01).all()
    assert 0.6 < distorted.sum() / plain.sum() < 1.6


def test_passages_are_the_same_with_every_version_of_python() -> None:
    example = make_example("held-out", "continue", 0)
    digest = hashlib.sha256(f"{example.prompt} {example.answer}".encode()).hexdigest()
    assert digest == "d5be986196aaa8e527deabd397949024df6f2096aabc46f427bf39d8013e82e0"


def test_passages_are_held_out() -> None:
    train, held_out = set(_passages("train")), set(_passages("held-out"))
    assert not train & held_out and len(train) > len(held_out) > 20


# --------------------------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_image_has_ink_where_its_digits_are(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """The brightness of a square with a digit varies much more than that of a background square."""
    # One variant of each scan instead of 64, which take ten seconds to make.
    monkeypatch.setattr("autotune.workloads.digits._scan_bank", lambda split, num_variants: _scan_bank(split, 1))
    for task in GRID_TASKS:
        check_ink(make_example(split, task, 0))


def check_ink(example: DigitsExample) -> None:
    assert example.image is not None and example.image.shape == (IMAGE_SIZE, IMAGE_SIZE, 3)
    assert example.image.dtype == np.uint8 and (example.image == example.image[:, :, :1]).all()
    squares = example.image[:, :, 0].reshape(2 * NUM_CELLS, DIGIT_SIZE, 2 * NUM_CELLS, DIGIT_SIZE)
    deviation = squares.astype(float).std(axis=(1, 3))
    assert example.cells is not None
    has_digit = example.cells != BLANK
    assert deviation[has_digit].min() > 2 * deviation[~has_digit].max()
    assert IMAGE_SIZE == NUM_CELLS * CELL_SIZE


# ---------------------------------------------------------------------------------------------------------- determinism


def test_example_is_a_function_of_its_index() -> None:
    """An example does not depend on earlier calls, and another index gives another example."""
    for task in TASKS:
        first = make_example("held-out", task, 7)
        other = make_example("held-out", task, 8)
        again = make_example("held-out", task, 7)
        assert (first.task, first.prompt, first.answer) == (task, again.prompt, again.answer)
        assert (first.image is None) == (first.cells is None) == (task == "continue")
        np.testing.assert_equal((first.image, first.cells), (again.image, again.cells))
        assert other.answer != first.answer, task


def test_prompts_vary_and_contain_no_digit() -> None:
    for task in GRID_TASKS:
        prompts = {make_example("held-out", task, index).prompt for index in range(20)}
        assert len(prompts) >= 2
        assert not any(numbers(prompt) for prompt in prompts if "0 to 9" not in prompt)


def test_unknown_task() -> None:
    with pytest.raises(KeyError):
        make_example("train", "juggle", 0)
