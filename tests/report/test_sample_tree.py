"""The tree that is drawn is the tree that was grown."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest

from autotune.acceptance.rounds import Round, rounds
from autotune.report.prompts import find_prompts
from autotune.report.sample_tree import draw_tree, round_to_draw, rows_of, stretches, visible
from autotune.report.samples import Sample, data_uri, samples
from autotune.report.sources import find_sources
from autotune.trees.policy import parse_policy
from autotune.trees.tree import new_tree
from tests.report.conftest import QUESTION, MadeStudy
from tests.sample_documents import random_trace

SVG = "{http://www.w3.org/2000/svg}"
TREE = {"policy": "eagle2", "depth": 4, "k": 3, "budget": 12}


@pytest.fixture(scope="module")
def found() -> list[Round]:
    return list(rounds(random_trace(11, num_tokens=60), 0, parse_policy(TREE)))


class NumberTokens:
    """Every token is its number in brackets, angular ones, as HTML would not like them."""

    is_known = True

    def text(self, before: list[int], token: int) -> str:
        return f"<{token}>"


def classes(svg: str) -> list[str]:
    return [group.get("class", "") for group in ET.fromstring(svg).iter(f"{SVG}g")]


def test_no_two_nodes_stand_in_one_place(found: list[Round]) -> None:
    for one in found:
        assert one.tree is not None
        size = int(one.tree.size[0])
        row = rows_of(one.tree.parent[:size], one.tree.rank[:size])
        assert len({(int(one.tree.depth[node]), row[node]) for node in range(size)}) == size
        for node in range(1, size):
            assert row[node] >= row[one.tree.parent[node]], "a child stands beside or below its parent"


def test_every_node_is_drawn_and_accepted_ones_are_marked(found: list[Round]) -> None:
    for one in found:
        assert one.tree is not None
        size = int(one.tree.size[0])
        texts = [f"<{token}>" for token in one.tree.token[:size]]
        kinds = classes(draw_tree(one.tree, one.path.tolist(), texts, "</svg>", "a & b"))
        assert kinds.count("node accepted") == len(one.path)
        assert kinds.count("node refused") == size - 1 - len(one.path)
        assert kinds.count("node root") == kinds.count("node own") == 1


def test_the_answers_end_has_no_token_of_the_targets_own(found: list[Round]) -> None:
    one = found[-1]
    assert one.tree is not None
    texts = ["x"] * int(one.tree.size[0])
    assert "node own" not in classes(draw_tree(one.tree, one.path.tolist(), texts, None, ""))


def test_a_root_alone_can_be_drawn() -> None:
    tree = new_tree(3)
    tree.size[0] = 1
    assert classes(draw_tree(tree, [], ["a"], "b", "")) == ["node root", "node own"]


def test_the_round_drawn_is_the_one_in_which_branches_paid(found: list[Round]) -> None:
    chosen = found[round_to_draw(found)]

    def branched(one: Round) -> int:
        assert one.tree is not None
        return int((one.tree.rank[one.path] > 0).sum())

    assert branched(chosen) == max(map(branched, found)) > 0
    plain = Round(0, None, np.zeros(0, np.int64), 0)
    assert round_to_draw([plain, *found]) == round_to_draw(found) + 1 and round_to_draw([plain]) == 0


def test_the_stretches_are_the_answer(found: list[Round]) -> None:
    trace = random_trace(11, num_tokens=60)
    texts = [f"{token} " for token in trace.forest.answer[: trace.answer_start[1]]]
    parts = stretches(found, texts, 2)
    assert texts[0] + "".join(part.accepted + part.own for part in parts) == "".join(texts)
    assert [part.is_drawn for part in parts].index(True) == 2


def test_blanks_are_to_be_seen() -> None:
    assert visible(" a\n") == "·a⏎" and visible("") == "∅"


# ------------------------------------------------------------------------------------------------------------------ samples


def sampled(made: MadeStudy, **options: Any) -> list[Sample]:
    sources = find_sources(made.profile_path)
    return samples(sources, options.get("prompts", find_prompts(sources, None)), NumberTokens())  # type: ignore[arg-type]


def test_every_point_has_a_sample_of_its_own_prompts(made: MadeStudy) -> None:
    first, second = sampled(made)
    assert (first.when, first.policy, first.question) == ("workload read", "chain", f"{QUESTION} 0")
    # Prompts 1 and 3 are of no condition; of them only the odd ones of the trace have visual tokens.
    assert (second.when, second.policy, second.question) == ("any other request", "eagle2", f"{QUESTION} 1")
    assert len(first.images) == 1 and first.images[0].startswith("data:image/png;base64,")
    for one in (first, second):
        emitted = "".join(part.accepted + part.own for part in one.answer)
        assert one.num_rounds == len(one.answer) and 1 <= one.drawn <= one.num_rounds
        assert one.tokens_per_round == pytest.approx(len(re.findall(r"<\d+>", emitted)) / one.num_rounds)
        assert classes(one.svg).count("node accepted") == one.accepted


def test_a_sample_without_its_prompt(made: MadeStudy) -> None:
    for one in sampled(made, prompts={}):
        assert one.question is None and one.images == [] and one.answer


def test_large_images_are_made_small() -> None:
    from PIL import Image

    large = Image.effect_noise((2000, 1000), 50).convert("RGB")
    assert len(data_uri(large)) < 600_000 and large.size == (2000, 1000)
