"""Settings of a call or of the model's generation config mean what they mean to ``generate``, or are refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    TopKLogitsWarper,
)

from autotune.errors import UserError
from autotune.modeling.prompt import EncodedPrompt
from autotune.runtime.decoder import Decoder
from autotune.runtime.generate_args import DEFAULT_MAX_NEW_TOKENS, Call, Request
from autotune.runtime.token_sampler import TokenSampler
from tests.runtime.conftest import TREES, deciding_at_once, new_tokens
from tests.tiny_models import Inputs, Pair

NEW_TOKENS = 20


@pytest.fixture
def decoder(pair: Pair, processor: Any) -> Decoder:
    return Decoder(pair.target, pair.draft, tree=TREES["sage"], processor=processor)


@pytest.fixture
def configured(pair: Pair) -> Iterator[Any]:
    """The target's generation config, which the test may change; it is restored afterwards."""
    before = copy.deepcopy(pair.target.generation_config)
    yield pair.target.generation_config
    pair.target.generation_config = before


@pytest.fixture
def text(pair: Pair, prompts: dict[str, Inputs]) -> list[int]:
    """The target's greedy answer to the image."""
    inputs = prompts["image"]
    return new_tokens(pair.target.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False), inputs)


# Settings that change the greedy text, as functions of it.
SETTINGS: dict[str, Any] = {
    "eos_token_id": lambda text: [text[9], text[14]],
    "min_new_tokens": lambda text: {"min_new_tokens": 14, "eos_token_id": text[5]},
    "min_length": lambda text: {"min_length": 60, "eos_token_id": text[5]},
    "repetition_penalty": lambda text: 1.4,
    "no_repeat_ngram_size": lambda text: 1,
    "bad_words_ids": lambda text: [[text[3]], text[7:9]],
    "suppress_tokens": lambda text: [text[2], text[6]],
    "begin_suppress_tokens": lambda text: [text[0]],
    "sequence_bias": lambda text: [[[text[1], text[2]], -10.0]],
    "exponential_decay_length_penalty": lambda text: {
        "exponential_decay_length_penalty": (3, 1.6),
        "eos_token_id": text[15],
    },
    "forced_eos_token_id": lambda text: text[15],
    "remove_invalid_values": lambda text: {"remove_invalid_values": True, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_mean_what_they_mean_to_generate(
    pair: Pair, prompts: dict[str, Inputs], decoder: Decoder, configured: Any, text: list[int], name: str
) -> None:
    """Given with the call, or in the model's generation config."""
    given = SETTINGS[name](text)
    settings = given if isinstance(given, dict) else {name: given}
    plain, inputs = Decoder(pair.target), {**prompts["image"], "max_new_tokens": NEW_TOKENS}
    at_once = deciding_at_once(pair)
    call = {**inputs, **settings}
    expected = pair.target.generate(**call, do_sample=False)
    assert new_tokens(expected, prompts["image"]) != text, "the setting must have an effect"
    for method in (decoder, at_once, plain):
        assert torch.equal(method.generate(**call).sequences, expected)
    assert torch.equal(pair.target.generate(**call, do_sample=False, custom_generate=decoder), expected)
    sampled = [method.generate(**call, temperature=0.9, seed=4).sequences for method in (decoder, at_once, plain)]
    assert torch.equal(sampled[0], sampled[1]) and torch.equal(sampled[0], sampled[2])
    configured.update(**settings)
    assert torch.equal(decoder.generate(**inputs).sequences, expected)
    assert torch.equal(pair.target.generate(**inputs, do_sample=False, custom_generate=plain), expected)
    assert list(decoder.stream(**inputs)) == new_tokens(expected, prompts["image"])


def test_how_long_an_answer_may_be(
    pair: Pair, prompts: dict[str, Inputs], decoder: Decoder, configured: Any, text: list[int]
) -> None:
    inputs = prompts["image"]
    length = inputs["input_ids"].shape[1]
    configured.eos_token_id = None
    assert decoder.generate(**inputs).sequences.shape[1] == length + DEFAULT_MAX_NEW_TOKENS
    assert new_tokens(decoder.generate(**inputs, max_length=length + 7).sequences, inputs) == text[:7]
    configured.max_length = length + 5
    assert new_tokens(decoder.generate(**inputs).sequences, inputs) == text[:5]
    assert new_tokens(decoder.generate(**inputs, max_new_tokens=9).sequences, inputs) == text[:9]
    configured.max_new_tokens = 4
    assert new_tokens(decoder.generate(**inputs).sequences, inputs) == text[:4]
    configured.max_length, configured.max_new_tokens = length, None
    with pytest.raises(UserError, match="generate refuses the call: Input length of input_ids"):
        decoder.generate(**inputs)


@pytest.mark.parametrize("where", ["call", "config", "config of the call"])
def test_stop_strings(
    pair: Pair,
    prompts: dict[str, Inputs],
    processor: Any,
    decoder: Decoder,
    configured: Any,
    text: list[int],
    where: str,
) -> None:
    """They need the processor's tokenizer."""
    words = [processor.tokenizer.decode(text[at : at + 2]) for at in range(2, 20)]
    stop = next(word for word in words if word.isascii() and word.strip())
    expected = pair.target.generate(
        **prompts["image"],
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        stop_strings=[stop],
        tokenizer=processor.tokenizer,
    )
    assert expected.shape[1] < prompts["image"]["input_ids"].shape[1] + NEW_TOKENS
    call = {**prompts["image"], "max_new_tokens": NEW_TOKENS}
    if where == "config":
        configured.stop_strings = [stop]
    elif where == "config of the call":
        del call["max_new_tokens"]
        call["generation_config"] = copy.deepcopy(configured)
        call["generation_config"].update(stop_strings=[stop], max_new_tokens=NEW_TOKENS)
    else:
        call["stop_strings"] = [stop]
    assert torch.equal(decoder.generate(**call).sequences, expected)
    with pytest.raises(UserError, match="stop_strings need the tokenizer; load the decoder with processor="):
        Decoder(pair.target).generate(**call)


class Never(LogitsProcessor):
    """A user's own processor: forbids a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, self.token] = -float("inf")
        return scores


class StopAfter(StoppingCriteria):
    """A user's own criterion: ends the text after a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] == self.token


def test_processors_and_criteria_of_the_user(
    pair: Pair, prompts: dict[str, Inputs], decoder: Decoder, text: list[int]
) -> None:
    call = {
        **prompts["image"],
        "max_new_tokens": NEW_TOKENS,
        "logits_processor": [Never(text[4])],
        "stopping_criteria": StoppingCriteriaList([StopAfter(text[2])]),
    }
    for one in ({}, {"stopping_criteria": StoppingCriteriaList()}):
        expected = pair.target.generate(**{**call, **one}, do_sample=False)
        assert torch.equal(decoder.generate(**{**call, **one}).sequences, expected)
        assert torch.equal(pair.target.generate(**{**call, **one}, do_sample=False, custom_generate=decoder), expected)


def test_sampling_is_the_generation_config_s_where_the_call_says_nothing(
    pair: Pair, prompts: dict[str, Inputs], decoder: Decoder, configured: Any
) -> None:
    call = {**prompts["image"], "max_new_tokens": NEW_TOKENS}
    greedy = decoder.generate(**call).sequences
    explicit = decoder.generate(**call, temperature=0.8, top_k=7, top_p=0.9, seed=3).sequences
    configured.update(do_sample=True, temperature=0.8, top_k=7, top_p=0.9)
    assert torch.equal(decoder.generate(**call, seed=3).sequences, explicit)
    assert not torch.equal(explicit, greedy)
    assert torch.equal(decoder.generate(**call, temperature=0).sequences, greedy)
    # A temperature of the call's own is not cut by the config's top-k and top-p.
    assert torch.equal(
        decoder.generate(**call, temperature=1.0, seed=3).sequences,
        Decoder(pair.target).generate(**call, temperature=1.0, top_k=0, top_p=1.0, seed=3).sequences,
    )


def test_processors_that_need_the_prefix_as_it_is_decide_one_by_one() -> None:
    penalty, warper = RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper(0.5)
    for processor, reads_prefix, one_by_one in (
        (TopKLogitsWarper(3), False, []),
        (MinNewTokensLengthLogitsProcessor(3, 5, 1), True, []),
        (penalty(1.2, prompt_ignore_length=3), True, []),
        (penalty(1.2, prompt_ignore_length=4), True, ["RepetitionPenaltyLogitsProcessor"]),  # a new token too
        (Never(3), True, ["Never"]),
    ):
        sampler = TokenSampler(processors=[warper, processor], prefix=torch.tensor([[4, 5, 6]]))
        assert (sampler.reads_prefix, sampler.one_by_one) == (reads_prefix, one_by_one)


def test_a_temperature_near_0_is_greedy_but_for_ties(
    pair: Pair, prompts: dict[str, Inputs], decoder: Decoder, configured: Any
) -> None:
    """As in the generation config of Qwen2.5-VL. The trees are those of greedy decoding."""
    call = {**prompts["image"], "max_new_tokens": NEW_TOKENS, "repetition_penalty": 1.05}
    expected = decoder.generate(**call)
    configured.update(do_sample=True, temperature=1e-6, top_p=0.8)
    for method in (deciding_at_once(pair), Decoder(pair.target), decoder):
        found = method.generate(**call, seed=7)
        assert torch.equal(found.sequences, expected.sequences)
    assert found.stats.verified_nodes == expected.stats.verified_nodes


def test_stops_of_a_round_are_those_of_single_tokens(
    prompts: dict[str, Inputs], processor: Any, text: list[int]
) -> None:
    """The first hit of any criterion cuts, wherever it and the rounds begin."""
    prefix = prompts["image"]["input_ids"]
    for at in range(len(text)):
        strings = [processor.tokenizer.decode(text[at : at + length]) for length in (1, 2)]
        stops = [StopStringCriteria(processor.tokenizer, [string]) for string in strings if string]
        call = Call({}, len(text), stops=[*stops, StopAfter(text[12])])
        alone = (torch.cat([prefix, torch.tensor([text[:end]])], 1) for end in range(1, len(text)))
        hits = (end for end, ids in enumerate(alone, 1) if any(bool(stop(ids, None)) for stop in call.stops))
        expected = text[: next(hits, len(text))]
        for size in (1, 4, 7, len(text)):
            request = Request(call, TokenSampler(), EncodedPrompt(prefix[0], prefix[0] < 0), prefix)
            while not request.is_finished:
                begin = len(request.tokens)
                assert request.emit(text[begin : begin + size]) == request.tokens[begin:]
            assert request.tokens == expected


def test_a_streamer_gets_the_prompt_and_then_round_by_round(
    pair: Pair, prompts: dict[str, Inputs], processor: Any, decoder: Decoder, text: list[int]
) -> None:
    """transformers' streamer, which skips the prompt."""
    streamer = TextIteratorStreamer(processor.tokenizer, skip_prompt=True)
    decoder.generate(**prompts["image"], max_new_tokens=NEW_TOKENS, streamer=streamer)
    assert "".join(streamer) == processor.tokenizer.decode(text)


# -------- batches


def padded(inputs: list[Inputs], side: str, pad: int) -> Inputs:
    """The text prompts as one batch."""
    rows = [one["input_ids"][0] for one in inputs]
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        at = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[number, at], mask[number, at] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def batch(prompts: dict[str, Inputs], pair: Pair) -> Inputs:
    """Three texts of different lengths, padded on the left as ``generate`` wants it."""
    ids = prompts["text"]["input_ids"]
    texts = [{"input_ids": one} for one in (ids, ids[:, :5], torch.cat([ids, ids[:, 2:]], 1))]
    return padded(texts, "left", pair.target.generation_config.pad_token_id)


def test_a_batch_equals_that_of_generate(pair: Pair, decoder: Decoder, batch: Inputs) -> None:
    """Rows that end early are padded. Processors read a row as it was given, its padding included."""
    for settings in ({}, {"repetition_penalty": 1.4}, {"min_new_tokens": 5, "no_repeat_ngram_size": 2}):
        call = {**batch, "max_new_tokens": 13, **settings}
        eos = pair.target.generate(**call, do_sample=False)[0, batch["input_ids"].shape[1] + 6].item()
        for ends in ({}, {"eos_token_id": eos}):
            expected = pair.target.generate(**call, **ends, do_sample=False)
            assert torch.equal(deciding_at_once(pair).generate(**call, **ends).sequences, expected)
            out = decoder.generate(**call, **ends)
            assert torch.equal(out.sequences, expected) and decoder.last_output is out
            found = pair.target.generate(**call, **ends, do_sample=False, custom_generate=decoder)
            assert torch.equal(found, expected)
            row_stats = decoder.last_output.row_stats
            assert [s.new_tokens for s in row_stats] == [s.new_tokens for s in out.row_stats]


def test_rows_of_a_batch_are_sampled_with_seeds_of_their_own(decoder: Decoder, prompts: dict[str, Inputs]) -> None:
    """Row r as alone with ``seed + r``, so that a prompt that comes twice gives two samples."""
    one = {"input_ids": prompts["text"]["input_ids"]}
    twice = {"input_ids": one["input_ids"].repeat(2, 1)}
    rows = decoder.generate(**twice, max_new_tokens=NEW_TOKENS, temperature=1.0, seed=8).sequences
    for row, seed in zip(rows, (8, 9), strict=True):
        alone = decoder.generate(**one, max_new_tokens=NEW_TOKENS, temperature=1.0, seed=seed).sequences[0]
        assert row[: len(alone)].tolist() == alone.tolist()
    assert rows[0].tolist() != rows[1].tolist()


OF_ALL_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"logits_processor": [Never(3)]}, "rows of a batch are decoded one by one, and Never may read all rows together"),
    ({"stopping_criteria": StoppingCriteriaList([StopAfter(3)])}, "StopAfter may read all rows together"),
    ({"prefix_allowed_tokens_fn": lambda row, ids: [4, 5]}, "PrefixConstrainedLogitsProcessor may read"),
    ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor may read all rows together"),
    ({"streamer": TextIteratorStreamer(None)}, "a streamer reads one prompt; input_ids has 3 rows"),
]


