"""The answers of the bundled workload are right: each is parsed and recomputed from the digits in the image."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from autotune.workloads.digits import (
    BLANK,
    CELL_SIZE,
    DIGIT_SIZE,
    IMAGE_SIZE,
    NUM_CELLS,
    TASKS,
    DigitsExample,
    Split,
    _docstrings,
    _passages,
    _scan_bank,
    make_example,
)

Grid = NDArray[np.int64]
GRID_TASKS = [task for task in TASKS if task != "continue"]
EXAMPLES = 8


def grid_of(example: DigitsExample) -> Grid:
    """The rows and columns of digits somewhere on the board, from the classes of its squares."""
    assert example.cells is not None and example.cells.shape == (2 * NUM_CELLS, 2 * NUM_CELLS)
    board = example.cells[::2, ::2]
    rows, columns = (np.flatnonzero((board != BLANK).any(axis)) for axis in (1, 0))
    grid = board[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    assert (grid != BLANK).all() and grid.size == (board != BLANK).sum(), "one grid without holes"
    assert (example.cells != BLANK).sum() == grid.size, (
        "a digit fills the first square of its cell; the other three are background"
    )
    return grid


def examples(task: str, split: Split = "held-out") -> list[tuple[Grid, str]]:
    found = [make_example(split, task, index) for index in range(EXAMPLES)]
    return [(grid_of(example), example.answer) for example in found]


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def row_sentences(answer: str, pattern: str) -> list[list[int]]:
    """The numbers of every sentence "Row n ...": rows must come in order, each once."""
    found = re.findall(rf"Row (\d+){pattern}\.", answer)
    assert [int(row) for row, _ in found] == list(range(1, len(found) + 1))
    return [numbers(rest) for _, rest in found]


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
        seen = np.full(grid.shape, BLANK)
        for digit, places, count in re.findall(r"Digit (\d) is at ([a-f0-9, ]+): (\d+)\.", answer):
            for place in places.split(", "):
                cell = "abcdef".index(place[0]), int(place[1:]) - 1
                assert seen[cell] == BLANK
                seen[cell] = int(digit)
            assert len(places.split(", ")) == int(count)
        np.testing.assert_array_equal(seen, grid)
        nowhere = [int(digit) for digit in re.findall(r"Digit (\d) is nowhere: 0\.", answer)]
        assert nowhere == [digit for digit in range(10) if digit not in grid]


def test_sum() -> None:
    """Every step is right, and the digits that are added are the row's."""
    for grid, answer in examples("sum"):
        rows = row_sentences(answer, r": ([^.]*)")
        assert len(rows) == len(grid)
        for row, found in zip(grid, rows, strict=True):
            total, steps = found[0], np.array(found[1:]).reshape(-1, 2)
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
        found = re.findall(r"Rows (\d) and (\d) make (\d+)\.", answer)
        assert len({(a, b) for a, b, _ in found}) == len(found) >= 5
        assert " ".join(f"Rows {a} and {b} make {n}." for a, b, n in found) == answer
        for a, b, claimed in found:
            assert int(a) < int(b)
            assert int(claimed) == as_number(grid[int(a) - 1]) + as_number(grid[int(b) - 1])


