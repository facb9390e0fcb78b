"""Examples of the report: the drawn tree is the replayed one, and the answer is complete."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest

from autotune.replay.reference_replay import ReplayedRound, rounds
from autotune.report.examples import DecodedExample, answer_parts, data_uri, decoded_example, round_to_draw
from autotune.report.prompts import find_prompts
from autotune.report.sources import Sources
from autotune.report.tree_drawing import draw_tree, node_rows, visible
from autotune.trees.policy import parse_policy
from autotune.trees.tree import new_tree
from tests.report.conftest import QUESTION
from tests.sample_documents import random_trace

SVG = "{http://www.w3.org/2000/svg}"
TREE = {"policy": "eagle2", "depth": 4, "k": 3, "budget": 12}


@pytest.fixture(scope="module")
def found() -> list[ReplayedRound]:
    return list(rounds(random_trace(11, num_tokens=60), 0, parse_policy(TREE)))


class NumberTokens:
    """Shows tokens as numbers in angle brackets, which HTML must escape."""

    has_tokenizer = True

    def text(self, before: list[int], token: int) -> str:
        return f"<{token}>"


def classes(svg: str) -> list[str]:
    return [group.get("class", "") for group in ET.fromstring(svg).iter(f"{SVG}g")]


def test_nodes_do_not_overlap(found: list[ReplayedRound]) -> None:
    for one in found:
        assert one.tree is not None
        size = int(one.tree.size[0])
        row = node_rows(one.tree.parent[:size], one.tree.rank[:size])
        assert len({(int(one.tree.depth[node]), row[node]) for node in range(size)}) == size
        for node in range(1, size):
            assert row[node] >= row[one.tree.parent[node]], "a child is next to or below its parent"


def test_every_node_is_drawn_and_accepted_nodes_are_marked(found: list[ReplayedRound]) -> None:
    for one in found:
        assert one.tree is not None
        size = int(one.tree.size[0])
        texts = [f"<{token}>" for token in one.tree.token[:size]]
        kinds = classes(draw_tree(one.tree, one.path.tolist(), texts, "</svg>", "a & b"))
        assert kinds.count("node accepted") == len(one.path)
        assert kinds.count("node rejected") == size - 1 - len(one.path)
        assert kinds.count("node root") == kinds.count("node own") == 1
    last, alone = found[-1].tree, new_tree(3)
    assert last is not None
    assert "node own" not in classes(draw_tree(last, found[-1].path.tolist(), ["x"] * int(last.size[0]), None, ""))
    alone.size[0] = 1
    assert classes(draw_tree(alone, [], ["a"], "b", "")) == ["node root", "node own"]


@pytest.mark.filterwarnings("error")
def test_tokens_without_a_probability_are_drawn(found: list[ReplayedRound]) -> None:
    """Retrieved ones, and their children."""
    one = next(one for one in found if one.tree is not None and one.tree.size[0] > 2)
    assert one.tree is not None
    size = int(one.tree.size[0])
    before = one.tree.path_logprob[1:size].copy()
    one.tree.path_logprob[1:size] = -np.inf
    svg = draw_tree(one.tree, [], ["a"] * size, None, "")
    one.tree.path_logprob[1:size] = before
    assert "nan" not in svg and svg.count("probability 0.0 %") == size - 1


def test_drawn_round_accepts_most_branches(found: list[ReplayedRound]) -> None:
    drawn = found[round_to_draw(found)]

    def branched(one: ReplayedRound) -> int:
        assert one.tree is not None
        return int((one.tree.rank[one.path] > 0).sum())

    assert branched(drawn) == max(map(branched, found)) > 0
    plain = ReplayedRound(0, 0, None, np.zeros(0, np.int64), widths=(), num_missing=0)
    assert round_to_draw([plain, *found]) == round_to_draw(found) + 1 and round_to_draw([plain]) == 0


def test_answer_parts_add_up_to_the_answer(found: list[ReplayedRound]) -> None:
    trace = random_trace(11, num_tokens=60)
    texts = [f"{token} " for token in trace.forest.answer[: trace.answer_start[1]]]
    parts = answer_parts(found, texts, 2)
    assert texts[0] + "".join(part.accepted + part.own for part in parts) == "".join(texts)
    assert [part.is_drawn for part in parts].index(True) == 2


def test_white_space_is_visible() -> None:
    assert visible(" a\n") == "·a⏎" and visible("") == "∅"


def example_of(sources: Sources, **options: Any) -> DecodedExample:
    prompts = options.get("prompts", find_prompts(sources, None))
    example = decoded_example(sources, prompts, NumberTokens())  # type: ignore[arg-type]
    assert example is not None
    return example


def test_the_example_is_of_a_prompt_with_an_image(sources: Sources) -> None:
    """In the trace, the odd prompts have visual tokens."""
    example = example_of(sources)
    assert (example.policy, example.question) == ("eagle2", f"{QUESTION} 1")
    emitted = "".join(part.accepted + part.own for part in example.answer)
    assert example.num_rounds == len(example.answer) and 1 <= example.drawn <= example.num_rounds
    assert example.tokens_per_round == pytest.approx(len(re.findall(r"<\d+>", emitted)) / example.num_rounds)
    assert classes(example.svg).count("node accepted") == len(example.shown.path)


def test_example_without_its_prompt(sources: Sources) -> None:
    example = example_of(sources, prompts={})
    assert example.question is None and example.images == [] and example.answer


def test_large_images_are_scaled_down() -> None:
    from PIL import Image

    large = Image.effect_noise((2000, 1000), 50).convert("RGB")
    assert len(data_uri(large)) < 600_000 and large.size == (2000, 1000)
