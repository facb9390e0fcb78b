"""Rounds led by the device grow the same trees as rounds led by the host, round by round, on the same models."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from autotune.drafters.checkpoint import load_draft
from autotune.drafters.retrieval import RetrievalDraft
from autotune.modeling import transfer
from autotune.modeling.graph_memory import graph_memory
from autotune.modeling.graph_runner import KV_LENGTH_STEP
from autotune.modeling.target import Target
from autotune.runtime import device_rounds
from autotune.runtime.decoder import Decoder
from autotune.runtime.device_rounds import DeviceRound
from autotune.runtime.points import as_draft
from autotune.runtime.stats import DecodingStats
from autotune.runtime.token_sampler import TokenSampler
from autotune.trees.fallback import RoundPrice
from autotune.trees.policy import TreeGrower
from tests.drafters.test_eagle3 import write_head
from tests.drafters.test_feature_draft import KINDS, agreeing_draft
from tests.drafters.test_mtp import random_draft as random_mtp
from tests.rehearsal import Rehearsal
from tests.tiny_models import VOCABULARY_SIZE, Inputs, Pair, inputs_on, on_device

STATIC = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0]]
TREES: dict[str, dict[str, Any]] = {
    "chain": {"policy": "chain", "depth": 4},
    "static": {"policy": "static", "paths": STATIC},
    "eagle2": {"policy": "eagle2", "depth": 4, "k": 3, "budget": 10},
    "eagle2-tight": {"policy": "eagle2", "depth": 5, "k": 4, "budget": 6},  # of what the draft read, most is pruned
    "eagle2-floor": {"policy": "eagle2", "depth": 4, "k": 4, "budget": 20, "floor": 0.05},
}
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "top_p": 0.9, "seed": 4})


class VerifiedTree(NamedTuple):
    token: list[int]
    parent: list[int]
    depth: list[int]
    rank: list[int]
    is_read: list[bool]
    path_logprob: list[float]


def watch_trees(decoder: Decoder) -> list[VerifiedTree]:
    """Collects the trees of all later rounds."""
    grower, trees = decoder.point.grower, []

    def update_and_note(*given: Any) -> None:
        tree, size = grower.tree, int(grower.tree.size[0])
        fields = (tree.token, tree.parent, tree.depth, tree.rank, tree.kv_slot >= 0, tree.path_logprob)
        trees.append(VerifiedTree(*(field[:size].tolist() for field in fields)))
        TreeGrower.update(grower, *given)

    grower.update = update_and_note  # type: ignore[method-assign]
    return trees


def make_draft(kind: str, pair: Pair, target: Target, folder: Path) -> Any:
    if kind == "independent":
        return as_draft(pair.draft)
    if kind == "eagle3":
        return load_draft(str(write_head(folder / "head", "speculators")), target)
    if kind == "mtp":
        return random_mtp(target)
    return agreeing_draft(kind, target, injection_layer=2 if kind == "star" else 4)


def led_by_host(decoder: Decoder) -> Decoder:
    decoder._device_rounds.get = lambda point, sampler: None  # type: ignore[method-assign]
    return decoder


def two_decoders(target: Target, draft: Any, tree: dict[str, Any], **options: Any) -> tuple[Decoder, Decoder]:
    """One led by the host and one by the device, with the same target and draft."""
    options = {"tree": tree, "mode": "fixed", **options}
    return led_by_host(Decoder(target, draft, **options)), Decoder(target, draft, **options)


def assert_same(host: Decoder, device: Decoder, inputs: Inputs, **settings: Any) -> DecodingStats:
    """Both decoders emit the same tokens and counts, and grow the same trees."""
    expected_trees, found_trees = watch_trees(host), watch_trees(device)
    expected = host.generate(**inputs, **settings)
    found = device.generate(**inputs, **settings)
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("accepted_lengths", "verified_nodes", "target_forwards", "plain_steps", "new_tokens"):
        assert getattr(found.stats, name) == getattr(expected.stats, name), name
    assert found.stats.acceptance_counts.to_json() == expected.stats.acceptance_counts.to_json()
    num_rounds = found.stats.target_forwards - found.stats.plain_steps
    # The host stops when no node is worth expanding; the device always runs all levels.
    on_device = device._device_rounds.get(device.point, TokenSampler())
    assert on_device is not None
    num_levels = on_device.num_levels
    assert expected.stats.draft_forwards <= found.stats.draft_forwards == num_levels * num_rounds
    if device.point.policy.policy != "eagle2":
        assert expected.stats.draft_forwards == found.stats.draft_forwards
    assert len(found_trees) == len(expected_trees) == num_rounds
    assert num_rounds == 0 or min(found.stats.draft_ms, found.stats.verify_ms, found.stats.overhead_ms) > 0.0
    for one, other in zip(found_trees, expected_trees, strict=True):
        assert one[:-1] == other[:-1]
        assert np.allclose(one.path_logprob, other.path_logprob, atol=1e-4)
    return found.stats


@pytest.mark.parametrize("kind", ["independent", "eagle3", "mtp", *KINDS])
def test_trees_and_tokens_are_those_of_the_host(
    pair: Pair, prompts: dict[str, Inputs], kind: str, tmp_path: Path
) -> None:
    target = Target(pair.target)
    draft = make_draft(kind, pair, target, tmp_path)
    num_accepted = 0
    for tree in TREES.values():
        host, device = two_decoders(target, draft, tree, capture_sizes=(1, 3, 8, 16, 64), visual_keep=0.5)
        for settings, name in zip(SETTINGS, ("image", "text"), strict=True):
            stats = assert_same(host, device, prompts[name], max_new_tokens=14, **settings)
            num_accepted += sum(stats.accepted_lengths)
    assert num_accepted > 10 or kind in ("eagle3", "mtp"), "random heads are hardly ever right; the others must be"


@pytest.mark.parametrize("kind", ["dream", "star"])
def test_trees_and_tokens_for_every_share_of_visual_tokens(pair: Pair, prompts: dict[str, Inputs], kind: str) -> None:
    """Blocks that cross have KV slots and a mask of their own where visual tokens are pruned."""
    target = Target(pair.target)
    draft = agreeing_draft(kind, target, injection_layer=4)
    for tree in (TREES["chain"], TREES["eagle2"]):
        for keep, name in ((0.1, "image"), (1.0, "image"), (0.1, "text"), (0.5, "long")):
            host, device = two_decoders(target, draft, tree, capture_sizes=(1, 8, 16), visual_keep=keep)
            assert_same(host, device, prompts[name], max_new_tokens=14)


def test_trees_of_other_shapes(pair: Pair, prompts: dict[str, Inputs]) -> None:
    target = Target(pair.target)
    dream = agreeing_draft("dream", target, injection_layer=4)
    for tree in (
        {"policy": "eagle2"},
        {"policy": "eagle2", "depth": 3, "k": 3, "budget": 1},
        {"policy": "eagle2", "depth": 3, "k": 1, "budget": 9},
        {"policy": "chain", "depth": 1},
        {"policy": "static", "paths": [[0], [0, 1]]},
    ):
        assert_same(*two_decoders(target, pair.draft, tree), prompts["image"], max_new_tokens=12)
        assert_same(*two_decoders(target, dream, tree), prompts["text"], max_new_tokens=12)


def test_eager_forwards_give_the_same_tokens(pair: Pair, prompts: dict[str, Inputs]) -> None:
    eager = Decoder(pair.target, pair.draft, tree=TREES["eagle2"])
    device = Decoder(pair.target, pair.draft, tree=TREES["eagle2"], mode="fixed")
    for settings in SETTINGS:
        expected = eager.generate(**prompts["image"], max_new_tokens=16, **settings)
        found = device.generate(**prompts["image"], max_new_tokens=16, **settings)
        assert torch.equal(found.sequences, expected.sequences)
        assert found.stats.accepted_lengths == expected.stats.accepted_lengths


def test_an_answer_grows_past_padded_lengths_and_capacities(text_pair: Pair) -> None:
    for kind in ("independent", "star"):
        target, capacities = Target(text_pair.target), set()
        draft = as_draft(text_pair.draft) if kind == "independent" else agreeing_draft(kind, target, injection_layer=2)
        host, device = two_decoders(target, draft, TREES["eagle2"])
        for length, num_tokens in ((10, 4), (KV_LENGTH_STEP - 6, 24), (1010, 40)):
            inputs = {"input_ids": torch.arange(length)[None] % 40 + 5}
            assert_same(host, device, inputs, max_new_tokens=num_tokens)
            capacities.add(target.cache.capacity)
        assert len(capacities) > 1


def test_the_context_to_the_last_token(text_pair: Pair) -> None:
    inputs = {"input_ids": torch.from_numpy(np.random.default_rng(1).integers(4, VOCABULARY_SIZE, (1, 2040)))}
    assert_same(*two_decoders(Target(text_pair.target), text_pair.draft, TREES["static"]), inputs, max_new_tokens=8)


def test_the_end_of_sequence_and_of_the_request(pair: Pair, prompts: dict[str, Inputs]) -> None:
    host, device = two_decoders(Target(pair.target), pair.draft, TREES["static"])
    length = prompts["text"]["input_ids"].shape[1]
    text = host.generate(**prompts["text"], max_new_tokens=12).sequences[0, length:].tolist()
    for number in (1, 2, 3, 7):
        assert_same(host, device, prompts["text"], max_new_tokens=number)
        assert_same(host, device, prompts["text"], max_new_tokens=12, eos_token_id=text[number])


def test_plain_steps_between_rounds(pair: Pair, prompts: dict[str, Inputs], tmp_path: Path) -> None:
    """After a plain step the draft has more pending tokens than after a round."""
    target = Target(pair.target)
    price = RoundPrice(round_steps=4.5, level_steps=0.0, node_steps=0.0)
    options = {"fallback": price, "capture_sizes": (1, 4, 16)}
    for kind in ("independent", "dream"):
        host, device = two_decoders(target, make_draft(kind, pair, target, tmp_path), TREES["eagle2"], **options)
        stats = assert_same(host, device, prompts["text"], max_new_tokens=60)
        assert 0 < stats.plain_steps < stats.target_forwards


def test_the_host_leads_where_it_must(pair: Pair, prompts: dict[str, Inputs], monkeypatch: pytest.MonkeyPatch) -> None:
    """It leads where policy, verification, logits processors or draft decide on the host, and in eager mode."""
    rounds = []
    run = DeviceRound.run
    monkeypatch.setattr(DeviceRound, "run", lambda *given: rounds.append(1) or run(*given))
    penalty = {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])}
    for leads, options, settings in (
        (True, {}, {}),
        (True, {}, {"temperature": 1.0}),
        (False, {}, penalty),
        (False, {"mode": "eager"}, {}),
        (False, {"draft": RetrievalDraft()}, {}),
        (False, {"tree": {"policy": "sage"}}, {}),
        (False, {"tree": {"policy": "wetap"}}, {}),
        (False, {"verification": {"kind": "wetap", "threshold": 0.9}}, {}),
    ):
        rounds.clear()
        given: dict[str, Any] = {"draft": pair.draft, "tree": TREES["eagle2"], "mode": "fixed", **options}
        Decoder(pair.target, **given).generate(**prompts["text"], max_new_tokens=8, **settings)
        assert bool(rounds) == leads, options


@pytest.mark.filterwarnings("error::autotune.modeling.graph_runner.EagerNotice")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_rounds_of_compiled_forwards(
    pair: Pair, prompts: dict[str, Inputs], backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In mode ``compile`` the host leads on a CPU, where device rounds do not pay; elsewhere drafting and verification are
    compiled, each as a whole.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    target = Target(pair.target)
    draft = make_draft("dream", pair, target, tmp_path)
    tree = {"policy": "eagle2", "depth": 2, "k": 3, "budget": 6}
    options = {"tree": tree, "mode": "compile", "capture_sizes": (4, 16)}
    decoder = Decoder(target, draft, **options)
    decoder.generate(**prompts["text"], max_new_tokens=4)
    assert decoder._device_rounds.get(decoder.point, TokenSampler()) is None
    monkeypatch.setattr(device_rounds, "_pays", lambda device, mode: True)
    options["visual_keep"] = 0.5
    for name in ("text", "image"):
        assert_same(*two_decoders(target, draft, **options), prompts[name], max_new_tokens=8)


# ---------------------------------------------------------------------------------------------------------- transfers


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the tensors transferred to the host."""
    shapes: list[tuple[int, ...]] = []
    to_host = transfer.to_host

    def counted(tensor: Tensor) -> Any:
        shapes.append(tuple(tensor.shape))
        return to_host(tensor)

    monkeypatch.setattr(transfer, "to_host", counted)
    return shapes


