"""The bench runs every arm of the runtime that can run, names the reason of every other, and says what it measured."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pandas import DataFrame

from autotune.console import Console
from autotune.documents.decoding_profile import AR, HF, TUNED, DecodingProfile
from autotune.documents.published_defaults import ARM_NAMES, COMPARED_DEFAULTS, HF_ASSISTED, PROMPT_LOOKUP
from autotune.drafters.retrieval import RetrievalDraft
from autotune.errors import ArmFailed, UserError
from autotune.evaluation.arms import Arm
from autotune.evaluation.bench import BenchArms, evaluation_prompts, require_arms, run_bench
from autotune.evaluation.bench_arms import ARMS, choose_arms, runtime_arms
from autotune.evaluation.runtime_arms import RuntimeArms
from autotune.machine.device import fingerprint
from autotune.modeling.loading import reference
from autotune.runtime.decoder import Decoder
from autotune.workloads.workload import Workload
from tests.evaluation.fake_arm import FakeArm
from tests.sample_documents import decoding_profile, write_image, write_workload
from tests.tiny_models import Pair


@pytest.fixture(scope="module")
def world(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile with a draft, one without, and a workload of two tasks."""
    folder = tmp_path_factory.mktemp("bench")
    target, draft = (reference(str(path)) for path in (pair.target_folder, pair.draft_folder))
    here = fingerprint("cpu")
    decoding_profile(target, draft, visual_keep=0.5, hardware=here).save(folder / "tree.json")
    decoding_profile(target, None, hardware=here).save(folder / "plain.json")
    image = [write_image(folder / "0.png", 0)]
    lines: list[dict[str, Any]] = [
        {"prompt": "Count to ten, then stop.", "task": "count"},
        {"prompt": "Read the digits row by row.", "images": image, "task": "read"},
        {"prompt": "And row 2?", "images": image, "task": "read"},
    ]
    write_workload(folder, [{"split": "evaluate", "max_new_tokens": 12, **line} for line in lines])
    return folder


@pytest.fixture(autouse=True)
def in_world(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)


def bench(profile: str, names: list[str] | None, prompts: Workload | None = None, **options: Any) -> dict[str, Any]:
    prompts = prompts or evaluation_prompts("workload.jsonl", num_prompts=3)
    chosen, device = runtime_arms(Path(profile), prompts, Console(), names=names, device="cpu", **options)
    return run_bench(DecodingProfile.load(Path(profile)), chosen, Console(), device=device)


def test_by_default_every_arm_runs(capsys: pytest.CaptureFixture[str]) -> None:
    result = bench("tree.json", None)
    names = [AR, HF, HF_ASSISTED, PROMPT_LOOKUP, *COMPARED_DEFAULTS, TUNED]
    assert [arm["name"] for arm in result["arms"]] == list(result["runs"]) == names
    assert result["unavailable"] == {}
    for arm in result["arms"]:
        assert arm["identical_outputs"] == arm["num_prompts"] == 3, arm["name"]
        assert arm["num_tokens"] == sum(one["new_tokens"] - 1 for one in result["runs"][arm["name"]])
        assert list(result["speedup_by_task"][arm["name"]]) == ["count", "read"] and arm["perplexity"] is None
    assert result["speedup_by_task"][AR] == {"count": 1.0, "read": 1.0}
    assert result["hardware"] == fingerprint("cpu").model_dump() and "transformers" in result["provenance"]
    assert result["provenance"]["contention"]["seconds"] > 0
    json.dumps(result, allow_nan=False)
    printed = capsys.readouterr().err
    assert "left out" not in printed and "perplexity" not in printed


def test_a_profile_without_a_draft_is_compared_with_arms_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    result = bench("plain.json", None, evaluation_prompts("workload.jsonl", num_prompts=1))
    assert [arm["name"] for arm in result["arms"]] == [AR, HF, PROMPT_LOOKUP]
    reason = "the profile decodes without a draft; name a --draft"
    assert [*result["unavailable"]] == [HF_ASSISTED, *COMPARED_DEFAULTS]
    said = capsys.readouterr().err
    assert f"left out: {', '.join(COMPARED_DEFAULTS)}: {reason}\n" in said and said.count(reason) == 1


def test_published_configurations_may_have_another_draft() -> None:
    """For a profile without a draft, and instead of a profile's draft. Prompt lookup is a retrieval draft."""
    with_plain = bench("plain.json", [PROMPT_LOOKUP, AR, "chain", "chain"], draft="retrieval")
    assert list(with_plain["runs"]) == [AR, PROMPT_LOOKUP, "chain"] and with_plain["unavailable"] == {}
    with_tree, own = bench("tree.json", ["chain"], draft="retrieval"), bench("tree.json", ["chain"])
    assert list(with_tree["runs"]) == [AR, "chain", TUNED]
    assert accepted(with_plain, "chain") == accepted(with_tree, "chain") != accepted(own, "chain")
    assert accepted(with_tree, TUNED) == accepted(own, TUNED)


