"""Pairs are decoded in turns, in random order, by workers that are restarted, and never twice."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from autotune.check.pairs import PairRunner, TimedPair
from autotune.errors import NotComparable
from autotune.files import read_lines
from tests.check.fake_workers import BASE, HEAD, World, requests


def runner(world: World, folder: Path, **options: Any) -> PairRunner:
    known: dict[str, Any] = {"seed": 0, "ledger": folder / "pairs.jsonl", "clock": world.clock}
    return PairRunner(BASE, HEAD, world.launch, requests(), **{**known, **options})


def run(world: World, folder: Path, num_pairs: int, **options: Any) -> list[TimedPair]:
    with runner(world, folder, **options) as pairs:
        pairs.run_to(num_pairs)
        return pairs.pairs


def test_a_pair_is_the_ratio_of_head_to_base_per_token(tmp_path: Path) -> None:
    world = World(ms=lambda side, prompt: 110.0 if side == "head" else 100.0)
    (pair, *_) = run(world, tmp_path, 1)
    assert (pair.base_ms, pair.head_ms) == (10.0, 11.0)  # ten tokens after the first
    assert pair.log_ratio == pytest.approx(math.log(1.1))
    assert pair.plain_log_ratio == 0.0


def test_all_prompts_take_turns(tmp_path: Path) -> None:
    pairs = run(World(), tmp_path, 12)
    for turn in range(4):
        assert {pair.prompt for pair in pairs[3 * turn : 3 * turn + 3]} == {f"prompt {n}" for n in range(3)}
    assert len({tuple(pair.prompt for pair in pairs[3 * turn : 3 * turn + 3]) for turn in range(4)}) > 1


def test_the_order_is_random_and_reproducible(tmp_path: Path) -> None:
    pairs = run(World(), tmp_path, 40)
    counted = Counter(pair.head_first for pair in pairs)
    assert 10 <= counted[True] <= 30
    again = run(World(), tmp_path / "again", 40)
    other = run(World(), tmp_path / "other", 40, seed=1)
    assert [pair.head_first for pair in again] == [pair.head_first for pair in pairs]
    assert [pair.head_first for pair in other] != [pair.head_first for pair in pairs]


def test_the_recorded_order_is_the_order_of_decoding(tmp_path: Path) -> None:
    """Compared with the log of the workers."""
    world = World()
    with runner(world, tmp_path) as pairs:
        for number in range(10):
            before = len(world.log)
            pairs.run_to(number + 1)
            seen = [entry for entry in world.log[before:] if entry[0] in ("base", "head")]
            tuned = [entry[0] for entry in seen if entry[2] == "tuned"][-2:]
            assert tuned == (["head", "base"] if pairs.pairs[-1].head_first else ["base", "head"])


def test_both_sides_are_restarted_and_warmed_up_every_five_pairs(tmp_path: Path) -> None:
    world = World()
    pairs = run(world, tmp_path, 12)
    assert [pair.launch for pair in pairs] == [0] * 5 + [1] * 5 + [2] * 2
    done = Counter(entry[:1] if entry[0] in ("launch", "close") else entry[::2] for entry in world.log)
    assert done[("launch",)] == done[("close",)] == 6
    # Every launch warms the two points of the prompts to come, and plain decoding; every fourth pair decodes plainly.
    assert done["base", "tuned"] == done["head", "tuned"] == 12 + 3 * 2
    assert done["base", "plain"] == done["head", "plain"] == 3 + 3
    assert world.num_short == 3 * 2 * (2 + 1), "only warm-ups are short"


def test_nothing_is_lost_and_nothing_done_twice(tmp_path: Path) -> None:
    """Interrupted in the seventh pair, the next run continues with the seventh, in new processes."""

    def interrupt(side: str, prompt: str) -> float:
        if len(read_lines(tmp_path / "pairs.jsonl")) == 6:
            raise KeyboardInterrupt
        return 100.0

    world = World(ms=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(world, tmp_path, 20)
    assert world.log[-2:] == [("close", "base"), ("close", "head")], "no process is left"
    with (tmp_path / "pairs.jsonl").open("a") as file:
        file.write('{"number": 6, "launch"')  # torn by a crash
    world = World()
    pairs = run(world, tmp_path, 12)
    assert [pair.number for pair in pairs] == list(range(12))
    assert [pair.launch for pair in pairs] == [0] * 5 + [1] + [2] * 5 + [3]
    whole = run(World(), tmp_path / "whole", 12)
    assert [(pair.prompt, pair.head_first) for pair in pairs] == [(pair.prompt, pair.head_first) for pair in whole]
    assert sum(entry == ("launch", "base") for entry in world.log) == 2


def test_different_answers_are_not_comparable(tmp_path: Path) -> None:
    world = World(answer=lambda side, prompt: side)
    with pytest.raises(NotComparable, match=r"prompt \d: base \(the base\) and head answer differently"):
        run(world, tmp_path, 1)
    assert len(run(world, tmp_path / "lossy", 3, must_agree=False)) == 3


def test_outliers_are_kept(tmp_path: Path) -> None:
    times = iter([100.0] * 8 + [1e5] + [100.0] * 100)  # four warm-ups, then two of each pair
    pairs = run(World(ms=lambda side, prompt: next(times)), tmp_path, 30)
    assert sorted(abs(pair.log_ratio) for pair in pairs)[-2:] == pytest.approx([0.0, math.log(1e3)])
    assert len(pairs) == 30
