"""Drafts that fit their target nearly: other tokens, a shorter context, another vision tower."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from autotune.drafters.draft import AnswerToRecord, DraftNotice
from autotune.drafters.independent import IndependentDraft
from autotune.drafters.retrieval import RetrievalDraft
from autotune.errors import UserError
from autotune.replay.trace import ForestBounds
from autotune.runtime.decoder import Decoder
from tests.drafters.test_eagle3 import write_head
from tests.tiny_models import Inputs, Pair, copy_common_weights, new_llama, sharpen

NEW_TOKENS = 24
TREE = {"policy": "eagle2", "k": 3, "depth": 3, "budget": 8}


class Words:
    """A tokenizer of which only the vocabulary is used."""

    def __init__(self, size: int, added: dict[int, str]) -> None:
        self.size, self.added_tokens_decoder = size, added

    def get_vocab(self) -> dict[str, int]:
        names = {number: f"word {number}" for number in range(self.size)} | self.added_tokens_decoder
        return {name: number for number, name in names.items()}


def llamas(target_size: int, draft_size: int, **config: Any) -> tuple[Any, Any]:
    """A target, and its draft of one layer."""
    torch.manual_seed(0)
    target = new_llama(2, vocabulary_size=target_size)
    sharpen(target, target.model.layers, 1)
    draft = new_llama(1, vocabulary_size=draft_size, **config)
    copy_common_weights(target, draft)
    return target.eval(), draft.eval()


def prompt(*tokens: int) -> Inputs:
    return {"input_ids": torch.tensor([[*range(30, 50), *tokens]])}


def decode(target: Any, draft: Any, inputs: Inputs, tokenizer: Any = None) -> Decoder:
    """Decode with the draft, and compare with plain decoding."""
    decoder = Decoder(target, draft, tree=TREE, processor=tokenizer)
    expected = Decoder(target).generate(**inputs, max_new_tokens=NEW_TOKENS).sequences
    assert torch.equal(decoder.generate(**inputs, max_new_tokens=NEW_TOKENS).sequences, expected)
    return decoder


def proposals(draft: IndependentDraft) -> set[int]:
    """The first two proposals after each token of an answer."""
    answer = AnswerToRecord(np.arange(60, 80), 20, ForestBounds(), {})
    draft.prefill(draft.prompts(prompt())[0], None, capacity=20 + answer.num_slots)
    return set(draft.forest(answer).child_token[:19, :2].flatten().tolist())


@pytest.mark.parametrize("draft_size", [300, 298])
def test_tokens_that_only_the_target_has(draft_size: int) -> None:
    """Added tokens, in the prompt and in the answer."""
    target, draft = llamas(302, draft_size)
    target.get_output_embeddings().weight.data[draft_size:] *= 2.0
    tokenizer = Words(300, {300: "<a>", 301: "<b>"})
    decoder = decode(target, IndependentDraft(draft, tokenizer=Words(298, {})), prompt(301, 40, 300), tokenizer)
    assert decoder.last_output.stats.draft_forwards > 0


def test_renamed_tokens_are_never_drafted() -> None:
    target, draft = llamas(302, 302)
    theirs, ours = Words(300, {300: "<tool>", 301: "<pad>"}), Words(300, {300: "<reserved>", 301: "<pad>"})
    head = draft.get_output_embeddings().weight.data
    head[300] = 3.0 * head[min(proposals(IndependentDraft(draft)))]  # so that the draft wants it
    wrapped = IndependentDraft(draft, tokenizer=ours)
    with pytest.warns(DraftNotice, match="1 added tokens of the target have other names .*: '<tool>'$"):
        decode(target, wrapped, prompt(300, 31), theirs)
    for unchecked in (False, True):
        proposed = proposals(IndependentDraft(draft) if unchecked else wrapped)
        assert (300 in proposed) == unchecked
    with pytest.raises(
        UserError, match=r"differ in 1 of 302 tokens \(token 7 is 'word 7' and 'another'\); use a draft"
    ):
        other = Words(300, {})
        other.get_vocab = lambda: {**{f"word {n}": n for n in range(302) if n != 7}, "another": 7}  # type: ignore[method-assign]
        Decoder(target, IndependentDraft(draft, tokenizer=other), processor=Words(302, {}))


@pytest.mark.parametrize(("context", "drafts"), [(12, False), (30, True)])
def test_a_request_that_outgrows_the_drafts_context(context: int, drafts: bool) -> None:
    """The rest is decoded plainly; a forest has no proposals there."""
    target, draft = llamas(300, 300, max_position_embeddings=context)
    wrapped = IndependentDraft(draft)
    with pytest.warns(
        DraftNotice, match=f"the draft's context has {context} tokens, the target's 2048: longer requests"
    ):
        stats = decode(target, wrapped, prompt()).last_output.stats
    assert stats.plain_steps > 0 and (stats.draft_forwards > 0) == drafts
    answer = AnswerToRecord(np.arange(60, 80), 20, ForestBounds(), {})
    wrapped.prefill(wrapped.prompts(prompt())[0], None, capacity=20 + answer.num_slots)
    forest = wrapped.forest(answer)
    first = max(0, context - 20)
    assert (forest.child_token[first:19] == -1).all() and (forest.child_token[:first] >= 0).all()


def test_another_vision_tower_reads_text_only(pair: Pair, prompts: dict[str, Inputs]) -> None:
    config = deepcopy(pair.draft.config)
    config.vision_config.patch_size //= 2
    draft = IndependentDraft(AutoModelForImageTextToText.from_config(config).eval())
    with pytest.warns(DraftNotice, match="vision tower does not give .* reads text only"):
        decoder = decode(pair.target, draft, prompts["image"])
    assert not draft.sees_images and decoder.last_output.stats.draft_forwards > 0


def test_a_head_whose_embedding_lacks_the_targets_added_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = new_llama(5, vocabulary_size=302)
    sharpen(target, target.model.layers, 2)
    folder = write_head(tmp_path / "head", "SpecForge/llama3-8B")
    tensors = load_file(folder / "model.safetensors")
    tensors.setdefault("embed_tokens.weight", torch.randn(300, 32))
    save_file(tensors, folder / "model.safetensors")
    with pytest.warns(DraftNotice, match="the target has 302 tokens, the draft's embedding 300"):
        decode(target, str(folder), prompt(301, 31, 300))


def test_drafts_by_name(pair: Pair, prompts: dict[str, Inputs], tmp_path: Path) -> None:
    for name in ("retrieval", str(pair.draft_folder), pair.draft_folder):
        assert decode(pair.target, name, prompts["text"]).draft is not None
    for wrong, message in (
        (7, "a draft is a loaded model, a name .* or None; got 7; give one of them"),
        (RetrievalDraft, "a draft is a loaded model"),
        (str(tmp_path / "no-such"), "no-such"),
    ):
        with pytest.raises(UserError, match=message) as refusal:
            Decoder(pair.target, wrong)
        assert "\n" not in str(refusal.value)