@pytest.mark.parametrize(("given", "message"), OF_ALL_ROWS)
def test_what_reads_all_rows_together_is_refused(
    given: dict[str, Any], message: str, decoder: Decoder, batch: Inputs
) -> None:
    with pytest.raises(UserError, match=message):
        decoder.generate(**batch, max_new_tokens=4, **given)


def test_a_stream_and_stats_are_of_one_prompt(decoder: Decoder, batch: Inputs) -> None:
    with pytest.raises(UserError, match="a stream is of one prompt; input_ids has 3 rows"):
        list(decoder.stream(**batch))
    with pytest.raises(UserError, match="stats are those of one prompt; this batch has 3; read row_stats"):
        decoder.generate(**batch, max_new_tokens=4).stats  # noqa: B018


def test_hooks_that_read_all_rows_together_work_on_one(
    pair: Pair, decoder: Decoder, prompts: dict[str, Inputs]
) -> None:
    """Each token is decided once, in the order of the text, as those that keep a state expect it."""
    call = {"input_ids": prompts["text"]["input_ids"], "max_new_tokens": 12}
    allowed = list(range(10, 40))
    for given in ({"prefix_allowed_tokens_fn": lambda row, ids: allowed}, {"guidance_scale": 1.7}):
        expected = pair.target.generate(**call, **given, do_sample=False)
        assert torch.equal(decoder.generate(**call, **given).sequences, expected)


