"""Arms decode the same tokens, each in its own way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autotune.documents.condition import Condition
from autotune.documents.configuration import Configuration
from autotune.documents.decoding_profile import AR, HF, TUNED, DecodingProfile
from autotune.documents.published_defaults import HF_ASSISTED, PROMPT_LOOKUP
from autotune.documents.subnet import Subnet
from autotune.evaluation.arms import Arm, DecoderArm, HuggingFaceArm
from autotune.evaluation.bench_tables import points_used
from autotune.evaluation.race import race
from autotune.evaluation.runner import PROMPT_LOOKUP_CHAIN, ArmRunner
from autotune.modeling.graph_memory import graph_memory
from autotune.runtime.decoder import Decoder
from autotune.runtime.points import LoadedPoint
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from autotune.workloads.workload import Workload
from tests.rehearsal import Rehearsal
from tests.runtime.test_control import COSTLY, useless_draft
from tests.sample_documents import decoding_profile
from tests.tiny_models import Pair, on_device

CHAIN = Configuration(tree={"policy": "chain", "depth": 3})
SAGE = Configuration(tree={"policy": "sage"}, subnet=Subnet(visual_keep=0.5))


def own_arms(runner: ArmRunner) -> list[Arm]:
    return [runner.plain, runner.prompt_lookup_arm(), runner.arm("chain", CHAIN), runner.arm("sage", SAGE)]


def test_all_arms_emit_the_same_tokens(runner: ArmRunner, pair: Pair, evaluate: Workload) -> None:
    """Plain decoding, Hugging Face alone and assisted, n-grams, a chain, and a tree whose draft sees half of
    the image.
    """
    hugging_face = [HuggingFaceArm(HF, pair.target), HuggingFaceArm(HF_ASSISTED, pair.target, pair.draft)]
    runs = runner.compare([*hugging_face, *own_arms(runner)], evaluate)
    assert list(runs) == [HF, HF_ASSISTED, AR, PROMPT_LOOKUP, "chain", "sage"]
    for per_prompt in zip(*runs.values(), strict=True):
        assert len({run.tokens_sha256 for run in per_prompt}) == 1
        assert len({run.new_tokens for run in per_prompt}) == 1
    assert [(run.prompt, run.task) for run in runs["sage"]] == [(p.name, p.settings.task) for p in evaluate.prompts]
    for name, found in runs.items():
        for one in found:
            assert one.decode_ms > 0 and one.target_prefill_ms > 0
            assert one.rounds == len(one.accepted_lengths)
            assert (one.draft_forwards > 0) == (name not in (AR, HF))
            assert (one.vision_ms > 0) == one.prompt.endswith((":2", ":3")), "the workload's prompts with an image"
            assert sum(one.accepted_lengths) + one.rounds >= one.new_tokens - 1
    plain = runs[AR][0]
    assert plain.rounds == plain.target_forwards == plain.new_tokens - 1


def test_sampled_tokens_are_the_same_with_and_without_a_draft(runner: ArmRunner, evaluate: Workload) -> None:
    """The noise is keyed by position; Hugging Face draws other noise and is left out."""
    sampled = tuple(
        WorkloadPrompt(p.name, p.settings.model_copy(update={"temperature": 1.0, "seed": 5}), p.pixels)
        for p in evaluate.prompts
    )
    runs = runner.compare(own_arms(runner), Workload("sampled", "evaluate", sampled))
    for per_prompt in zip(*runs.values(), strict=True):
        assert len({run.tokens_sha256 for run in per_prompt}) == 1
    greedy = runner.compare([runner.plain], evaluate)
    assert [run.tokens_sha256 for run in runs[AR]] != [run.tokens_sha256 for run in greedy[AR]]


def test_keys_identify_configurations_and_drafters(runner: ArmRunner, evaluate: Workload) -> None:
    drafted, by_lookup = runner.arm("drafted", PROMPT_LOOKUP_CHAIN), runner.prompt_lookup_arm()
    assert drafted.key == PROMPT_LOOKUP_CHAIN.key != by_lookup.key
    again = runner.arm("renamed", PROMPT_LOOKUP_CHAIN)
    assert again.key == drafted.key and again.decoder is drafted.decoder
    runs = runner.compare([drafted, by_lookup], evaluate)
    assert [run.rounds for run in runs["drafted"]] != [run.rounds for run in runs[PROMPT_LOOKUP]]


def test_configurations_find_their_drafts(decoder: Decoder, processor: Any, evaluate: Workload) -> None:
    """Several drafts run in one comparison, each configuration with its own."""
    requested: list[Configuration] = []
    runner = ArmRunner(decoder, processor, draft_of=lambda c: requested.append(c) or decoder.draft)
    named = Configuration(tree={"policy": "chain", "depth": 2}, draft="some/draft", subnet=Subnet(visual_keep=0.5))
    runs = runner.compare([runner.plain, runner.arm("chain", CHAIN), runner.arm("named", named)], evaluate)
    assert [c.draft for c in requested] == [None, "some/draft"]
    assert [r.tokens_sha256 for r in runs["named"]] == [r.tokens_sha256 for r in runs[AR]]


PROMPTS = Workload(
    "by hand",
    "evaluate",
    tuple(
        WorkloadPrompt(f"{number}", Prompt(prompt=f"Go on with {number}.", task=task, max_new_tokens=30), ())
        for number, task in enumerate(["hard", "easy", "hard", "easy", "hard", "hard"])
    ),
)


@pytest.fixture
def tuned(pair: Pair, processor: Any) -> DecoderArm:
    """Two points: for hard prompts a draft that never helps, for all others one that always does."""
    when = Condition(workload="hard")
    points = [LoadedPoint(useless_draft(), fallback=COSTLY, when=when), LoadedPoint(pair.target, fallback=COSTLY)]
    point = decoding_profile().point
    profile: DecodingProfile = decoding_profile().model_copy(
        update={"points": [point.model_copy(update={"when": when}), point]}
    )
    return DecoderArm(TUNED, Decoder(pair.target, points=points, processor=processor, profile=profile))


def test_every_point_is_warmed_up_once(tuned: DecoderArm, processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    for method in ("generate", "stream"):
        monkeypatch.setattr(tuned.decoder, method, noted(getattr(tuned.decoder, method), started))
    runner = ArmRunner(tuned.decoder, processor)
    runs = runner.compare([tuned], PROMPTS)[TUNED]
    assert [run.plain_steps > 0 for run in runs] == [True, False, True, False, True, True], "the useless draft's"
    assert (started.count("hard"), started.count("easy")) == (5, 3), "four prompts and two, and a warm-up each"
    assert [run.point for run in runs] == [int(prompt.settings.task == "easy") for prompt in PROMPTS.prompts]
    assert tuned.decoder.profile is not None
    assert points_used(tuned.decoder.profile, runs) == "4 by point 0 (workload hard), 2 by point 1 (any request)"
    again = runner.compare([tuned], PROMPTS)[TUNED]
    assert [run.draft_forwards for run in again] == [run.draft_forwards for run in runs]


def noted(method: Any, tasks: list[str]) -> Any:
    def call(**options: Any) -> Any:
        tasks.append(options["workload"])
        return method(**options)

    return call


def test_a_disturbed_run_is_not_remembered(tuned: DecoderArm, processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are the same whether the machine was busy or not: the useless draft does not lose one request twice."""
    runner = ArmRunner(tuned.decoder, processor)
    arms = [runner.plain, HuggingFaceArm(HF, tuned.decoder.target_model), tuned]  # two of three set the median
    expected = runner.compare(arms, PROMPTS)[TUNED]
    disturbed = [PROMPTS.prompts[0].settings]
    for arm in arms:
        monkeypatch.setattr(arm, "decode", slowed(arm, disturbed))
    found = runner.compare(arms, PROMPTS)[TUNED]
    assert runner.num_repeated >= 1 and not disturbed
    assert [run.draft_forwards for run in found] == [run.draft_forwards for run in expected]


