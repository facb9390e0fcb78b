"""Arms decode the same tokens, each in its own way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from autotune.documents.configuration import Configuration
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR, HF, TUNED
from autotune.documents.published_defaults import HF_ASSISTED, PROMPT_LOOKUP
from autotune.documents.subnet import Subnet
from autotune.evaluation.arms import Arm
from autotune.evaluation.race import Everyone, Fastest, race
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.runtime_arms import (
    PROMPT_LOOKUP_CHAIN,
    SHAPE_TOKENS,
    DecoderArm,
    HuggingFaceArm,
    RuntimeArm,
    RuntimeArms,
)
from autotune.modeling.graph_memory import graph_memory
from autotune.runtime.decoder import Decoder
from autotune.runtime.stats import DecodingStats
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from autotune.workloads.workload import Workload
from tests.rehearsal import Rehearsal
from tests.runtime.test_control import COSTLY, useless_draft
from tests.tiny_models import Pair, on_device

CHAIN = Configuration(tree={"policy": "chain", "depth": 3})
SAGE = Configuration(tree={"policy": "sage"}, subnet=Subnet(visual_keep=0.5))


def own_arms(arms: RuntimeArms) -> list[Arm]:
    return [arms.plain, arms.prompt_lookup(), arms.arm("chain", CHAIN), arms.arm("sage", SAGE)]


def runs_of(arms: Sequence[Arm], prompts: Sequence[WorkloadPrompt]) -> dict[str, list[Decoded]]:
    return race(ArmRunner(), arms, prompts, Everyone()).runs


def test_all_arms_emit_the_same_tokens(arms: RuntimeArms, pair: Pair, evaluate: Workload) -> None:
    """Plain decoding, Hugging Face alone and assisted, n-grams, a chain, and a tree whose draft sees half of
    the image.
    """
    hugging_face = [HuggingFaceArm(HF, arms), HuggingFaceArm(HF_ASSISTED, arms, pair.draft)]
    runs = runs_of([*hugging_face, *own_arms(arms)], evaluate.prompts)
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


def test_sampled_tokens_are_the_same_with_and_without_a_draft(arms: RuntimeArms, evaluate: Workload) -> None:
    """The noise is keyed by position; Hugging Face draws other noise and is left out."""
    sampled = tuple(
        WorkloadPrompt(p.name, p.settings.model_copy(update={"temperature": 1.0, "seed": 5}), p.pixels)
        for p in evaluate.prompts
    )
    runs = runs_of(own_arms(arms), sampled)
    for per_prompt in zip(*runs.values(), strict=True):
        assert len({run.tokens_sha256 for run in per_prompt}) == 1
    greedy = runs_of([arms.plain], evaluate.prompts)
    assert [run.tokens_sha256 for run in runs[AR]] != [run.tokens_sha256 for run in greedy[AR]]


def test_keys_identify_configurations_and_drafters(arms: RuntimeArms, evaluate: Workload) -> None:
    drafted, by_lookup = arms.arm("drafted", PROMPT_LOOKUP_CHAIN), arms.prompt_lookup()
    assert drafted.key == PROMPT_LOOKUP_CHAIN.key != by_lookup.key
    again = arms.arm("renamed", PROMPT_LOOKUP_CHAIN)
    assert again.key == drafted.key and again.decoder is drafted.decoder
    runs = runs_of([drafted, by_lookup], evaluate.prompts)
    assert [run.rounds for run in runs["drafted"]] != [run.rounds for run in runs[PROMPT_LOOKUP]]


def test_configurations_find_their_drafts(decoder: Decoder, processor: Any, evaluate: Workload) -> None:
    """Several drafts run in one comparison, each configuration with its own."""
    requested: list[Configuration] = []
    arms = RuntimeArms(decoder, processor, draft_of=lambda c: requested.append(c) or decoder.draft)
    named = Configuration(tree={"policy": "chain", "depth": 2}, draft="some/draft", subnet=Subnet(visual_keep=0.5))
    runs = runs_of([arms.plain, arms.arm("chain", CHAIN), arms.arm("named", named)], evaluate.prompts)
    assert [c.draft for c in requested] == [None, "some/draft"]
    assert [r.tokens_sha256 for r in runs["named"]] == [r.tokens_sha256 for r in runs[AR]]


PROMPTS = [
    WorkloadPrompt(f"{number}", Prompt(prompt=f"Go on with {number}.", task=task, max_new_tokens=30), ())
    for number, task in enumerate(["hard", "easy", "hard", "easy", "hard", "hard"])
]


@pytest.fixture
def tuned(pair: Pair, processor: Any) -> DecoderArm:
    """A draft that never helps, so that requests fall back to plain steps."""
    decoder = Decoder(pair.target, useless_draft(), fallback=COSTLY, processor=processor)
    return DecoderArm(TUNED, decoder, RuntimeArms(decoder))


def test_a_disturbed_run_is_not_remembered(tuned: DecoderArm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are the same whether the machine was busy or not: the useless draft does not lose one request twice."""
    arms = [tuned.arms.plain, HuggingFaceArm(HF, tuned.arms), tuned]  # two of three set the median
    expected = runs_of(arms, PROMPTS)[TUNED]
    disturbed = [PROMPTS[0].name]
    for arm in arms:
        monkeypatch.setattr(arm, "decode", slowed(arm, disturbed))
    runner = ArmRunner()
    found = race(runner, arms, PROMPTS, Everyone()).runs[TUNED]
    assert runner.num_repeated >= 1 and not disturbed
    assert [run.draft_forwards for run in found] == [run.draft_forwards for run in expected]


