"""Operators of SpecVLM's compressor in subnets: loading, recording, search spaces and profiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import load_draft
from autotune.errors import UserError
from autotune.modeling.target import Target
from autotune.recording.traces import record_trace, recorder_of
from autotune.replay.trace import bounds_for
from autotune.runtime.decoder import Decoder
from autotune.runtime.model_pool import ModelPool
from autotune.study.spaces import load_space
from autotune.trees.chain import ChainPolicy
from autotune.workloads.workload import load_workload
from tests.drafters.test_feature_draft import agreeing_draft
from tests.sample_documents import write_image, write_workload
from tests.tiny_models import NUM_VISUAL_TOKENS, Inputs, Pair


@pytest.fixture(scope="module")
def folder(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("specvlm")
    with torch.inference_mode():
        agreeing_draft("specvlm", Target(pair.target), injection_layer=4).network.save(folder)  # type: ignore[operator]
    return folder


@pytest.fixture(scope="module")
def model_pool(pair: Pair, folder: Path) -> ModelPool:
    return ModelPool(str(pair.target_folder), [str(folder), str(pair.draft_folder)], "cpu")


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


def test_drafts_without_the_operator_are_refused(pair: Pair, folder: Path, tmp_path: Path) -> None:
    target = Target(pair.target)
    with torch.inference_mode():
        agreeing_draft("dream", target, injection_layer=4).network.save(tmp_path)  # type: ignore[operator]
    with pytest.raises(UserError, match="only a specvlm draft compresses visual tokens; got operator pool for dream"):
        load_draft(str(tmp_path), target, Subnet(operator="pool"))
    with pytest.raises(
        UserError, match="this draft has no subnets; leave heads, injection_layer, operator, vocabulary and"
    ):
        load_draft(str(pair.draft_folder), target, Subnet(operator="pool"))
    with pytest.raises(UserError, match="only prune and pool have a ratio to choose; got 5 for convolve"):
        load_draft(str(folder), target, Subnet(operator="convolve", operator_ratio=5))


def test_traces_record_the_operator(model_pool: ModelPool, tmp_path: Path) -> None:
    """Their draft's KV length is the number of the operator's rows."""
    specvlm = next(iter(model_pool.references))
    lines = [
        {"split": "tune", "max_new_tokens": 12, "prompt": "And 2?", "images": [write_image(tmp_path / "0.png", 0)]}
    ]
    prompts = load_workload(str(write_workload(tmp_path, lines)), "tune")
    recorder = recorder_of(model_pool, tmp_path)
    traces = {}
    for operator in ("convolve", "text_only"):
        subnet = Subnet(operator=operator)
        trace = record_trace(recorder, model_pool, (specvlm, subnet), prompts, bounds_for([ChainPolicy(depth=2)]))
        assert trace.header.subnet.operator == operator
        traces[operator] = trace
    lengths = {name: int(trace.draft_prompt_length[0]) for name, trace in traces.items()}
    assert lengths["convolve"] - lengths["text_only"] == 6


def test_a_space_names_operators_of_the_compressor() -> None:
    operators = ("prune", "pool", "convolve", "resample", "text_only")
    found = load_space("full").subnets("specvlm", Subnet(), (), operators)
    assert {subnet.operator for subnet in found} == {None, *operators} and len(found) == 11 * 5 + 1
    with pytest.raises(UserError, match="the compressor of x has the operators prune, pool; got resample"):
        load_space("full", ("operator=resample",)).subnets("x", Subnet(), (), ("prune", "pool"))
