"""The bench runs every arm that can run, names the reason of every other, and prints what the runs measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from pandas import DataFrame

from autotune.console import Console
from autotune.documents.condition import Condition
from autotune.documents.decoding_profile import AR, HF, TUNED, DecodingProfile
from autotune.documents.published_defaults import ARM_NAMES, COMPARED_DEFAULTS, HF_ASSISTED, PROMPT_LOOKUP
from autotune.drafters.retrieval import RetrievalDraft
from autotune.errors import UserError
from autotune.evaluation import runtime_arms
from autotune.evaluation.bench import ARMS, assistant_of, choose_arms, run_bench
from autotune.evaluation.bench_settings import BenchSettings, EvaluationPrompts
from autotune.evaluation.bench_tables import (
    benchmark_results,
    gain_by_length,
    geomeans,
    print_arms,
    print_benchmark,
    print_lengths,
    print_tasks,
    speedups_by_task,
)
from autotune.evaluation.runtime_arms import HuggingFaceArm, RuntimeArms
from autotune.evaluation.summary import summarize
from autotune.machine.device import fingerprint
from autotune.modeling.loading import reference
from autotune.modeling.target import Target
from autotune.modeling.text_model import TextModel
from autotune.runtime.decoder import Decoder
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from autotune.workloads.workload import Workload, load_workload
from tests.evaluation.sample_runs import run
from tests.sample_documents import decoding_profile, write_image, write_workload
from tests.tiny_models import Pair

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
    world: Path,
    profile: str,
    against: list[str] | None,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_prompts: int = 3,
    temperature: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    monkeypatch.chdir(world)
    prompts = EvaluationPrompts("workload.jsonl", num_prompts=num_prompts, temperature=temperature)
    names = None if against is None else tuple(against)
    return run_bench(Path(profile), BenchSettings(prompts, names, device="cpu", **options), Console())


def test_by_default_every_arm_runs(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_in(world, "tree.json", None, monkeypatch)
    names = [AR, HF, HF_ASSISTED, PROMPT_LOOKUP, *COMPARED_DEFAULTS, TUNED]
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
    assert result["provenance"]["contention"]["seconds"] > 0
    json.dumps(result, allow_nan=False)
    printed = capsys.readouterr().err
    assert f"{HF_ASSISTED}: {BLIND}" in printed and "left out" not in printed


def test_a_profile_without_a_draft_is_compared_with_arms_without_one(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_in(world, "plain.json", None, monkeypatch, num_prompts=1)
    assert [arm["name"] for arm in result["arms"]] == [AR, HF, PROMPT_LOOKUP]
    reason = "the profile decodes without a draft"
    assert result["unavailable"] == dict.fromkeys([HF_ASSISTED, *COMPARED_DEFAULTS], reason)
    said = capsys.readouterr().err
    assert f"left out: {', '.join([HF_ASSISTED, *COMPARED_DEFAULTS])}: {reason}\n" in said and said.count(reason) == 1


def test_published_configurations_may_have_another_draft(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a profile without a draft, and instead of a profile's draft. Prompt lookup is a retrieval draft."""
    with_plain = run_in(world, "plain.json", [PROMPT_LOOKUP, AR, "chain", "chain"], monkeypatch, draft="retrieval")
    assert list(with_plain["runs"]) == [AR, PROMPT_LOOKUP, "chain"] and with_plain["unavailable"] == {}
    with_tree = run_in(world, "tree.json", ["chain"], monkeypatch, draft="retrieval")
    own = run_in(world, "tree.json", ["chain"], monkeypatch)
    assert list(with_tree["runs"]) == [AR, "chain", TUNED]
    accepted = [
        [run["accepted_lengths"] for run in found["runs"][name]]
        for found, name in (
            (with_plain, "chain"),
            (with_tree, "chain"),
            (own, "chain"),
            (with_tree, TUNED),
            (own, TUNED),
        )
    ]
    assert accepted[0] == accepted[1] != accepted[2] and accepted[3] == accepted[4]
    for found in (with_plain, with_tree):
        assert all(arm["identical_outputs"] == 3 for arm in found["arms"])


def write_points(world: Path, of_task: str, task: str, of_others: str) -> None:
    """A profile with the point of one profile for a task, and the point of another one for all others."""
    profile, other = (DecodingProfile.load(world / f"{name}.json") for name in (of_task, of_others))
    point = profile.point.model_copy(update={"when": Condition(workload=task)})
    profile.model_copy(update={"points": [point, other.point]}).save(world / "points.json")