# -------- refusals


# Settings of generation configs as people have them, and whether a warning says that the answer is another.
CONFIGS: list[tuple[dict[str, Any], str | None]] = [
    ({"do_sample": True, "temperature": 0.0}, None),
    ({"do_sample": True, "temperature": 0.0, "top_k": -1}, None),
    ({"top_p": 0.9, "temperature": 0.6, "typical_p": 0.9, "top_k": -1}, None),
    ({"temperature": None, "top_k": None, "top_p": None}, None),
    ({"num_beams": 4, "early_stopping": True, "length_penalty": 2.0}, "num_beams 4"),
    ({"num_beams": 4, "num_beam_groups": 2, "num_return_sequences": 2}, "num_beams 4, num_return_sequences 2"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha 0.6"),
    ({"prompt_lookup_num_tokens": 3, "assistant_confidence_threshold": 0.4}, None),
    ({"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True}, None),
    *(({"cache_implementation": kind}, None) for kind in ("static", "hybrid", "quantized", "offloaded")),
    ({"use_cache": False, "pad_token_id": -1, "max_length": 20}, None),
]


CALL = {
    "num_beams": 2,
    "num_return_sequences": 2,
    "penalty_alpha": 0.1,
}  # a call's own are refused, and never warned of


@pytest.mark.parametrize(("settings", "said"), CONFIGS)
def test_odd_generation_configs_give_the_greedy_answer(
    settings: dict[str, Any], said: str | None, decoder: Decoder, prompts: dict[str, Inputs], configured: Any
) -> None:
    plain = decoder.generate(**prompts["text"], max_new_tokens=12).sequences
    for name, value in settings.items():
        setattr(configured, name, value)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert torch.equal(decoder.generate(**prompts["text"], max_new_tokens=12).sequences, plain)
        with pytest.raises(UserError, match="decoding in rounds has no num_beams; got 2"):
            decoder.generate(**prompts["text"], max_new_tokens=3, **CALL)
    lines = [str(one.message) for one in found if "generation config has" in str(one.message)]
    assert lines == (
        [] if said is None else [f"the model's generation config has {said}; one sequence is decoded, token by token"]
    )


IDS, MASK = torch.arange(20, 29)[None], torch.ones(1, 9, dtype=torch.long)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": float("nan")}, "temperature must be a number of at least 0; got nan"),
    ({"temperature": -0.5}, "temperature must be a number of at least 0; got -0.5"),
    ({"top_p": 1.5}, "top_p must be above 0 and at most 1; got 1.5"),
    ({"max_new_tokens": 0}, "generate refuses the call: `max_new_tokens` must be greater than 0, but is 0"),
    ({"max_new_tokens": 10**30}, "prompt and answer must fit the target's context"),
    *(
        ({name: value}, f"decoding in rounds has no {name}; got {value}; leave {name} out")
        for name, value in (("num_beams", 2), ("cache_implementation", "offloaded"))
    ),
    *(
        ({name: True, "return_dict_in_generate": True}, f"decoding in rounds has no {name}")
        for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    ),
    ({"inputs_embeds": torch.ones(1, 9, 32)}, "decoding in rounds has no inputs_embeds"),
    ({"past_key_values": 5}, "generate refuses the call|decoding in rounds has no past_key_values"),
    ({"eos_token_id": "x"}, "generate refuses the call"),
    ({"eos_token_id": float("nan")}, "generate refuses the call: value cannot be converted"),
    ({"input_ids": [[1, 2]]}, r"input_ids are integers \[prompts, tokens\], at least one of each; got list"),
    ({"input_ids": IDS[:0], "attention_mask": MASK[:0]}, r"got torch.int64 \[0, 9\]"),
    ({"input_ids": IDS[:, :0], "attention_mask": MASK[:, :0]}, r"got torch.int64 \[1, 0\]"),
    ({"input_ids": IDS[0]}, r"got torch.int64 \[9\]"),
    ({"input_ids": IDS.float()}, r"got torch.float32 \[1, 9\]"),
    ({"input_ids": IDS - 30}, "tokens of a prompt are from 0 to 299; got -10; use the target's own tokenizer"),
    ({"input_ids": IDS + 275}, "tokens of a prompt are from 0 to 299; got 300"),
    ({"attention_mask": 0 * MASK}, "attention_mask is as large as input_ids, .*shows a token of every prompt"),
    ({"input_ids": IDS.repeat(2, 1), "attention_mask": torch.stack([MASK[0], 0 * MASK[0]])}, "a token of every prompt"),
    ({"attention_mask": MASK[:, 1:]}, r"input_ids, \[1, 9\], .* got torch.int64 \[1, 8\]"),
    ({"attention_mask": MASK.repeat(2, 1)}, r"got torch.int64 \[2, 9\]"),
    ({"attention_mask": [[1] * 9]}, "got list"),
    ({"position_ids": torch.arange(9)[None] + 1}, "got other position_ids; leave them out"),
    *(({"position_ids": value}, "got other position_ids; leave them out") for value in (5, "x", torch.arange(8)[None])),
]  # fmt: skip
RIGHT: list[dict[str, Any]] = [
    {"max_new_tokens": np.int64(3), "top_k": np.int32(1)},
    {"attention_mask": MASK.bool()},
    {"attention_mask": MASK.float()},
    {"attention_mask": None},
    {"input_ids": IDS.int()},
    {"position_ids": torch.arange(9)[None]},
]


@pytest.mark.parametrize("model", ["text", "vision"])
def test_values_of_wrong_types(model: str, decoder: Decoder, text_pair: Pair) -> None:
    """One line; by ``custom_generate`` too, unless ``generate`` itself refuses the call, or never reads the value."""
    decoder = decoder if model == "vision" else Decoder(text_pair.target, text_pair.draft, tree=TREES["sage"])
    target = decoder.target_model
    inputs = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 4}
    for wrong, message in WRONG:
        with pytest.raises(UserError, match=message) as caught:
            decoder.generate(**{**inputs, **wrong})
        assert "\n" not in str(caught.value)
        with torch.inference_mode():
            of_generate = {name: value for name, value in wrong.items() if name not in ("seed", "workload")}
            try:
                got = target.generate(**{**inputs, **wrong}, custom_generate=decoder)
            except UserError as error:
                assert "\n" not in str(error), error
            except (ValueError, TypeError, AttributeError, LookupError, RuntimeError) as error:
                with pytest.raises((type(error), AttributeError)):
                    target.generate(**{**inputs, **of_generate})
            else:
                assert torch.equal(got, target.generate(**{**inputs, **of_generate})), wrong
    for right in RIGHT:
        expected = target.generate(**{**inputs, **right})
        assert torch.equal(decoder.generate(**{**inputs, **right}).sequences, expected), right
        assert torch.equal(target.generate(**{**inputs, **right}, custom_generate=decoder), expected), right
    decoder.generate(**inputs, temperature=np.float64(0.5), seed=np.int32(1))
