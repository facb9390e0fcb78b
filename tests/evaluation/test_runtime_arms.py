"""Arms decode the same tokens, each in its own way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autotune.documents.configuration import Configuration
from autotune.documents.decoding_profile import AR, HF
from autotune.documents.published_defaults import HF_ASSISTED
from autotune.documents.subnet import Subnet
from autotune.evaluation.race import Everyone, Fastest, race
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.runtime_arms import PROMPT_LOOKUP_CHAIN, SHAPE_TOKENS, HuggingFaceArm, RuntimeArm, RuntimeArms
from autotune.modeling.graph_memory import graph_memory
from autotune.runtime.decoder import Decoder
from autotune.runtime.stats import DecodingStats
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from autotune.workloads.workload import Workload
from tests.rehearsal import Rehearsal
from tests.tiny_models import Pair, on_device

CHAIN = Configuration(tree={"policy": "chain", "depth": 3})
SAGE = Configuration(tree={"policy": "sage"}, subnet=Subnet(visual_keep=0.5))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_arms_emit_the_same_tokens(temperature: float, arms: RuntimeArms, pair: Pair, evaluate: Workload) -> None:
    """Plain decoding, Hugging Face alone and assisted, n-grams, a chain, and a tree whose draft sees half of the image.
    The noise of sampling is keyed by position; Hugging Face draws other noise and is left out.
    """
    prompts = [
        replace(p, settings=p.settings.model_copy(update={"temperature": temperature})) for p in evaluate.prompts
    ]
    hugging_face = [HuggingFaceArm(HF, arms), HuggingFaceArm(HF_ASSISTED, arms, pair.draft)]
    drafted = [arms.prompt_lookup(), arms.arm("chain", CHAIN), arms.arm("sage", SAGE)]
    compared = [*([] if temperature else hugging_face), arms.plain, *drafted]
    runs = race(ArmRunner(), compared, prompts, Everyone()).runs
    for per_prompt in zip(*runs.values(), strict=True):
        assert len({run.tokens_sha256 for run in per_prompt}) == len({run.new_tokens for run in per_prompt}) == 1
    assert [(run.prompt, run.task) for run in runs["sage"]] == [(p.name, p.settings.task) for p in prompts]
    for name, run in ((name, run) for name, of_arm in runs.items() for run in of_arm):
        assert run.decode_ms > 0 and run.target_prefill_ms > 0
        assert run.rounds == len(run.accepted_lengths)
        assert (run.draft_forwards > 0) == (name not in (AR, HF))
        assert (run.vision_ms > 0) == run.prompt.endswith((":2", ":3")), "the workload's prompts with an image"
        assert sum(run.accepted_lengths) + run.rounds >= run.new_tokens - 1
    assert runs[AR][0].rounds == runs[AR][0].target_forwards == runs[AR][0].new_tokens - 1


def test_arms_have_the_key_and_the_draft_of_their_configurations(decoder: Decoder, processor: Any) -> None:
    requested: list[Configuration] = []
    arms = RuntimeArms(decoder, processor, draft_of=lambda c: requested.append(c) or decoder.draft)
    named = Configuration(tree={"policy": "chain", "depth": 2}, draft="some/draft", subnet=Subnet(visual_keep=0.5))
    drafted, by_lookup = arms.arm("drafted", PROMPT_LOOKUP_CHAIN), arms.prompt_lookup()
    assert drafted.key == PROMPT_LOOKUP_CHAIN.key != by_lookup.key
    assert arms.arm("named", named).key == named.key and [c.draft for c in requested] == [None, "some/draft"]
    again = arms.arm("renamed", PROMPT_LOOKUP_CHAIN)
    assert again.key == drafted.key and again.decoder is drafted.decoder, "equal configurations share a decoder"


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
