"""Prompt lookup: its index against a scan of the whole text, and lossless decoding."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from autotune.drafters.prompt_lookup import PromptLookupDraft
from autotune.runtime.decoder import Decoder
from autotune.trees.tree import ROOT
from tests.tiny_models import VOCABULARY_SIZE, Inputs, Pair

CHAIN = {"policy": "chain", "depth": 5}


def draft_after(*tokens: int, **options: Any) -> PromptLookupDraft:
    """A draft with all of ``tokens`` but the last as its prompt, and the last appended."""
    draft = PromptLookupDraft(VOCABULARY_SIZE, **options)
    draft.prefill(list(tokens[:-1]), None, capacity=0)
    draft.append(tokens[-1])
    return draft


def tree_of(tokens: list[int], parents: list[int]) -> Any:
    """The fields of a tree that the draft reads; the root is first."""
    return SimpleNamespace(token=np.array(tokens), parent=np.array(parents))


def root_of(token: int) -> Any:
    return tree_of([token], [-1])


def tokens_below_root(tree: Any, node: int) -> list[int]:
    """Tokens on the path from the root, excluded, to the node."""
    return [] if node == ROOT else [*tokens_below_root(tree, int(tree.parent[node])), int(tree.token[node])]


def proposed(draft: PromptLookupDraft, token: int, num_proposals: int) -> list[tuple[int, float]]:
    """The root's proposals as (token, probability), without the filling."""
    tokens, logprobs = draft.propose(root_of(token), np.array([ROOT]), num_proposals)
    return [(int(t), round(float(np.exp(p)), 4)) for t, p in zip(tokens[0], logprobs[0], strict=True) if p > -np.inf]


def rescan(committed: list[int], context: list[int], *, max_ngram: int, never: int | None) -> list[tuple[int, float]]:
    """Scan the whole text, for the longest n-gram first."""
    for length in range(min(max_ngram, len(context)), 0, -1):
        offsets = [
            end
            for end in range(length, len(committed))
            if committed[end - length : end] == context[-length:] and committed[end] != never
        ]
        if offsets:
            counts = Counter(committed[index] for index in offsets)
            last = {committed[index]: index for index in offsets}
            best = sorted(counts, key=lambda token: (-counts[token], -last[token]))
            return [(token, counts[token] / len(offsets)) for token in best]
    return []


@pytest.mark.parametrize("max_ngram", [1, 2, 3, 5])
def test_the_index_equals_a_rescan_of_the_text(max_ngram: int) -> None:
    """Over rounds of random trees and accepted paths. Texts have few words, so that long n-grams recur."""
    rng = np.random.default_rng(max_ngram)
    num_matches = 0
    for num_words in (2, 4, 9):
        prompt = rng.integers(0, num_words, int(rng.integers(1, 30))).tolist()
        draft = PromptLookupDraft(num_words + 20, max_ngram=max_ngram, placeholders=frozenset({1}))
        draft.prefill(prompt, None, capacity=0)
        committed = [*prompt, 0]
        draft.append(0)
        for _ in range(12):
            below = rng.integers(0, num_words + 2, 12).tolist()
            tree = tree_of([committed[-1], *below], [-1, *(int(rng.integers(n)) for n in range(1, 13))])
            frontier = rng.permutation(13)[:5]
            tokens, logprobs = draft.propose(tree, frontier, 6)
            for row, node in enumerate(frontier):
                context = committed + tokens_below_root(tree, int(node))
                expected = rescan(committed, context, max_ngram=max_ngram, never=1)[:6]
                num_matches += len(expected)
                assert tokens[row, : len(expected)].tolist() == [token for token, _ in expected]
                np.testing.assert_allclose(np.exp(logprobs[row, : len(expected)]), [p for _, p in expected], rtol=1e-6)
                assert (logprobs[row, len(expected) :] == -np.inf).all()
            path = [int(node) for node in np.sort(rng.permutation(np.arange(1, 13))[: rng.integers(0, 4)])]
            draft.commit(tree, np.array(path, np.int64), next_token := int(rng.integers(num_words)))
            committed += [*(int(tree.token[node]) for node in path), next_token]
    assert num_matches > 100


