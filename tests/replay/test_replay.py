"""Replay counts the rounds that decoding takes, and prices them as computed by hand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune.cost.request_costs import Overhead, PrefillCost
from autotune.cost.table import DensePrices
from autotune.documents.configuration import Configuration
from autotune.documents.provenance import ModelReference
from autotune.documents.subnet import Subnet
from autotune.drafters.independent import IndependentDraft
from autotune.drafters.retrieval import RetrievalDraft
from autotune.errors import UserError
from autotune.modeling.loading import RETRIEVAL, reference
from autotune.modeling.target import Target
from autotune.recording.recorder import Recorder
from autotune.replay.replay import Replay, _level_price, plain_decode_ms, replay
from autotune.replay.trace import ForestBounds, RecordedPrompt, Trace, bounds_for, join
from autotune.runtime.decoder import Decoder
from autotune.runtime.stats import DecodingStats
from autotune.trees.chain import ChainPolicy
from autotune.trees.eagle2 import Eagle2Policy
from autotune.trees.limits import MAX_DEPTH, MAX_LEVEL_STEP, MAX_RETRIEVED
from autotune.trees.policy import POLICIES, parse_policy
from autotune.trees.sage import SagePolicy
from autotune.trees.wetap import WetapPolicy
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload, load_workload
from tests.replay.configurations import Sizes, random_price, random_tree_policy
from tests.sample_documents import (
    DRAFT,
    cost_table,
    forest_of,
    free_prices,
    header,
    random_trace,
    write_image,
    write_workload,
)

KEEPS = (1.0, 0.5, 0.1)
# A trace within these bounds holds all that any of the random trees asks for, but for a beam now and then.
SIZES = Sizes(depth=12, beam_depth=5, k=5, width=12, top_k=5, top_p=0.7)
LARGEST_EAGLE2 = Eagle2Policy(depth=5, k=5, budget=24)
LARGEST_WETAP = WetapPolicy(length=5, w_min=12, w_max=12, top_k=5, top_p=0.7)
EVERYTHING = bounds_for([LARGEST_EAGLE2, LARGEST_WETAP, SagePolicy(d_max=12)]).model_copy(
    update={"depth": SIZES.depth, "num_proposals": 16, "width": 128, "beam": 32, "nucleus_width": 128}
)

# A narrow beam may lead where the recorded, wider one does not; replay counts that as missing.
BEAMS = ("eagle2", "wetap")
# The shape of these does not depend on the proposals, and the answer is always recorded, so missing nodes change
# nothing.
FIXED_SHAPES = ("chain", "static")


def random_configurations(of_each: int = 3, seed: int = 0) -> list[Configuration]:
    """So many of every policy, with the visual keeps in turn; a fallback now and then."""
    rng, configurations, keeps = random.Random(seed), [], itertools.cycle(KEEPS)
    for number, (name, keep) in enumerate(zip(sorted([*POLICIES] * of_each), keeps, strict=False)):
        configurations.append(
            Configuration(
                tree=random_tree_policy(name, rng, SIZES),
                subnet=Subnet(visual_keep=keep),
                fallback=random_price(rng) if number % 4 == 1 else None,
            )
        )
    return configurations


@pytest.fixture(scope="module")
def record(
    recorder: Recorder, draft: IndependentDraft, draft_reference: ModelReference, workload: Workload
) -> Callable[..., Trace]:
    """Records the draft along a workload, by default with everything."""

    def trace(of: Workload = workload, visual_keep: float = 1.0, bounds: ForestBounds = EVERYTHING) -> Trace:
        return recorder.trace(draft, draft_reference, of, visual_keep=visual_keep, bounds=bounds)

    return trace


@pytest.fixture(scope="module")
def traces(record: Callable[..., Trace]) -> dict[float, Trace]:
    """A trace for each visual keep."""
    return {keep: record(visual_keep=keep) for keep in KEEPS}


@pytest.fixture(scope="module")
def decoder(target: Target, draft: IndependentDraft) -> Decoder:
    return Decoder(target, draft)


def decode(decoder: Decoder, prompt: WorkloadPrompt, processor: Any) -> DecodingStats:
    return decoder.generate(**prompt.inputs(processor), **prompt.settings.generation).stats


def assert_rounds_are_the_decoders(
    trace: Trace, configuration: Configuration, decoder: Decoder, workload: Workload, processor: Any
) -> Replay:
    """Compare rounds, accepted lengths, draft forwards, verified nodes and tokens of every prompt; returns the
    replayed ones.
    """
    fallback = configuration.fallback
    decoder = Decoder(
        decoder.target,
        decoder.draft,
        tree=configuration.tree,
        visual_keep=configuration.subnet.visual_keep,
        fallback=fallback,
    )
    policy = parse_policy(configuration.tree)
    replayed = replay(trace, policy, free_prices(), fallback)
    assert policy.policy in (*BEAMS, *FIXED_SHAPES) or replayed.missing.sum() == 0
    for p, prompt in enumerate(workload.prompts):
        if replayed.missing[p] and policy.policy in BEAMS:
            continue
        stats = decode(decoder, prompt, processor)
        assert replayed.accepted_lengths[p].tolist() == stats.accepted_lengths, prompt.name
        counted = (replayed.rounds[p], replayed.draft_forwards[p], replayed.verified_nodes[p], replayed.tokens[p])
        assert counted == (stats.rounds, stats.draft_forwards, sum(stats.verified_nodes), stats.new_tokens - 1)
        assert replayed.plain_steps[p] == stats.plain_steps
    return replayed


def test_replay_counts_the_rounds_of_the_decoder(
    traces: dict[float, Trace], decoder: Decoder, workload: Workload, processor: Any
) -> None:
    num_plain_steps, num_missing = 0, 0
    for configuration in random_configurations(of_each=2):
        trace = traces[configuration.subnet.visual_keep]
        replayed = assert_rounds_are_the_decoders(trace, configuration, decoder, workload, processor)
        num_plain_steps += replayed.plain_steps.sum()
        num_missing += (replayed.missing > 0).sum() * (configuration.tree["policy"] in BEAMS)
    assert num_plain_steps > 0 and num_missing < 3, "prompts that a beam leaves are not compared"


@pytest.mark.parametrize("of_each", [2, pytest.param(10, marks=pytest.mark.nightly)])
def test_replay_counts_the_rounds_of_a_retrieval_draft(
    of_each: int, recorder: Recorder, target: Target, workload: Workload, processor: Any
) -> None:
    """So many random configurations of every policy. Shares of occurrences are often equal, and often nothing is
    proposed.
    """
    draft = RetrievalDraft()
    draft.attach(target)
    trace = recorder.trace(draft, reference(RETRIEVAL), workload, visual_keep=1.0, bounds=EVERYTHING)
    decoder, rng = Decoder(target, draft), random.Random(5)
    num_accepted = num_roots_alone = 0
    for number in range(of_each * len(POLICIES)):
        tree = random_tree_policy(list(POLICIES)[number % len(POLICIES)], rng, SIZES)
        configuration = Configuration(tree=tree, fallback=random_price(rng) if number % 4 == 1 else None)
        replayed = assert_rounds_are_the_decoders(trace, configuration, decoder, workload, processor)
        num_accepted += sum(int(lengths.sum()) for lengths in replayed.accepted_lengths)
        num_roots_alone += int((replayed.verified_nodes < replayed.rounds).sum())
    assert num_accepted > 10 * of_each and num_roots_alone > 0


def test_replay_counts_the_rounds_of_deep_trees_with_a_second_source(
    recorder: Recorder, target: Target, workload: Workload, processor: Any
) -> None:
    """A tree of 24 levels takes no more retrieved tokens than a trace holds of a position."""
    draft = RetrievalDraft()
    draft.attach(target)
    bounds = ForestBounds(depth=MAX_DEPTH, num_proposals=1)
    trace = recorder.trace(draft, reference(RETRIEVAL), workload, visual_keep=1.0, bounds=bounds)
    sizes = SIZES._replace(k=1)
    for seed in range(6):
        tree = random_tree_policy("priced", random.Random(seed), sizes)
        tree |= {"depth": MAX_DEPTH, "budget": 64, "worth": 2.0, "retrieval": True}
        tree |= {"skip_draft_above": 0.2 + 0.1 * seed}
        configuration = Configuration(tree=tree)
        assert_rounds_are_the_decoders(trace, configuration, Decoder(target, draft), workload, processor)
    longest = (trace.forest.retrieved >= 0).sum(1).max()
    assert longest == MAX_RETRIEVED < MAX_DEPTH


@pytest.fixture(scope="module")
def sampled_workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Sampled prompts, with and without an image and a cut of the distribution."""
    folder = tmp_path_factory.mktemp("sampled")
    images = [write_image(folder / "0.png", 0)]
    prompts: list[dict[str, Any]] = [
        {"prompt": "Count to ten, then stop.", "temperature": 1.0, "seed": 1},
        {"prompt": "Read the digits row by row.", "images": images, "temperature": 0.7, "seed": 2},
        {"prompt": "And row 2?", "images": images, "temperature": 1.3, "top_k": 5, "top_p": 0.9, "seed": 3},
    ]
    lines = [{"split": "tune", "max_new_tokens": 14, **prompt} for prompt in prompts]
    return load_workload(str(write_workload(folder, lines)), "tune")


