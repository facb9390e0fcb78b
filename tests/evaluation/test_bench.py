"""The bench: every arm that can run does, one that cannot is named with its reason, and tables say what the runs say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.console import Console
from autotune.device import fingerprint
from autotune.documents.condition import Condition
from autotune.documents.configuration import PUBLISHED_DEFAULTS
from autotune.documents.decoding_profile import DecodingProfile
from autotune.drafters.prompt_lookup import PromptLookupDraft
from autotune.errors import UserError
from autotune.evaluation import bench
from autotune.evaluation import runner as runner_module
from autotune.evaluation.arms import HF, HF_ASSISTED, PROMPT_LOOKUP
from autotune.evaluation.bench import choose_arms, known_arms, print_arms, print_tasks, run_bench, speedups_by_task
from autotune.evaluation.profile_runner import TUNED
from autotune.evaluation.runner import AR, ArmRunner
from autotune.evaluation.summary import summarize
from autotune.modeling.loading import reference
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.workloads.workload import Prompt, Workload, WorkloadPrompt, load_workload
from tests.evaluation.test_runner import run
from tests.sample_documents import decoding_profile, write_image, write_workload
from tests.tiny_models import VOCABULARY_SIZE, Pair

BLIND = "generate gives the draft no image, so that it drafts blind"


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


def run_in(
    world: Path, profile: str, against: list[str] | None, monkeypatch: pytest.MonkeyPatch, *, num_prompts: int = 3
) -> dict[str, Any]:
    monkeypatch.chdir(world)
    return run_bench(Path(profile), "workload.jsonl", against, num_prompts, 0, "cpu", Console())


# ----------------------------------------------------------------------------------------------------------- whole runs


def test_by_default_every_arm_that_can_run_does(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_in(world, "tree.json", None, monkeypatch)
    names = [AR, HF, HF_ASSISTED, PROMPT_LOOKUP, *PUBLISHED_DEFAULTS, TUNED]
    assert [arm["name"] for arm in result["arms"]] == list(result["runs"]) == names
    assert result["unavailable"] == {} and result["notes"] == {HF_ASSISTED: BLIND}
    for arm in result["arms"]:
        assert arm["identical_outputs"] == arm["num_prompts"] == 3, arm["name"]
        runs = result["runs"][arm["name"]]
        assert [one["new_tokens"] for one in runs] == [one["new_tokens"] for one in result["runs"][AR]]
        assert arm["num_tokens"] == sum(one["new_tokens"] - 1 for one in runs)
        assert list(result["speedup_by_task"][arm["name"]]) == ["count", "read"]
    assert result["speedup_by_task"][AR] == {"count": 1.0, "read": 1.0} and result["speedup_geomean"][AR] == 1.0
    assert result["hardware"] == fingerprint("cpu").model_dump() and "transformers" in result["provenance"]
    json.dumps(result, allow_nan=False)
    printed = capsys.readouterr().err
    assert f"{HF_ASSISTED}: {BLIND}" in printed and "left out" not in printed


def test_a_profile_without_a_draft_is_compared_with_what_needs_none(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_in(world, "plain.json", None, monkeypatch, num_prompts=1)
    assert [arm["name"] for arm in result["arms"]] == [AR, HF, PROMPT_LOOKUP]
    reason = "the profile decodes without a draft"
    assert result["unavailable"] == dict.fromkeys([HF_ASSISTED, *PUBLISHED_DEFAULTS], reason)
    assert f"chain is left out: {reason}\n" in capsys.readouterr().err


def test_every_prompt_is_decoded_by_its_point(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain decoding for one task, a tree for all others; as many rounds as with each of them alone."""
    tree, plain = (DecodingProfile.load(world / f"{name}.json") for name in ("tree", "plain"))
    count = plain.point.model_copy(update={"when": Condition(workload="count")})
    tree.model_copy(update={"points": [count, tree.point]}).save(world / "points.json")
    found = run_in(world, "points.json", [AR], monkeypatch)
    assert [run["point"] for run in found["runs"][TUNED]] == [0, 1, 1]
    assert "tuned: 1 by point 0 (workload count), 2 by point 1 (any request)" in capsys.readouterr().err
    alone = run_in(world, "tree.json", [AR], monkeypatch)["runs"]
    rounds = [run["accepted_lengths"] for run in found["runs"][TUNED]]
    by_tree = [run["accepted_lengths"] for run in alone[TUNED]]
    assert rounds == [[0] * found["runs"][AR][0]["rounds"], *by_tree[1:]] and rounds[0] != by_tree[0]