def accepted(result: dict[str, Any], name: str) -> list[list[int]]:
    """Accepted lengths of an arm by prompt."""
    return [run["accepted_lengths"] for run in result["runs"][name]]


def test_arms_are_those_of_the_backend() -> None:
    assert tuple(ARMS) == ARM_NAMES
    with pytest.raises(UserError, match="--arms prompt_lokup: no such arm of runtime; did you mean 'prompt_lookup'"):
        require_arms(decoding_profile(), (AR, "prompt_lokup"))


@pytest.mark.parametrize("name", [PROMPT_LOOKUP, TUNED])
def test_an_arm_that_fails_is_left_out_unless_it_is_the_profile(name: str) -> None:
    prompts = evaluation_prompts("workload.jsonl", num_prompts=2)
    fails = {name: prompts.prompts[1].name}
    arms: list[Arm] = [FakeArm(arm, fails=fails.get(arm)) for arm in (AR, PROMPT_LOOKUP, TUNED)]
    with pytest.raises(UserError, match=r"^tuned: ") if name == TUNED else nullcontext():
        result = run_bench(decoding_profile(), BenchArms(arms, prompts), Console(), device="cpu")
        assert list(result["runs"]) == [AR, TUNED] and [*result["unavailable"]] == [name]


@pytest.mark.parametrize("draft", ["model", "retrieval", "none"])
def test_assisted_generation_needs_a_whole_model(draft: str, text_pair: Pair, processor: Any) -> None:
    drafts = {"model": text_pair.draft, "retrieval": RetrievalDraft(), "none": None}
    arms = RuntimeArms(Decoder(text_pair.target, drafts[draft]), processor)
    chosen = choose_arms([HF, HF_ASSISTED], arms, evaluation_prompts("workload.jsonl"))
    reason = "the profile has no draft that generate takes as its assistant_model"
    assert chosen.unavailable == ({} if draft == "model" else {HF_ASSISTED: reason})


def test_assisted_generation_that_raises_fails_with_the_first_line(
    pair: Pair, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = RuntimeArms(Decoder(pair.target, pair.draft), processor)
    monkeypatch.setattr(
        arms.decoder.draft.standalone_model, "generate", Mock(side_effect=ValueError("It cannot.\nSecond line."))
    )
    (prompt,) = evaluation_prompts("workload.jsonl", num_prompts=1).prompts
    with pytest.raises(ArmFailed, match=r"generate raised ValueError: It cannot\.$"):
        ARMS[HF_ASSISTED](arms).decode(prompt)


def test_a_public_benchmark_is_reported_in_its_own_terms(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two-turn questions: all arms follow the target's answers."""
    rows = [
        {"question_id": number, "category": category, "turns": ["Count to ten.", f"And to {number}?"]}
        for number, category in enumerate(("writing", "math", "writing", "math"), start=81)
    ]
    write_workload(world, rows, name="question.jsonl")
    prompts = evaluation_prompts("question.jsonl", num_prompts=6, max_new_tokens=10, is_whole=True)
    result = bench("tree.json", [HF], prompts)
    assert all(arm["identical_outputs"] == arm["num_prompts"] == 6 for arm in result["arms"])
    results = DataFrame(result["benchmark_results"]).set_index(["arm", "task"])
    assert results.questions.loc[TUNED].to_dict() == {"writing": 2, "math": 1, "overall": 3}
    assert (results.mean_accepted_tokens.loc[TUNED] > 1).all() and (results.mean_accepted_tokens.loc[AR] == 1).all()
    assert "mt-bench: speedup over ar, prefill included" in capsys.readouterr().err


def test_a_lossy_arm_is_marked_with_what_it_costs_in_quality() -> None:
    """Lossless arms agree with plain decoding in every token."""
    found = bench("tree.json", ["wetap", "wetap-lossy"], evaluation_prompts("workload.jsonl", num_prompts=2))
    arms = {arm["name"]: arm for arm in found["arms"]}
    assert list(arms) == [AR, "wetap", "wetap-lossy", TUNED]
    assert arms["wetap"]["agreement"] == arms[AR]["agreement"] == arms[TUNED]["agreement"] == 1.0
    assert arms["wetap-lossy"]["agreement"] < 1.0
    assert 1 < arms[AR]["perplexity"] == arms[TUNED]["perplexity"] != arms["wetap-lossy"]["perplexity"]
    for name, runs in found["runs"].items():
        total = sum(run["new_tokens"] for run in runs)
        assert arms[name]["agreement"] == pytest.approx(sum(r["agreement"] * r["new_tokens"] for r in runs) / total)
