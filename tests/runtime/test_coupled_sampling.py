"""Coupled sampling: proposals equal brute force, more of them are accepted, and no emitted token changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TypicalLogitsWarper,
)

from autotune.drafters.draft import Draft
from autotune.drafters.independent import IndependentDraft
from autotune.modeling.target import Target
from autotune.runtime import token_sampler
from autotune.runtime.decoder import Decoder
from autotune.runtime.token_sampler import TokenSampler
from autotune.trees.tree import Tree
from tests.drafters.test_feature_draft import STAR_FOR_BOTH
from tests.runtime.conftest import NEW_TOKENS, SAMPLED, TREES
from tests.runtime.test_captured_rounds import make_draft
from tests.tiny_models import VOCABULARY_SIZE, Inputs, Pair, new_llama

PROMPTS = ("text", "image", "long")
CHAIN = {"policy": "chain", "depth": 5}
WARPERS = [TypicalLogitsWarper(0.9), EtaLogitsWarper(0.01), EpsilonLogitsWarper(0.001), MinPLogitsWarper(0.02)]


@pytest.mark.parametrize("kind", ["independent", "retrieval", "eagle3", "mtp", "specvlm", *STAR_FOR_BOTH])
def test_no_token_changes_for_any_draft_and_tree(
    pair: Pair, prompts: dict[str, Inputs], sampled_plainly: Callable[[str, int], Tensor], kind: str, tmp_path: Path
) -> None:
    """Every tree, each with the next prompt and the next of the settings."""
    target = Target(pair.target)
    draft = make_draft(kind, pair, target, tmp_path)
    requests = zip(itertools.cycle(PROMPTS), itertools.cycle(range(len(SAMPLED))), TREES.items(), strict=False)
    for name, setting, (tree_name, tree) in requests:
        request = {**prompts[name], "max_new_tokens": NEW_TOKENS, **SAMPLED[setting]}
        found = Decoder(target, draft, tree=tree, visual_keep=0.5).generate(**request).sequences
        assert torch.equal(found, sampled_plainly(name, setting)), (name, setting, tree_name)


def test_coupling_raises_the_accepted_length(pair: Pair, prompts: dict[str, Inputs]) -> None:
    target, draft = Target(pair.target), IndependentDraft(pair.draft)
    accepted = {}
    for coupled in (False, True):
        decoder = Decoder(target, draft, tree=CHAIN, coupled=coupled)
        outputs = [
            decoder.generate(**prompts[name], max_new_tokens=40, temperature=1.0, seed=seed)
            for name, seed in itertools.product(PROMPTS, range(2))
        ]
        tokens, rounds = (sum(getattr(out.stats, field) for out in outputs) for field in ("new_tokens", "rounds"))
        accepted[coupled] = tokens / rounds - 1
    assert accepted[True] > 1.4 * accepted[False] > 0.5


@pytest.mark.parametrize("mode", ["eager", "fixed"])
@pytest.mark.parametrize(
    "settings",
    [
        *SAMPLED,
        *({"temperature": 0.8, "seed": 5, "logits_processor": LogitsProcessorList([warper])} for warper in WARPERS),
    ],
)
def test_a_draft_that_is_the_target_is_accepted_whole(
    pair: Pair, prompts: dict[str, Inputs], settings: dict[str, Any], mode: str
) -> None:
    """So that the draft's scores have the target's temperature, warpers and noise, in eager steps and over static
    buffers.
    """
    for number, name in enumerate(PROMPTS if mode == "eager" else PROMPTS[1:2]):
        decoder = Decoder(pair.target, pair.target, tree=CHAIN, mode=mode)
        lengths = decoder.generate(**prompts[name], max_new_tokens=16 + number, **settings).stats.accepted_lengths
        assert lengths[:-1] == [5] * (len(lengths) - 1) and len(lengths) > 2


def test_processors_that_read_the_prefix_are_left_out(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """With a penalty that changes no token, the target accepts its own proposals: they have temperature and noise."""
    for penalty, is_whole in ((1.0 + 1e-9, True), (3.0, False)):
        settings = {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])}
        settings |= {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "seed": 3, "max_new_tokens": NEW_TOKENS}
        out = Decoder(pair.target, pair.target, tree=CHAIN).generate(**prompts["text"], **settings)
        assert torch.equal(out.sequences, Decoder(pair.target).generate(**prompts["text"], **settings).sequences)
        assert (set(out.stats.accepted_lengths[:-1]) == {5}) == is_whole


@pytest.mark.parametrize("draft_vocabulary", [VOCABULARY_SIZE - 20, VOCABULARY_SIZE + 20])
def test_a_padded_vocabulary(text_pair: Pair, prompts: dict[str, Inputs], draft_vocabulary: int) -> None:
    """A draft that is the target, but for fewer or more rows of its embedding, whose tokens do not occur."""
    target = Target(text_pair.target)
    known = VOCABULARY_SIZE - 20
    target.tokenizer = tokenizer = Tokenizer(known)
    model = new_llama(4, vocabulary_size=draft_vocabulary)
    shared = min(draft_vocabulary, VOCABULARY_SIZE)
    weights = {
        name: weight if weight.shape[0] != VOCABULARY_SIZE else padded_rows(weight, shared, draft_vocabulary)
        for name, weight in text_pair.target.state_dict().items()
    }
    model.load_state_dict(weights)
    settings = {"max_new_tokens": 40, "temperature": 1.0, "seed": 2}
    settings |= {"suppress_tokens": list(range(known, VOCABULARY_SIZE))}
    inputs = {"input_ids": prompts["text"]["input_ids"] % known}
    decoder = Decoder(target, IndependentDraft(model, tokenizer=tokenizer), tree=CHAIN)
    out = decoder.generate(**inputs, **settings)
    assert torch.equal(out.sequences, Decoder(target).generate(**inputs, **settings).sequences)
    assert set(out.stats.accepted_lengths[:-1]) == {5}


class Tokenizer:
    """A vocabulary of ``size`` tokens."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(self.size)}


