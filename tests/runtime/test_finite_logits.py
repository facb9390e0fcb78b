"""Logits that are not finite give no answer, and a draft's give no proposals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import TopPLogitsWarper

from autotune.drafters.independent import IndependentDraft
from autotune.errors import UserError
from autotune.evaluation.divergence import answer_logits
from autotune.evaluation.runtime_arms import hf_generate
from autotune.modeling.step import NOT_FINITE
from autotune.modeling.target import Target
from autotune.runtime.answer_batch import drawn_tokens
from autotune.runtime.decoder import Decoder
from autotune.runtime.token_sampler import TokenSampler
from tests.runtime.conftest import TREES
from tests.tiny_models import Inputs, Pair

BAD = (float("nan"), float("inf"), -float("inf"))


def spoiled(monkeypatch: pytest.MonkeyPatch, model: Any, value: float, *, from_call: int = 0) -> None:
    """Let the head of a model give one value from a forward pass on, as activations that overflow do."""
    head, calls = model.get_output_embeddings(), []
    forward = head.forward

    def spoil(*args: Any, **kwargs: Any) -> Any:
        calls.append(0)
        logits = forward(*args, **kwargs)
        return logits if len(calls) <= from_call else torch.full_like(logits, value)

    monkeypatch.setattr(head, "forward", spoil)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 8, "top_p": 0.9}, {"repetition_penalty": 1.2}]
)
@pytest.mark.parametrize("from_call", [0, 2])
def test_no_token_follows_from_them(
    pair: Pair,
    prompts: dict[str, Inputs],
    settings: dict[str, Any],
    value: float,
    from_call: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = prompts["text"]
    for draft in (None, IndependentDraft(pair.draft)):
        decoder = Decoder(Target(pair.target), draft)
        with monkeypatch.context() as patched:
            spoiled(patched, pair.target, value, from_call=from_call)
            first = inputs["input_ids"].shape[1]
            with pytest.raises(UserError, match=r"at position \d+ are not finite in float32") as refused:
                decoder.generate(**inputs, max_new_tokens=12, **settings)
        position = int(str(refused.value).partition("position ")[2].split()[0])
        assert position == first if from_call == 0 else position > first
        assert "--dtype" not in str(refused.value), "float32 is the widest"
        assert decoder.generate(**inputs, max_new_tokens=2).stats.new_tokens == 2, "the session is closed"


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("from_call", [0, 3])
def test_a_draft_without_finite_logits_proposes_nothing(
    pair: Pair, prompts: dict[str, Inputs], tree: Any, from_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, target = prompts["text"], Target(pair.target)
    expected = Decoder(target).generate(**inputs, max_new_tokens=12).sequences
    spoiled(monkeypatch, pair.draft, float("nan"), from_call=from_call)
    decoder = Decoder(target, IndependentDraft(pair.draft), tree=TREES[tree])
    with pytest.warns(UserWarning, match="are not finite, and propose no tokens"):
        output = decoder.generate(**inputs, max_new_tokens=12)
    assert torch.equal(output.sequences, expected)
    if from_call == 0:
        assert sum(output.stats.accepted_lengths) == 0


@pytest.mark.parametrize("value", BAD)
def test_batches_and_readings(
    pair: Pair, prompts: dict[str, Inputs], value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(3, 40)
    logits[1, 7] = value if value > 0 else float("nan")
    samplers = [
        TokenSampler(),
        TokenSampler(temperature=1.0),
        TokenSampler(temperature=1.0, processors=[TopPLogitsWarper(0.5)]),
    ]
    for order in (samplers, samplers[1:] + samplers[:1], samplers[2:] + samplers[:2]):
        tokens = drawn_tokens(order, logits, [0, 1, 2])
        assert tokens[1] == NOT_FINITE and tokens[0] >= 0 and tokens[2] >= 0
    spoiled(monkeypatch, pair.target, value)
    with pytest.raises(UserError, match="not finite"):
        answer_logits(Target(pair.target), prompts["text"], [1, 2, 3])
    with pytest.raises(UserError, match="not finite"):
        hf_generate(pair.target, prompts["text"], max_new_tokens=4, temperature=1.0)


def test_a_processor_may_replace_them_or_force_a_token() -> None:
    logits = torch.full((1, 40), float("nan"))
    replaced = TokenSampler(processors=[lambda _, scores: scores.nan_to_num(nan=0.0)])
    assert replaced.tokens(logits, np.array([3])).tolist() == [0]
    forced = TokenSampler(processors=[lambda _, scores: scores.index_fill(1, torch.tensor([5]), float("inf"))])
    assert forced.tokens(torch.zeros(1, 40), np.array([3])).tolist() == [5]