@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["independent", "specvlm"])
def test_a_round_is_one_transfer(
    pair: Pair,
    prompts: dict[str, Inputs],
    kind: str,
    settings: dict[str, Any],
    transfers: list[tuple[int, ...]],
    tmp_path: Path,
) -> None:
    """Where the host leads, it is one transfer per level and one per round."""
    target = Target(pair.target)
    draft = make_draft(kind, pair, target, tmp_path)
    host, device = two_decoders(target, draft, TREES["eagle2"])
    host.host_round.decides_at_once = True
    found = host.generate(**prompts["image"], max_new_tokens=16, **settings).stats
    assert len(transfers) == 1 + found.draft_forwards + found.rounds  # the first token is the prefill's
    transfers.clear()
    found = device.generate(**prompts["image"], max_new_tokens=16, **settings).stats
    assert len(transfers) == 1 + found.rounds
    assert len(set(transfers[1:])) == 1, "of one shape, whatever was accepted"


# -------------------------------------------------------------------------------------------------------- on a device

FEW_SIZES = {"capture_sizes": (1, 8, 16)}


@pytest.mark.filterwarnings("error::autotune.modeling.graph_runner.EagerNotice")
@pytest.mark.parametrize(
    "kind",
    ["independent", "mtp", "dream", *(pytest.param(k, marks=pytest.mark.nightly) for k in ("eagle3", "specvlm"))],
)
def test_a_captured_round_depends_on_its_buffers_alone(
    gpu: str, pair: Pair, prompts: dict[str, Inputs], kind: str, tmp_path: Path
) -> None:
    """One capture decodes requests of different lengths and settings; they are those of rounds led by the host."""
    pair = on_device(pair, gpu)
    target = Target(pair.target)
    draft = make_draft(kind, pair, target, tmp_path)
    options = {**FEW_SIZES, "visual_keep": 0.5}
    tree = TREES["static" if kind in ("independent", "dream") else "eagle2"]
    host = led_by_host(Decoder(target, draft, tree=tree, mode="eager", **options))
    device = Decoder(target, draft, tree=tree, **options)
    assert device.mode == "cuda-graph", "the default on a GPU"
    inputs = {name: inputs_on(one, gpu) for name, one in prompts.items()}
    for name, settings in (
        ("text", {}),
        ("image", {"temperature": 1.0, "seed": 1}),
        ("text", {"temperature": 0.7, "top_k": 7, "seed": 2}),
        ("image", {}),
    ):
        assert_same(host, device, inputs[name], max_new_tokens=10, **settings)
    before = graph_memory(target.device).num_kept
    device.generate(**inputs["text"], max_new_tokens=9)
    assert graph_memory(target.device).num_kept == before


