"""Real runs: none is repeated, none is lost, and their statistics are what a reader would compute."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autotune.documents.configuration import Configuration
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.evaluation import runner as runner_module
from autotune.evaluation.arms import HF, HF_ASSISTED, PROMPT_LOOKUP_ARM, Arm, Run
from autotune.evaluation.runner import AR, SHAPE_TOKENS, ArmRunner
from autotune.evaluation.summary import bootstrap_ratio, speedup, summarize
from autotune.runtime.decoder import Decoder
from autotune.search.elimination import eliminate, surely_slower
from autotune.trees.acceptance_counts import AcceptanceCounts
from autotune.workloads.workload import Prompt, Workload, WorkloadPrompt
from tests.tiny_models import Pair

CHAIN = Configuration(tree={"policy": "chain", "depth": 3})
SAGE = Configuration(tree={"policy": "sage"}, subnet=Subnet(visual_keep=0.5))
ARMS = [Arm(AR), Arm(HF), Arm(HF_ASSISTED), PROMPT_LOOKUP_ARM, Arm("chain", CHAIN), Arm("tuned", SAGE)]


def run(decode_ms: float, *, tokens: int = 11, rounds: int = 5, output: str = "same", **times: float) -> Run:
    """A run typed in: ``tokens`` new ones, of which the prefill gave the first."""
    zero = dict.fromkeys(("target_prefill_ms", "vision_ms", "draft_prefill_ms", "draft_ms"), 0.0)
    known = {**zero, "verify_ms": decode_ms, **times}
    return Run(
        arm="x",
        prompt="p",
        prompt_sha256="0",
        tokens_sha256=output,
        new_tokens=tokens,
        rounds=rounds,
        accepted_lengths=[1] * rounds,
        target_forwards=rounds,
        draft_forwards=rounds,
        decode_ms=decode_ms,
        acceptance_counts=AcceptanceCounts().to_json(),
        **known,
    )


# ----------------------------------------------------------------------------------------------------------- statistics


def test_a_run_of_an_earlier_version_is_read() -> None:
    """It called its acceptance counts ``health``."""
    document = run(1.0).model_dump()
    document["health"] = document.pop("acceptance_counts")
    assert Run.model_validate(document) == run(1.0)


def test_a_constant_ratio_has_no_width() -> None:
    """Pairs stay together: prompts of very different lengths do not widen the interval."""
    below = np.array([1.0, 10.0, 100.0, 3.0])
    assert bootstrap_ratio(2.5 * below, below) == pytest.approx((2.5, 2.5))


def test_the_interval_is_that_of_resampled_sums() -> None:
    """Two pairs of ratios 1 and 3: resamples are (1, 1), (1, 3) and (3, 3), and their sums are divided."""
    above, below = np.array([1.0, 9.0]), np.array([1.0, 3.0])
    assert bootstrap_ratio(above, below) == pytest.approx((1.0, 3.0))
    # Nineteen prompts of ratio 2 and one of ratio 1: hardly any resample leaves the neighbourhood of 1.95.
    above, below = np.array([2.0] * 19 + [1.0]), np.ones(20)
    low, high = bootstrap_ratio(above, below)
    assert 1.8 <= low < 1.95 < high == 2.0


def test_more_prompts_narrow_the_interval() -> None:
    rng = np.random.default_rng(0)
    widths = []
    for count in (10, 1000):
        below = rng.uniform(1, 2, count)
        low, high = bootstrap_ratio(below * rng.normal(2, 0.3, count), below)
        assert low < 2.0 < high or count == 10
        widths.append(high - low)
    assert widths[1] < widths[0] / 4


def test_the_interval_is_repeatable() -> None:
    rng = np.random.default_rng(1)
    above, below = rng.uniform(1, 2, (2, 12))
    assert bootstrap_ratio(above, below, seed=3) == bootstrap_ratio(above, below, seed=3)
    assert bootstrap_ratio(above, below, seed=3) != bootstrap_ratio(above, below, seed=4)


def test_units_make_it_an_interval_of_ratios_per_unit() -> None:
    """9 ms for 3 tokens over 1 ms for 1 token, and 1 over 1: of the resamples (0, 0), (0, 1), (1, 1) the sums per unit
    are 3 / 1, (10 / 4) / (2 / 2) and 1 / 1.
    """
    above, above_units = np.array([9.0, 1.0]), np.array([3.0, 1.0])
    below, below_units = np.ones(2), np.ones(2)
    low, high = bootstrap_ratio(above, below, above_units=above_units, below_units=below_units)
    assert (low, high) == pytest.approx((1.0, 3.0))
    # Equal units on both sides change nothing.
    plain = bootstrap_ratio(above, below, seed=5)
    assert bootstrap_ratio(above, below, above_units=above_units, below_units=above_units, seed=5) == pytest.approx(
        plain
    )


def test_a_summary_by_hand() -> None:
    """Times and tokens are summed before they are divided: 400 / 150, not the mean of 2 and 3."""
    runs = [
        run(50.0, tokens=11, rounds=5, draft_prefill_ms=5.0, draft_ms=10.0, verify_ms=20.0, target_prefill_ms=9.0),
        run(
            100.0,
            tokens=21,
            rounds=5,
            output="other",
            draft_ms=40.0,
            verify_ms=45.0,
            target_prefill_ms=30.0,
            vision_ms=6.0,
        ),
    ]
    baseline = [run(100.0, tokens=11, rounds=10), run(300.0, tokens=21, rounds=20)]
    found = summarize("tuned", runs, baseline)
    assert (found.name, found.num_prompts, found.num_tokens) == ("tuned", 2, 30)
    assert found.speedup == speedup(runs, baseline) == pytest.approx(400 / 150)
    assert found.ci95 == pytest.approx((2.0, 3.0))
    assert found.median_speedup == pytest.approx(2.5)
    assert found.tokens_per_second == pytest.approx(1000 * 30 / 150)
    assert found.tokens_per_round == 3.0
    assert (found.prefill_ms, found.vision_ms) == ((9.0 + 24.0) / 2, 3.0), "prefill without vision"
    assert (found.draft_prefill_ms, found.decode_ms) == (2.5, 75.0)
    assert found.identical_outputs == 1
    assert found.outside_share == pytest.approx((15 + 15) / 150)


def test_a_lossy_arm_is_compared_per_token() -> None:
    """It stops after half of the tokens, at the same speed: no gain, neither pooled nor for a prompt."""
    baseline = [run(100.0, tokens=11), run(300.0, tokens=31)]
    lossy = [run(50.0, tokens=6, output="short"), run(150.0, tokens=16, output="short")]
    found = summarize("lossy", lossy, baseline)
    assert (found.speedup, found.median_speedup) == pytest.approx((1.0, 1.0))
    assert found.ci95 == pytest.approx((1.0, 1.0)) and found.identical_outputs == 0
    # Twice the speed at 15 instead of 40 tokens: (400 / 40) / (75 / 15).
    lossy = [run(25.0, tokens=6), run(50.0, tokens=11)]
    assert speedup(lossy, baseline) == pytest.approx((400 / 40) / (75 / 15)) == 2.0


def test_answers_of_one_token_have_no_part_in_the_speedup() -> None:
    """The prefill gives their only token. Where there are no others, there is nothing to say."""
    baseline, runs = [run(100.0), run(0.0, tokens=1, rounds=0)], [run(50.0), run(0.0, tokens=1, rounds=0)]
    found = summarize("tuned", runs, baseline)
    assert (found.speedup, found.median_speedup, found.ci95) == (2.0, 2.0, (2.0, 2.0)) and found.num_prompts == 2
    # An arm that goes on where plain decoding ended has nothing to be compared with either.
    assert speedup([run(50.0), run(7.0)], baseline) == 2.0
    with pytest.raises(UserError, match=r"every answer has one token, so nothing was decoded .* raise max_new_tokens"):
        summarize("tuned", runs[1:], baseline[1:])
    assert np.isnan(speedup(runs[1:], baseline[1:]))


def test_no_rounds_have_no_tokens_per_round() -> None:
    assert summarize(AR, [run(1.0, rounds=0)], [run(1.0)]).tokens_per_round is None


def test_what_is_not_measured_has_no_share() -> None:
    assert summarize(HF, [run(1.0, verify_ms=0.0)], [run(1.0)]).outside_share is None


# --------------------------------------------------------------------------------------------------------------- runner


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "runs.jsonl"


def test_all_arms_say_the_same(decoder: Decoder, processor: Any, evaluate: Workload) -> None:
    """Plain decoding, Hugging Face alone and assisted, n-grams, a chain and a tree that sees half of the image: token
    for token.
    """
    runs = ArmRunner(decoder, processor).compare(ARMS, evaluate)
    assert list(runs) == [AR, HF, HF_ASSISTED, "prompt_lookup", "chain", "tuned"]
    for per_prompt in zip(*runs.values(), strict=True):
        assert len({run.tokens_sha256 for run in per_prompt}) == 1
        assert len({run.new_tokens for run in per_prompt}) == 1
    assert [run.prompt for run in runs["tuned"]] == [prompt.name for prompt in evaluate.prompts]
    for name, found in runs.items():
        for one in found:
            assert one.decode_ms > 0 and one.target_prefill_ms > 0
            assert one.rounds == len(one.accepted_lengths)
            assert (one.draft_forwards > 0) == (name not in (AR, HF))
            assert (one.vision_ms > 0) == one.prompt.endswith((":2", ":3")), "the workload's prompts with an image"
            assert sum(one.accepted_lengths) + one.rounds >= one.new_tokens - 1
    plain = runs[AR][0]
    assert plain.rounds == plain.target_forwards == plain.new_tokens - 1


def test_sampled_prompts_say_the_same_with_and_without_a_draft(
    decoder: Decoder, processor: Any, evaluate: Workload
) -> None:
    """The noise belongs to the position; Hugging Face draws other numbers, and is left out."""
    sampled = tuple(
        WorkloadPrompt(p.name, p.settings.model_copy(update={"temperature": 1.0, "seed": 5}), p.pixels)
        for p in evaluate.prompts
    )
    arms = [arm for arm in ARMS if arm.name not in (HF, HF_ASSISTED)]
    runs = ArmRunner(decoder, processor).compare(arms, Workload("sampled", "evaluate", sampled))
    for per_prompt in zip(*runs.values(), strict=True):
        assert len({run.tokens_sha256 for run in per_prompt}) == 1
    greedy = ArmRunner(decoder, processor).compare([Arm(AR)], evaluate)
    assert [run.tokens_sha256 for run in runs[AR]] != [run.tokens_sha256 for run in greedy[AR]]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Every decoding that a runner does, as (arm, prompt), warm-ups included."""
    calls: list[tuple[str, str]] = []
    of_ours, of_hf = Decoder._decode, runner_module.hf_generate
    prompt_of_run: list[tuple[str, str]] = []
    run = ArmRunner.run

    def noting_run(self: ArmRunner, arm: Arm, prompt: WorkloadPrompt) -> Any:
        prompt_of_run[:] = [(arm.name, prompt.name)]
        return run(self, arm, prompt)

    def noting(decoding: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            calls.extend(prompt_of_run)
            return decoding(*args, **options)

        return noted

    monkeypatch.setattr(ArmRunner, "run", noting_run)
    monkeypatch.setattr(Decoder, "_decode", noting(of_ours))
    monkeypatch.setattr(runner_module, "hf_generate", noting(of_hf))
    return calls


def test_known_runs_are_not_repeated(
    decoder: Decoder, processor: Any, evaluate: Workload, ledger: Path, decoded: list[tuple[str, str]]
) -> None:
    arms = [Arm(AR), Arm("chain", CHAIN)]
    first = ArmRunner(decoder, processor, ledger, context="here").compare(arms, evaluate)
    assert len(decoded) == 2 * (3 + 2), "each arm's first prompt with an image and without is decoded twice"
    assert len(ledger.read_text().splitlines()) == 6
    decoded.clear()
    again = ArmRunner(decoder, processor, ledger, context="here").compare(arms, evaluate)
    assert again == first and not decoded
    renamed = ArmRunner(decoder, processor, ledger, context="here").compare(
        [Arm("other name", CHAIN), Arm(AR)], evaluate
    )
    assert renamed["other name"] == first["chain"] and not decoded, "a configuration is known by what it is"


def test_another_comparison_measures_all_its_arms(
    decoder: Decoder, processor: Any, evaluate: Workload, ledger: Path, decoded: list[tuple[str, str]]
) -> None:
    """Plain decoding as it was an hour ago is no measure of what decodes now."""
    ArmRunner(decoder, processor, ledger).compare([Arm(AR), Arm("chain", CHAIN)], evaluate)
    decoded.clear()
    ArmRunner(decoder, processor, ledger).compare([Arm(AR), Arm("sage", SAGE)], evaluate)
    assert {name for name, _ in decoded} == {AR, "sage"}


def test_an_interrupted_prompt_is_measured_as_a_whole(
    decoder: Decoder, processor: Any, evaluate: Workload, ledger: Path, decoded: list[tuple[str, str]]
) -> None:
    arms = [Arm(AR), Arm("chain", CHAIN)]
    ArmRunner(decoder, processor, ledger).compare(arms, evaluate)
    lines = ledger.read_text().splitlines()
    ledger.write_text("".join(f"{line}\n" for line in lines[:3]))  # a whole prompt and an arm of the next
    decoded.clear()
    ArmRunner(decoder, processor, ledger).compare(arms, evaluate)
    again = {prompt for _, prompt in decoded}
    assert again == {prompt.name for prompt in evaluate.prompts[1:]}
    assert {name for name, prompt in decoded if prompt == evaluate.prompts[1].name} == {AR, "chain"}


def test_an_arm_is_warmed_up_for_every_shape(
    decoder: Decoder, processor: Any, evaluate: Workload, decoded: list[tuple[str, str]]
) -> None:
    """Prompts of up to 64 tokens are of one shape, longer ones and those with an image of others."""

    def prompt(name: str, num_words: int, pixels: tuple[Any, ...] = ()) -> WorkloadPrompt:
        return WorkloadPrompt(name, Prompt(prompt="a " * num_words, max_new_tokens=2), pixels)

    image = evaluate.prompts[1].pixels
    prompts = [prompt("short", 1), prompt("as short", 2), prompt("long", 40), prompt("seen", 1, image)]
    prompts += [prompt("as long", 41), prompt("seen too", 2, image)]
    lengths = {p.name: p.inputs(processor)["input_ids"].shape[1] for p in prompts}
    assert max(lengths["short"], lengths["as short"], lengths["seen too"]) <= SHAPE_TOKENS < lengths["long"]
    ArmRunner(decoder, processor).compare([Arm(AR), Arm(HF)], Workload("shapes", "evaluate", tuple(prompts)))
    counted = {name: [prompt for arm, prompt in decoded if arm == name] for name in (AR, HF)}
    expected = ["short", "short", "as short", "long", "long", "seen", "seen", "as long", "seen too"]
    assert counted[AR] == counted[HF] == expected


def test_the_same_tree_of_another_drafter_is_another_arm(
    decoder: Decoder, processor: Any, evaluate: Workload, ledger: Path, decoded: list[tuple[str, str]]
) -> None:
    """Their runs in one ledger are kept apart."""
    drafted = Arm("drafted", PROMPT_LOOKUP_ARM.configuration)
    runs = ArmRunner(decoder, processor, ledger).compare([drafted, PROMPT_LOOKUP_ARM], evaluate)
    assert {name for name, _ in decoded} == {"drafted", "prompt_lookup"}
    assert [run.rounds for run in runs["drafted"]] != [run.rounds for run in runs["prompt_lookup"]]
    decoded.clear()
    assert ArmRunner(decoder, processor, ledger).compare([PROMPT_LOOKUP_ARM, drafted], evaluate) == runs and not decoded


def test_the_assistant_is_the_draft_s_model(decoder: Decoder, text_pair: Pair) -> None:
    assert ArmRunner(decoder, None).assistant is decoder.draft.model
    assert ArmRunner(Decoder(text_pair.target), None).assistant is None


def test_runs_of_another_pair_or_device_do_not_count(
    decoder: Decoder, processor: Any, evaluate: Workload, ledger: Path, decoded: list[tuple[str, str]]
) -> None:
    one = Workload("one", "evaluate", evaluate.prompts[:1])
    for context in ("here", "elsewhere"):
        decoded.clear()
        ArmRunner(decoder, processor, ledger, context=context).compare([Arm(AR)], one)
        assert decoded
    decoded.clear()
    for context in ("here", "elsewhere"):
        ArmRunner(decoder, processor, ledger, context=context).compare([Arm(AR)], one)
    assert not decoded


def test_a_torn_ledger_loses_the_torn_line(
    decoder: Decoder, processor: Any, evaluate: Workload, ledger: Path, decoded: list[tuple[str, str]]
) -> None:
    """A crash in the middle of a line, a line of another version, and one that is no JSON."""
    first = ArmRunner(decoder, processor, ledger).compare([Arm(AR)], evaluate)
    lines = ledger.read_text().splitlines()
    other_version = json.dumps({**json.loads(lines[1]), "temperature_of_the_room": 21})
    ledger.write_text("\n".join([lines[0], other_version, "not JSON", lines[2][: len(lines[2]) // 2]]))
    decoded.clear()
    again = ArmRunner(decoder, processor, ledger).compare([Arm(AR)], evaluate)
    assert {prompt for _, prompt in decoded} == {prompt.name for prompt in evaluate.prompts[1:]}
    assert again[AR][0] == first[AR][0]
    decoded.clear()
    assert ArmRunner(decoder, processor, ledger).compare([Arm(AR)], evaluate) == again
    assert not decoded, "the new lines did not run into the torn one"


def test_arms_take_turns_in_a_random_order_that_the_seed_repeats(
    decoder: Decoder, processor: Any, evaluate: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt by prompt, every arm once: a machine that slows down slows all of them."""
    prompts = Workload("many", "evaluate", evaluate.prompts * 4)
    orders: dict[int, list[list[tuple[str, str]]]] = {0: [], 1: []}
    for seed in (0, 0, 1):
        called: list[tuple[str, str]] = []
        monkeypatch.setattr(
            ArmRunner, "run", lambda self, arm, prompt, to=called: (to.append((arm.name, prompt.name)), run(1.0))[1]
        )
        ArmRunner(decoder, processor).compare(ARMS, prompts, seed=seed)
        orders[seed].append(called)
    assert orders[0][0] == orders[0][1] != orders[1][0]
    turns = [orders[0][0][i : i + len(ARMS)] for i in range(0, len(orders[0][0]), len(ARMS))]
    assert [{prompt for _, prompt in turn} for turn in turns] == [{prompt.name} for prompt in prompts.prompts]
    assert all({name for name, _ in turn} == {arm.name for arm in ARMS} for turn in turns)
    assert len({tuple(name for name, _ in turn) for turn in turns}) > 4


def test_an_arm_named_twice_counts_once(decoder: Decoder, processor: Any, evaluate: Workload) -> None:
    runs = ArmRunner(decoder, processor).compare([Arm(AR), Arm(AR)], evaluate)
    assert len(runs[AR]) == len(evaluate.prompts)


def test_a_prompt_that_would_end_too_late_is_not_begun(
    decoder: Decoder, processor: Any, evaluate: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which looking at it takes a second: two prompts took a second and a half each, and 1.2 s are left."""
    ticks = itertools.count()
    monkeypatch.setattr("autotune.evaluation.runner.time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    runs = ArmRunner(decoder, processor).compare([Arm(AR)], evaluate, deadline=4.2, min_prompts=1)
    assert len(runs[AR]) == 2 < len(evaluate.prompts)


def test_past_the_deadline_it_ends_with_whole_prompts(decoder: Decoder, processor: Any, evaluate: Workload) -> None:
    """After at least ``min_prompts`` of them, each with all arms."""
    said: list[tuple[int, int]] = []
    runs = ArmRunner(decoder, processor).compare(
        [Arm(AR), Arm("chain", CHAIN)],
        evaluate,
        deadline=time.monotonic() - 1,
        min_prompts=2,
        report=lambda *args: said.append(args),
    )
    assert [len(found) for found in runs.values()] == [2, 2] and said == [(1, 3), (2, 3)]


def test_a_disturbed_run_is_measured_again(
    decoder: Decoder, processor: Any, evaluate: Workload, monkeypatch: pytest.MonkeyPatch, ledger: Path
) -> None:
    """Its prefill took much longer than the other arms' of the same prompt: the machine was busy. How long its decoding
    took plays no part.
    """
    runner = ArmRunner(decoder, processor, ledger)
    arms = [Arm(AR), Arm("chain", CHAIN), Arm("sage", SAGE)]
    decode, calls = runner.decode, []

    def slowed(arm: Arm, inputs: Any, prompt: WorkloadPrompt) -> Any:
        tokens, stats = decode(arm, inputs, prompt)
        calls.append(arm.name)
        # The third prompt's chain is disturbed twice, and the sage arm only decodes slowly.
        is_chain = arm.name == "chain" and prompt is evaluate.prompts[2]
        stats.target_prefill_ms = 1000.0 if is_chain and len([n for n in calls if n == "slow"]) < 2 else 10.0
        if stats.target_prefill_ms == 1000.0:
            calls.append("slow")
        if arm.name == "sage":
            stats.decode_ms = 1e6
        return tokens, stats

    monkeypatch.setattr(runner, "decode", slowed)
    monkeypatch.setattr(
        runner, "_warm", {(arm.key, sees, n) for arm in arms for sees in (True, False) for n in range(9)}
    )
    runs = runner.compare(arms, evaluate)
    assert runner.num_disturbed == 2
    assert all(run.target_prefill_ms == 10.0 for of_arm in runs.values() for run in of_arm)
    assert all(run.decode_ms == 1e6 for run in runs["sage"])
    # The ledger's last word on a run counts.
    assert ArmRunner(decoder, processor, ledger).compare(arms, evaluate) == runs


def test_a_run_in_which_the_machine_stood_still_is_measured_again(
    decoder: Decoder, processor: Any, evaluate: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forwards took much longer than any tree's could; five times as long they may."""
    runner = ArmRunner(decoder, processor)
    decode, stalls = runner.decode, iter([500.0])

    def slowed(arm: Arm, inputs: Any, prompt: WorkloadPrompt) -> Any:
        tokens, stats = decode(arm, inputs, prompt)
        stats.target_prefill_ms, forward_ms = 10.0, 50.0 if arm.name == "chain" else 10.0
        if arm.name == AR and prompt is evaluate.prompts[1]:
            forward_ms = next(stalls, forward_ms)
        stats.verify_ms = forward_ms * stats.target_forwards
        return tokens, stats

    monkeypatch.setattr(runner, "decode", slowed)
    monkeypatch.setattr(
        runner, "_warm", {(arm, sees, n) for arm in (AR, CHAIN.key) for sees in (True, False) for n in range(9)}
    )
    runs = runner.compare([Arm(AR), Arm("chain", CHAIN)], evaluate)
    assert runner.num_disturbed == 1
    assert {run.forward_ms for run in runs[AR]} == {10.0} and {run.forward_ms for run in runs["chain"]} == {50.0}


# ---------------------------------------------------------------------------------------------------------- elimination


class TimedRunner(ArmRunner):
    """Arms take what is typed in: a time for every prompt, and noise of a seed."""

    def __init__(self, ms: dict[str, float], noise: float = 0.0) -> None:
        self.ms = ms
        self.noise = noise
        self.random = np.random.default_rng(1)
        self.compared: list[tuple[set[str], int, bool]] = []

    def compare(  # type: ignore[override]
        self, arms: list[Arm], workload: Workload, *, repeat: int, goes_on: bool, **_: Any
    ) -> dict[str, list[Run]]:
        self.compared.append(({arm.name for arm in arms}, repeat, goes_on))
        prompts = 1 + np.arange(len(workload.prompts))  # some take longer, in every arm
        return {
            arm.name: [run(float(self.ms[arm.name] * n * self.random.normal(1, self.noise))) for n in prompts]
            for arm in arms
        }


def some_prompts(count: int) -> Workload:
    prompt = WorkloadPrompt("p", Prompt(prompt="p"), ())
    return Workload("by hand", "tune", (prompt,) * count)


def test_arms_that_are_surely_slower_leave() -> None:
    """And run no more; what is left goes on until one is left."""
    runner = TimedRunner({AR: 100.0, "slow": 70.0, "near": 50.5, "best": 50.0}, noise=0.03)
    arms = [Arm(name, CHAIN) for name in ("slow", "near", "best")]
    found = eliminate(runner, arms, some_prompts(16))
    assert "slow" not in found.standing and found.standing[0] == "best"
    assert len(found.runs["slow"]) == 8 < len(found.runs["near"]) <= len(found.runs["best"]) == len(found.runs[AR])
    assert runner.compared[0][0] == {AR, "slow", "near", "best"} and "slow" not in runner.compared[1][0]


def test_equals_are_not_told_apart() -> None:
    """They run to the end: every prompt so many times, under its own number, and neither leaves."""
    runner = TimedRunner({AR: 100.0, "one": 50.0, "other": 50.0}, noise=0.05)
    found = eliminate(runner, [Arm("one", CHAIN), Arm("other", CHAIN)], some_prompts(16))
    assert sorted(found.standing) == ["one", "other"]
    assert len(found.runs["one"]) == len(found.runs["other"]) == len(found.runs[AR]) == 16 * runner_module.MAX_PASSES
    assert [repeat for _, repeat, _ in runner.compared] == [
        n for n in range(runner_module.MAX_PASSES) for _ in range(2)
    ]
    assert [goes_on for _, _, goes_on in runner.compared] == [False, *[True] * (2 * runner_module.MAX_PASSES - 1)]


def test_chance_seldom_tells_equals_apart() -> None:
    """At every look, whatever the number of prompts: a false alarm now and then, and hardly ever a true one missed."""
    rng = np.random.default_rng(0)
    for count in (4, 8, 64):
        equal = [surely_slower(*rng.normal(1, 0.05, (2, count)), risk=0.05) for _ in range(400)]
        assert sum(equal) / 400 < 0.08, count
        slower = [
            surely_slower(1.2 * rng.normal(1, 0.05, count), rng.normal(1, 0.05, count), risk=0.05) for _ in range(400)
        ]
        assert sum(slower) / 400 > 0.9, count
    assert surely_slower(np.full(4, 2.0), np.ones(4), risk=0.001) and not surely_slower(
        np.ones(4), np.ones(4), risk=0.5
    )


def test_an_elimination_ends_behind_a_block_once_time_is_up() -> None:
    runner = TimedRunner({AR: 100.0, "one": 50.0, "other": 50.0}, noise=0.05)
    arms = [Arm("one", CHAIN), Arm("other", CHAIN)]
    found = eliminate(runner, arms, some_prompts(16), deadline=time.monotonic() - 1)
    assert len(found.runs[AR]) == runner_module.PROMPTS_PER_ROUND and len(runner.compared) == 1


@pytest.mark.parametrize(("seconds", "blocks"), [(5.0, 1), (19.0, 1), (21.0, 2), (29.0, 2), (31.0, 3)])
def test_a_block_that_would_be_late_is_not_begun(seconds: float, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes ten seconds here, and so will the next."""
    runner = TimedRunner({AR: 100.0, "one": 50.0, "other": 50.0}, noise=0.05)
    clock = SimpleNamespace(monotonic=lambda: 10.0 * len(runner.compared))
    monkeypatch.setattr(runner_module, "time", clock)
    eliminate(runner, [Arm("one", CHAIN), Arm("other", CHAIN)], some_prompts(16), deadline=seconds)
    assert len(runner.compared) == blocks


def test_repeats_of_a_comparison_are_measured_again(
    decoder: Decoder, processor: Any, evaluate: Workload, tmp_path: Path
) -> None:
    arms = [Arm(AR), Arm("chain", CHAIN)]
    runner = ArmRunner(decoder, processor, tmp_path / "runs.jsonl")
    first, second = (runner.compare(arms, evaluate, repeat=repeat) for repeat in (0, 1))
    again = ArmRunner(decoder, processor, tmp_path / "runs.jsonl").compare(arms, evaluate, repeat=1)
    assert again == second != first


def test_configurations_find_their_drafts(decoder: Decoder, processor: Any, evaluate: Workload) -> None:
    """Several drafts run in one comparison, each configuration with its own."""
    asked: list[Configuration] = []
    runner = ArmRunner(decoder, processor, draft_of=lambda c: asked.append(c) or decoder.draft)
    named = Configuration(tree={"policy": "chain", "depth": 2}, draft="some/draft", subnet=Subnet(visual_keep=0.5))
    runs = runner.compare([Arm(AR), Arm("chain", CHAIN), Arm("named", named)], evaluate)
    assert {c.draft for c in asked} == {None, "some/draft"}
    assert [r.tokens_sha256 for r in runs["named"]] == [r.tokens_sha256 for r in runs[AR]]