def test_the_longest_match_decides() -> None:
    """7 follows 5 twice, but 8 follows (4, 5)."""
    draft = draft_after(5, 7, 5, 7, 4, 5, 8, 4, 5)
    assert proposed(draft, 5, 3) == [(8, 1.0)]
    assert proposed(draft_after(5, 7, 5, 7, 4, 5, 8, 4, 5, max_ngram=1), 5, 3) == [(7, 0.6667), (8, 0.3333)]


def test_frequent_followers_come_first_and_of_equal_ones_the_most_recent() -> None:
    assert proposed(draft_after(5, 6, 5, 7, 5, 6, 5, max_ngram=1), 5, 3) == [(6, 0.6667), (7, 0.3333)]
    assert proposed(draft_after(5, 6, 5, 7, 5), 5, 3) == [(7, 0.5), (6, 0.5)]
    assert proposed(draft_after(5, 7, 5, 6, 5), 5, 3) == [(6, 0.5), (7, 0.5)]
    assert proposed(draft_after(5, 7, 5, 6, 5), 5, 1) == [(6, 0.5)]


def test_a_node_s_context_includes_its_path() -> None:
    """The text repeats 1 2 3 4: the root 1 is followed by 2, and the path 1 2 3 by 4."""
    tree = tree_of([1, 2, 3, 9], [-1, ROOT, 1, 1])
    tokens, _ = draft_after(1, 2, 3, 4, 9, 1).propose(tree, np.array([ROOT, 1, 2, 3]), 1)
    assert tokens[:, 0].tolist() == [2, 3, 4, 1]


def test_a_row_is_filled_with_other_tokens_of_probability_zero() -> None:
    """The tokens are valid and distinct, and never image placeholders."""
    draft = draft_after(5, 2, 5, placeholders=frozenset({1}))
    tokens, logprobs = draft.propose(root_of(5), np.array([ROOT]), 5)
    assert tokens.tolist() == [[2, 0, 3, 4, 5]]
    assert logprobs.tolist() == [[0.0, *[-np.inf] * 4]]
    nothing, logprobs = draft_after(7, placeholders=frozenset({0})).propose(root_of(7), np.array([ROOT]), 3)
    assert nothing.tolist() == [[1, 2, 3]] and (logprobs == -np.inf).all()


def test_the_image_is_never_proposed() -> None:
    """Although its placeholders follow each other hundreds of times."""
    image = 1
    draft = draft_after(5, image, image, image, 6, 5, placeholders=frozenset({image}))
    assert proposed(draft, 5, 3) == []
    assert proposed(draft_after(5, image, image, image, 6, 5), 5, 3) == [(image, 1.0)]
    after_image = draft_after(5, image, image, image, 6, 5, image, placeholders=frozenset({image}))
    assert proposed(after_image, image, 3) == [(6, 1.0)]


def test_a_request_starts_with_an_empty_index() -> None:
    draft = draft_after(5, 6, 5)
    draft.prefill([8, 9], None, capacity=0)
    draft.append(5)
    assert proposed(draft, 5, 3) == []


@pytest.mark.parametrize("prompt", ["text", "image", "long"])
def test_decoding_emits_the_target_s_own_tokens(pair: Pair, prompts: dict[str, Inputs], prompt: str) -> None:
    inputs = prompts[prompt]
    draft = PromptLookupDraft(VOCABULARY_SIZE)
    expected = Decoder(pair.target).generate(**inputs, max_new_tokens=40)
    found = Decoder(pair.target, draft, tree=CHAIN).generate(**inputs, max_new_tokens=40)
    assert torch.equal(found.sequences, expected.sequences)


def test_a_repetitive_answer_is_accepted(
    pair: Pair, prompts: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With zero weights in its layers, a tied head repeats the last token, which prompt lookup then finds."""
    for layer in pair.target.model.language_model.layers:
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            monkeypatch.setattr(weight, "data", torch.zeros_like(weight))
    expected = Decoder(pair.target).generate(**prompts["text"], max_new_tokens=40)
    found = Decoder(pair.target, PromptLookupDraft(VOCABULARY_SIZE), tree=CHAIN).generate(
        **prompts["text"], max_new_tokens=40
    )
    assert torch.equal(found.sequences, expected.sequences)
    assert len(set(expected.sequences[0, -40:].tolist())) == 1, "not repetitive"
    assert sum(found.stats.accepted_lengths) >= 25
    assert found.stats.rounds < expected.stats.rounds / 3