@pytest.mark.filterwarnings("error::autotune.modeling.graph_runner.EagerNotice")
@pytest.mark.parametrize("mode", [pytest.param("fixed", marks=pytest.mark.nightly), "cuda-graph"])
@pytest.mark.parametrize("kind", ["independent", "dream", "specvlm"])
def test_a_round_waits_for_the_device_once(
    gpu: str,
    pair: Pair,
    prompts: dict[str, Inputs],
    kind: str,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Nothing but the transfer synchronises."""
    pair, inputs = on_device(pair, gpu), inputs_on(prompts["image"], gpu)
    target = Target(pair.target)
    draft = make_draft(kind, pair, target, tmp_path)
    for name in ("chain", "eagle2"):
        device = Decoder(target, draft, tree=TREES[name], mode=mode, **FEW_SIZES)
        device.generate(**inputs, max_new_tokens=12)  # captures, which waits
        with monkeypatch.context() as patch:
            numbers = count_waits(patch)
            device.generate(**inputs, max_new_tokens=12)
        assert numbers and set(numbers) == {1}


def count_waits(patch: pytest.MonkeyPatch) -> list[int]:
    """Counts the transfers of each round; any other wait is an error."""
    run, to_host, numbers = DeviceRound.run, transfer.to_host, []

    def counted(tensor: Tensor) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        numbers[-1] += 1
        found = to_host(tensor)
        torch.cuda.set_sync_debug_mode("error")
        return found

    def run_watched(*given: Any) -> Any:
        numbers.append(0)
        patch.setattr(transfer, "to_host", counted)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            patch.setattr(transfer, "to_host", to_host)

    patch.setattr(DeviceRound, "run", run_watched)
    return numbers


def test_a_request_waits_once_a_round_and_for_its_prefills(
    rehearsal: Rehearsal, pair: Pair, prompts: dict[str, Inputs]
) -> None:
    """Clocks included. Rounds that the host leads wait once a level, and once for the verification."""
    pair, inputs = on_device(pair, "cuda:0"), inputs_on(prompts["text"], "cuda:0")
    target, draft = Target(pair.target), as_draft(pair.draft)
    for mode in ("eager", "cuda-graph"):
        decoder = Decoder(target, draft, tree=TREES["chain"], mode=mode, **FEW_SIZES)
        waits = []
        for number in (12, 20):
            decoder.generate(**inputs, max_new_tokens=number)
            with rehearsal.counted() as counts:
                stats = decoder.generate(**inputs, max_new_tokens=number).stats
            waits.append(counts.waits - stats.rounds - (stats.draft_forwards if mode == "eager" else 0))
        assert waits[0] == waits[1], "a request's own, whatever its length"


def test_a_capture_is_of_the_target_s_device(rehearsal: Rehearsal, pair: Pair, prompts: dict[str, Inputs]) -> None:
    """``--device cuda:1``, while ``cuda:0`` is current."""
    host = Decoder(pair.target, pair.draft, tree=TREES["chain"], mode="eager")
    expected = host.generate(**prompts["image"], max_new_tokens=12)
    pair, inputs = on_device(pair, "cuda:1"), inputs_on(prompts["image"], "cuda:1")
    found = Decoder(pair.target, pair.draft, tree=TREES["chain"], **FEW_SIZES).generate(**inputs, max_new_tokens=12)
    assert torch.equal(found.sequences.cpu(), expected.sequences)
    assert rehearsal.counts.captures > 0