@pytest.mark.parametrize("of_each", [2, pytest.param(10, marks=pytest.mark.nightly)])
def test_replay_counts_the_rounds_of_sampled_requests(
    of_each: int, record: Callable[..., Trace], sampled_workload: Workload, decoder: Decoder, processor: Any
) -> None:
    """The recorded proposals are coupled to the noise of the request, as those of the runtime are."""
    traces = {keep: record(sampled_workload, keep) for keep in KEEPS}
    configurations = random_configurations(of_each, seed=1)
    num_missing, num_different = 0, 0
    for configuration in configurations:
        trace = traces[configuration.subnet.visual_keep]
        replayed = assert_rounds_are_the_decoders(trace, configuration, decoder, sampled_workload, processor)
        num_missing += (replayed.missing > 0).sum() * (configuration.tree["policy"] in BEAMS)
        if configuration.tree["policy"] == "chain":
            decoder = Decoder(
                decoder.target,
                decoder.draft,
                tree=configuration.tree,
                visual_keep=configuration.subnet.visual_keep,
                coupled=False,
            )
            lengths = [decode(decoder, prompt, processor).accepted_lengths for prompt in sampled_workload.prompts]
            num_different += lengths != [found.tolist() for found in replayed.accepted_lengths]
    assert num_missing < 4 * of_each, "prompts that a beam leaves are not compared"
    assert num_different > of_each / 2, "of the chains; otherwise the proposals need not be coupled"


