"""Decoding beside the tree: fallback to plain steps, capture sizes, lossy verification, acceptance counts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from autotune.drafters import cached_draft
from autotune.drafters.independent import IndependentDraft
from autotune.errors import UserError
from autotune.evaluation.divergence import answer_logits, first_divergence, quality
from autotune.modeling.target import Target
from autotune.modeling.tree_model import TreeModel
from autotune.runtime.decoder import Decoder
from autotune.trees.fallback import RoundPrice
from autotune.trees.limits import MAX_LEVEL_STEP
from autotune.trees.tree import ROOT
from autotune.trees.verification import WetapVerification
from tests.obvious import ancestors_of, logits_after
from tests.runtime.conftest import TREES, new_tokens
from tests.tiny_models import Inputs, Pair, new_llama

NEW_TOKENS = 40
COSTLY = RoundPrice(round_steps=1.2, level_steps=0.3, node_steps=0.03)


def useless_draft() -> Any:
    """An untrained draft, whose tokens the target never accepts."""
    torch.manual_seed(5)
    return new_llama(1, hidden_size=16)


# -------- fallback


def test_a_fallback_changes_no_token(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """Neither with a draft that mostly helps nor with a useless one, whose requests fall back to plain steps."""
    plain, useless = Decoder(pair.target), useless_draft()
    settings = [{"max_new_tokens": 40, "temperature": temperature, "seed": 3} for temperature in (0.0, 1.0)]
    expected = [plain.generate(**prompts["image"], **setting).sequences for setting in settings]
    for number, tree in enumerate(TREES.values()):
        for draft, num_tokens in ((pair.draft, 20), (useless, 40)):
            decoder = Decoder(pair.target, draft, tree=tree, fallback=COSTLY)
            out = decoder.generate(**prompts["image"], **settings[number % 2] | {"max_new_tokens": num_tokens})
            assert torch.equal(out.sequences, expected[number % 2][:, : out.sequences.shape[1]])
            assert out.stats.rounds == out.stats.target_forwards >= out.stats.plain_steps
        assert out.stats.plain_steps > 20


# -------- capture sizes


def test_forwards_have_capture_sizes(pair: Pair, prompts: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(pair.target, pair.draft, tree={"policy": "sage"}, capture_sizes=(4, 12, 70))
    sizes: set[int] = set()
    evaluate = TreeModel.evaluate_step
    monkeypatch.setattr(
        TreeModel, "evaluate_step", lambda self, step: (sizes.add(len(step.tokens)), evaluate(self, step))[1]
    )
    decoder.generate(**prompts["image"], max_new_tokens=NEW_TOKENS)
    assert sizes == {4, 12, 70} or sizes == {4, 12}


@pytest.mark.parametrize("size", [0, 999])
def test_a_size_out_of_range(pair: Pair, size: int) -> None:
    with pytest.raises(UserError, match=f"capture sizes are numbers of tokens from 1 to 160; got {size}"):
        Decoder(pair.target, capture_sizes=(8, size))


# -------- lossy verification


def test_wetap_accepts_by_the_ratio_of_probabilities(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """In every round it accepts the deepest node whose path is at least ``threshold`` times as probable under the
    target as under the draft, computed from forward passes of the target over the whole text.
    """
    inputs, verification = prompts["image"], WetapVerification(threshold=0.4)
    decoder = Decoder(pair.target, pair.draft, tree=TREES["wetap-tight"], verification=verification)
    rounds: list[tuple[Any, list[int]]] = []
    commit = decoder.draft.commit  # type: ignore[union-attr]

    def watch(tree: Any, path: Any, next_token: int) -> None:
        rounds.append((type(tree)(*(array.copy() for array in tree)), [int(node) for node in path]))
        commit(tree, path, next_token)

    decoder.draft.commit = watch  # type: ignore[union-attr, method-assign]
    out = decoder.generate(**inputs, max_new_tokens=NEW_TOKENS)
    answer = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    committed = 1
    for tree, path in rounds:
        accepted: dict[int, float] = {}
        for node in range(1, int(tree.size[0])):
            tokens = [int(tree.token[n]) for n in ancestors_of(tree, node)[1:]]
            logprobs = logits_after(pair.target, inputs, answer[:committed] + tokens).log_softmax(-1)[committed:-1]
            of_target = float(logprobs[torch.arange(len(tokens)), tokens].sum())
            if of_target - float(tree.path_logprob[node]) >= math.log(0.4):
                accepted[node] = of_target
        best = max(accepted, key=lambda n: (tree.depth[n], accepted[n]), default=ROOT)
        assert path == ancestors_of(tree, best)[1:]
        committed += len(path) + 1
    assert sum(len(path) for _, path in rounds) > 10


def test_levels_wider_than_a_forward_pass_are_drafted_in_parts(
    pair: Pair, prompts: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In passes of 8 nodes and of 128 the trees are the same, and so are the rounds."""
    shape = {"length": 4, "w_min": 16, "w_max": 256, "top_k": 16, "top_p": 1.0, "gamma": 0.2, "budget": 128}
    widths: list[int] = []
    evaluate = IndependentDraft.evaluate_step

    def watch(self: IndependentDraft, step: Any, source: Any) -> Any:
        widths.append(len(step.tokens))
        return evaluate(self, step, source)

    monkeypatch.setattr(IndependentDraft, "evaluate_step", watch)
    found = []
    for mode, most in itertools.product(("eager", "fixed"), (MAX_LEVEL_STEP, 8)):
        decoder = Decoder(pair.target, pair.draft, tree={"policy": "wetap", **shape}, mode=mode)
        monkeypatch.setattr(cached_draft, "MAX_LEVEL_STEP", most)
        widths.clear()
        out = decoder.generate(**prompts["image"], max_new_tokens=12)
        assert max(widths) == most
        found.append((out.sequences.tolist(), out.stats.accepted_lengths, out.stats.verified_nodes))
    assert found == found[:1] * 4
    assert found[0][0] == Decoder(pair.target).generate(**prompts["image"], max_new_tokens=12).sequences.tolist()