def test_every_prompt_is_decoded_by_its_point(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain decoding for one task and a tree for all others take as many rounds as each of them alone."""
    write_points(world, "plain", "count", "tree")
    found = run_in(world, "points.json", [AR], monkeypatch)
    assert [run["point"] for run in found["runs"][TUNED]] == [0, 1, 1]
    assert "tuned: 1 by point 0 (workload count), 2 by point 1 (any request)" in capsys.readouterr().err
    alone = run_in(world, "tree.json", [AR], monkeypatch)["runs"]
    rounds = [run["accepted_lengths"] for run in found["runs"][TUNED]]
    by_tree = [run["accepted_lengths"] for run in alone[TUNED]]
    assert rounds == [[0] * found["runs"][AR][0]["rounds"], *by_tree[1:]] and rounds[0] != by_tree[0]


def test_trees_are_compared_where_only_some_points_have_a_draft(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_points(world, "tree", "read", "plain")
    found = run_in(world, "points.json", ["chain"], monkeypatch)
    assert list(found["runs"]) == [AR, "chain", TUNED] and found["unavailable"] == {}
    assert [run["point"] for run in found["runs"][TUNED]] == [1, 0, 0]


def test_an_unknown_arm_is_refused_before_anything_is_read() -> None:
    with pytest.raises(UserError, match="--arms prompt_lokup: no such arm; did you mean 'prompt_lookup'"):
        BenchSettings(EvaluationPrompts("nowhere.jsonl"), (AR, "prompt_lokup"))


def test_requested_trees_need_a_draft(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"decodes without a draft, so trees .*; bench it --arms ar,hf,prompt_lookup"):
        run_in(world, "plain.json", [AR, "chain"], monkeypatch)


@pytest.fixture
def prompts(world: Path, monkeypatch: pytest.MonkeyPatch) -> Workload:
    monkeypatch.chdir(world)
    return load_workload("workload.jsonl", "evaluate")


@pytest.fixture
def arms(pair: Pair, processor: Any) -> RuntimeArms:
    return RuntimeArms(Decoder(pair.target, pair.draft), processor)


def reason_against_assisted(arms: RuntimeArms, prompts: Workload) -> str | None:
    chosen = choose_arms([AR, HF_ASSISTED], arms, prompts)
    assert [arm.name for arm in chosen.arms] == [AR, *([] if chosen.unavailable else [HF_ASSISTED])]
    return chosen.unavailable.get(HF_ASSISTED)


def test_assisted_generation_that_raises_is_left_out(
    arms: RuntimeArms, prompts: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first line of any exception is the reason."""
    errors = [ValueError("The assistant cannot.\nSecond line."), NotImplementedError()]

    def failing(*_: Any, **__: Any) -> Any:
        raise errors.pop(0)

    monkeypatch.setattr(assistant_of(arms), "generate", failing)
    for reason in ("ValueError: The assistant cannot.", "NotImplementedError: no message"):
        assert reason_against_assisted(arms, prompts) == f"on workload.jsonl:1 generate raised {reason}"


def test_assisted_generation_with_another_output_is_left_out(
    arms: RuntimeArms, prompts: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rounding or sampling may explain the difference, the table shows it instead."""
    original = runtime_arms.hf_generate

    def garbled(*args: Any, assistant: Any, **settings: Any) -> Any:
        tokens, stats = original(*args, assistant=assistant, **settings)
        return (tokens if assistant is None else tokens[::-1]), stats

    monkeypatch.setattr(runtime_arms, "hf_generate", garbled)
    for is_exact, temperature, is_refused in ((True, 0.0, True), (False, 0.0, False), (True, 1.0, False)):
        monkeypatch.setattr(TextModel, "is_exact", is_exact)
        sampled = tuple(
            WorkloadPrompt(p.name, p.settings.model_copy(update={"temperature": temperature}), p.pixels)
            for p in prompts.prompts
        )
        reason = reason_against_assisted(arms, Workload("sampled", "evaluate", sampled))
        assert reason == ("on workload.jsonl:1 its output differs from generate alone" if is_refused else None)


def test_a_draft_that_is_no_model_cannot_assist(pair: Pair, processor: Any, prompts: Workload) -> None:
    arms = RuntimeArms(Decoder(pair.target, RetrievalDraft()), processor)
    assert reason_against_assisted(arms, prompts) == (
        "the profile's draft is no model that generate takes as its assistant_model"
    )


def test_both_kinds_of_prompt_are_tried(arms: RuntimeArms, prompts: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of each kind; a workload without images tries one prompt."""
    tried: list[tuple[str, str]] = []
    original = HuggingFaceArm.decode

    def noting(arm: HuggingFaceArm, prompt: WorkloadPrompt) -> Any:
        tried.append((arm.name, prompt.settings.text))
        return original(arm, prompt)

    monkeypatch.setattr(HuggingFaceArm, "decode", noting)
    chosen = choose_arms([HF_ASSISTED], arms, prompts)
    assert tried == [(arm, prompt.settings.text) for prompt in prompts.prompts[:2] for arm in (HF_ASSISTED, HF)]
    assert chosen.notes == {HF_ASSISTED: BLIND}
    text = Workload("text", "evaluate", prompts.prompts[:1])
    assert choose_arms([HF_ASSISTED], arms, text).notes == {}, "without images the draft is not blind"


def test_text_pairs_assist(text_pair: Pair, processor: Any) -> None:
    """A Llama assists a Llama, with no limitation to note."""
    prompt = WorkloadPrompt("text", Prompt(prompt="Count.", max_new_tokens=12), ())
    arms = RuntimeArms(Decoder(Target(text_pair.target), text_pair.draft), processor)
    chosen = choose_arms([HF_ASSISTED], arms, Workload("text", "evaluate", (prompt,)))
    assert [arm.name for arm in chosen.arms] == [HF_ASSISTED] and not chosen.notes and not chosen.unavailable


def test_the_arm_of_hugging_face_is_said_to_be_eager(text_pair: Pair, processor: Any, prompts: Workload) -> None:
    arms = RuntimeArms(Decoder(text_pair.target, mode="fixed"), processor)
    assert "so that gains over it include that of mode fixed" in choose_arms([HF], arms, prompts).notes[HF]


def test_speedups_by_task_by_hand() -> None:
    """Pooled within a task: (100 + 300) / (50 + 50); the last task's only answer has one token."""
    tasks = ["read", "add", "read", "say"]
    runs = {
        name: [run(ms, tokens=11 if ms else 1, task=task) for ms, task in zip(times, tasks, strict=True)]
        for name, times in {AR: [100.0, 90.0, 300.0, 0.0], TUNED: [50.0, 45.0, 50.0, 0.0]}.items()
    }
    found = speedups_by_task(runs)
    assert list(found.index) == [AR, TUNED] and list(found.columns) == ["read", "add", "say"]
    assert found.loc[AR, ["read", "add"]].tolist() == [1.0, 1.0]
    assert found.loc[TUNED, ["read", "add"]].tolist() == [4.0, 2.0] and found["say"].isna().all()
    assert geomeans(found)[TUNED] == pytest.approx(8**0.5)


def test_benchmark_results_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """Two turns of one question, and a question of another task. Tokens per second are averaged over questions, prefill
    included.
    """
    first = WorkloadPrompt("q:1/turn-1", Prompt(prompt="a", task="chat"), ())
    second = WorkloadPrompt("q:1/turn-2", Prompt(turns=["a", "b"], task="chat"), ())
    prompts = [first, second, WorkloadPrompt("q:2", Prompt(prompt="c", task="qa"), ())]
    tasks = [prompt.settings.task for prompt in prompts]
    runs = {
        name: [
            run(ms, tokens=11, rounds=rounds, task=task, target_prefill_ms=100.0)
            for ms, task in zip(times, tasks, strict=True)
        ]
        for name, rounds, times in ((AR, 0, [900.0, 900.0, 1000.0]), (TUNED, 4, [400.0, 400.0, 900.0]))
    }
    found = benchmark_results(runs, prompts).set_index(["arm", "task"])
    assert found.questions.tolist() == [1, 1, 1, 1, 2, 2]
    assert found.mean_accepted_tokens[TUNED].tolist() == [2.5, 2.5, 2.5] and found.mean_accepted_tokens[AR].isna().all()
    speeds = {AR: (22 / 2.0, 11 / 1.1), TUNED: (22 / 1.0, 11 / 1.0)}
    expected = [
        speeds[TUNED][0] / speeds[AR][0],
        speeds[TUNED][1] / speeds[AR][1],
        sum(speeds[TUNED]) / sum(speeds[AR]),
    ]
    assert found.speedup[TUNED].tolist() == pytest.approx(expected) and (found.speedup[AR] == 1).all()
    print_benchmark("mt-bench", found.reset_index(), Console())
    printed = capsys.readouterr().err
    assert (
        "mt-bench: speedup over ar, prefill included, and mean accepted tokens" in printed and "2.00x, 2.50" in printed
    )


def test_a_public_benchmark_is_reported_in_its_own_terms(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two-turn questions: all arms follow the target's answers."""
    rows = [
        {"question_id": number, "category": category, "turns": ["Count to ten.", f"And to {number}?"]}
        for number, category in enumerate(("writing", "math", "writing", "math"), start=81)
    ]
    write_workload(world, rows, name="question.jsonl")
    monkeypatch.chdir(world)
    prompts = EvaluationPrompts("question.jsonl", num_prompts=6, max_new_tokens=10, is_whole=True)
    result = run_bench(Path("tree.json"), BenchSettings(prompts, (HF,), device="cpu"), Console())
    assert all(arm["identical_outputs"] == arm["num_prompts"] == 6 for arm in result["arms"]), (
        "hf decodes the same chats"
    )
    results = DataFrame(result["benchmark_results"]).set_index(["arm", "task"])
    assert results.questions.loc[TUNED].to_dict() == {"writing": 2, "math": 1, "overall": 3}
    assert (results.mean_accepted_tokens.loc[TUNED] > 1).all() and (results.mean_accepted_tokens.loc[AR] == 1).all()
    assert "mt-bench: speedup over ar, prefill included" in capsys.readouterr().err


def test_gain_by_answer_length_by_hand() -> None:
    """Two answers of 17 to 32 tokens: (60 + 60) / (20 + 40); one of up to 16; one without decoding."""
    tokens = [21, 11, 31, 1]
    runs = {
        AR: [run(ms, tokens=n, rounds=n - 1) for ms, n in zip([60.0, 30.0, 60.0, 0.0], tokens, strict=True)],
        TUNED: [run(ms, tokens=n, rounds=5) for ms, n in zip([20.0, 30.0, 40.0, 0.0], tokens, strict=True)],
    }
    found = gain_by_length(runs).set_index(["arm", "length"])
    assert found.loc[(TUNED, "17-32")].tolist() == pytest.approx([2, 2.0, (20 + 30) / 10])
    assert found.loc[(TUNED, "1-16")].tolist() == pytest.approx([1, 1.0, 2.0])
    assert found.loc[(AR, "17-32")].tolist() == pytest.approx([2, 1.0, 1.0])
    assert len(found) == 4


def test_gain_by_length_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    runs = {AR: [run(9.0), run(9.0, tokens=40)], TUNED: [run(3.0), run(9.0, tokens=40)]}
    print_lengths(gain_by_length(runs), Console())
    shown = capsys.readouterr().err
    assert "33-64" in shown and "3.00x, M 2.00" in shown and "1.00x, M 7.80" in shown
    print_lengths(gain_by_length({AR: [run(9.0)]}), Console())
    assert capsys.readouterr().err == "", "one length says nothing"


def test_the_tables_show_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    baseline = [run(100.0, tokens=101, rounds=100), run(300.0, tokens=101, rounds=100)]
    runs = [run(ms, tokens=101, rounds=25) for ms in (50.0, 100.0)]
    console = Console()
    tuned = summarize(TUNED, runs, baseline)
    unmeasured = dataclasses.replace(tuned, name="hf", tokens_per_round=None)
    print_arms([unmeasured, tuned], console)
    printed = capsys.readouterr().err
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.strip()}
    assert "hf: Hugging Face's generate\nM: mean number of tokens of a round\n" in printed and "ar: " not in printed
    expected = ["2.67x", "(2.00-3.00)", "4.00", "1333", "2/2"]
    assert rows[TUNED] == expected
    assert rows["hf"] == [*expected[:2], "-", *expected[3:]]

    print_tasks(DataFrame({"read": {AR: 1.0, TUNED: 2.0}, "say": {AR: 1.0, TUNED: float("nan")}}), console)
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().err.splitlines() if line.strip()}
    assert rows["arm"] == ["read", "say", "geomean"] and rows[TUNED] == ["2.00x", "-", "2.00x"]


def test_a_lossy_arm_is_marked_with_what_it_costs_in_quality(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lossless arms agree with plain decoding in every token."""
    found = run_in(world, "tree.json", ["wetap", "wetap-lossy"], monkeypatch, num_prompts=2)
    arms = {arm["name"]: arm for arm in found["arms"]}
    assert list(arms) == [AR, "wetap", "wetap-lossy", TUNED] and found["lossy_arms"] == ["wetap-lossy"]
    assert arms["wetap"]["agreement"] == arms[AR]["agreement"] == arms[TUNED]["agreement"] == 1.0
    assert arms["wetap-lossy"]["agreement"] < 1.0
    assert 1 < arms[AR]["perplexity"] == arms[TUNED]["perplexity"] != arms["wetap-lossy"]["perplexity"]
    for name, runs in found["runs"].items():
        total = sum(run["new_tokens"] for run in runs)
        assert arms[name]["agreement"] == pytest.approx(sum(r["agreement"] * r["new_tokens"] for r in runs) / total)


def test_acceptance_counts_are_pooled_over_prompts(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_in(world, "tree.json", ["chain"], monkeypatch)
    printed = capsys.readouterr().err
    runs, counts = found["runs"]["chain"], found["acceptance_counts"]["chain"]

    def rounds(of: Any) -> int:
        return int(of["by_depth"][0][0])

    assert sum(rounds(run["acceptance_counts"]) for run in runs) == rounds(counts) > 0
    assert AR not in found["acceptance_counts"]
    assert {arm["perplexity"] for arm in found["arms"]} == {None} and "perplexity" not in printed


def test_every_named_arm_can_be_made() -> None:
    assert tuple(ARMS) == ARM_NAMES