def test_an_answer_of_one_token_takes_no_round(traces: dict[float, Trace], workload: Workload) -> None:
    """Its prefill of the draft is not priced."""
    single = [prompt.settings.max_new_tokens for prompt in workload.prompts].index(1)
    overhead = Overhead(round_ms=1, level_ms=1, node_ms=1)
    prices = DensePrices(np.ones(1), *[np.ones((2, 1))] * 3, 16, overhead, one_ms_per_prefill())
    replayed = replay(traces[1.0], ChainPolicy(), prices)
    assert replayed.rounds[single] == 0 and replayed.decode_ms[single] == 0
    assert (np.delete(replayed.draft_prefill_ms, single) == 1).all()


def one_ms_per_prefill() -> PrefillCost:
    return PrefillCost(intercept_ms=1, per_token_ms=0, image_ms=0, samples=[])


def test_an_answer_that_ends_early(
    record: Callable[..., Trace],
    recorder: Recorder,
    decoder: Decoder,
    workload: Workload,
    processor: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    """Tokens accepted after an end of sequence within a round do not count."""
    answer = recorder.answers(workload)[0].tokens
    ending = next(token for token in answer[8:] if token not in answer[:8])
    monkeypatch.setattr(decoder.target_model.generation_config, "eos_token_id", ending)
    monkeypatch.setattr(recorder, "folder", tmp_path)
    ended = Workload(workload.name, workload.split, workload.prompts[:2])
    trace = record(ended)
    assert trace.forest.answer[: trace.answer_start[1]].tolist() == answer[: answer.index(ending) + 1]
    for tree in ({"policy": "chain", "depth": 12}, {"policy": "sage", "d_min": 8, "d_max": 12}):
        assert_rounds_are_the_decoders(trace, Configuration(tree=tree), decoder, ended, processor)


# -------- bounded traces


def test_a_raised_floor_loses_nodes_and_no_accepted_token(
    record: Callable[..., Trace], traces: dict[float, Trace]
) -> None:
    """While no budget binds, a node depends on its ancestors alone, and all nodes on the answer are recorded."""
    small = ForestBounds(depth=SIZES.depth, num_proposals=16, floor=0.3, width=1)
    trace = record(visual_keep=0.5, bounds=small)
    for tree in ({}, {"confidence": "current", "w_min": 6, "w_max": 12, "d_min": 6}, {"k": 16, "d_max": 12}):
        policy = SagePolicy(n_max=128, **tree)
        whole, partial = (replay(t, policy, free_prices()) for t in (traces[0.5], trace))
        assert whole.missing.sum() == 0 < partial.missing.sum()
        assert [a.tolist() for a in partial.accepted_lengths] == [a.tolist() for a in whole.accepted_lengths]
        assert partial.verified_nodes.sum() < whole.verified_nodes.sum()
        assert whole.is_covered and not partial.is_covered, "whole levels are missing, and so is their price"


def test_missing_nodes_are_counted_where_a_budget_binds() -> None:
    """Three children leave room for two nodes, and a child of the second displaces the one on the answer. If the second
    child is not recorded, replay accepts a token that decoding would not, and ``missing`` must show it.
    """
    policy = SagePolicy(d_min=2, d_max=2, w_min=3, w_max=3, k=3, n_max=5)
    child = [(20, 0.9, -1), (21, 0.04, -1), (22, 0.03, -1)]
    on_answer = [(12, 0.8, -1), (21, 0.1, -1), (22, 0.05, -1)]

    def accepted(second_child: int) -> tuple[list[int], int]:
        root = [(30, 0.34, 2), (31, 0.33, second_child), (11, 0.32, 3)]
        forest = forest_of([10, 11, 12], [root, on_answer, child, on_answer, child])
        trace = join(header(1, bounds=ForestBounds(depth=2, num_proposals=3)), [RecordedPrompt(forest, 4, 4, 0)])
        result = replay(trace, policy, free_prices())
        return result.accepted_lengths[0].tolist(), int(result.missing[0])

    assert accepted(second_child=4) == ([1], 0)
    assert accepted(second_child=-1) == ([2], 1)


def test_a_policy_beyond_the_trace_is_refused() -> None:
    for policy, asks_for in (
        (ChainPolicy(depth=5), "chain asks for 1 to depth 5"),
        (SagePolicy(k=5, d_max=4), "sage asks for 5 to depth 4"),
        (SagePolicy(k=4, d_max=4, depth_cap=6), "sage asks for 4 to depth 6"),
    ):
        with pytest.raises(UserError) as refused:
            replay(random_trace(0), policy, free_prices())
        assert "holds 4 children per node to depth 4" in str(refused.value)
        assert asks_for in str(refused.value) and "record a larger one" in str(refused.value)


# -------- by hand

# The answer is 10 11 12 13 14 15 16; forest nodes 0 to 5 are its first six tokens. Every node has two children.
ANSWER = [10, 11, 12, 13, 14, 15, 16]
NODES = [
    [(11, 0.6, 6), (20, 0.3, 7)],  # 0, after 10
    [(12, 0.5, -1), (20, 0.4, -1)],  # 1, after 11
    [(12, 0.5, -1), (20, 0.4, -1)],  # 2, after 12: 13 is not among the children
    [(14, 0.7, 8), (20, 0.2, 9)],  # 3, after 13
    [(15, 0.9, -1), (20, 0.05, -1)],  # 4, after 14
    [(16, 0.9, -1), (20, 0.05, -1)],  # 5, after 15
    [(12, 0.8, -1), (21, 0.1, -1)],  # 6, after 10 11
    [(21, 0.9, -1), (22, 0.05, -1)],  # 7, after 10 20
    [(21, 0.9, -1), (15, 0.05, -1)],  # 8, after 13 14
    [(21, 0.9, -1), (22, 0.05, -1)],  # 9, after 13 20
]


def trace_by_hand() -> Trace:
    bounds = ForestBounds(depth=2, num_proposals=2)
    return join(header(1, bounds=bounds), [RecordedPrompt(forest_of(ANSWER, NODES), 9, 5, 4, 16)])


def prices_by_hand() -> DensePrices:
    """A draft level of n tokens takes n ms, the first of a round 0.5 ms more, a verification of n nodes 10 n ms; every
    4 cached tokens add 0.1, 0.1 and 1 ms. The draft's prefill takes 1 ms + 0.5 ms per token, and with an image 1 ms +
    1/16 ms per patch; overhead is 0.25 ms per round, 0.125 ms per level and 0.0625 ms per verified node.
    """
    tokens, bins = np.arange(5.0)[:, None], np.arange(6.0)[None, :]
    prefill = PrefillCost(intercept_ms=1, per_token_ms=0.5, image_ms=1, patch_ms=1 / 16, samples=[])
    draft = tokens + 0.1 * bins
    overhead = Overhead(round_ms=0.25, level_ms=0.125, node_ms=0.0625)
    return DensePrices(5 + bins[0], draft + 0.5, draft, 10 * tokens + bins, 4, overhead, prefill)


def test_a_chain_by_hand() -> None:
    """ReplayedRound 1, root 10: the tree is 11, 12; both are accepted, and verification yields 13. The draft has not
    read the leaf 12, so round 2 begins with two tokens, 12 and 13. ReplayedRound 2, root 13: 14, 21; 14 is accepted,
    verification yields 15. ReplayedRound 3, root 15: 16 is accepted, the answer ends.
    """
    replayed = replay(trace_by_hand(), ChainPolicy(depth=2), prices_by_hand())
    assert replayed.accepted_lengths[0].tolist() == [2, 1, 1]
    assert (replayed.tokens[0], replayed.rounds[0], replayed.tokens_per_round) == (6, 3, 2.0)
    # The last round's second level would follow 16, which has no forest node: that chain ends with 16.
    assert (replayed.draft_forwards[0], replayed.verified_nodes[0], replayed.missing[0]) == (6, 5, 1)
    # Draft, (tokens, cached): (1, 5) (1, 6) | (2, 7) (1, 9) | 14 has been read, so it is kept: (1, 10) (1, 11)
    draft_ms = (1 + 0.1) + (1 + 0.1) + (2 + 0.1) + (1 + 0.2) + (1 + 0.2) + (1 + 0.2) + 3 * 0.5
    # Target: three, three and two nodes after 9, 9 + 3 and 9 + 5 cached tokens.
    verify_ms = (30 + 2) + (30 + 3) + (20 + 3)
    assert replayed.draft_ms[0] == pytest.approx(draft_ms)
    assert replayed.verify_ms[0] == pytest.approx(verify_ms)
    assert replayed.overhead_ms[0] == pytest.approx(3 * 0.25 + 6 * 0.125 + 5 * 0.0625)
    assert replayed.draft_prefill_ms[0] == pytest.approx(1 + 5 * 0.5 + 2)
    total = draft_ms + verify_ms + 1.8125 + 5.5
    assert replayed.decode_ms[0] == pytest.approx(total)
    assert replayed.ms_per_token == pytest.approx(total / 6)


def test_a_level_wider_than_a_forward_pass_costs_several() -> None:
    """300 nodes are passes of 128, 128 and 44 tokens, each after the nodes of the one before."""
    table = np.add.outer(np.arange(MAX_LEVEL_STEP + 2.0), 1000.0 * np.arange(20))  # tokens + 1000 per 64 cached tokens
    assert _level_price(table, 300, 64, 64) == (128 + 1000) + (128 + 3000) + (44 + 5000)
    assert _level_price(table, MAX_LEVEL_STEP, 64, 64) == 128 + 1000


def test_a_draft_with_blocks_that_cross_by_hand() -> None:
    """The chain above: four of nine prompt tokens are pruned, and half of the keys and values are of the whole
    prompt.
    """
    prices = replace(prices_by_hand(), crossing_share=0.5)
    replayed = replay(trace_by_hand(), ChainPolicy(depth=2), prices)
    # Draft, (tokens, effective KV length), two more than above: (1, 7) (1, 8) | (2, 9) (1, 11) | (1, 12) (1, 13)
    draft_ms = (1 + 0.1) + (1 + 0.2) + (2 + 0.2) + (1 + 0.2) + (1 + 0.3) + (1 + 0.3) + 3 * 0.5
    assert replayed.draft_ms[0] == pytest.approx(draft_ms)
    assert replayed.draft_prefill_ms[0] == pytest.approx(1 + 5 * 0.5 + 2)


def test_plain_decoding_by_hand() -> None:
    """Six steps after 9 to 14 cached tokens; a step takes 5 ms, and 1 ms more for every 4 cached tokens."""
    assert plain_decode_ms(trace_by_hand(), prices_by_hand()).tolist() == [(5 + 2) * 3 + (5 + 3) * 3]


def test_a_subset_of_prompts_is_replayed_as_in_the_whole() -> None:
    trace, prices = random_trace(3), cost_table().prices(DRAFT, max_tokens=64, max_kv_length=64)
    for policy in (ChainPolicy(depth=4), SagePolicy(k=4, d_max=4), Eagle2Policy(k=4, depth=4)):
        whole, subset = replay(trace, policy, prices), replay(trace, policy, prices, None, np.array([0, 2]))
        for name in ("tokens", "rounds", "draft_forwards", "verified_nodes", "decode_ms"):
            assert getattr(subset, name)[[0, 2]].tolist() == getattr(whole, name)[[0, 2]].tolist()
            assert getattr(subset, name)[[1, 3]].tolist() == [0, 0]
        assert subset.tokens_per_round == whole.tokens[[0, 2]].sum() / whole.rounds[[0, 2]].sum()