def slowed(arm: Arm, disturbed: list[str]) -> Any:
    decode = arm.decode

    def call(prompt: WorkloadPrompt) -> Decoded:
        is_slow = arm.name == TUNED and prompt.name in disturbed
        if is_slow:
            disturbed.remove(prompt.name)
        return decode(prompt).model_copy(update={"target_prefill_ms": 1000.0 if is_slow else 10.0})

    return call


class NotedArm(RuntimeArm):
    """Notes what warms it up, and what it decodes."""

    def __init__(self, name: str, arms: RuntimeArms, captures: int = 0) -> None:
        super().__init__(name, arms)
        self.captures = captures
        self.decoded: list[str] = []
        self.warmed_up: list[str] = []

    def generate(self, inputs: dict[str, Any], settings: Prompt) -> tuple[list[int], DecodingStats]:
        self.decoded.append(settings.text.split(" a")[0])
        graph_memory(self.arms.decoder.target.device).num_kept += self.captures
        return [1, 2, 3], DecodingStats(new_tokens=3, accepted_lengths=[0, 0], target_forwards=2, decode_ms=1.0)

    def warm_up(self, inputs: dict[str, Any], settings: Prompt) -> None:
        self.warmed_up.append(settings.text.split(" a")[0])


def test_an_arm_is_warmed_up_for_every_shape(arms: RuntimeArms, evaluate: Workload, processor: Any) -> None:
    """Prompts of up to 64 tokens have one shape, those of up to 128, 256, ... and those with an image others, so that
    images of many sizes warm up a few times. What is captured meanwhile is counted.
    """
    image = evaluate.prompts[1].pixels
    words = [("s", 1, ()), ("t", 2, ()), ("long", 40, ()), ("seen", 1, image), ("as long", 41, ()), ("s", 2, image)]
    prompts = [
        WorkloadPrompt(name, Prompt(prompt=f"{name}{' a' * count}", max_new_tokens=2), pixels)
        for name, count, pixels in [*words, ("longer", 100, ()), ("longer too", 70, ())]
    ]
    lengths = [p.inputs(processor)["input_ids"].shape[1] for p in prompts]
    assert max(lengths[0], lengths[1], lengths[5]) <= SHAPE_TOKENS < lengths[2]
    assert 2 * SHAPE_TOKENS < lengths[7] <= lengths[6] - 30 < 4 * SHAPE_TOKENS
    for arm in (NotedArm(AR, arms), NotedArm("captures", arms, captures=2)):
        runs = [arm.decode(prompt) for prompt in prompts]
        assert arm.decoded == [prompt.name for prompt in prompts]
        assert arm.warmed_up == ["s", "long", "seen", "longer"]
        assert [run.captures for run in runs] == [arm.captures] * len(prompts) and runs[0].tokens == [1, 2, 3]


def test_no_arm_captures_anything_while_it_is_timed(
    rehearsal: Rehearsal, pair: Pair, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the largest tree comes second, and a longer prompt, which follows an answer, later: caches do not
    grow.
    """
    monkeypatch.setattr("autotune.evaluation.runner.MAX_REPEATS", 0)
    pair = on_device(pair, "cuda:0")
    runtime = RuntimeArms(Decoder(pair.target, pair.draft, mode="cuda-graph", capture_sizes=(1, 8)), processor)
    trees: dict[str, Any] = {
        "chain": {"policy": "chain", "depth": 2},
        "wide": {"policy": "eagle2", "depth": 8, "k": 16, "budget": 20},
    }
    arms = [runtime.plain, *(runtime.arm(name, Configuration(tree=tree)) for name, tree in trees.items())]
    prompts = [WorkloadPrompt(f"{n}", Prompt(prompt=n * "a ", max_new_tokens=8), ()) for n in (20, 1000, 30)]
    done = race(ArmRunner(), arms, prompts, Fastest(0.05, 1, always=[arm.name for arm in arms], ends=lambda _: False))
    assert {run.captures for runs in done.runs.values() for run in runs} == {0}
    memory = graph_memory(torch.device("cuda:0"))
    assert memory.num_dropped == 0 and len(memory) == memory.num_kept > 0


def test_iterators_of_warm_up_are_closed(tuned: DecoderArm, processor: Any) -> None:
    """A warm-up that ends early leaves the target free for the next request."""
    prompt = PROMPTS[1]
    inputs = prompt.inputs(processor)
    tuned.warm_up(inputs, prompt.settings.model_copy(update={"max_new_tokens": 100}))
    tokens: Iterator[int] = tuned.decoder.stream(**inputs, **prompt.settings.generation)
    assert len(list(tokens)) == 30
