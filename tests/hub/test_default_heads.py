"""Heads of the stand-in that a target gets without ``--draft``: found, loaded, and lossless."""

from __future__ import annotations

import pytest
import torch

from autotune.drafters.checkpoint import load_draft
from autotune.modeling.loading import RETRIEVAL, load_model, resolve
from autotune.modeling.self_check import allowed_difference, compare_tree_decoding
from autotune.modeling.target import Target
from autotune.modeling.target_defaults import default_drafts
from autotune.runtime.decoder import Decoder
from tests.hub.repositories import LLAMA, QWEN
from tests.hub.server import Hub

HEADS = {LLAMA: "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", QWEN: f"{QWEN}:mtp"}
PROMPTS = torch.randint(0, 100, (4, 20), generator=torch.Generator().manual_seed(0)).split(1)


@pytest.mark.parametrize("name", [LLAMA, pytest.param(QWEN, marks=pytest.mark.nightly)])
def test_the_published_head_is_a_default_and_drafts(name: str, public_hub: Hub) -> None:
    head = HEADS[name]
    resolve(head.partition(":")[0])
    assert default_drafts(name) == (head, RETRIEVAL)
    target = Target(load_model(name))
    difference, noise = compare_tree_decoding(target)
    assert difference <= allowed_difference(target, noise)
    decoders = [Decoder(target), Decoder(target, load_draft(head, target), tree={"policy": "chain", "depth": 3})]
    options = {"max_new_tokens": 48, "min_new_tokens": 48, "do_sample": False}
    plain, drafted = ([one.generate(input_ids=ids, **options) for ids in PROMPTS] for one in decoders)
    assert all(torch.equal(a.sequences, b.sequences) for a, b in zip(plain, drafted, strict=True))
    accepted = sum(answer.stats.new_tokens - answer.stats.rounds for answer in drafted)
    assert name == QWEN or accepted > 4
