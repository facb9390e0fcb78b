"""Decoding with a draft emits the target's own tokens, whatever the draft, the tree, the temperature and the way it is
called.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput

from autotune.drafters.independent import IndependentDraft
from autotune.errors import UserError
from autotune.runtime.decoder import Decoder
from autotune.runtime.stats import DecodingStats
from tests.obvious import chi_square_p_value
from tests.tiny_models import NUM_VISUAL_TOKENS, VOCABULARY_SIZE, Inputs, Pair, copy_common_weights, new_llama, sharpen

NEW_TOKENS = 40
PROMPTS = ("text", "image", "long")
TREES: dict[str, dict[str, Any]] = {
    "chain": {"policy": "chain", "depth": 4},
    "sage": {"policy": "sage"},
    "sage-wide": {
        "policy": "sage",
        "confidence": "current",
        "w_min": 6,
        "w_max": 16,
        "k": 16,
        "d_min": 1,
        "n_max": 100,
        "depth_cap": 12,
        "window": 3,
    },
    "sage-tight": {"policy": "sage", "n_max": 5},  # full trees: leaves that the draft has not read are accepted
    "eagle2": {"policy": "eagle2"},
    "eagle2-tight": {"policy": "eagle2", "depth": 5, "k": 4, "budget": 6},  # of what the draft read, most is pruned
    "wetap": {"policy": "wetap"},
    "wetap-tight": {"policy": "wetap", "w_min": 3, "w_max": 9, "alpha": 0.2, "budget": 7},
    "static": {
        "policy": "static",
        "paths": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0]],
    },
}
KEEPS = (1.0, 0.3)
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.0, "seed": 2},
    {"temperature": 1.0, "top_p": 0.8, "seed": 3},
    {"temperature": 1.3, "top_k": 5, "seed": 4},
]

Greedy = Callable[..., Tensor]


@pytest.fixture(scope="module")
def greedy(pair: Pair, prompts: dict[str, Inputs]) -> Greedy:
    """What Hugging Face's own greedy decoding of a prompt gives."""

    @functools.cache
    def generate(prompt: str, **settings: Any) -> Tensor:
        return pair.target.generate(**prompts[prompt], do_sample=False, **{"max_new_tokens": NEW_TOKENS, **settings})

    return generate


@pytest.fixture(scope="module")
def sampled_plainly(pair: Pair, prompts: dict[str, Inputs]) -> Callable[[str, int], Tensor]:
    """What plain (AR) decoding of a prompt gives at the n-th of the SAMPLED settings."""
    plain = Decoder(pair.target)

    @functools.cache
    def generate(prompt: str, setting: int) -> Tensor:
        return plain.generate(**prompts[prompt], max_new_tokens=NEW_TOKENS, **SAMPLED[setting]).sequences

    return generate


@pytest.fixture
def decoder(pair: Pair) -> Decoder:
    return Decoder(pair.target, pair.draft, tree=TREES["sage"], visual_keep=0.5)


def new_tokens(sequences: Tensor, inputs: Inputs) -> list[int]:
    return sequences[0, inputs["input_ids"].shape[1] :].tolist()


# ------------------------------------------------------------------------------------------------------------ lossless