def padded_rows(weight: Tensor, num_shared: int, num_rows: int) -> Tensor:
    return torch.cat([weight[:num_shared], torch.full((num_rows - num_shared, weight.shape[1]), 0.0)])


# -------- brute force


def brute_force(logits: NDArray[np.float64], noise: NDArray[np.float64], temperature: float, top_k: int) -> Any:
    """Log-softmax of ``warp(logits / T) + noise`` of one row, in float64."""
    scores = logits / temperature
    scores[scores < np.sort(scores)[-top_k]] = -np.inf
    scores += noise
    return scores - np.logaddexp.reduce(scores)


@pytest.mark.parametrize("kind", ["independent", "eagle3"])
def test_proposals_equal_brute_force(
    pair: Pair, prompts: dict[str, Inputs], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities of the children of every node, in all levels of all rounds."""
    target, temperature, top_k, seed = Target(pair.target), 0.6, 7, 11
    draft = make_draft(kind, pair, target, tmp_path)
    noise_of = TokenSampler(temperature=1.0, seed=seed)
    propose, best, num_checked = draft.propose, draft.best, 0
    latest: list[Tensor] = []  # logits of a frontier, in the draft's own vocabulary

    def watched_best(logits: Tensor, num_proposals: int, coupling: Any) -> Any:
        latest[:] = [logits]
        return best(logits, num_proposals, coupling)

    def logits_of(tree: Tree, frontier: Any) -> NDArray[np.float64]:
        logits = np.full((len(frontier), VOCABULARY_SIZE), -np.inf)
        ids = np.arange(VOCABULARY_SIZE) if draft.token_ids is None else draft.token_ids.numpy()
        logits[:, ids] = latest[0].double().numpy()
        return logits

    def watched_propose(tree: Tree, frontier: Any, num_proposals: int, coupling: Any) -> Any:
        nonlocal num_checked
        tokens, logprobs = propose(tree, frontier, num_proposals, coupling)
        noise = noise_of.noise([target.length + int(tree.depth[frontier[0]]) + 1], VOCABULARY_SIZE)[0].double().numpy()
        for row, logits in enumerate(logits_of(tree, frontier)):
            expected = brute_force(logits, noise, temperature, top_k)
            np.testing.assert_allclose(logprobs[row], np.sort(expected)[::-1][:num_proposals], atol=1e-4)
            np.testing.assert_allclose(logprobs[row], expected[tokens[row]], atol=1e-4)
            num_checked += 1
        return tokens, logprobs

    monkeypatch.setattr(draft, "propose", watched_propose)
    monkeypatch.setattr(draft, "best", watched_best)
    settings = {"temperature": temperature, "top_k": top_k, "seed": seed, "max_new_tokens": 20}
    tree = {"policy": "eagle2", "depth": 3, "k": 4, "budget": 12}
    for name in PROMPTS:
        Decoder(target, draft, tree=tree).generate(**prompts[name], **settings)
    assert num_checked > 40


# -------- when, and at what cost


def test_which_rounds_are_coupled(pair: Pair, prompts: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled and lossless ones, unless it is switched off."""
    draft: Draft = IndependentDraft(pair.draft)
    inner, couplings = draft.propose, []

    def propose(tree: Tree, frontier: Any, num_proposals: int, coupling: Any) -> Any:
        couplings.append(coupling is not None)
        return inner(tree, frontier, num_proposals, coupling)

    monkeypatch.setattr(draft, "propose", propose)
    lossy = {"verification": {"kind": "wetap", "threshold": 0.5}}
    for temperature, options, is_coupled in (
        (1.0, {}, True),
        (0.0, {}, False),
        (1.0, {"coupled": False}, False),
        (1.0, lossy, False),
    ):
        couplings.clear()
        decoder = Decoder(pair.target, draft, tree={"policy": "eagle2"}, **options)
        decoder.generate(**prompts["text"], max_new_tokens=8, temperature=temperature)
        assert set(couplings) == {is_coupled}, options


def test_the_memory_of_noise_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_sampler, "MAX_NOISE_BYTES", 4 * 50 * 3)
    sampler, fresh = TokenSampler(temperature=1.0, seed=1), TokenSampler(temperature=1.0, seed=1)
    for position in (0, 1, 2, 3, 4, 0):
        assert torch.equal(sampler.noise([position], 50), fresh.noise([position], 50))
        assert len(sampler._noise) <= 3
    large = TokenSampler(temperature=1.0)
    assert torch.equal(large.noise([5], 1000), TokenSampler(temperature=1.0).noise([5], 1000)), "larger than the limit"
