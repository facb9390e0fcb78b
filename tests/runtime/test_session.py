"""A session configures shared models for one request and restores them, however the request ends; streams yield early."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from autotune.errors import UserError
from autotune.evaluation.perplexity import quality
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.trees.fallback import RoundPrice
from tests.drafters.test_feature_draft import agreeing_draft
from tests.runtime.conftest import NEW_TOKENS, SAMPLED, TREES, Greedy, new_tokens
from tests.tiny_models import VOCABULARY_SIZE, Inputs, Pair


def test_requests_do_not_disturb_each_other(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """Each request equals that of a fresh decoder: long after short (the caches grow), short after long, with and without
    image, with other trees and temperatures.
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


def test_a_stream_that_another_request_interrupts_is_refused(
    pair: Pair, decoder: Decoder, prompts: dict[str, Inputs], greedy: Greedy
) -> None:
    """Another request on the target or the draft, of this or another decoder, or another use of the target's cache. The
    request that interrupts is decoded as ever.
    """
    inputs = prompts["image"]
    draft = decoder.draft
    for other in (decoder, Decoder(decoder.target), Decoder(Target(pair.target), draft), None):
        stream = decoder.stream(**inputs, max_new_tokens=NEW_TOKENS)
        tokens = [next(stream) for _ in range(5)]
        assert tokens == new_tokens(greedy("image"), inputs)[:5]
        if other is None:
            quality(decoder.target, inputs, tokens)
        else:
            text = other.generate(**prompts["text"], max_new_tokens=NEW_TOKENS).sequences
            assert torch.equal(text, greedy("text"))
        with pytest.raises(UserError, match="another request has begun on this target; finish or close a stream"):
            list(stream)
        if draft is not None:
            draft.attach(decoder.target)


def state_of(decoder: Decoder) -> list[Any]:
    """The settings of the shared models that a session changes."""
    target, draft = decoder.target, decoder.draft
    assert draft is not None
    return [target.mode, target.output_layers, draft.mode, draft.visual_keep, draft.capture_sizes]


def test_a_session_is_closed_however_its_request_ends(
    pair: Pair, prompts: dict[str, Inputs], greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a stream is read to its end, closed, dropped or interrupted by an exception: the target and the draft are as
    before, and the fallback counts the request.
    """
    price = RoundPrice(round_steps=9.0, level_steps=1.0, node_steps=0.0)
    draft = agreeing_draft("dream", target := Target(pair.target), injection_layer=4)
    options = {"visual_keep": 0.5, "capture_sizes": (1, 8, 160), "mode": "fixed", "fallback": price}
    inputs = prompts["image"]

    def finish(stream: Any) -> None:
        list(stream)

    def fail(stream: Any) -> None:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
            patch.setattr(target, "step", raise_out_of_memory)
            list(stream)

    def drop(stream: Any) -> None:
        """The caller's reference is the last one."""

    for end in (finish, lambda stream: stream.close(), fail, drop):
        decoder = Decoder(target, draft, tree=TREES["sage"], **options)
        before = state_of(decoder)
        stream = decoder.stream(**inputs, max_new_tokens=NEW_TOKENS)
        for _ in range(6):
            next(stream)
        assert state_of(decoder) == ["fixed", (4,), "fixed", 0.5, (1, 8, 160)] != before
        end(stream)
        del stream
        assert state_of(decoder) == before
        assert decoder.point.fallback.history.num_failed == 1
        assert torch.equal(Decoder(target).generate(**inputs, max_new_tokens=NEW_TOKENS).sequences, greedy("image"))


def raise_out_of_memory(*_: Any) -> None:
    raise RuntimeError("out of memory")


def test_a_request_after_a_failed_one(decoder: Decoder, prompts: dict[str, Inputs], greedy: Greedy) -> None:
    with pytest.raises(UserError):
        decoder.generate(input_ids=prompts["image"]["input_ids"])
    assert torch.equal(decoder.generate(**prompts["image"], max_new_tokens=NEW_TOKENS).sequences, greedy("image"))


# ----------------------------------------------------------------------------------------------------------- streaming


def test_a_stream_yields_the_tokens_of_generate(decoder: Decoder, prompts: dict[str, Inputs]) -> None:
    for settings in ({}, SAMPLED[1]):
        out = decoder.generate(**prompts["image"], max_new_tokens=NEW_TOKENS, **settings)
        streamed = list(decoder.stream(**prompts["image"], max_new_tokens=NEW_TOKENS, **settings))
        assert streamed == new_tokens(out.sequences, prompts["image"])


def test_a_stream_yields_before_the_text_is_done(decoder: Decoder, prompts: dict[str, Inputs]) -> None:
    """The first token after the prefill alone: the draft has not even read the prompt."""
    stream = decoder.stream(**prompts["image"], max_new_tokens=NEW_TOKENS)
    next(stream)
    assert decoder.draft is not None and decoder.draft.length == 0
    stream.close()


def test_between_two_tokens_the_caller_s_grad_mode_is_its_own(decoder: Decoder, prompts: dict[str, Inputs]) -> None:
    """A caller may train or score between two tokens."""
    stream = decoder.stream(**prompts["image"], max_new_tokens=5)
    modes = [torch.is_inference_mode_enabled() for _ in stream]
    assert not any(modes)