def test_the_pair_is_worth_decoding(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """All that follows would hold of empty trees too. These branch, and their rounds are of every kind."""
    stats = Decoder(pair.target, pair.draft, tree=TREES["sage"]).generate(**prompts["image"], max_new_tokens=150).stats
    assert np.mean(stats.verified_nodes) > 5 and max(stats.verified_nodes) > TREES["chain"]["depth"]
    assert {0, 1, 2, 3} <= set(stats.accepted_lengths)
    pruned = (
        Decoder(pair.target, pair.draft, tree=TREES["sage"], visual_keep=0.3)
        .generate(**prompts["image"], max_new_tokens=150)
        .stats
    )
    assert pruned.accepted_lengths != stats.accepted_lengths, "the draft looks at the image"
    chain = Decoder(pair.target, pair.draft, tree=TREES["chain"]).generate(**prompts["image"], max_new_tokens=150).stats
    assert chain.accepted_lengths != stats.accepted_lengths, "branches other than the best one are accepted"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_plain_decoding_equals_hugging_face(
    pair: Pair, prompts: dict[str, Inputs], greedy: Greedy, prompt: str
) -> None:
    out = Decoder(pair.target).generate(**prompts[prompt], max_new_tokens=NEW_TOKENS)
    assert torch.equal(out.sequences, greedy(prompt))
    assert len(set(new_tokens(out.sequences, prompts[prompt]))) > 10, "a text that repeats one token proves little"
    assert out.stats.rounds == out.stats.target_forwards == out.stats.new_tokens - 1 and out.stats.draft_forwards == 0


@pytest.mark.parametrize(("prompt", "tree", "keep"), list(itertools.product(PROMPTS, TREES, KEEPS)))
def test_a_draft_changes_no_token(
    pair: Pair,
    prompts: dict[str, Inputs],
    greedy: Greedy,
    sampled_plainly: Callable[[str, int], Tensor],
    prompt: str,
    tree: str,
    keep: float,
) -> None:
    """Greedy output is Hugging Face's, sampled output that of plain decoding with the same seed: token for token."""
    decoder = Decoder(pair.target, pair.draft, tree=TREES[tree], visual_keep=keep)
    assert torch.equal(decoder.generate(**prompts[prompt], max_new_tokens=NEW_TOKENS).sequences, greedy(prompt))
    for setting, settings in enumerate(SAMPLED):
        out = decoder.generate(**prompts[prompt], max_new_tokens=NEW_TOKENS, **settings)
        assert torch.equal(out.sequences, sampled_plainly(prompt, setting)), settings


def test_seeds_and_temperatures_give_different_texts(
    sampled_plainly: Callable[[str, int], Tensor], greedy: Greedy
) -> None:
    """Else the comparisons above would compare the greedy output with itself."""
    texts = [greedy("image"), *(sampled_plainly("image", setting) for setting in range(len(SAMPLED)))]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(texts, 2))


@pytest.mark.parametrize("tree", TREES)
def test_text_models_decode_the_same_way(text_pair: Pair, prompts: dict[str, Inputs], tree: str) -> None:
    inputs = prompts["text"]
    decoder, plain = Decoder(text_pair.target, text_pair.draft, tree=TREES[tree]), Decoder(text_pair.target)
    expected = text_pair.target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(decoder.generate(**inputs, max_new_tokens=NEW_TOKENS).sequences, expected)
    settings = {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "seed": 8}
    assert torch.equal(decoder.generate(**inputs, **settings).sequences, plain.generate(**inputs, **settings).sequences)


def test_a_draft_that_is_never_right_changes_no_token(pair: Pair, prompts: dict[str, Inputs], greedy: Greedy) -> None:
    """A draft of unrelated weights, narrower than the target: nearly every round accepts nothing, and the target speaks
    alone.
    """
    torch.manual_seed(5)
    draft = new_llama(1, hidden_size=16)
    sharpen(draft, draft.model.layers, 1)
    out = Decoder(pair.target, draft, tree=TREES["sage"]).generate(**prompts["image"], max_new_tokens=NEW_TOKENS)
    assert torch.equal(out.sequences, greedy("image"))
    assert out.stats.tokens_per_round is not None and out.stats.tokens_per_round < 1.5


def test_a_draft_that_is_always_right_is_accepted_whole(pair: Pair, prompts: dict[str, Inputs], greedy: Greedy) -> None:
    """The target as its own draft: a chain of 4 gains 4 tokens in every round, and the target's own; 40 = 1 of the
    prefill + 7 * 5 + 4.
    """
    out = Decoder(pair.target, pair.target, tree=TREES["chain"]).generate(**prompts["image"], max_new_tokens=NEW_TOKENS)
    assert torch.equal(out.sequences, greedy("image"))
    assert out.stats.accepted_lengths == [4] * 8


