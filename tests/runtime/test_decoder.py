"""Decoding with a draft emits the target's own tokens, for every draft, tree, temperature and entry point."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autotune.drafters.draft import DraftNotice
from autotune.drafters.independent import IndependentDraft
from autotune.errors import UserError
from autotune.runtime.decoder import Decoder
from autotune.runtime.stats import DecodingStats
from tests.obvious import chi_square_p_value
from tests.runtime.conftest import NEW_TOKENS, SAMPLED, TREES, Greedy, deciding_at_once, new_tokens
from tests.tiny_models import VOCABULARY_SIZE, Inputs, Pair, copy_common_weights, new_llama, sharpen

PROMPTS = ("text", "image", "long")
KEEPS = (1.0, 0.3)


# -------- lossless


def test_the_pair_grows_trees_that_branch(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """The tests below would pass with empty trees too: these branch, and their accepted lengths vary."""
    stats = Decoder(pair.target, pair.draft, tree=TREES["sage"]).generate(**prompts["image"], max_new_tokens=100).stats
    assert np.mean(stats.verified_nodes) > 5 and max(stats.verified_nodes) > TREES["chain"]["depth"]
    assert {0, 1, 2, 3} <= set(stats.accepted_lengths)
    for tree, keep, reason in (
        ("sage", 0.3, "the draft looks at the image"),
        ("chain", 1.0, "branches other than the best one are accepted"),
    ):
        decoder = Decoder(pair.target, pair.draft, tree=TREES[tree], visual_keep=keep)
        other = decoder.generate(**prompts["image"], max_new_tokens=100).stats
        assert other.accepted_lengths != stats.accepted_lengths, reason


def test_plain_decoding_equals_hugging_face(pair: Pair, prompts: dict[str, Inputs], greedy: Greedy) -> None:
    for prompt in PROMPTS:
        out = Decoder(pair.target).generate(**prompts[prompt], max_new_tokens=NEW_TOKENS)
        assert torch.equal(out.sequences, greedy(prompt))
        assert len(set(new_tokens(out.sequences, prompts[prompt]))) > 10, "a text that repeats one token proves little"
        assert out.stats.rounds == out.stats.target_forwards == out.stats.new_tokens - 1
        assert out.stats.draft_forwards == 0


@pytest.mark.parametrize("tree", TREES)
def test_a_draft_changes_no_token(
    pair: Pair, prompts: dict[str, Inputs], greedy: Greedy, sampled_plainly: Callable[[str, int], Tensor], tree: str
) -> None:
    """Greedy output equals Hugging Face's, sampled output equals plain decoding with the same seed, token by token."""
    for number, prompt in enumerate(PROMPTS, list(TREES).index(tree)):
        keep, setting = KEEPS[number % len(KEEPS)], number % len(SAMPLED)
        decoder = Decoder(pair.target, pair.draft, tree=TREES[tree], visual_keep=keep)
        assert torch.equal(decoder.generate(**prompts[prompt], max_new_tokens=NEW_TOKENS).sequences, greedy(prompt))
        out = decoder.generate(**prompts[prompt], max_new_tokens=NEW_TOKENS, **SAMPLED[setting])
        assert torch.equal(out.sequences, sampled_plainly(prompt, setting)), (prompt, keep, setting)


def test_tokens_of_visited_nodes_are_those_of_all_rows_at_once(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """Acceptance on a CPU, and on a device."""
    for setting in ({}, SAMPLED[2], {"repetition_penalty": 1.05, "temperature": 1.0, "seed": 5}):
        decoders = Decoder(pair.target, pair.draft, tree=TREES["sage"]), deciding_at_once(pair)
        visited, at_once = (d.generate(**prompts["image"], max_new_tokens=NEW_TOKENS, **setting) for d in decoders)
        assert torch.equal(visited.sequences, at_once.sequences)
        assert (
            visited.stats.accepted_lengths == at_once.stats.accepted_lengths
            and len(set(at_once.stats.accepted_lengths)) > 2
        )


def test_seeds_and_temperatures_give_different_texts(
    sampled_plainly: Callable[[str, int], Tensor], greedy: Greedy
) -> None:
    """Otherwise the test above would compare the greedy output with itself."""
    texts = [greedy("image"), *(sampled_plainly("image", setting) for setting in range(len(SAMPLED)))]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(texts, 2))


