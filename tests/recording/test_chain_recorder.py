"""Chains of all subnets of a supernet in one batch equal those that are recorded one by one, and those of decoding."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autotune.documents.subnet import Subnet
from autotune.modeling.target import Target
from autotune.recording import chain_recorder
from autotune.recording.chain_recorder import chain_traces
from autotune.recording.recorder import Recorder
from autotune.recording.traces import record_trace, recorder_of
from autotune.replay.replay import replay
from autotune.replay.trace import Trace, bounds_for
from autotune.runtime.model_pool import ModelPool
from autotune.trees.chain import ChainPolicy
from autotune.trees.static import NO_TOKEN
from autotune.workloads.workload import Workload, load_workload
from tests.drafters.test_feature_draft import agreeing_draft
from tests.sample_documents import free_prices, write_image, write_workload
from tests.tiny_models import Pair

BOUNDS = bounds_for([ChainPolicy(depth=6)]).model_copy(update={"answer_tokens": 20})
SHARES = [None, *list(itertools.product((1.0, 0.5), repeat=3))[1:]]  # of each block; None: all heads
KEEPS = (1.0, 0.5)


def pool_of_supernet(pair: Pair, folder: Path, **sizes: Any) -> ModelPool:
    """A pool with a supernet whose heads differ in importance."""
    with torch.inference_mode():
        network: Any = agreeing_draft("star", Target(pair.target), injection_layer=4, **sizes).network
        network.head_importance.copy_(
            torch.rand(network.head_importance.shape, generator=torch.Generator().manual_seed(0))
        )
        network.save(folder)
    return ModelPool(str(pair.target_folder), [str(folder)], "cpu")


@pytest.fixture(scope="module")
def model_pool(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> ModelPool:
    return pool_of_supernet(pair, tmp_path_factory.mktemp("star"))


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """A greedy answer, a sampled one, and one of a single token, which has nothing to draft."""
    folder = tmp_path_factory.mktemp("workload")
    images = [write_image(folder / "0.png", 0)]
    prompts: list[dict[str, Any]] = [
        {"prompt": "Read the digits row by row.", "images": images, "max_new_tokens": 30},
        {"prompt": "And 2?", "max_new_tokens": 12, "temperature": 0.8, "top_k": 20, "seed": 3},
        {"prompt": "And 3?", "max_new_tokens": 1},
    ]
    return load_workload(str(write_workload(folder, [{"split": "tune", **prompt} for prompt in prompts])), "tune")


@pytest.fixture(scope="module")
def recorder(model_pool: ModelPool, tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return recorder_of(model_pool, tmp_path_factory.mktemp("records"))


def figures(trace: Trace, depth: int) -> tuple[list[list[int]], list[int], list[int], int]:
    """Counts of a replayed chain by prompt: accepted lengths, draft forwards, verified nodes; and what it misses."""
    found = replay(trace, ChainPolicy(depth=depth), free_prices())
    accepted = [lengths.tolist() for lengths in found.accepted_lengths]
    return accepted, found.draft_forwards.tolist(), found.verified_nodes.tolist(), int(found.missing.sum())


@pytest.mark.parametrize("rows_at_once", [100, 1 << 15])
def test_chains_of_all_subnets_equal_those_recorded_one_by_one(
    model_pool: ModelPool, recorder: Recorder, workload: Workload, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all shares of heads, layers and shares of visual tokens, whether all subnets fit in one batch or a few."""
    monkeypatch.setattr(chain_recorder, "ROWS_AT_ONCE", rows_at_once)
    (name,) = model_pool.references
    draft: Any = model_pool.draft(name)
    layers = model_pool.drafts[name].dimensions.injection_layers
    seen, accepted = set(), 0
    is_whole = rows_at_once > 100
    for layer, keep in itertools.product(layers, KEEPS) if is_whole else [(layers[-1], 0.5)]:
        subnets = [Subnet(heads=shares, injection_layer=layer, visual_keep=keep) for shares in SHARES]
        together = chain_traces(recorder, draft, model_pool.references[name], workload, subnets, BOUNDS)
        for subnet, found in zip(subnets, together, strict=True):
            alone = record_trace(recorder, model_pool, (name, subnet), workload, BOUNDS)
            assert found.header.model_copy(update={"provenance": alone.header.provenance}) == alone.header
            for field in ("answer_start", "prompt_length", "draft_prompt_length", "num_visual_tokens"):
                np.testing.assert_array_equal(getattr(found, field), getattr(alone, field))
            for depth in (1, 2, 4, 6):
                assert figures(found, depth) == figures(alone, depth), (subnet, depth)
            lengths = figures(found, 6)[0]
            seen.add(str(lengths))
            accepted += sum(map(sum, lengths))
    assert not is_whole or (len(seen) > 3 and accepted > 100), "equal or useless subnets would prove nothing"


def test_probabilities_equal_those_recorded_one_by_one(
    model_pool: ModelPool, recorder: Recorder, workload: Workload
) -> None:
    """Children of every root, and chains that follow the answer, are compared."""
    (name,) = model_pool.references
    subnets = [Subnet(heads=shares, injection_layer=2, visual_keep=0.5) for shares in SHARES]
    draft: Any = model_pool.draft(name)
    together = chain_traces(recorder, draft, model_pool.references[name], workload, subnets, BOUNDS)
    compared = 0
    for subnet, found in zip(subnets, together, strict=True):
        alone = record_trace(recorder, model_pool, (name, subnet), workload, BOUNDS)
        _, _, ours = found.roots()
        _, _, theirs = alone.roots()
        while len(ours):
            np.testing.assert_array_equal(found.forest.child_token[ours, 0], alone.forest.child_token[theirs, 0])
            np.testing.assert_allclose(
                found.forest.child_logprob[ours, 0], alone.forest.child_logprob[theirs, 0], atol=1e-4
            )
            compared += len(ours)
            ours, theirs = found.forest.child_node[ours, 0], alone.forest.child_node[theirs, 0]
            is_real = (ours >= 0) & (found.forest.child_token[ours, 0] != NO_TOKEN)
            ours, theirs = ours[is_real], theirs[is_real]
    assert compared > 200
    first = {tuple(trace.forest.child_logprob[:5, 0].round(3).tolist()) for trace in together}
    assert len(first) == len(SHARES), "equal subnets would prove nothing"