@pytest.mark.parametrize(
    "tree", [{"policy": "sage", "k": 4, "w_min": 3}, {"policy": "chain", "depth": 2}], ids=["sage", "chain"]
)
def test_sampled_tokens_follow_the_target_s_distribution(tree: dict[str, Any]) -> None:
    """Over many seeds, the first three tokens of a vocabulary of five against the product of the target's own
    probabilities, all 125 of them.

    The first is the prefill's; the second and third come from a tree. Equality with plain decoding for each seed
    (above) does not show that plain decoding samples the right thing: this does.
    """
    torch.manual_seed(2)
    sizes = {"vocabulary_size": 5, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    target, draft = new_llama(2, **sizes), new_llama(1, **sizes)
    sharpen(target, target.model.layers, 1)
    target.get_input_embeddings().weight.data *= 0.4  # flatter than elsewhere, so that most of the 125 texts do occur
    copy_common_weights(target, draft)
    prompt = torch.tensor([[1, 2, 3]])
    texts = torch.tensor(list(itertools.product(range(5), repeat=3)))
    with torch.inference_mode():
        logprobs = target(torch.cat([prompt.repeat(125, 1), texts], 1)).logits[:, 2:-1].double().log_softmax(-1)
    probabilities = logprobs.gather(2, texts[:, :, None]).sum((1, 2)).exp().numpy()

    decoder, counts, accepted = Decoder(target, draft, tree=tree), np.zeros(125), 0
    for seed in range(1000):
        out = decoder.generate(input_ids=prompt, max_new_tokens=3, temperature=1.0, seed=seed)
        first, second, third = new_tokens(out.sequences, {"input_ids": prompt})
        counts[25 * first + 5 * second + third] += 1
        accepted += sum(out.stats.accepted_lengths)
    assert accepted > 500, "most of these tokens must come out of the tree"
    # A right implementation fails this for one set of seeds in a thousand; the seeds are fixed.
    assert chi_square_p_value(counts, probabilities) > 0.001


# --------------------------------------------------------------------------------------------------------- how it ends


@pytest.mark.parametrize("tree", TREES)
def test_the_asked_number_of_tokens_and_no_more(
    pair: Pair, prompts: dict[str, Inputs], greedy: Greedy, tree: str
) -> None:
    """Also where the last round verified more; its statistics count what was emitted, and are otherwise those of a
    longer run.
    """
    decoder, inputs = Decoder(pair.target, pair.draft, tree=TREES[tree]), prompts["image"]
    prompt_length = inputs["input_ids"].shape[1]
    whole = decoder.generate(**inputs, max_new_tokens=NEW_TOKENS).stats
    num_cut = 0
    for asked in range(1, 20):
        out = decoder.generate(**inputs, max_new_tokens=asked)
        assert torch.equal(out.sequences, greedy("image")[:, : prompt_length + asked])
        expected, left = [], asked - 1  # the prefill emits one
        for length in whole.accepted_lengths:
            if left > 0:
                expected.append(min(length, left))
                left -= min(length + 1, left)
        assert out.stats.accepted_lengths == expected
        num_cut += check_stats(out.stats, asked)
    assert num_cut > 0 or tree not in ("chain", "sage", "sage-tight"), "no round was cut"


def check_stats(stats: DecodingStats, num_new_tokens: int) -> int:
    """A round emits its accepted tokens and one of the target's; the last may be cut before that one. Returns 1 where
    it was, else 0.
    """
    assert stats.new_tokens == num_new_tokens
    assert stats.rounds == len(stats.accepted_lengths) == len(stats.verified_nodes) == stats.target_forwards
    cut = 1 + sum(stats.accepted_lengths) + stats.rounds - num_new_tokens
    assert cut in (0, 1)
    assert stats.tokens_per_round == ((num_new_tokens - 1) / stats.rounds if stats.rounds else None)
    assert all(accepted <= nodes for accepted, nodes in zip(stats.accepted_lengths, stats.verified_nodes, strict=True))
    assert stats.draft_forwards >= stats.rounds, "at least the root's proposals are asked for in every round"
    return cut


def test_stats_are_json(decoder: Decoder, prompts: dict[str, Inputs]) -> None:
    stats = decoder.generate(**prompts["image"], max_new_tokens=12).stats
    content = json.loads(json.dumps(stats.to_json(), allow_nan=False))
    assert content["prompt_tokens"] == prompts["image"]["input_ids"].shape[1]
    assert (content["new_tokens"], content["rounds"], content["tokens_per_round"]) == (
        12,
        stats.rounds,
        stats.tokens_per_round,
    )


def test_a_single_token_needs_no_round_and_no_draft(decoder: Decoder, prompts: dict[str, Inputs]) -> None:
    stats = decoder.generate(**prompts["image"], max_new_tokens=1).stats
    assert (stats.rounds, stats.draft_forwards, stats.target_forwards, stats.tokens_per_round) == (0, 0, 0, None)


@pytest.mark.parametrize("tree", [None, *TREES])
def test_decoding_ends_with_the_end_of_sequence(
    pair: Pair, prompts: dict[str, Inputs], greedy: Greedy, monkeypatch: pytest.MonkeyPatch, tree: str | None
) -> None:
    """Every token of the output in turn is made the end: so that it comes first, last and in the middle of an accepted
    path, and from the target alone.
    """
    inputs = prompts["image"]
    text = new_tokens(greedy("image"), inputs)
    decoder = Decoder(pair.target) if tree is None else Decoder(pair.target, pair.draft, tree=TREES[tree])
    for eos in dict.fromkeys(text):
        monkeypatch.setattr(pair.target.generation_config, "eos_token_id", eos)
        out = decoder.generate(**inputs, max_new_tokens=NEW_TOKENS)
        assert new_tokens(out.sequences, inputs) == text[: text.index(eos) + 1]
        if tree is not None:
            check_stats(out.stats, text.index(eos) + 1)


def test_several_ends_of_sequence(
    pair: Pair, prompts: dict[str, Inputs], greedy: Greedy, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Llama 3 has them: the first to come ends the text. The list is not one token."""
    text = new_tokens(greedy("image"), prompts["image"])
    ends = [text[20], text[9]]
    monkeypatch.setattr(pair.target.generation_config, "eos_token_id", ends)
    expected = text[: min(text.index(end) for end in ends) + 1]
    assert (
        new_tokens(decoder.generate(**prompts["image"], max_new_tokens=NEW_TOKENS).sequences, prompts["image"])
        == expected
    )
    generated = pair.target.generate(
        **prompts["image"], max_new_tokens=NEW_TOKENS, do_sample=False, custom_generate=decoder
    )
    assert new_tokens(generated, prompts["image"]) == expected


# ----------------------------------------------------------------------------------------------- request after request


def test_requests_do_not_disturb_each_other(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """Long after short (the caches grow), short after long, with and without image, other trees and temperatures: each
    as a fresh decoder answers it.
    """
    rng = np.random.default_rng(0)
    very_long = {"input_ids": torch.from_numpy(rng.integers(4, VOCABULARY_SIZE, (1, 1100)))}
    decoder = Decoder(pair.target, pair.draft, tree=TREES["sage"], visual_keep=0.3)
    initial_capacity = decoder.target.cache.capacity
    turns = [
        (prompts["image"], "sage"),
        (very_long, "sage-wide"),
        (prompts["text"], "chain"),
        (prompts["long"], "sage"),
        (very_long, "sage"),
    ]
    for turn, (inputs, tree) in enumerate(turns):
        settings = {"max_new_tokens": 25, "temperature": 0.5 * (turn % 3), "seed": turn}
        decoder.configure(TREES[tree], visual_keep=0.3)
        out = decoder.generate(**inputs, **settings)
        fresh = Decoder(pair.target, pair.draft, tree=TREES[tree], visual_keep=0.3).generate(**inputs, **settings)
        assert torch.equal(out.sequences, fresh.sequences)
        assert out.stats.accepted_lengths == fresh.stats.accepted_lengths
        assert out.stats.verified_nodes == fresh.stats.verified_nodes
    assert decoder.target.cache.capacity > initial_capacity


def test_a_request_after_a_failed_or_abandoned_one(
    decoder: Decoder, prompts: dict[str, Inputs], greedy: Greedy
) -> None:
    with pytest.raises(UserError):
        decoder.generate(input_ids=prompts["image"]["input_ids"])
    stream = decoder.stream(**prompts["text"], max_new_tokens=NEW_TOKENS)
    next(stream), next(stream)
    stream.close()
    assert torch.equal(decoder.generate(**prompts["image"], max_new_tokens=NEW_TOKENS).sequences, greedy("image"))


def test_a_stream_interrupted_by_another_request_is_refused_or_right(
    decoder: Decoder, prompts: dict[str, Inputs], greedy: Greedy
) -> None:
    stream = decoder.stream(**prompts["image"], max_new_tokens=NEW_TOKENS)
    tokens = [next(stream)]
    decoder.generate(**prompts["text"], max_new_tokens=NEW_TOKENS)
    try:
        tokens += stream
    except UserError:
        return
    assert tokens == new_tokens(greedy("image"), prompts["image"])


# ----------------------------------------------------------------------------------------------------------- streaming


@pytest.mark.parametrize("settings", [{}, SAMPLED[1]])
def test_a_stream_yields_the_tokens_of_generate(
    decoder: Decoder, prompts: dict[str, Inputs], settings: dict[str, Any]
) -> None:
    out = decoder.generate(**prompts["image"], max_new_tokens=NEW_TOKENS, **settings)
    assert list(decoder.stream(**prompts["image"], max_new_tokens=NEW_TOKENS, **settings)) == new_tokens(
        out.sequences, prompts["image"]
    )


def test_a_stream_yields_before_the_text_is_done(decoder: Decoder, prompts: dict[str, Inputs]) -> None:
    """The first token after the prefill alone: the draft has not even read the prompt."""
    stream = decoder.stream(**prompts["image"], max_new_tokens=NEW_TOKENS)
    next(stream)
    assert decoder.draft is not None and decoder.draft.length == 0
    stream.close()


def test_between_two_tokens_the_caller_s_grad_mode_is_its_own(decoder: Decoder, prompts: dict[str, Inputs]) -> None:
    """A caller that trains or scores between two tokens must not find its tensors turned into inference tensors."""
    stream = decoder.stream(**prompts["image"], max_new_tokens=5)
    modes = [torch.is_inference_mode_enabled() for _ in stream]
    assert not any(modes)


# -------------------------------------------------------------------------------------- Hugging Face's custom_generate


@pytest.mark.parametrize("num_tokens", [1, 7, NEW_TOKENS])
@pytest.mark.parametrize("prompt", ["image", "long"])
def test_custom_generate_equals_generate(
    pair: Pair, prompts: dict[str, Inputs], greedy: Greedy, decoder: Decoder, prompt: str, num_tokens: int
) -> None:
    for point in (decoder, Decoder(pair.target)):
        generated = pair.target.generate(
            **prompts[prompt], max_new_tokens=num_tokens, do_sample=False, custom_generate=point
        )
        assert torch.equal(generated, greedy(prompt, max_new_tokens=num_tokens))


@pytest.mark.parametrize("kind", ["repetition_penalty", "no_repeat_ngram_size", "bad_words_ids"])
@pytest.mark.parametrize("prompt", ["image", "long"])
def test_custom_generate_equals_generate_with_logits_processors(
    pair: Pair, prompts: dict[str, Inputs], greedy: Greedy, decoder: Decoder, prompt: str, kind: str
) -> None:
    """They read the prefix of each node, and run on the visited nodes only."""
    text = new_tokens(greedy(prompt), prompts[prompt])
    # The bad words are a token, and a pair that is bad only together: from the text itself, so that forbidding them
    # matters.
    value = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 1, "bad_words_ids": [[text[15]], text[4:6]]}[kind]
    settings = {**prompts[prompt], "max_new_tokens": NEW_TOKENS, "do_sample": False, kind: value}
    expected = pair.target.generate(**settings)
    assert not torch.equal(expected, greedy(prompt)), "the processor must have an effect"
    assert torch.equal(pair.target.generate(**settings, custom_generate=decoder), expected)
    assert decoder.last_stats.tokens_per_round is not None and decoder.last_stats.tokens_per_round > 1.2, (
        "the draft still helps"
    )
    assert torch.equal(pair.target.generate(**settings, custom_generate=Decoder(pair.target)), expected)


def test_custom_generate_of_a_text_model(text_pair: Pair, prompts: dict[str, Inputs]) -> None:
    decoder = Decoder(text_pair.target, text_pair.draft, tree=TREES["sage"])
    settings = {**prompts["text"], "max_new_tokens": NEW_TOKENS, "do_sample": False, "repetition_penalty": 1.2}
    assert torch.equal(
        text_pair.target.generate(**settings, custom_generate=decoder), text_pair.target.generate(**settings)
    )


def test_custom_generate_samples_repeatably_and_the_draft_changes_nothing(
    pair: Pair, prompts: dict[str, Inputs], decoder: Decoder
) -> None:
    """The seed comes from torch's global state. Temperature, top-k and top-p are processors there."""

    def sample(point: Decoder, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return pair.target.generate(
            **prompts["image"],
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            temperature=0.7,
            top_p=0.9,
            top_k=20,
            custom_generate=point,
        )

    assert torch.equal(sample(decoder, 1), sample(decoder, 1))
    assert torch.equal(sample(decoder, 1), sample(Decoder(pair.target), 1))
    assert not torch.equal(sample(decoder, 1), sample(decoder, 2))


class StopAt(StoppingCriteria):
    """Ends the text behind a token: the simplest criterion that depends on what was emitted. transformers asks for one
    answer per row.
    """

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] == self.token


def test_custom_generate_obeys_stopping_criteria(
    pair: Pair, prompts: dict[str, Inputs], greedy: Greedy, decoder: Decoder
) -> None:
    text = new_tokens(greedy("image"), prompts["image"])
    for token in dict.fromkeys(text):
        stopped = pair.target.generate(
            **prompts["image"],
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([StopAt(token)]),
            custom_generate=decoder,
        )
        assert new_tokens(stopped, prompts["image"]) == text[: text.index(token) + 1]


def test_custom_generate_obeys_the_call_s_end_of_sequence(
    pair: Pair, prompts: dict[str, Inputs], greedy: Greedy, decoder: Decoder
) -> None:
    text = new_tokens(greedy("image"), prompts["image"])
    generated = pair.target.generate(
        **prompts["image"], max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=text[11], custom_generate=decoder
    )
    assert new_tokens(generated, prompts["image"]) == text[: text.index(text[11]) + 1]


def test_custom_generate_returns_a_dict_when_asked(
    pair: Pair, prompts: dict[str, Inputs], greedy: Greedy, decoder: Decoder
) -> None:
    out = pair.target.generate(
        **prompts["image"],
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        custom_generate=decoder,
    )
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert torch.equal(out.sequences, greedy("image"))


class Recorder:
    """A streamer that keeps what it is given: all that transformers' own streamers share is ``put`` and ``end``."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.num_puts = 0
        self.num_ends = 0

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()
        self.num_puts += 1

    def end(self) -> None:
        self.num_ends += 1


def test_custom_generate_feeds_a_streamer(
    pair: Pair, prompts: dict[str, Inputs], greedy: Greedy, decoder: Decoder
) -> None:
    """``generate`` does not forward its own ``streamer`` to a custom method, so it is bound beforehand. It gets the
    prompt, as from transformers, then the tokens round by round."""
    streamer = Recorder()
    out = pair.target.generate(
        **prompts["image"],
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        custom_generate=functools.partial(decoder, streamer=streamer),
    )
    assert streamer.tokens == out[0].tolist() == greedy("image")[0].tolist()
    assert (streamer.num_puts, streamer.num_ends) == (2 + decoder.last_stats.rounds, 1)


def test_custom_generate_of_a_prompt_without_an_image(
    pair: Pair, prompts: dict[str, Inputs], greedy: Greedy, decoder: Decoder
) -> None:
    generated = pair.target.generate(
        **prompts["text"], max_new_tokens=NEW_TOKENS, do_sample=False, custom_generate=decoder
    )
    assert torch.equal(generated, greedy("text"))


def test_custom_generate_shows_the_draft_the_image_itself(
    pair: Pair, prompts: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The features of the target's tower are of the target's width, and mean nothing to the draft."""
    seen = []
    forward = pair.draft.model.get_image_features

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["pixel_values"])
        return forward(*args, **kwargs)

    monkeypatch.setattr(pair.draft.model, "get_image_features", spy)
    pair.target.generate(
        **prompts["image"], max_new_tokens=4, do_sample=False, custom_generate=Decoder(pair.target, pair.draft)
    )
    assert len(seen) == 1 and torch.equal(seen[0], prompts["image"]["pixel_values"])


def test_custom_generate_of_a_model_whose_images_come_with_more_than_pixels() -> None:
    """LLaVA-NeXT cuts an image into tiles and is told its size. ``generate`` hands what its image encoder takes to a
    custom method that names it, and to nobody otherwise."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    vision = CLIPVisionConfig(num_hidden_layers=1, image_size=32, patch_size=8, **sizes)
    text = LlamaConfig(vocab_size=VOCABULARY_SIZE, num_hidden_layers=2, eos_token_id=None, **sizes)
    config = LlavaNextConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=3,
        image_grid_pinpoints=[[32, 32]],
        vision_feature_layer=-1,
    )
    target = LlavaNextForConditionalGeneration(config).eval()
    # The whole image and its one tile are 4 x 4 patches each; each of the tile's four rows ends with a newline feature.
    inputs = {
        "input_ids": torch.tensor([[1, *[3] * (16 + 16 + 4), 7, 8, 9]]),
        "pixel_values": torch.randn(1, 2, 3, 32, 32),
        "image_sizes": torch.tensor([[32, 32]]),
    }
    expected = target.generate(**inputs, max_new_tokens=8, do_sample=False)
    decoder = Decoder(target, target)
    assert torch.equal(decoder.generate(**inputs, max_new_tokens=8).sequences, expected)
    assert torch.equal(target.generate(**inputs, max_new_tokens=8, do_sample=False, custom_generate=decoder), expected)


# ------------------------------------------------------------------------------------------------ drafts without sight


def test_a_draft_without_sight_helps_a_target_with_it(pair: Pair, prompts: dict[str, Inputs], greedy: Greedy) -> None:
    """It reads the prompt without the image: useful behind it, and lossless in any case."""
    draft = new_llama(2)
    copy_common_weights(pair.draft.model.language_model, draft.model)
    out = Decoder(pair.target, draft, tree=TREES["sage"]).generate(**prompts["image"], max_new_tokens=NEW_TOKENS)
    assert torch.equal(out.sequences, greedy("image"))


def test_visual_keep_means_nothing_to_a_draft_without_sight(
    pair: Pair, prompts: dict[str, Inputs], greedy: Greedy
) -> None:
    decoder = Decoder(pair.target, new_llama(2), tree=TREES["sage"], visual_keep=0.3)
    assert torch.equal(decoder.generate(**prompts["image"], max_new_tokens=NEW_TOKENS).sequences, greedy("image"))


# ------------------------------------------------------------------------------------------------------------ mistakes


def expect(error: pytest.ExceptionInfo[UserError], *parts: str) -> None:
    for part in parts:
        assert part in str(error.value)


def test_vocabularies_that_differ(pair: Pair) -> None:
    with pytest.raises(UserError) as caught:
        Decoder(pair.target, new_llama(1, vocabulary_size=299))
    expect(
        caught,
        "must share one vocabulary",
        "the target has 300 tokens, the draft 299",
        "use a draft made for this target",
    )


class WordLevel:
    """All that is asked of a tokenizer: its tokens."""

    def __init__(self, size: int, name: str = "") -> None:
        self.size = size
        self.name = name

    def __len__(self) -> int:
        return self.size

    def get_vocab(self) -> dict[str, int]:
        return {f"{self.name}{token}": token for token in range(self.size)}


@pytest.mark.parametrize("draft_size", [300, 333])
def test_vocabularies_that_are_padded_to_different_sizes(draft_size: int) -> None:
    """As those of the large and the small Qwen2.5; and LLaVA has tokens more than the Llama inside. Neither model is
    asked for what only the other has, even if one says it.
    """
    torch.manual_seed(0)
    target, draft = new_llama(2, vocabulary_size=316), new_llama(1, vocabulary_size=draft_size)
    for model in (target, draft):
        sharpen(model, model.model.layers, 2)
        model.get_output_embeddings().weight.data[300:] *= 3.0  # padding that is said all the time
    tokenizer = WordLevel(300)
    inputs = {"input_ids": torch.arange(30, 50)[None]}
    expected = Decoder(target).generate(**inputs, max_new_tokens=NEW_TOKENS).sequences
    assert (expected >= 300).any()
    decoder = Decoder(
        target, IndependentDraft(draft, tokenizer=WordLevel(298)), tree=TREES["sage"], processor=tokenizer
    )
    assert torch.equal(decoder.generate(**inputs, max_new_tokens=NEW_TOKENS).sequences, expected)
    for other in (draft, IndependentDraft(draft)):
        with pytest.raises(UserError, match="must share one vocabulary; the target has 316 tokens"):
            Decoder(target, other, processor=tokenizer)
    with pytest.raises(UserError, match="must share one vocabulary; their tokenizers differ"):
        Decoder(target, IndependentDraft(draft, tokenizer=WordLevel(300, "other ")), processor=tokenizer)


def test_image_tokens_without_an_image(decoder: Decoder, prompts: dict[str, Inputs]) -> None:
    with pytest.raises(UserError) as caught:
        decoder.generate(input_ids=prompts["image"]["input_ids"])
    expect(
        caught,
        f"the prompt has {NUM_VISUAL_TOKENS} image tokens but no pixel_values",
        "pass the image to the processor",
    )


def test_an_image_without_image_tokens(decoder: Decoder, prompts: dict[str, Inputs]) -> None:
    with pytest.raises(UserError) as caught:
        decoder.generate(**prompts["text"], pixel_values=prompts["image"]["pixel_values"])
    expect(caught, "pixel_values came without image tokens", "let the processor make both")


def test_more_than_the_context_holds(decoder: Decoder, prompts: dict[str, Inputs]) -> None:
    length = prompts["text"]["input_ids"].shape[1]
    with pytest.raises(UserError) as caught:
        decoder.generate(**prompts["text"], max_new_tokens=2049 - length)
    expect(
        caught,
        "context of 2048 tokens",
        f"got {length} + {2049 - length}",
        "shorten the prompt or lower max_new_tokens",
    )


def test_the_context_to_the_last_token(text_pair: Pair) -> None:
    """A prompt and answer that fill it are allowed: the tree that reaches beyond it is not emitted."""
    prompt = torch.from_numpy(np.random.default_rng(1).integers(4, VOCABULARY_SIZE, (1, 2040)))
    out = Decoder(text_pair.target, text_pair.draft, tree=TREES["sage"]).generate(input_ids=prompt, max_new_tokens=8)
    assert torch.equal(out.sequences, text_pair.target.generate(input_ids=prompt, max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("num_tokens", [0, -3])
def test_no_tokens(decoder: Decoder, prompts: dict[str, Inputs], num_tokens: int) -> None:
    with pytest.raises(UserError) as caught:
        decoder.generate(**prompts["text"], max_new_tokens=num_tokens)
    expect(caught, f"max_new_tokens must be at least 1; got {num_tokens}")


def test_no_prompt(decoder: Decoder) -> None:
    with pytest.raises(UserError) as caught:
        decoder.generate(pixel_values=torch.zeros(1, 3, 32, 32))
    expect(caught, "generate needs input_ids", "got pixel_values")
    with pytest.raises(UserError, match="got nothing"):
        decoder.generate()


@pytest.mark.parametrize("call", ["generate", "stream"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature must be a number of at least 0; got -1.0"),
        ({"top_p": 2.0}, "top_p must be above 0 and at most 1; got 2.0"),
        ({"top_k": -2}, "top_k must be at least 0; got -2"),
    ],
)
def test_sampling_settings_out_of_range(
    decoder: Decoder, prompts: dict[str, Inputs], call: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        list(getattr(decoder, call)(**prompts["text"], **settings))


@pytest.mark.parametrize("misspelt", ["temprature", "max_tokens", "do_samples"])
def test_a_misspelt_setting(decoder: Decoder, prompts: dict[str, Inputs], misspelt: str) -> None:
    with pytest.raises(UserError, match=misspelt):
        decoder.generate(**prompts["text"], max_new_tokens=2, **{misspelt: 1})


@pytest.mark.parametrize("keep", [0.0, -0.5, 1.5, float("nan")])
def test_a_share_of_visual_tokens_out_of_range(pair: Pair, keep: float) -> None:
    with pytest.raises(UserError) as caught:
        Decoder(pair.target, pair.draft, visual_keep=keep)
    expect(caught, f"visual_keep must be above 0 and at most 1; got {keep}")


def test_configure_checks_the_share_too(decoder: Decoder) -> None:
    with pytest.raises(UserError, match=r"visual_keep must be above 0 and at most 1; got 7\.0"):
        decoder.configure({"policy": "sage"}, visual_keep=7.0)


def test_an_unknown_tree(pair: Pair, decoder: Decoder) -> None:
    with pytest.raises(UserError, match="unknown tree policy 'sagee'; did you mean 'sage'"):
        Decoder(pair.target, pair.draft, tree={"policy": "sagee"})
    with pytest.raises(UserError, match="unknown key 'dmax'; did you mean 'd_max'"):
        decoder.configure({"policy": "sage", "dmax": 3}, visual_keep=1.0)


def test_custom_generate_on_another_model(pair: Pair, prompts: dict[str, Inputs], decoder: Decoder) -> None:
    with pytest.raises(UserError, match="must be called on the decoder's own target; load it with target=model"):
        pair.draft.generate(**prompts["image"], max_new_tokens=3, custom_generate=decoder)


@pytest.mark.parametrize("settings", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}])
def test_custom_generate_of_several_sequences(
    pair: Pair, prompts: dict[str, Inputs], decoder: Decoder, settings: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match="num_beams and num_return_sequences must be 1"):
        pair.target.generate(**prompts["image"], max_new_tokens=3, custom_generate=decoder, **settings)