def slowed(arm: Arm, disturbed: list[Prompt]) -> Any:
    decode = arm.decode

    def call(inputs: Any, settings: Prompt) -> Any:
        tokens, stats = decode(inputs, settings)
        stats.target_prefill_ms = 10.0
        if arm.name == TUNED and settings in disturbed:
            disturbed.remove(settings)
            stats.target_prefill_ms = 1000.0
        return tokens, stats

    return call


def test_no_arm_captures_anything_while_it_is_timed(
    rehearsal: Rehearsal, pair: Pair, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the largest tree comes second, and a longer prompt, which follows an answer, later: caches do not
    grow.
    """
    monkeypatch.setattr("autotune.evaluation.runner.MAX_REPEATS", 0)
    pair = on_device(pair, "cuda:0")
    runner = ArmRunner(Decoder(pair.target, pair.draft, mode="cuda-graph", capture_sizes=(1, 8)), processor)
    trees: dict[str, Any] = {
        "chain": {"policy": "chain", "depth": 2},
        "wide": {"policy": "eagle2", "depth": 8, "k": 16, "budget": 20},
    }
    arms = [runner.plain, *(runner.arm(name, Configuration(tree=tree)) for name, tree in trees.items())]
    prompts = [WorkloadPrompt(f"{n}", Prompt(prompt=n * "a ", max_new_tokens=8), ()) for n in (20, 1000, 30)]
    texts = Workload("texts", "tune", tuple(prompts))
    done = race(runner, [], texts, always=arms, risk=0.05, prompts_per_block=1, min_prompts=1, ends=lambda _: False)
    assert {run.captures for runs in done.runs.values() for run in runs} == {0}
    memory = graph_memory(torch.device("cuda:0"))
    assert memory.num_dropped == 0 and len(memory) == memory.num_kept > 0


def test_iterators_of_warm_up_are_closed(tuned: DecoderArm, processor: Any) -> None:
    """A warm-up that ends early leaves the target free for the next request."""
    prompt = PROMPTS.prompts[1]
    inputs = prompt.inputs(processor)
    tuned.warm_up(inputs, prompt.settings.model_copy(update={"max_new_tokens": 100}))
    tokens: Iterator[int] = tuned.decoder.stream(**inputs, **prompt.settings.generation)
    assert len(list(tokens)) == 30
