"""Rank 0 sends one broadcast a step, and waits for the device no more often than one process does, in a rehearsal."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from autotune.documents.execution import AUTO, COMPILED, CUDA_GRAPH, EAGER
from autotune.errors import UserError
from autotune.modeling.ranks import MESSAGE, Ranks
from autotune.modeling.step import Layout
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.runtime.points import as_draft
from autotune.runtime.preparation import decoding_mode
from autotune.trees.limits import MAX_LEVEL_STEP
from tests.rehearsal import Counts, Rehearsal
from tests.sharded.processes import counted_steps
from tests.tiny_models import Inputs, Pair, inputs_on, on_device

TREE = {"policy": "eagle2", "depth": 3, "k": 2, "budget": 7}


@pytest.mark.parametrize("mode", [EAGER, CUDA_GRAPH])
@pytest.mark.parametrize("with_draft", [False, True], ids=["target", "and draft"])
def test_a_step_is_one_broadcast_and_no_further_wait(
    rehearsal: Rehearsal,
    monkeypatch: pytest.MonkeyPatch,
    pair: Pair,
    prompts: dict[str, Inputs],
    mode: str,
    with_draft: bool,
) -> None:
    """Steps of the target, and of a draft that is divided too, each for the model with its number."""
    sent: list[tuple[int, int]] = []  # bytes, and the number of the model
    monkeypatch.setattr(dist, "broadcast", lambda message, source: sent.append((message.nbytes, int(message[1]))))
    counts: list[Counts] = []
    tokens: list[list[int]] = []
    for is_shared in (False, True):
        models = on_device(pair, "cuda:0")
        target = Target(models.target)
        if is_shared:
            target.ranks = Ranks(0, 2, torch.device("cuda:0"), None)
            monkeypatch.setattr(target.ranks, "send", lambda *_: None)
        draft: Any = as_draft(models.draft)
        if is_shared and with_draft:
            draft.ranks = target.ranks.of_next_draft()
        steps = counted_steps(draft)
        decoder = Decoder(target, draft, tree=TREE, mode=mode)
        inputs = inputs_on(prompts["text"], "cuda:0")
        decoder.generate(**inputs, max_new_tokens=8)  # captures
        sent.clear()
        steps.clear()
        with rehearsal.counted() as counted:
            out = decoder.generate(**inputs, max_new_tokens=8)
        counts.append(counted)
        tokens.append(out.sequences.tolist())
    assert tokens[0] == tokens[1]
    assert counts[1].waits == counts[0].waits and counts[1].to_host == counts[0].to_host
    assert counts[1].replays == counts[0].replays and counts[1].operations == counts[0].operations
    expected = {0: out.stats.target_forwards} | ({1: len(steps)} if with_draft else {})
    assert Counter(sent) == {(8 * MESSAGE, number): count for number, count in expected.items()}


def test_a_step_that_no_message_holds_arrives_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The widest level of a draft with two kinds of masks, in a captured step."""
    sender, receiver = (Ranks(rank, 2, torch.device("cpu"), None) for rank in range(2))
    messages: list[torch.Tensor] = []
    layout, moves = Layout(MAX_LEVEL_STEP, 1024, 2, 1), [5, 2, 0, 3]
    integers = np.arange(sum(layout.sizes))
    monkeypatch.setattr(dist, "broadcast", lambda message, _: messages.append(message.clone()))
    sender.of_next_draft().send_step(layout, integers, moves, is_captured=True)
    assert len(messages) == 2
    monkeypatch.setattr(dist, "broadcast", lambda message, _: message.copy_(messages.pop(0)))
    operation, number, (received_layout, received, *others) = receiver.receive()
    assert (operation, number, received_layout, others) == ("step", 1, layout, [moves, True, False])
    assert received.tolist() == integers.tolist()


def test_captured_steps_are_off_by_default(rehearsal: Rehearsal, pair: Pair) -> None:
    target = Target(on_device(pair, "cuda:0").target)
    target.ranks = Ranks(0, 2, torch.device("cuda:0"), None)
    with pytest.warns(UserWarning, match="captured steps of 2 processes were not measured"):
        assert decoding_mode(AUTO, target, []) == EAGER
    with pytest.raises(UserError, match="several processes hold in parts; choose eager"):
        target.use_mode(COMPILED)
