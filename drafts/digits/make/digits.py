"""Questions about grids of real handwritten digits, and passages of documentation to continue.

Images are composed from scikit-learn's 1,797 handwritten digits. Scans 0-1399 are for training, 1400-1796 are held out,
so no held-out image contains a scan that a bundled model was trained on. An example is a pure function of ``(split,
task, index)``, and every machine makes the same example. Only the passages of ``continue`` are stored, docstrings of
Python 3.11's standard library of at least 200 ASCII characters. ``../workload.jsonl`` has held-out examples: 0 to 7 of
each task for tuning, and 100,000 to 100,007 for evaluation.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Split = Literal["train", "held-out"]

IMAGE_SIZE = 192  # pixels, both sides
CELL_SIZE = 32  # pixels of one cell: 6 x 6 cells fill the image
DIGIT_SIZE = 16  # pixels of a digit, which covers a quarter of its cell; the rest is background
NUM_CELLS = IMAGE_SIZE // CELL_SIZE
FIRST_HELD_OUT_SCAN = 1400
BLANK = 10  # the class of a cell without a digit

TASKS = ("read", "count", "sum", "sort", "add", "multiply", "describe", "continue")
MAX_NEW_TOKENS = 250  # bound of every answer; ``continue`` stops at PASSAGE_TOKENS
PASSAGE_TOKENS = 128

Grid = NDArray[np.int64]  # [rows, columns], digit values


@dataclass(frozen=True)
class DigitsExample:
    """One question with its reference answer. ``image`` is uint8 [192, 192, 3], or None for a text-only task."""

    task: str
    prompt: str
    answer: str  # for ``continue``: more than PASSAGE_TOKENS tokens, without an end
    image: NDArray[np.uint8] | None
    cells: Grid | None  # [12, 12] digit in each DIGIT_SIZE square, or BLANK: labels of the grounding loss


@functools.cache
def _scans() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    # The file of ``sklearn.datasets.load_digits``, read directly: importing scikit-learn takes more than a second.
    package = importlib.util.find_spec("sklearn")
    assert package is not None and package.origin is not None
    rows = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8).astype(np.float32) / 16.0, rows[:, -1].astype(np.int64)


@functools.cache
def _scan_bank(split: Split, num_variants: int) -> tuple[NDArray[np.float32], list[NDArray[np.int64]]]:
    """Scans enlarged to DIGIT_SIZE [scans, variants, 16, 16], and the scan indices of each digit.

    Variant 0 is the unchanged scan. The others, for training only, are rotated, sheared, scaled, shifted, warped and
    thickened: the held-out scans are of other writers, whose digits are read at 98 % with warping and 95 % without.
    """
    from scipy.ndimage import map_coordinates

    images, labels = _scans()
    is_in_split = (np.arange(len(images)) < FIRST_HELD_OUT_SCAN) == (split == "train")
    images, labels = images[is_in_split], labels[is_in_split]
    rng = np.random.default_rng(20240)
    bank = np.empty((len(images), num_variants, DIGIT_SIZE, DIGIT_SIZE), np.float32)
    scale = images.shape[-1] / DIGIT_SIZE
    grid = np.mgrid[0:DIGIT_SIZE, 0:DIGIT_SIZE].reshape(2, -1) - (DIGIT_SIZE - 1) / 2  # pixels from the centre
    knots = (grid - grid.min()) / np.ptp(grid) * 2  # the same points on a 3 x 3 lattice of displacements
    for scan, image in enumerate(images):
        for variant in range(num_variants):
            points, gamma = grid * scale, 1.0
            if variant:
                angle, shear = rng.uniform(-0.4, 0.4, 2)
                rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
                matrix = rotation @ np.array([[1.0, shear], [0.0, 1.0]]) @ np.diag(rng.uniform(0.77, 1.3, 2))
                lattices = rng.normal(0.0, 1.0, (2, 3, 3))
                warp = np.stack([map_coordinates(lattice, knots, order=1) for lattice in lattices])
                points = matrix @ points + warp + rng.uniform(-0.7, 0.7, (2, 1))
                gamma = rng.uniform(0.6, 1.6)
            ink = map_coordinates(image, points + (image.shape[0] - 1) / 2, order=1).clip(0.0, 1.0) ** gamma
            bank[scan, variant] = ink.reshape(DIGIT_SIZE, DIGIT_SIZE)
    return bank, [np.flatnonzero(labels == digit) for digit in range(10)]


def _draw_grid(grid: Grid, split: Split, rng: Generator) -> tuple[NDArray[np.uint8], Grid]:
    """Draw ``grid`` at a random position of a 6 x 6 board; also returns the classes of its DIGIT_SIZE squares."""
    bank, scans_of_digit = _scan_bank(split, num_variants=64 if split == "train" else 1)
    rows, columns = grid.shape
    top, left = rng.integers(NUM_CELLS - rows + 1), rng.integers(NUM_CELLS - columns + 1)
    cells = np.full((NUM_CELLS, NUM_CELLS), BLANK, np.int64)
    cells[top : top + rows, left : left + columns] = grid
    canvas = np.zeros((IMAGE_SIZE, IMAGE_SIZE), np.float32)
    for (row, column), digit in np.ndenumerate(cells):
        if digit == BLANK:
            continue
        scan = rng.choice(scans_of_digit[digit])
        cell = bank[scan, rng.integers(bank.shape[1])]
        down, right = rng.integers(-1, 2, 2)  # jitter of one pixel
        y, x = row * CELL_SIZE, column * CELL_SIZE
        canvas[y : y + DIGIT_SIZE, x : x + DIGIT_SIZE] = np.roll(cell, (down, right), (0, 1))
    ink, paper = rng.uniform(0.75, 1.0), rng.uniform(0.0, 0.12)
    shaded = paper + (ink - paper) * canvas + rng.normal(0.0, 0.03, canvas.shape)
    grey = (shaded.clip(0.0, 1.0) * 255).astype(np.uint8)
    squares = np.full((IMAGE_SIZE // DIGIT_SIZE,) * 2, BLANK, np.int64)
    squares[:: CELL_SIZE // DIGIT_SIZE, :: CELL_SIZE // DIGIT_SIZE] = cells
    return np.repeat(grey[:, :, None], 3, axis=2), squares


def _listing(values: NDArray[np.int64] | list[int]) -> str:
    return ", ".join(str(value) for value in values)


def _number(row: NDArray[np.int64]) -> int:
    return int("".join(str(digit) for digit in row))


def _read(grid: Grid, rng: Generator) -> str:
    rows = " ".join(f"Row {r + 1} reads {_listing(row)}." for r, row in enumerate(grid))
    num_rows, num_columns = grid.shape
    return f"The grid has {num_rows} rows and {num_columns} columns. {rows} That makes {grid.size} digits in all."


def _count(grid: Grid, rng: Generator) -> str:
    parts = []
    for digit in range(10):
        cells = [f"{'abcdef'[r]}{c + 1}" for r, c in zip(*np.nonzero(grid == digit), strict=True)]
        positions = f"at {', '.join(cells)}" if cells else "nowhere"
        parts.append(f"Digit {digit} is {positions}: {len(cells)}.")
    return " ".join(parts)


def _sum(grid: Grid, rng: Generator) -> str:
    parts = []
    for r, row in enumerate(grid):
        totals = np.cumsum(row)
        steps = ", ".join(f"+ {digit} = {total}" for digit, total in zip(row[1:], totals[1:], strict=True))
        parts.append(f"Row {r + 1}: {row[0]} {steps}.")
    return " ".join(parts) + f" All rows make {grid.sum()}."


def _sort(grid: Grid, rng: Generator) -> str:
    parts = [f"Row {r + 1} in order: {_listing(np.sort(row))}." for r, row in enumerate(grid)]
    return " ".join(parts) + f" Smallest {grid.min()}, largest {grid.max()}."


def _add(grid: Grid, rng: Generator) -> str:
    pairs = [(a, b) for a in range(len(grid)) for b in range(a + 1, len(grid))][:9]
    return " ".join(f"Rows {a + 1} and {b + 1} make {_number(grid[a]) + _number(grid[b])}." for a, b in pairs)


def _multiply(grid: Grid, rng: Generator) -> str:
    factors = [(r, row, int(factor)) for r, row in enumerate(grid) for factor in (row[0], row[-1])]
    return " ".join(f"Row {r + 1} times {factor} makes {_number(row) * factor}." for r, row, factor in factors)


_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


def _describe(grid: Grid, rng: Generator) -> str:
    """Facts about the grid in random order and phrasing: almost every sentence has alternatives."""

    def pick(*options: str) -> str:
        return str(rng.choice(list(options)))

    def corner() -> str:
        up, side = rng.integers(2), rng.integers(2)
        digit = grid[-1 if up else 0, -1 if side else 0]
        name = f"{pick('lower', 'bottom') if up else pick('upper', 'top')} {'right' if side else 'left'}"
        return pick(
            f"in the {name} corner we find a {digit}",
            f"the {name} corner holds a {digit}",
            f"a {digit} sits at the {name}",
        )

    def edge() -> str:
        r = rng.integers(len(grid))
        if rng.integers(2):
            return f"the {_ORDINALS[r]} row {pick('starts', 'begins', 'opens')} with {_WORDS[grid[r, 0]]}"
        return f"the {_ORDINALS[r]} row {pick('ends', 'closes', 'finishes')} {pick('with', 'on')} {_WORDS[grid[r, -1]]}"

    def extreme() -> str:
        c = rng.integers(grid.shape[1])
        if rng.integers(2):
            return f"{pick('the largest', 'the biggest', 'the highest')} digit of column {c + 1} is {grid[:, c].max()}"
        return f"{pick('the smallest', 'the lowest', 'the least')} digit of column {c + 1} is {grid[:, c].min()}"

    def total() -> str:
        r = rng.integers(len(grid))
        return f"row {r + 1} {pick('sums to', 'adds up to', 'has a total of', 'comes to')} {grid[r].sum()}"

    def tally() -> str:
        digit = rng.integers(10)
        return f"{pick('there are', 'we count', 'one can see')} {(grid == digit).sum()} {pick('cells', 'places', 'squares')} with {_WORDS[digit]}"

    opening = pick("This is", "Here we see", "The picture shows", "We look at")
    sentences = [f"{opening} {pick('a grid', 'a table', 'a board')} of {grid.size} digits"]
    facts = [corner, corner, edge, edge, extreme, extreme, total, total, tally, tally]
    rng.shuffle(facts)  # type: ignore[arg-type]
    while facts:
        sentence = facts.pop()()
        if facts and rng.random() < 0.5:
            sentence += pick(", and ", ", while ", "; ") + facts.pop()()
        sentences.append(pick("", "", "Also, ", "Moreover, ", "Then ") + sentence)
    return " ".join(s[0].upper() + s[1:] + "." for s in sentences)


_ANSWERS = dict(zip(TASKS, (_read, _count, _sum, _sort, _add, _multiply, _describe), strict=False))
_PROMPTS = {
    "read": ["Read the digits row by row.", "What digits does the grid show?", "Please read this grid aloud."],
    "count": [
        "Where is each digit?",
        "List the places of every digit and count them.",
        "Find every digit from 0 to 9.",
    ],
    "sum": ["Add up each row step by step.", "Give the running sums of the rows.", "Sum every row, showing each step."],
    "sort": ["Sort each row.", "Put the digits of each row in order.", "Give every row in ascending order."],
    "add": [
        "Read rows as numbers and add pairs of them.",
        "Add the rows as numbers, two at a time.",
        "What do pairs of rows add to?",
    ],
    "multiply": [
        "Multiply each row by its first and last digit.",
        "Read rows as numbers; multiply by first and last digit.",
    ],
    "describe": ["Describe the picture.", "What can you tell about this image?", "Say some things about the grid."],
}


@functools.cache
def _passages(split: Split) -> list[str]:
    """Docstrings of the standard library, one line each, long enough to be split in two; 1 in 10 is held out by its
    hash.
    """
    passages: list[str] = json.loads(gzip.decompress((Path(__file__).parent / "passages.json.gz").read_bytes()))
    is_held_out = {text: hashlib.sha256(text.encode()).digest()[0] % 10 == 0 for text in passages}
    return [text for text, held_out in is_held_out.items() if held_out == (split == "held-out")]


def _passage(split: Split, rng: Generator) -> tuple[str, str]:
    """The beginning of a passage and its continuation; further passages are appended when one is too short."""
    passages = _passages(split)
    words = str(rng.choice(passages)).split(" ")
    # Training draws a random window, so that it sees all of long docstrings; evaluation starts at the beginning.
    words = words[int(rng.integers(max(1, len(words) - 40))) :] if split == "train" else words
    while len(words) < 140:
        words += str(rng.choice(passages)).split(" ")
    cut = int(rng.integers(10, 20))
    return "Continue: " + " ".join(words[:cut]), " ".join(words[cut:140])


def make_example(split: Split, task: str, index: int) -> DigitsExample:
    """The example ``index`` of a task; the same on every machine.

    Raises:
        KeyError: the task is not one of TASKS.
    """
    if task not in TASKS:
        raise KeyError(task)
    rng = np.random.default_rng([TASKS.index(task), index, 0 if split == "train" else 1])
    if task == "continue":
        prompt, answer = _passage(split, rng)
        return DigitsExample(task, prompt, answer, image=None, cells=None)
    rows, columns = rng.integers(5, NUM_CELLS + 1, 2)
    grid = rng.integers(0, 10, (rows, columns))
    answer = _ANSWERS[task](grid, rng)
    image, cells = _draw_grid(grid, split, rng)
    return DigitsExample(task, str(rng.choice(_PROMPTS[task])), answer, image, cells)
