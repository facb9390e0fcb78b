"""Examples of the report: the drawn tree is the replayed one, and the answer is complete."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autotune.replay.reference_replay import ReplayedRound, rounds
from autotune.report.examples import DecodedExample, TreeNode, data_uri, decoded_example, find_prompts, round_to_draw
from autotune.report.sources import Sources
from autotune.trees.policy import parse_policy
from tests.report.conftest import QUESTION
from tests.sample_documents import random_trace

TREE = {"policy": "eagle2", "depth": 4, "k": 3, "budget": 12}


@pytest.fixture(scope="module")
def found() -> list[ReplayedRound]:
    return list(rounds(random_trace(11, num_tokens=60), 0, parse_policy(TREE)))


class NumberTokens:
    """Shows tokens as numbers in angle brackets, which HTML must escape."""

    tokenizer = "by hand"

    def text(self, before: list[int], token: int) -> str:
        return f"<{token}>"


def nodes_of(root: TreeNode) -> list[TreeNode]:
    return [root, *(node for child in root.children for node in nodes_of(child))]


def test_drawn_round_accepts_most_branches(found: list[ReplayedRound]) -> None:
    drawn = found[round_to_draw(found)]

    def branched(one: ReplayedRound) -> int:
        assert one.tree is not None
        return int((one.tree.rank[one.path] > 0).sum())

    assert branched(drawn) == max(map(branched, found)) > 0
    plain = ReplayedRound(0, None, np.zeros(0, np.int64), widths=(), num_missing=0)
    assert round_to_draw([plain, *found]) == round_to_draw(found) + 1 and round_to_draw([plain]) == 0


def example_of(sources: Sources, **options: Any) -> DecodedExample:
    prompts = options.get("prompts", find_prompts(sources, None))
    example = decoded_example(sources, prompts, NumberTokens())  # type: ignore[arg-type]
    assert example is not None
    return example


def test_the_example_is_of_a_prompt_with_an_image(sources: Sources) -> None:
    """In the trace, the odd prompts have visual tokens."""
    example = example_of(sources)
    assert (example.policy, example.question) == ("eagle2", f"{QUESTION} 1")
    assert example.rounds[example.drawn - 1] is example.shown
    assert example.tokens_per_round == pytest.approx((len(example.texts) - 1) / len(example.rounds))
    assert example.root is not None and example.shown.tree is not None
    nodes = nodes_of(example.root)
    assert len(nodes) == example.shown.tree.size[0] == 1 + example.shown.num_nodes
    assert [node.text for node in nodes if node.is_accepted][1:] == [
        f"<{example.shown.tree.token[node]}>" for node in example.shown.path
    ]
    for node in nodes:
        assert sum(child.share for child in node.children) <= 1.001


def test_example_without_its_prompt(sources: Sources) -> None:
    example = example_of(sources, prompts={})
    assert example.question is None and example.images == [] and example.texts


def test_large_images_are_scaled_down() -> None:
    from PIL import Image

    large = Image.effect_noise((2000, 1000), 50).convert("RGB")
    assert len(data_uri(large)) < 600_000 and large.size == (2000, 1000)