@pytest.mark.parametrize(
    ("verification", "message"),
    [
        ({"kind": "wetapp"}, "verification: unknown kind 'wetapp'; did you mean 'wetap'"),
        ({"threshold": 0.5}, "verification: unknown kind None; known: lossless, wetap"),
        ("wetap", "verification: unknown kind None"),
        ({"kind": "wetap", "threshold": 1.5}, "verification: threshold: .*less than or equal to 1; got 1.5"),
        ({"kind": "wetap", "treshold": 0.5}, "verification: unknown key 'treshold'; did you mean 'threshold'"),
    ],
)
def test_a_mistake_in_the_verification(pair: Pair, verification: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Decoder(pair.target, pair.draft, verification=verification)


def test_logits_processors_of_lossy_verification_read_what_is_accepted(pair: Pair, prompts: dict[str, Inputs]) -> None:
    decoder = Decoder(pair.target, pair.draft, verification=WetapVerification(threshold=0.01))
    (request,) = decoder.requests(**prompts["text"], max_new_tokens=25, repetition_penalty=1.3)
    assert sum(map(len, decoder._decode(request, decoder._own()))) == 25 and sum(request.stats.accepted_lengths) > 5
    sequence = request.sequence()
    assert torch.equal(request.sampler.prefix[:, : sequence.shape[1]], sequence)


def test_agreement_and_divergence_are_those_of_the_request_s_processors(pair: Pair, prompts: dict[str, Inputs]) -> None:
    decoder, inputs = Decoder(pair.target), prompts["text"]
    settings = {"repetition_penalty": 1.6, "max_new_tokens": 25}
    answer = new_tokens(decoder.generate(**inputs, **settings).sequences, inputs)
    assert quality(decoder.target, inputs, answer, decoder.sampler(**inputs, **settings)).agreement == 1.0
    assert quality(decoder.target, inputs, answer).agreement < 1.0
    wrong = [*answer[:20], answer[20] + 1]
    found = first_divergence(decoder.target, inputs, answer, wrong, decoder.sampler(**inputs, **settings))
    logits = logits_after(pair.target, inputs, answer[:20])[-1:]
    ids = torch.cat([inputs["input_ids"], torch.tensor([answer[:20]])], 1)
    scores = RepetitionPenaltyLogitsProcessor(1.6)(ids, logits)[0]
    assert found is not None and found.margin == pytest.approx(float(scores[answer[20]] - scores[wrong[20]]), abs=1e-4)


def test_perplexity_is_that_of_one_forward_over_everything(pair: Pair, prompts: dict[str, Inputs]) -> None:
    target = Target(pair.target)
    for inputs in (prompts["text"], prompts["image"]):
        for count in (1, 2, 30):
            answer = np.random.default_rng(0).integers(4, 300, count).tolist()
            expected = logits_after(pair.target, inputs, answer)[:-1].log_softmax(-1)[torch.arange(count), answer]
            logprobs = answer_logits(target, inputs, answer).log_softmax(-1)[torch.arange(len(answer)), answer]
            torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)
            assert quality(target, inputs, answer).perplexity == pytest.approx(
                math.exp(-float(expected.mean())), rel=1e-4
            )


# -------- counts


def test_acceptance_is_counted_by_depth_and_rank(pair: Pair, prompts: dict[str, Inputs]) -> None:
    decoder = Decoder(pair.target, pair.draft, tree=TREES["sage"])
    for prompt in ("text", "image"):
        stats = decoder.generate(**prompts[prompt], max_new_tokens=120).stats
        counts = stats.acceptance_counts
        accepted = int(counts.by_depth[:, 1].sum())
        assert accepted == counts.by_rank[:, 1].sum()
        # The last round may have accepted more than was emitted.
        assert 0 < sum(stats.accepted_lengths) <= accepted <= sum(stats.accepted_lengths) + 12
        assert counts.by_depth[1, 0] == sum(nodes > 0 for nodes in stats.verified_nodes)