def test_multiply() -> None:
    for grid, answer in examples("multiply"):
        found = re.findall(r"Row (\d) times (\d) makes (\d+)\.", answer)
        assert len(found) == 2 * len(grid)
        for number, (row, factor, claimed) in enumerate(found):
            digits = grid[number // 2]
            assert (int(row), int(factor)) == (number // 2 + 1, digits[0] if number % 2 == 0 else digits[-1])
            assert int(claimed) == as_number(digits) * int(factor)


WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


def test_describe() -> None:
    """Each of the ten stated facts is found and holds."""
    for grid, answer in examples("describe"):
        text = answer.lower()
        assert numbers(text.split(" digits")[0])[-1] == grid.size
        found = 0
        for up, side, digit in corners(text):
            found += 1
            assert grid[-1 if up in ("lower", "bottom") else 0, -1 if side == "right" else 0] == digit
        for row, end, word in re.findall(rf"the ({'|'.join(ORDINALS)}) row (\w+) (?:with|on) (\w+)", text):
            found += 1
            is_first = end in ("starts", "begins", "opens")
            assert grid[ORDINALS.index(row), 0 if is_first else -1] == WORDS.index(word)
        for most, column, digit in re.findall(r"the (\w+) digit of column (\d) is (\d)", text):
            found += 1
            values = grid[:, int(column) - 1]
            assert int(digit) == (values.max() if most in ("largest", "biggest", "highest") else values.min())
        for row, total in re.findall(r"row (\d) (?:sums to|adds up to|has a total of|comes to) (\d+)", text):
            found += 1
            assert grid[int(row) - 1].sum() == int(total)
        for count, word in re.findall(r"(\d+) (?:cells|places|squares) with (\w+)", text):
            found += 1
            assert (grid == WORDS.index(word)).sum() == int(count)
        assert found == 10


def corners(text: str) -> list[tuple[str, str, int]]:
    where = r"(lower|bottom|upper|top) (left|right)"
    phrasings = (rf"in the {where} corner we find a (\d)", rf"the {where} corner holds a (\d)")
    found = [(up, side, int(digit)) for pattern in phrasings for up, side, digit in re.findall(pattern, text)]
    return [*found, *((up, side, int(d)) for d, up, side in re.findall(rf"a (\d) sits at the {where}", text))]


def test_continue() -> None:
    """Prompt and answer are one running text, which begins like a passage of the split."""
    passages = _passages("held-out")
    for index in range(EXAMPLES):
        example = make_example("held-out", "continue", index)
        assert example.image is None and example.cells is None
        prompt = example.prompt.removeprefix("Continue: ").split(" ")
        assert 10 <= len(prompt) < 20
        words = [*prompt, *example.answer.split(" ")]
        assert len(words) == 140
        assert any(" ".join(words).startswith(passage[:200]) for passage in passages)


def test_passages_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process reads the cached passages, unless the cache is damaged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls: list[Path] = []
    monkeypatch.setattr(
        "autotune.workloads.digits._read_docstrings", lambda source: calls.append(source) or ["one", "two"]
    )
    read = _docstrings.__wrapped__
    assert read() == read() == ["one", "two"] and len(calls) == 1
    (cached,) = (tmp_path / "cache" / "autotune").iterdir()
    cached.write_text('["one", "tw')
    assert read() == read() == ["one", "two"] and len(calls) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(cached))  # a file, in which nothing can be cached
    assert read() == ["one", "two"] and len(calls) == 3


def test_passages_are_held_out() -> None:
    train, held_out = set(_passages("train")), set(_passages("held-out"))
    assert not train & held_out and len(train) > len(held_out) > 20


# --------------------------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize("task", GRID_TASKS)
@pytest.mark.parametrize("split", ["train", "held-out"])
def test_the_image_has_ink_where_its_digits_are(task: str, split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    """A square with a digit varies much more than a background square, up to one pixel of jitter."""
    if split == "train":  # 64 variants of 1,400 scans take a while; how many there are does not matter here
        monkeypatch.setattr("autotune.workloads.digits._scan_bank", lambda split, num_variants: _scan_bank(split, 1))
    example = make_example(split, task, 0)
    assert example.image is not None and example.image.shape == (IMAGE_SIZE, IMAGE_SIZE, 3)
    assert example.image.dtype == np.uint8 and (example.image == example.image[:, :, :1]).all()
    squares = example.image[:, :, 0].reshape(2 * NUM_CELLS, DIGIT_SIZE, 2 * NUM_CELLS, DIGIT_SIZE)
    deviation = squares.astype(float).std(axis=(1, 3))
    assert example.cells is not None
    has_digit = example.cells != BLANK
    assert deviation[has_digit].min() > 2 * deviation[~has_digit].max()
    assert IMAGE_SIZE == NUM_CELLS * CELL_SIZE


# ---------------------------------------------------------------------------------------------------------- determinism


@pytest.mark.parametrize("task", TASKS)
def test_an_example_is_a_function_of_its_number(task: str) -> None:
    """The example does not depend on what was made before; another index or split gives another example."""
    first = make_example("held-out", task, 7)
    make_example("held-out", task, 8)
    again = make_example("held-out", task, 7)
    assert (first.task, first.prompt, first.answer) == (task, again.prompt, again.answer)
    for one, other in ((first.image, again.image), (first.cells, again.cells)):
        assert (one is None) == (other is None) == (task == "continue")
        if one is not None and other is not None:
            np.testing.assert_array_equal(one, other)
    assert make_example("held-out", task, 8).answer != first.answer


def test_prompts_vary_and_contain_no_digit() -> None:
    for task in GRID_TASKS:
        prompts = {make_example("held-out", task, index).prompt for index in range(20)}
        assert len(prompts) >= 2
        assert not any(numbers(prompt) for prompt in prompts if "0 to 9" not in prompt)


def test_an_unknown_task_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        make_example("train", "juggle", 0)