@pytest.mark.parametrize("num_seeds", [200, pytest.param(1000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "tree", [{"policy": "sage", "k": 4, "w_min": 3}, {"policy": "chain", "depth": 2}], ids=["sage", "chain"]
)
def test_sampled_tokens_follow_the_target_s_distribution(tree: dict[str, Any], num_seeds: int) -> None:
    """Over many seeds, the first three tokens follow the product of the target's own probabilities, over a vocabulary
    of five tokens and thus 125 texts.

    The first token is the prefill's; the second and third come from a tree. Equality with plain decoding does not show
    that plain decoding samples from the right distribution; this does.
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
    for seed in range(num_seeds):
        out = decoder.generate(input_ids=prompt, max_new_tokens=3, temperature=1.0, seed=seed)
        first, second, third = new_tokens(out.sequences, {"input_ids": prompt})
        counts[25 * first + 5 * second + third] += 1
        accepted += sum(out.stats.accepted_lengths)
    assert accepted > num_seeds / 2, "most of these tokens must come out of the tree"
    # A correct implementation fails for one set of seeds in a thousand; the seeds are fixed.
    assert chi_square_p_value(counts, probabilities) > 0.001


# -------- how it ends


def test_the_requested_number_of_tokens_and_no_more(pair: Pair, prompts: dict[str, Inputs], greedy: Greedy) -> None:
    """A last round that verified more tokens is cut. Statistics count emitted tokens, and otherwise equal a longer
    run's.
    """
    inputs, num_cut = prompts["image"], {}
    prompt_length = inputs["input_ids"].shape[1]
    for name, tree in TREES.items():
        decoder = Decoder(pair.target, pair.draft, tree=tree)
        accepted_lengths = decoder.generate(**inputs, max_new_tokens=NEW_TOKENS).stats.accepted_lengths
        num_cut[name] = 0
        for number in (1, 2, 3, 4, 6, 9):
            out = decoder.generate(**inputs, max_new_tokens=number)
            assert torch.equal(out.sequences, greedy("image")[:, : prompt_length + number])
            expected, left = [], number - 1  # the prefill emits one
            for length in accepted_lengths:
                if left > 0:
                    expected.append(min(length, left))
                    left -= min(length + 1, left)
            assert out.stats.accepted_lengths == expected
            num_cut[name] += check_stats(out.stats, number)
    assert min(num_cut["chain"], num_cut["sage"], num_cut["sage-tight"]) > 0, "no round was cut"


def check_stats(stats: DecodingStats, num_new_tokens: int) -> int:
    """A round emits its accepted tokens and one of the target's, which the last round may lack. Returns 1 if so, else
    0.
    """
    assert stats.new_tokens == num_new_tokens
    assert stats.rounds == len(stats.accepted_lengths) == len(stats.verified_nodes) == stats.target_forwards
    cut = 1 + sum(stats.accepted_lengths) + stats.rounds - num_new_tokens
    assert cut in (0, 1)
    assert stats.tokens_per_round == ((num_new_tokens - 1) / stats.rounds if stats.rounds else None)
    assert all(accepted <= nodes for accepted, nodes in zip(stats.accepted_lengths, stats.verified_nodes, strict=True))
    assert stats.draft_forwards >= stats.rounds, "at least the root's proposals are asked for in every round"
    return cut


def test_decoding_ends_with_the_end_of_sequence(
    pair: Pair, prompts: dict[str, Inputs], greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of the output in turn are the end of sequence: the first, the last, tokens in the middle of an accepted
    path, and tokens of the target alone.
    """
    inputs = prompts["image"]
    text = new_tokens(greedy("image"), inputs)
    for number, tree in enumerate([None, *TREES.values()]):
        decoder = Decoder(pair.target) if tree is None else Decoder(pair.target, pair.draft, tree=tree)
        for eos in list(dict.fromkeys(text))[number % 4 :: 4]:
            monkeypatch.setattr(pair.target.generation_config, "eos_token_id", eos)
            out = decoder.generate(**inputs, max_new_tokens=NEW_TOKENS)
            assert new_tokens(out.sequences, inputs) == text[: text.index(eos) + 1]
            if tree is not None:
                check_stats(out.stats, text.index(eos) + 1)


# -------- Hugging Face's custom_generate


def test_custom_generate_samples_repeatably_and_the_draft_changes_nothing(
    pair: Pair, prompts: dict[str, Inputs], decoder: Decoder
) -> None:
    """The seed is drawn from torch's global state. Temperature, top-k and top-p are processors."""

    def sample(method: Decoder, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return pair.target.generate(
            **prompts["image"],
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            temperature=0.7,
            top_p=0.9,
            top_k=20,
            custom_generate=method,
        )

    assert torch.equal(sample(decoder, 1), sample(decoder, 1))
    assert torch.equal(sample(decoder, 1), sample(Decoder(pair.target), 1))
    assert not torch.equal(sample(decoder, 1), sample(decoder, 2))


def test_custom_generate_shows_the_draft_the_image_itself(
    pair: Pair, prompts: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The features of the target's vision tower have the target's width and are of no use to the draft."""
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


# -------- mistakes


MISTAKES: list[tuple[dict[str, Any], str]] = [
    *(({"visual_keep": keep}, f"must be above 0 and at most 1; got {keep}") for keep in (0.0, -0.5, 1.5, float("nan"))),
    ({"visual_keep": 0.5, "visual_ranking": "evn"}, "unknown visual_ranking 'evn'; did you mean 'even'"),
    (
        {"draft": new_llama(1, vocabulary_size=250)},
        "must share one vocabulary; the target has 300 tokens, the draft 250; use a draft made for this target",
    ),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_a_decoder_that_cannot_be(pair: Pair, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Decoder(pair.target, **{"draft": pair.draft, **options})


def test_calls_of_no_prompt_and_of_another_model(pair: Pair, prompts: dict[str, Inputs], decoder: Decoder) -> None:
    for inputs, given in (({"pixel_values": torch.zeros(1, 3, 32, 32)}, "pixel_values"), ({}, "nothing")):
        with pytest.raises(UserError, match=f"generate needs input_ids, .*; got {given}"):
            decoder.generate(**inputs)
    with pytest.raises(UserError, match="must be called on the decoder's own target; load it with target=model"):
        pair.draft.generate(**prompts["image"], max_new_tokens=3, custom_generate=decoder)


class WordLevel:
    """A tokenizer of which only the vocabulary is used."""

    def __init__(self, size: int, name: str = "") -> None:
        self.size = size
        self.name = name

    def __len__(self) -> int:
        return self.size

    def get_vocab(self) -> dict[str, int]:
        return {f"{self.name}{token}": token for token in range(self.size)}


@pytest.mark.parametrize("draft_size", [300, 333])
def test_vocabularies_that_are_padded_to_different_sizes(draft_size: int) -> None:
    """As in the large and the small Qwen2.5, and in LLaVA and the Llama inside. Neither model is given a token that
    only the other has, even if the other emits it.
    """
    torch.manual_seed(0)
    target, draft = new_llama(2, vocabulary_size=316), new_llama(1, vocabulary_size=draft_size)
    for model in (target, draft):
        sharpen(model, model.model.layers, 2)
        model.get_output_embeddings().weight.data[300:] *= 3.0  # padding that is often emitted
    tokenizer = WordLevel(300)
    inputs = {"input_ids": torch.arange(30, 50)[None]}
    expected = Decoder(target).generate(**inputs, max_new_tokens=NEW_TOKENS).sequences
    assert (expected >= 300).any()
    decoder = Decoder(
        target, IndependentDraft(draft, tokenizer=WordLevel(298)), tree=TREES["sage"], processor=tokenizer
    )
    assert torch.equal(decoder.generate(**inputs, max_new_tokens=NEW_TOKENS).sequences, expected)
    for other in (draft, IndependentDraft(draft)):
        with pytest.warns(
            DraftNotice, match=f"target has 316 tokens, the draft {draft_size}, .* are taken for the same"
        ):
            decoder = Decoder(target, other, processor=tokenizer)
        assert torch.equal(decoder.generate(**inputs, max_new_tokens=NEW_TOKENS).sequences, expected)
    with pytest.raises(UserError, match="must share one vocabulary; their tokenizers differ"):
        Decoder(target, IndependentDraft(draft, tokenizer=WordLevel(300, "other ")), processor=tokenizer)


def test_the_context_to_the_last_token(text_pair: Pair) -> None:
    """A prompt and answer that fill it are allowed: the tree that reaches beyond it is not emitted."""
    prompt = torch.from_numpy(np.random.default_rng(1).integers(4, VOCABULARY_SIZE, (1, 2040)))
    out = Decoder(text_pair.target, text_pair.draft, tree=TREES["sage"]).generate(input_ids=prompt, max_new_tokens=8)
    assert torch.equal(out.sequences, text_pair.target.generate(input_ids=prompt, max_new_tokens=8, do_sample=False))
