"""Assistants of Gemma 4: tiny models of the real classes against transformers' own candidate generator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autotune.drafters.gemma4_assistant import Gemma4AssistantDraft
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.trees.tree import Tree
from tests.assistants import Stock, agreeing_assistant, new_assistant
from tests.drafters.test_eagle3 import assert_lossless_and_replayed
from tests.families import FAMILIES, Inputs, load, load_processor, random_inputs, save
from tests.obvious import tokens_to

TREE = {"policy": "eagle2", "depth": 3, "k": 2, "budget": 6}
NAMES = ("gemma4_text", "gemma4_text_large", "gemma4", "gemma4_unified")
"""With layers that read keys of earlier ones; with keys that are values, fewer of them in full layers, and experts; with images."""


class Member:
    """A target of a family, and a prompt of every kind."""

    def __init__(self, name: str, folder: Path) -> None:
        family = FAMILIES[name]
        save(family, folder)
        self.folder = folder / "target"
        self.model = load(self.folder)
        processor, rng = load_processor(family, self.folder), np.random.default_rng(4)
        sights = (None, *family.sees)
        self.prompts = {str(sight): random_inputs(family, processor, rng, sight=sight) for sight in sights}


@pytest.fixture(scope="module", params=NAMES)
def member(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Member:
    return Member(request.param, tmp_path_factory.mktemp(request.param))


def greedy(model: Any, inputs: Inputs, number: int) -> list[int]:
    length = inputs["input_ids"].shape[1]
    return model.generate(**inputs, max_new_tokens=number, do_sample=False)[0, length:].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_ordered", [False, True])
@torch.inference_mode()
def test_proposals_are_those_of_transformers(
    member: Member, monkeypatch: pytest.MonkeyPatch, is_ordered: bool
) -> None:
    """At every node of every round: the tokens and how much less probable they are than the best one. The root's best child is
    what transformers' candidate generator drafts first from the same state, and the output is that of ``generate``.
    """
    assistant = new_assistant(member.model, is_ordered=is_ordered)
    target, draft, stock = Target(member.model), Gemma4AssistantDraft(assistant), Stock(member.model, assistant)
    inner = draft.propose
    for inputs in member.prompts.values():
        length, answer, num_checked = inputs["input_ids"].shape[1], greedy(member.model, inputs, 12), 0

        def propose(tree: Tree, frontier: Any, num_proposals: int, coupling: Any) -> Any:
            nonlocal num_checked
            tokens, logprobs = inner(tree, frontier, num_proposals, coupling)
            committed = answer[: draft.length - length]  # noqa: B023 (called in this iteration)
            for row, node in enumerate(frontier):
                path = tokens_to(tree, int(node))
                expected = stock.logits_after(inputs, committed, path[1:])  # noqa: B023
                best = expected[torch.from_numpy(tokens[row]).long()]
                assert expected.argmax() == tokens[row, 0]
                found = torch.from_numpy(logprobs[row] - logprobs[row, 0])
                torch.testing.assert_close(found, best - best[0], atol=1e-3, rtol=0)
                if len(path) == 1:
                    assert stock.drafted(inputs, committed, 1) == [tokens[row, 0]]  # noqa: B023
                num_checked += 1
                following = len(committed) - 1 + len(path)
                if path == answer[len(committed) - 1 : following] and following < len(answer) and num_checked % 2:  # noqa: B023
                    tokens[row, 0] = answer[following]  # noqa: B023 (a true token now and then, that rounds accept some)
            return tokens, logprobs

        monkeypatch.setattr(draft, "propose", propose)
        out = Decoder(target, draft, tree=TREE).generate(**inputs, max_new_tokens=12)
        assert out.sequences[0, length:].tolist() == answer
        assert num_checked > 10 and max(out.stats.accepted_lengths) > 0


def test_decoding_is_lossless_and_replayed(member: Member) -> None:
    """Greedy and sampled, with a draft that is right half of the time."""
    target = Target(member.model)
    draft = agreeing_assistant(target, [*member.prompts.values()], 16)
    assert_lossless_and_replayed(target, draft, member.prompts)
    for inputs in member.prompts.values():
        stats = Decoder(target, draft, tree=TREE).generate(**inputs, max_new_tokens=16).stats
        assert stats.tokens_per_round > 1.5
