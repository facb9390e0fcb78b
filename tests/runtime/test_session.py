"""A session configures shared models for one request and restores them, however the request ends; streams yield
early.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from autotune.drafters.retrieval import RetrievalDraft
from autotune.errors import UserError
from autotune.evaluation.divergence import quality
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.trees.fallback import RoundPrice
from tests.drafters.test_feature_draft import agreeing_draft
from tests.runtime.conftest import NEW_TOKENS, TREES, Greedy, new_tokens
from tests.tiny_models import VOCABULARY_SIZE, Inputs, Pair


def test_requests_do_not_disturb_each_other(pair: Pair, prompts: dict[str, Inputs]) -> None:
    """Each request equals that of a fresh decoder: long after short (the caches grow), short after long, with and
    without image, with other trees and temperatures.
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
        decoder = Decoder(decoder.target, decoder.draft, tree=TREES[tree], visual_keep=0.3)
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


def state_of(decoder: Decoder) -> list[Any]:
    """The settings of the shared models that a session changes."""
    target, draft = decoder.target, decoder.draft
    assert draft is not None
    return [target.mode, target.output_layers, draft.mode, draft.visual_keep, draft.capture_sizes]


def test_a_session_is_closed_however_its_request_ends(
    pair: Pair, prompts: dict[str, Inputs], greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a stream is read to its end, closed, dropped or interrupted by an exception: the target and the draft are
    as before.
    """
    price = RoundPrice(round_steps=9.0, level_steps=1.0, node_steps=0.0)
    draft = agreeing_draft("dream", target := Target(pair.target), injection_layer=4)
    options = {"visual_keep": 0.5, "capture_sizes": (1, 8, 160), "mode": "fixed", "fallback": price}
    inputs = prompts["image"]

    def finish(stream: Any) -> None:
        list(stream)

    def fail(stream: Any) -> None:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
            patch.setattr(target, "evaluate_step", raise_out_of_memory)
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
        assert torch.equal(Decoder(target).generate(**inputs, max_new_tokens=NEW_TOKENS).sequences, greedy("image"))


def raise_out_of_memory(*_: Any) -> None:
    raise RuntimeError("out of memory")


# -------- threads


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results of calls that begin together, each in a thread of its own; errors are results."""
    ready, results = threading.Barrier(len(calls)), [None] * len(calls)

    def run(number: int) -> None:
        ready.wait()
        try:
            results[number] = calls[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def check_threads(decoders: list[Decoder], name: str, inputs: Inputs, greedy: Greedy, turns: int) -> None:
    """Whatever runs at once, one request at least is decoded, with the right tokens, and the others are refused."""
    expected = greedy(name)
    for turn in range(turns):
        results = in_threads([partial(d.generate, **inputs, max_new_tokens=NEW_TOKENS) for d in decoders])
        answers = [result.sequences for result in results if not isinstance(result, UserError)]
        assert answers and all(torch.equal(answer, expected) for answer in answers), (turn, results)
        refused = {str(result) for result in results if isinstance(result, UserError)}
        assert refused <= {
            "a target and its drafts decode one request at a time, and another one has not ended; wait until it has, or "
            "close its stream"
        }
    model = decoders[0].target_model
    assert torch.equal(model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS), expected)
    for decoder in dict.fromkeys(decoders):
        assert torch.equal(decoder.generate(**inputs, max_new_tokens=NEW_TOKENS).sequences, expected)


@pytest.mark.parametrize("turns", [1, pytest.param(200, marks=pytest.mark.nightly)])
def test_a_second_thread_is_refused_at_once(pair: Pair, prompts: dict[str, Inputs], greedy: Greedy, turns: int) -> None:
    """On one decoder, and on two that share the target's model or the draft, without a draft and with each kind."""
    drafts = [None, pair.draft, agreeing_draft("dream", Target(pair.target), injection_layer=4), RetrievalDraft()]
    for draft in drafts:
        options = {} if draft is None else {"tree": TREES["sage"], "visual_keep": 0.5}
        decoder = Decoder(pair.target, draft, **options)
        check_threads([decoder] * 4, "image", prompts["image"], greedy, turns)
        if draft is not None:
            others = [decoder, Decoder(pair.target, decoder.draft, **options), Decoder(decoder.target)]
            check_threads(others, "image", prompts["image"], greedy, turns)


def test_decoders_of_other_models_run_at_the_same_time(pair: Pair, prompts: dict[str, Inputs], greedy: Greedy) -> None:
    """Both observe the attention of their prefills."""
    decoders = [Decoder(deepcopy(pair.target), deepcopy(pair.draft), visual_keep=0.5) for _ in range(2)]
    for _ in range(3):
        calls = [partial(decoder.generate, **prompts["image"], max_new_tokens=NEW_TOKENS) for decoder in decoders]
        assert all(torch.equal(result.sequences, greedy("image")) for result in in_threads(calls))


def test_a_stream_keeps_its_models_until_it_is_closed_or_its_thread_takes_them(
    decoder: Decoder, prompts: dict[str, Inputs], greedy: Greedy
) -> None:
    """A pool reads the tokens of a stream in whichever thread is free; when that thread has ended, the stream is
    abandoned.
    """
    call = partial(decoder.generate, **prompts["image"], max_new_tokens=NEW_TOKENS)
    stream = decoder.stream(**prompts["image"], max_new_tokens=NEW_TOKENS)
    tokens = [next(stream)]
    (refused,) = in_threads([call])
    assert isinstance(refused, UserError)
    tokens += in_threads([partial(next, stream)])
    assert [*tokens, *stream] == new_tokens(greedy("image"), prompts["image"])
    stream = decoder.stream(**prompts["image"], max_new_tokens=NEW_TOKENS)
    in_threads([partial(next, stream)])
    assert torch.equal(call().sequences, greedy("image"))
    with pytest.raises(UserError, match="another request has begun"):
        next(stream)


def test_a_request_within_a_step_of_another_is_refused(
    decoder: Decoder, prompts: dict[str, Inputs], greedy: Greedy
) -> None:
    """In a logits processor; between the rounds, in a streamer, it takes the models over. Afterwards all is as
    before.
    """
    call = partial(decoder.generate, **prompts["image"], max_new_tokens=NEW_TOKENS)
    with pytest.raises(UserError, match="another one has not ended"):
        call(logits_processor=[lambda ids, scores: call() and scores])
    with pytest.raises(UserError, match="another request has begun"):
        call(streamer=SimpleNamespace(put=lambda tokens: call(), end=lambda: None))
    with pytest.raises(ZeroDivisionError):
        call(logits_processor=[lambda ids, scores: 1 / 0])
    assert torch.equal(call().sequences, greedy("image"))
    model = decoder.target_model
    assert torch.equal(model.generate(**prompts["image"], do_sample=False, max_new_tokens=NEW_TOKENS), greedy("image"))


def test_decoders_that_share_a_draft_take_turns(pair: Pair, prompts: dict[str, Inputs], greedy: Greedy) -> None:
    """Also with targets of their own, whose features the draft reads; and with another model, whose layers it then
    reads.
    """
    draft = agreeing_draft("dream", Target(pair.target), injection_layer=4)
    targets = [Target(pair.target), Target(pair.target), Target(deepcopy(pair.target))]
    for shared in (draft, pair.draft):
        decoders = [Decoder(target, shared, tree=TREES["sage"], visual_keep=0.5) for target in targets]
        for decoder in (*decoders, *reversed(decoders)):
            out = decoder.generate(**prompts["image"], max_new_tokens=NEW_TOKENS)
            assert torch.equal(out.sequences, greedy("image")) and out.stats.rounds < NEW_TOKENS


def hooks_of(model: Any) -> int:
    return sum(len(part._forward_pre_hooks) + len(part._forward_hooks) for part in model.modules())


def test_between_two_tokens_and_after_an_error_in_any_layer_the_model_is_the_user_s(
    pair: Pair, prompts: dict[str, Inputs], greedy: Greedy
) -> None:
    """No attention is swapped and no hook is left while a stream waits; an error at any call of a layer leaves nothing
    either.
    """
    draft = agreeing_draft("dream", Target(pair.target), injection_layer=4)
    decoder = Decoder(model := pair.target, draft, tree=TREES["sage"], visual_keep=0.5)
    text, inputs = decoder.target.text, prompts["image"]
    before = model.config.to_dict(), text.config._attn_implementation, hooks_of(model), sorted(ALL_ATTENTION_FUNCTIONS)

    def state() -> Any:
        return (
            model.config.to_dict(),
            text.config._attn_implementation,
            hooks_of(model),
            sorted(ALL_ATTENTION_FUNCTIONS),
        )

    stream = decoder.stream(**inputs, max_new_tokens=NEW_TOKENS)
    for number, _ in enumerate(stream):
        assert state() == before
        if number % 10 == 3:
            own = model(input_ids=prompts["text"]["input_ids"]).logits
            assert own.isfinite().all() and state() == before
    for part in (text.layers[0], text.layers[-1], text.module, draft.network):
        for number in range(3):
            left = iter(range(number))

            def fail(*_: Any, left: Any = left) -> None:
                if next(left, None) is None:
                    raise ZeroDivisionError

            handle = part.register_forward_pre_hook(fail)
            with pytest.raises(ZeroDivisionError):
                decoder.generate(**inputs, max_new_tokens=NEW_TOKENS)
            handle.remove()
            assert state() == before
            assert torch.equal(decoder.generate(**inputs, max_new_tokens=NEW_TOKENS).sequences, greedy("image"))


# -------- streaming


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
