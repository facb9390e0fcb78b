"""Rank 0 sends one broadcast a step, and waits for the device no more often than one process does, in a rehearsal."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autotune.documents.execution import AUTO, COMPILED, CUDA_GRAPH, EAGER
from autotune.errors import UserError
from autotune.modeling.ranks import MESSAGE, Ranks
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.runtime.points import as_draft
from autotune.runtime.preparation import decoding_mode
from tests.rehearsal import Counts, Rehearsal
from tests.tiny_models import Inputs, Pair, inputs_on, on_device

TREE = {"policy": "eagle2", "depth": 3, "k": 2, "budget": 7}


@pytest.mark.parametrize("mode", [EAGER, CUDA_GRAPH])
def test_a_step_is_one_broadcast_and_no_further_wait(
    rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch, pair: Pair, prompts: dict[str, Inputs], mode: str
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(dist, "broadcast", lambda message, source: sizes.append(message.nbytes))
    counts: list[Counts] = []
    tokens: list[list[int]] = []
    for is_shared in (False, True):
        models = on_device(pair, "cuda:0")
        target = Target(models.target)
        if is_shared:
            target.ranks = Ranks(0, 2, torch.device("cuda:0"), None)
            monkeypatch.setattr(target.ranks, "send", lambda *_: None)
        decoder = Decoder(target, as_draft(models.draft), tree=TREE, mode=mode)
        inputs = inputs_on(prompts["text"], "cuda:0")
        decoder.generate(**inputs, max_new_tokens=8)  # captures
        sizes.clear()
        with rehearsal.counted() as counted:
            out = decoder.generate(**inputs, max_new_tokens=8)
        counts.append(counted)
        tokens.append(out.sequences.tolist())
    assert tokens[0] == tokens[1]
    assert counts[1].waits == counts[0].waits and counts[1].to_host == counts[0].to_host
    assert counts[1].replays == counts[0].replays and counts[1].operations == counts[0].operations
    assert sizes == [8 * MESSAGE] * out.stats.target_forwards


def test_captured_steps_are_off_by_default(rehearsal: Rehearsal, pair: Pair) -> None:
    target = Target(on_device(pair, "cuda:0").target)
    target.ranks = Ranks(0, 2, torch.device("cuda:0"), None)
    with pytest.warns(UserWarning, match="captured steps of 2 processes were not measured"):
        assert decoding_mode(AUTO, target, []) == EAGER
    with pytest.raises(UserError, match="several processes hold in parts; choose eager"):
        target.use_mode(COMPILED)