def test_trees_are_compared_where_only_some_points_have_a_draft(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, plain = (DecodingProfile.load(world / f"{name}.json") for name in ("tree", "plain"))
    read = tree.point.model_copy(update={"when": Condition(workload="read")})
    tree.model_copy(update={"points": [read, plain.point]}).save(world / "points.json")
    found = run_in(world, "points.json", ["chain"], monkeypatch)
    assert list(found["runs"]) == [AR, "chain", TUNED] and found["unavailable"] == {}
    assert [run["point"] for run in found["runs"][TUNED]] == [1, 0, 0]


def test_the_arms_asked_for_come_after_ar_each_once(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    against = [PROMPT_LOOKUP, AR, PROMPT_LOOKUP]
    result = run_in(world, "tree.json", against, monkeypatch, num_prompts=1)
    assert list(result["runs"]) == [AR, PROMPT_LOOKUP, TUNED]


def test_an_unknown_arm_is_refused_before_anything_is_read() -> None:
    with pytest.raises(UserError, match="--against prompt_lokup: no such arm; did you mean 'prompt_lookup'"):
        run_bench(Path("nowhere.json"), "nowhere.jsonl", [AR, "prompt_lokup"], 1, 0, "cpu", Console())


def test_trees_asked_for_need_a_draft(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match=r"decodes without a draft, so trees .*; bench it --against ar,hf,prompt_lookup"
    ):
        run_in(world, "plain.json", [AR, "chain"], monkeypatch)


# ------------------------------------------------------------------------------------------------ assisted, if it works


@pytest.fixture
def prompts(world: Path, monkeypatch: pytest.MonkeyPatch) -> Workload:
    monkeypatch.chdir(world)
    return load_workload("workload.jsonl", "evaluate")


def reason_against_assisted(runner: ArmRunner, prompts: Workload) -> str | None:
    chosen = choose_arms([AR, HF_ASSISTED], runner, prompts)
    assert [arm.name for arm in chosen.arms] == [AR, *([] if chosen.unavailable else [HF_ASSISTED])]
    return chosen.unavailable.get(HF_ASSISTED)


@pytest.fixture
def runner(pair: Pair, processor: Any) -> ArmRunner:
    return ArmRunner(Decoder(pair.target, pair.draft), processor)


def test_assisted_generation_that_raises_is_left_out(
    runner: ArmRunner, prompts: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it raises: the first line of it is the reason."""

    def failing(*_: Any, **__: Any) -> Any:
        raise ValueError("The assistant cannot.\nSecond line.")

    monkeypatch.setattr(runner.assistant, "generate", failing)
    reason = reason_against_assisted(runner, prompts)
    assert reason == "on workload.jsonl:1 generate raised ValueError: The assistant cannot."

    def speechless(*_: Any, **__: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(runner.assistant, "generate", speechless)
    assert reason_against_assisted(runner, prompts) == (
        "on workload.jsonl:1 generate raised NotImplementedError: no message"
    )


@pytest.mark.parametrize(("dtype", "temperature", "is_refused"), [
    (torch.float32, 0.0, True),
    (torch.bfloat16, 0.0, False),
    (torch.float32, 1.0, False),
])  # fmt: skip
def test_assisted_generation_with_another_output_is_left_out(
    runner: ArmRunner,
    prompts: Workload,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    temperature: float,
    is_refused: bool,
) -> None:
    """Where rounding or sampling may explain it, the table counts it instead."""
    original = runner_module.hf_generate

    def garbled(*args: Any, assistant: Any, **settings: Any) -> Any:
        tokens, stats = original(*args, assistant=assistant, **settings)
        return (tokens if assistant is None else tokens[::-1]), stats

    monkeypatch.setattr(runner_module, "hf_generate", garbled)
    monkeypatch.setattr(runner.decoder.target, "dtype", dtype)
    sampled = tuple(
        WorkloadPrompt(p.name, p.settings.model_copy(update={"temperature": temperature}), p.pixels)
        for p in prompts.prompts
    )
    reason = reason_against_assisted(runner, Workload("sampled", "evaluate", sampled))
    assert reason == ("on workload.jsonl:1 its output is not that of generate alone" if is_refused else None)


def test_a_draft_that_is_no_model_cannot_assist(pair: Pair, processor: Any, prompts: Workload) -> None:
    runner = ArmRunner(Decoder(pair.target, PromptLookupDraft(VOCABULARY_SIZE)), processor)
    assert reason_against_assisted(runner, prompts) == (
        "the profile's draft is no model that generate takes as its assistant_model"
    )


def test_both_kinds_of_prompt_are_tried(runner: ArmRunner, prompts: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of each; a workload without images tries one."""
    tried: list[str] = []
    original = ArmRunner.decode

    def noting(self: ArmRunner, arm: Any, inputs: Any, prompt: WorkloadPrompt) -> Any:
        tried.append(f"{arm.name} {prompt.name}")
        return original(self, arm, inputs, prompt)

    monkeypatch.setattr(ArmRunner, "decode", noting)
    chosen = choose_arms([HF_ASSISTED], runner, prompts)
    assert sorted(tried) == sorted(f"{arm} workload.jsonl:{line}" for arm in (HF, HF_ASSISTED) for line in (1, 2))
    assert chosen.notes == {HF_ASSISTED: BLIND}
    text = Workload("text", "evaluate", prompts.prompts[:1])
    assert choose_arms([HF_ASSISTED], runner, text).notes == {}, "nothing to be blind to"


def test_text_pairs_assist(text_pair: Pair, processor: Any) -> None:
    """A Llama with a Llama: no image, nothing to note."""
    prompt = WorkloadPrompt("text", Prompt(prompt="Count.", max_new_tokens=12), ())
    runner = ArmRunner(Decoder(Target(text_pair.target), text_pair.draft), processor)
    chosen = choose_arms([HF_ASSISTED], runner, Workload("text", "evaluate", (prompt,)))
    assert [arm.name for arm in chosen.arms] == [HF_ASSISTED] and not chosen.notes and not chosen.unavailable


# ------------------------------------------------------------------------------------------------------------- figures


def workload_of(*tasks: str) -> Workload:
    prompts = tuple(WorkloadPrompt(task, Prompt(prompt="x", task=task), ()) for task in tasks)
    return Workload("by hand", "evaluate", prompts)


def test_speedups_by_task_by_hand() -> None:
    """Pooled within a task: (100 + 300) / (50 + 50); the last task's only answer has one token."""
    runs = {
        AR: [run(100.0), run(90.0), run(300.0), run(0.0, tokens=1)],
        TUNED: [run(50.0), run(45.0), run(50.0), run(0.0, tokens=1)],
    }
    found = speedups_by_task(runs, workload_of("read", "add", "read", "say"))
    assert found == {AR: {"read": 1.0, "add": 1.0, "say": None}, TUNED: {"read": 4.0, "add": 2.0, "say": None}}
    assert bench._geomean(found[TUNED]) == pytest.approx(8**0.5)
    # After a deadline there are fewer runs than prompts.
    assert speedups_by_task({AR: runs[AR][:2]}, workload_of("read", "add", "sum")) == {AR: {"read": 1.0, "add": 1.0}}


def test_the_tables_say_what_the_figures_say(capsys: pytest.CaptureFixture[str]) -> None:
    baseline = [run(100.0, tokens=101, rounds=100), run(300.0, tokens=101, rounds=100)]
    runs = [
        run(50.0, tokens=101, rounds=25, target_prefill_ms=30.0, vision_ms=10.0, draft_prefill_ms=5.0, verify_ms=40.0),
        run(100.0, tokens=101, rounds=25, target_prefill_ms=30.0, vision_ms=10.0, draft_prefill_ms=5.0, verify_ms=90.0),
    ]
    console = Console()
    tuned = summarize(TUNED, runs, baseline)
    unmeasured = dataclasses.replace(
        tuned, name="hf", outside_share=None, outside_us_per_round=None, tokens_per_round=None
    )
    print_arms([unmeasured, tuned], console)
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().err.splitlines() if line.strip()}
    expected = ["2.67x", "2.00-3.00", "2.50x", "4.00", "1333", "20.0", "10.0", "5.0", "6.7", "%", "200", "2/2"]
    assert rows[TUNED] == expected
    assert rows["hf"] == [*expected[:3], "-", *expected[4:8], "-", "-", "2/2"]

    print_tasks({AR: {"read": 1.0, "say": None}, TUNED: {"read": 2.0, "say": None}}, {AR: 1.0, TUNED: 2.0}, console)
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().err.splitlines() if line.strip()}
    assert rows["arm"] == ["read", "say", "geomean"] and rows[TUNED] == ["2.00x", "-", "2.00x"]


def test_published_defaults_are_all_arms() -> None:
    assert list(known_arms()) == [AR, HF, HF_ASSISTED, PROMPT_LOOKUP, *PUBLISHED_DEFAULTS, "wetap-lossy"]
    assert all(known_arms()[name].configuration == default for name, default in PUBLISHED_DEFAULTS.items())


def test_a_lossy_arm_is_compared_on_request_and_by_its_perplexity(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_in(world, "tree.json", ["wetap-lossy"], monkeypatch)
    plain, lossy, tuned = (arm["perplexity"] for arm in found["arms"])
    assert plain == tuned != lossy and min(plain, lossy) > 1 and "perplexity" in capsys.readouterr().err
    found = run_in(world, "tree.json", ["chain"], monkeypatch)
    assert {arm["perplexity"] for arm in found["arms"]} == {None} and "perplexity" not in capsys.readouterr().err


def test_acceptance_counts_are_pooled_over_prompts(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_in(world, "tree.json", ["chain"], monkeypatch)
    runs, counts = found["runs"]["chain"], found["acceptance_counts"]["chain"]

    def rounds(of: Any) -> int:
        return sum(int(tables["by_depth"][0][0]) for tables in of.values() if tables["by_depth"])

    assert sum(rounds(run["acceptance_counts"]) for run in runs) == rounds(counts) > 0
    assert AR not in found["acceptance_counts"] and "accepted of offered" in capsys.readouterr().err
