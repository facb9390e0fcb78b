"""Retrieval: its index against a scan of the whole text, its corpus, and lossless decoding."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from autotune.documents.provenance import ModelReference
from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import load_draft
from autotune.drafters.retrieval import RetrievalDraft
from autotune.drafters.suffix_index import FIRST_CAPACITY
from autotune.errors import UserError
from autotune.modeling.loading import RETRIEVAL, reference
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.search.model_pool import ModelPool
from autotune.search.space import load_space
from autotune.trees.limits import MAX_RETRIEVED
from autotune.trees.priced import MAX_MATCH, identity_curves
from autotune.trees.tree import ROOT
from tests.tiny_models import VOCABULARY_SIZE, Inputs, Pair

TEXT_END = -2  # in texts to scan
CHAIN = {"policy": "chain", "depth": 5}


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
    committed: list[int], context: list[int], *, max_match: int, min_match: int = 1, never: int | None = None
) -> list[tuple[int, float]]:
    """Scan the whole text, for the longest match first."""
    for length in range(min(max_match, len(context)), min_match - 1, -1):
        offsets = [
            end
            for end in range(length, len(committed))
            if committed[end - length : end] == context[-length:] and committed[end] not in (never, TEXT_END)
        ]
        if offsets:
            counts = Counter(committed[index] for index in offsets)
            last = {committed[index]: index for index in offsets}
            best = sorted(counts, key=lambda token: (-counts[token], -last[token]))
            return [(token, counts[token] / len(offsets)) for token in best]
    return []


@pytest.mark.parametrize(("min_match", "max_match"), [(1, 1), (1, 2), (1, 3), (1, 16), (2, 5), (3, 3)])
def test_the_index_equals_a_rescan_of_the_text(min_match: int, max_match: int) -> None:
    """Over rounds of random trees and accepted paths. Texts have few words, so that long matches recur."""
    rng = np.random.default_rng(max_match)
    num_matches = 0
    for num_words in (2, 4, 9):
        committed = [*rng.integers(0, num_words, int(rng.integers(1, 30))).tolist(), 0]
        draft = new_draft(vocab_size=num_words + 20, image=1, min_match=min_match, max_match=max_match)
        begin(draft, *committed)
        for _ in range(30):
            below = rng.integers(0, num_words + 2, 12).tolist()
            tree = tree_of([committed[-1], *below], [-1, *(int(rng.integers(n)) for n in range(1, 13))])
            frontier = rng.permutation(13)[:5]
            tokens, logprobs = draft.propose(tree, frontier, 6)
            for row, node in enumerate(frontier):
                context = committed + tokens_below_root(tree, int(node))
                expected = rescan(committed, context, max_match=max_match, min_match=min_match, never=1)[:6]
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


def test_the_length_of_the_root_s_match_is_kept() -> None:
    draft = draft_after(1, 2, 3, 4, 9, 2, 3)
    assert proposed(draft, 3, 2) == [(4, 1.0)] and draft.match_length == 2
    draft.propose(tree_of([3, 4, 9], [-1, ROOT, 1]), np.array([2]), 2)
    assert draft.match_length == 2, "that of the round's root"
    assert proposed(draft_after(1, 2, 3, 4, 9, 2, 3, max_match=1), 3, 2) == [(4, 1.0)]
    assert proposed(draft_after(1, 2, 3, 4, 9, 2, 3, min_match=3), 3, 2) == []
    nothing = draft_after(1, 2, 3)
    assert proposed(nothing, 3, 2) == [] and nothing.match_length == 0


def test_a_row_is_filled_with_other_tokens_of_probability_zero() -> None:
    """The tokens are valid and distinct, and never image placeholders."""
    draft = draft_after(5, 2, 5, image=1)
    tokens, logprobs = draft.propose(root_of(5), np.array([ROOT]), 5)
    assert tokens.tolist() == [[2, 0, 3, 4, 5]]
    assert logprobs.tolist() == [[0.0, *[-np.inf] * 4]]
    nothing, logprobs = draft_after(7, image=0).propose(root_of(7), np.array([ROOT]), 3)
    assert nothing.tolist() == [[1, 2, 3]] and (logprobs == -np.inf).all()


def test_the_image_is_never_proposed() -> None:
    """Although its placeholders follow each other hundreds of times."""
    image = 1
    draft = draft_after(5, image, image, image, 6, 5, image=image)
    assert proposed(draft, 5, 3) == []
    assert proposed(draft_after(5, image, image, image, 6, 5), 5, 3) == [(image, 1.0)]
    after_image = draft_after(5, image, image, image, 6, 5, image, image=image)
    assert proposed(after_image, image, 3) == [(6, 1.0)]


def test_options_out_of_range_are_refused() -> None:
    for options, message in (
        ({"min_match": 0}, "min_match must be from 1 to max_match, 16; got 0"),
        ({"min_match": 4, "max_match": 3}, "min_match must be from 1 to max_match, 3; got 4"),
        ({"corpus_tokens": -1}, "corpus_tokens must be at least 0; got -1"),
    ):
        with pytest.raises(UserError, match=message):
            RetrievalDraft(**options)


def test_it_is_loaded_by_name_and_has_one_subnet(pair: Pair) -> None:
    target = Target(pair.target)
    draft = load_draft(RETRIEVAL, target)
    assert (draft.kind, draft.subnet, draft.vocab_size) == ("retrieval", Subnet(), VOCABULARY_SIZE)
    assert reference(RETRIEVAL) == ModelReference(id="retrieval", sha256="")
    with pytest.raises(UserError, match="retrieval: a retrieval draft has no subnets; leave heads, injection_layer"):
        load_draft(RETRIEVAL, target, Subnet(heads=0.5))
    pool = ModelPool(str(pair.target_folder), (RETRIEVAL, str(pair.draft_folder)), "cpu")
    subnets = Counter(draft for draft, _ in pool.subnets(load_space("quick")))
    assert subnets == {RETRIEVAL: 1, str(pair.draft_folder): 10}


# -------------------------------------------------------------------------------------------------------------- corpus


def answer_requests(draft: RetrievalDraft, *answers: list[int]) -> None:
    """Requests with the prompt 90, 91 and these answers, then one with the prompt 92 that has begun with 5."""
    for first, *others in answers:
        begin(draft, 90, 91, first)
        for token in others:
            draft.append(token)
    begin(draft, 92, 5)


def test_the_corpus_holds_earlier_answers_without_their_prompts() -> None:
    draft = new_draft(corpus_tokens=100)
    answer_requests(draft, [4, 5, 6, 90], [5, 7, 5, 7])
    assert proposed(draft, 5, 5) == [(7, 0.6667), (6, 0.3333)]
    begin(draft, 92, 90)
    assert proposed(draft, 90, 5) == [], "91 followed 90 in prompts only, and nothing follows the end of an answer"
    without = new_draft()
    answer_requests(without, [4, 5, 6, 90], [5, 7, 5, 7])
    assert proposed(without, 5, 5) == []


def test_the_oldest_answers_leave_the_corpus_first() -> None:
    """By whole answers. Of an answer that is longer than the corpus, the end is kept."""
    draft = new_draft(corpus_tokens=6)
    answer_requests(draft, [5, 10], [5, 11], [5, 12])
    assert [token for token, _ in proposed(draft, 5, 5)] == [12, 11, 10]
    draft.append(13)  # the request's answer: 5, 13
    begin(draft, 92, 5)
    assert [token for token, _ in proposed(draft, 5, 5)] == [13, 12, 11]
    answer_requests(draft, [5, 1, 5, 2, 5, 3, 5, 4])
    assert [token for token, _ in proposed(draft, 5, 5)] == [4, 3, 2]


def test_a_corpus_changes_proposals_as_a_scan_of_its_texts_does() -> None:
    """Requests of few words, with answers that leave the corpus. No match spans two texts."""
    rng, answers = np.random.default_rng(4), list[list[int]]()
    draft = new_draft(corpus_tokens=60, max_match=4)
    for _ in range(40):
        prompt, answer = (rng.integers(2, 6, int(rng.integers(1, 25))).tolist() for _ in range(2))
        begin(draft, *prompt, answer[0])
        for token in answer[1:]:
            draft.append(token)
        while sum(map(len, answers)) > 60:
            answers.pop(0)
        text = [token for one in answers for token in (*one, TEXT_END)]
        expected = rescan([*text, *prompt, *answer], [*prompt, *answer], max_match=4)
        assert proposed(draft, answer[-1], 4) == [(token, round(share, 4)) for token, share in expected[:4]]
        answers.append(answer)


# ------------------------------------------------------------------------------------------------------------ decoding


@pytest.mark.parametrize("prompt", ["text", "image", "long"])
def test_decoding_emits_the_target_s_own_tokens(pair: Pair, prompts: dict[str, Inputs], prompt: str) -> None:
    inputs = prompts[prompt]
    draft = RetrievalDraft()
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
    found = Decoder(pair.target, RetrievalDraft(), tree=CHAIN).generate(**prompts["text"], max_new_tokens=40)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(set(expected.sequences[0, -40:].tolist())) == 1, "not repetitive"
    assert sum(found.stats.accepted_lengths) >= 25
    assert found.stats.rounds < expected.stats.rounds / 3


def test_a_corpus_saves_rounds(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """A prompt that was answered before is answered with its own answer as the draft, and with the target's own tokens."""
    plain = Decoder(pair.target)
    decoder = Decoder(pair.target, RetrievalDraft(corpus_tokens=500), tree={"policy": "chain", "depth": 8})
    rounds = []
    for prompt in ("text", "image", "text"):
        found = decoder.generate(**prompts[prompt], max_new_tokens=40, temperature=1.0)
        expected = plain.generate(**prompts[prompt], max_new_tokens=40, temperature=1.0)
        assert torch.equal(found.sequences, expected.sequences)
        rounds.append(found.stats.rounds)
    assert rounds[2] < rounds[0] / 2


def test_a_corpus_serves_as_the_second_source_of_a_tree(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """The second time, a prompt is answered by rounds that ask the draft for nothing."""
    found = {"curves": identity_curves().tolist(), "retrieved": [[0.9] * MAX_MATCH] * 2, "num_tokens": 1}
    found |= {"draft": "", "draft_sha256": "", "workload_sha256": "", "log_loss": 0.1, "raw_log_loss": 0.1}
    tree = {"policy": "priced", "retrieval": True, "skip_draft_above": 0.8, "calibration": found}
    plain = Decoder(pair.target)
    decoder = Decoder(pair.target, pair.draft, tree=tree, corpus_tokens=500)
    forwards = []
    for prompt in ("text", "image", "text"):
        output = decoder.generate(**prompts[prompt], max_new_tokens=40, temperature=1.0)
        expected = plain.generate(**prompts[prompt], max_new_tokens=40, temperature=1.0)
        assert torch.equal(output.sequences, expected.sequences)
        forwards.append(output.stats.draft_forwards)
    assert forwards[2] < forwards[0] / 2
    with pytest.raises(UserError, match="corpus_tokens must be at least 0; got -1"):
        Decoder(pair.target, pair.draft, corpus_tokens=-1)
