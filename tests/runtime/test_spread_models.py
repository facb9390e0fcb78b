"""Targets that are spread over several GPUs."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from accelerate import dispatch_model

from autotune.errors import UserError
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.runtime.points import as_draft
from tests.drafters.test_feature_draft import agreeing_draft
from tests.rehearsal import Rehearsal
from tests.tiny_models import Inputs, Pair, inputs_on

TREE = {"policy": "eagle2", "depth": 3, "k": 2, "budget": 7}


def spread(pair: Pair) -> Target:
    """The target with its first two layers and the head, which is tied to the embedding, on ``cuda:0``, the rest on
    ``cuda:1``.
    """
    model = deepcopy(pair.target)
    text, devices = "model.language_model", ("cuda:0", "cuda:1")
    layers = {f"{text}.layers.{number}": devices[number > 1] for number in range(4)}
    first = (
        "model.vision_tower",
        "model.multi_modal_projector",
        f"{text}.embed_tokens",
        f"{text}.rotary_emb",
        "lm_head",
    )
    parts = {**layers, **dict.fromkeys(first, devices[0]), f"{text}.norm": devices[1]}
    return Target(dispatch_model(model, parts, main_device=devices[0]))


@pytest.mark.parametrize("kind", ["independent", "dream"])
def test_every_draft_decodes_eagerly(rehearsal: Rehearsal, pair: Pair, prompts: dict[str, Inputs], kind: str) -> None:
    target = spread(pair)
    assert target.num_devices == 2
    whole = Target(pair.target)
    for name, settings in (("text", {}), ("image", {"temperature": 1.0, "seed": 3})):
        drafts = []
        for one in (whole, target):
            if kind == "independent":
                drafts.append(as_draft(deepcopy(pair.draft).to(one.device)))
            else:
                drafts.append(agreeing_draft(kind, one, injection_layer=4))
        expected = Decoder(whole, drafts[0], tree=TREE).generate(**prompts[name], max_new_tokens=8, **settings)
        decoder = Decoder(target, drafts[1], tree=TREE, visual_keep=0.5)
        assert decoder.mode == "eager", "the default where graphs cannot be captured"
        found = decoder.generate(**inputs_on(prompts[name], "cuda:0"), max_new_tokens=8, **settings)
        assert torch.equal(found.sequences.cpu(), expected.sequences)


@pytest.mark.parametrize("mode", ["cuda-graph", "fixed"])
def test_other_modes_are_refused(rehearsal: Rehearsal, pair: Pair, mode: str) -> None:
    with pytest.raises(UserError, match=f"mode {mode} needs a model on one device; it is spread over 2; choose eager"):
        Decoder(spread(pair), mode=mode)
