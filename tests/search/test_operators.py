"""Operators of SpecVLM's compressor in subnets: loading, recording, search spaces and profiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import load_draft
from autotune.errors import UserError
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.study.spaces import load_space
from tests.drafters.test_feature_draft import agreeing_draft
from tests.tiny_models import NUM_VISUAL_TOKENS, Inputs, Pair


@pytest.fixture(scope="module")
def folder(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("specvlm")
    with torch.inference_mode():
        agreeing_draft("specvlm", Target(pair.target), injection_layer=4).network.save(folder)  # type: ignore[operator]
    return folder


@pytest.mark.parametrize(
    ("subnet", "num_visual_rows"),
    [
        (Subnet(operator="prune", operator_ratio=4), 4),
        (Subnet(operator="pool", operator_ratio=5), 4),
        (Subnet(operator="convolve"), 6),
        (Subnet(operator="resample"), 2),
        (Subnet(operator="text_only"), 0),
    ],
)
def test_a_fixed_operator_compresses_every_prompt(
    pair: Pair, prompts: dict[str, Inputs], folder: Path, subnet: Subnet, num_visual_rows: int
) -> None:
    """Whatever the gate prefers, and the output is the target's."""
    assert NUM_VISUAL_TOKENS == 16
    target = Target(pair.target)
    draft = load_draft(str(folder), target, subnet)
    assert draft.subnet == subnet.model_copy(update={"injection_layer": 4})
    for name in ("image", "long"):
        inputs = {**prompts[name], "max_new_tokens": 16}
        decoder = Decoder(target, draft, tree={"policy": "chain", "depth": 3})
        (prompt,) = target.encode(prompts[name]).prompts
        out = decoder.generate(**inputs).sequences
        assert draft._num_condensed == prompt.num_visual_tokens - num_visual_rows  # type: ignore[union-attr]
        assert torch.equal(out, Decoder(target).generate(**inputs).sequences)


def test_a_space_names_operators_of_the_compressor() -> None:
    operators = ("prune", "pool", "convolve", "resample", "text_only")
    found = load_space("full").subnets("specvlm", Subnet(), (), operators)
    assert {subnet.operator for subnet in found} == {None, *operators} and len(found) == 11 * 5 + 1
    with pytest.raises(UserError, match="the compressor of x has the operators prune, pool; got resample"):
        load_space("full", ("operator=resample",)).subnets("x", Subnet(), (), ("prune", "pool"))
