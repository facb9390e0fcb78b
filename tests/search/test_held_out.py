"""Answers of a profile that differ from plain decoding on held-out prompts."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch

from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR, TUNED, Differences
from autotune.drafters.independent import IndependentDraft
from autotune.evaluation.arms import DecoderArm
from autotune.evaluation.runner import ArmRunner
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.search.held_out import differences_of
from autotune.workloads.workload import Workload, load_workload
from tests.sample_documents import write_workload
from tests.tiny_models import Pair

NUM = 8


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    folder = tmp_path_factory.mktemp("held-out")
    prompts = [{"prompt": f"Go on with number {n}.", "split": "evaluate", "max_new_tokens": 60} for n in range(NUM)]
    return load_workload(str(write_workload(folder, prompts)), "evaluate")


def compared(pair: Pair, processor: Any, dtype: torch.dtype) -> tuple[DecoderArm, ArmRunner]:
    target, draft = (deepcopy(model).to(dtype) for model in (pair.target, pair.draft))
    runner = ArmRunner(Decoder(Target(target), IndependentDraft(draft)), processor)
    return DecoderArm(TUNED, runner.decoder), runner


def test_answers_that_differ_by_rounding_are_told_from_others(
    pair: Pair, processor: Any, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 some answers leave plain decoding at a near tie. They are not decoded again to find that out."""
    tuned, runner = compared(pair, processor, torch.bfloat16)
    runs = runner.compare([runner.plain, tuned], workload)
    num = sum(a.tokens_sha256 != b.tokens_sha256 for a, b in zip(runs[AR], runs[TUNED], strict=True))
    assert 0 < num < NUM, "the test proves nothing"

    def decode_again(*_: Any) -> None:
        raise AssertionError("answers are known")

    with monkeypatch.context() as patch:
        patch.setattr(DecoderArm, "decode", decode_again)
        found = differences_of(tuned, runner, workload, runs, math.inf)
    assert found == Differences(rounding=num)
    assert differences_of(tuned, runner, workload, runs, 0.0) == Differences(unexamined=num), "no time was left"

    wrong = runs[TUNED][0].model_copy(update={"tokens_sha256": "other"})
    answer = runner.answers[tuned.key, wrong.prompt_sha256]
    monkeypatch.setitem(runner.answers, (tuned.key, wrong.prompt_sha256), [*answer[:3], 5, *answer[4:]])
    found = differences_of(tuned, runner, workload, {**runs, TUNED: [wrong, *runs[TUNED][1:]]}, math.inf)
    (other,) = found.other
    assert other.startswith("workload.jsonl:1: token 3: ") and other.endswith(": not a tie")
    assert found.rounding >= num - 1 and found.unexamined == 0


def test_in_float32_no_difference_is_rounding(pair: Pair, processor: Any, workload: Workload) -> None:
    """By the rule of ``autotune check``, even where two logits are nearly equal."""
    tuned, runner = compared(pair, processor, torch.float32)
    one = workload.cut(1)
    runs: dict[str, list[Decoded]] = runner.compare([runner.plain, tuned], one)
    assert differences_of(tuned, runner, one, runs, math.inf) == Differences()
    (run,) = runs[TUNED]
    answer = runner.answers[tuned.key, run.prompt_sha256]
    runner.answers[tuned.key, run.prompt_sha256] = [*answer[:3], 5, *answer[4:]]
    changed = {**runs, TUNED: [run.model_copy(update={"tokens_sha256": "other"})]}
    found = differences_of(tuned, runner, one, changed, math.inf)
    assert (found.rounding, len(found.other), found.unexamined) == (0, 1, 0)
