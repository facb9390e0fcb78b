"""Retrieval: its index against a scan of the whole text, and lossless decoding."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autotune.documents.provenance import ModelReference
from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import load_draft
from autotune.drafters.retrieval import FIRST_CAPACITY, RetrievalDraft
from autotune.errors import UserError
from autotune.modeling.loading import RETRIEVAL, reference
from autotune.modeling.target import Target
from autotune.runtime.model_pool import ModelPool, variants_of
from autotune.study.spaces import load_space
from autotune.trees.limits import MAX_RETRIEVED
from autotune.trees.tree import ROOT
from tests.tiny_models import VOCABULARY_SIZE, Pair


def new_draft(*, vocab_size: int = VOCABULARY_SIZE, image: int | None = None, **options: Any) -> RetrievalDraft:
    """A draft for a target with one kind of placeholder."""
    draft = RetrievalDraft(**options)
    config = SimpleNamespace(image_token_id=image)
    draft.attach(SimpleNamespace(vocab_size=vocab_size, model=SimpleNamespace(config=config)))  # type: ignore[arg-type]
    return draft


def begin(draft: RetrievalDraft, *tokens: int) -> None:
    """Begin a request with all of ``tokens`` but the last as its prompt, and the last appended."""
    draft.prefill(np.array(tokens[:-1], np.int32), None, capacity=0)
    draft.append(tokens[-1])


def draft_after(*tokens: int, **options: Any) -> RetrievalDraft:
    draft = new_draft(**options)
    begin(draft, *tokens)
    return draft


def tree_of(tokens: list[int], parents: list[int]) -> Any:
    """The fields of a tree that the draft reads; the root is first."""
    return SimpleNamespace(token=np.array(tokens), parent=np.array(parents))


def root_of(token: int) -> Any:
    return tree_of([token], [-1])


def tokens_below_root(tree: Any, node: int) -> list[int]:
    """Tokens on the path from the root, excluded, to the node."""
    return [] if node == ROOT else [*tokens_below_root(tree, int(tree.parent[node])), int(tree.token[node])]


def proposed(draft: RetrievalDraft, token: int, num_proposals: int) -> list[tuple[int, float]]:
    """The root's proposals as (token, probability), without the filling."""
    tokens, logprobs = draft.propose(root_of(token), np.array([ROOT]), num_proposals)
    return [(int(t), round(float(np.exp(p)), 4)) for t, p in zip(tokens[0], logprobs[0], strict=True) if p > -np.inf]


def rescan(
    committed: list[int], context: list[int], *, max_match: int, never: int | None = None
) -> list[tuple[int, float]]:
    """Scan the whole text, for the longest match first."""
    for length in range(min(max_match, len(context)), 0, -1):
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


@pytest.mark.parametrize("max_match", [1, 2, 3, 16])
def test_the_index_equals_a_rescan_of_the_text(max_match: int) -> None:
    """Over rounds of random trees and accepted paths. Texts have few words, so that long matches recur."""
    rng = np.random.default_rng(max_match)
    num_matches = 0
    for num_words in (2, 4, 9):
        committed = [*rng.integers(0, num_words, int(rng.integers(1, 30))).tolist(), 0]
        draft = new_draft(vocab_size=num_words + 20, image=1, max_match=max_match)
        begin(draft, *committed)
        for _ in range(30):
            below = rng.integers(0, num_words + 2, 12).tolist()
            tree = tree_of([committed[-1], *below], [-1, *(int(rng.integers(n)) for n in range(1, 13))])
            frontier = rng.permutation(13)[:5]
            tokens, logprobs = draft.propose(tree, frontier, 6)
            for row, node in enumerate(frontier):
                context = committed + tokens_below_root(tree, int(node))
                expected = rescan(committed, context, max_match=max_match, never=1)[:6]
                num_matches += len(expected)
                assert tokens[row, : len(expected)].tolist() == [token for token, _ in expected]
                np.testing.assert_allclose(np.exp(logprobs[row, : len(expected)]), [p for _, p in expected], rtol=1e-6)
                assert (logprobs[row, len(expected) :] == -np.inf).all()
            path = [int(node) for node in np.sort(rng.permutation(np.arange(1, 13))[: rng.integers(0, 4)])]
            draft.commit(tree, np.array(path, np.int64), next_token := int(rng.integers(num_words)))
            committed += [*(int(tree.token[node]) for node in path), next_token]
    assert num_matches > 100


def test_a_continuation_follows_the_best_follower_again_and_again() -> None:
    """Each token found is part of the context in which the next one is looked up."""
    rng, num_whole = np.random.default_rng(1), 0
    for num_words in (2, 5, 30):
        for _ in range(20):
            text = rng.integers(0, num_words, int(rng.integers(1, 60))).tolist()
            found = draft_after(*text).continuation()
            expected: list[int] = []
            while len(expected) < MAX_RETRIEVED and (best := rescan(text, text + expected, max_match=16)):
                expected.append(best[0][0])
            assert found.tokens.tolist() == [*expected, *[-1] * (MAX_RETRIEVED - len(expected))]
            lengths = [n for n in range(1, 17) if any(text[end - n : end] == text[-n:] for end in range(n, len(text)))]
            assert found.match_length == max(lengths, default=0)
            num_whole += len(expected) == MAX_RETRIEVED
    assert 0 < num_whole < 60


def test_the_index_grows_with_the_text() -> None:
    """Beyond the memory that it reserves first."""
    rng = np.random.default_rng(0)
    text = rng.integers(2, 9, 3 * FIRST_CAPACITY).tolist()
    draft = draft_after(*text, max_match=5)
    for _ in range(40):
        expected = rescan(text, text, max_match=5)[:3]
        assert proposed(draft, text[-1], 3) == [(token, round(share, 4)) for token, share in expected]
        text += rng.integers(2, 9, 60).tolist()
        for token in text[-60:]:
            draft.append(token)


def test_the_image_is_never_proposed() -> None:
    """Although its placeholders follow each other hundreds of times."""
    image = 1
    draft = draft_after(5, image, image, image, 6, 5, image=image)
    assert proposed(draft, 5, 3) == []
    assert proposed(draft_after(5, image, image, image, 6, 5), 5, 3) == [(image, 1.0)]
    after_image = draft_after(5, image, image, image, 6, 5, image, image=image)
    assert proposed(after_image, image, 3) == [(6, 1.0)]


def test_it_is_loaded_by_name_and_has_one_subnet(pair: Pair) -> None:
    target = Target(pair.target)
    draft = load_draft(RETRIEVAL, target)
    assert (draft.kind, draft.subnet, draft.vocab_size) == ("retrieval", Subnet(), VOCABULARY_SIZE)
    assert reference(RETRIEVAL) == ModelReference(id="retrieval", sha256="")
    with pytest.raises(UserError, match="retrieval: this draft has no subnets; leave heads, injection_layer"):
        load_draft(RETRIEVAL, target, Subnet(heads=0.5))
    pool = ModelPool(str(pair.target_folder), (RETRIEVAL, str(pair.draft_folder)), "cpu")
    subnets = Counter(draft for draft, _ in variants_of(pool, load_space("quick")))
    assert subnets == {RETRIEVAL: 1, str(pair.draft_folder): 10}


# -------- decoding
