"""Plans for a budget, with given speeds instead of measured ones; and what is loaded and measured before the plan."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from threading import Thread, current_thread, main_thread
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from autotune.console import Console
from autotune.errors import UserError
from autotune.recording.traces import recorder_of
from autotune.runtime.decoder import Decoder
from autotune.runtime.model_pool import ModelPool
from autotune.search import pipeline
from autotune.search import tuning as clocks
from autotune.search.plan import Rates, SearchSize, make_plan, measure_rates
from autotune.search.thresholds import (
    ANSWERS_SHARE,
    KEPT_PROMPTS,
    LEAST_TOKENS,
    MAX_SCREENING_SHARE,
    MIN_TRACED_PROMPTS,
    RATE_TOKENS,
    STAGES,
)
from autotune.search.tuning import StageClock
from autotune.study.search_settings import SearchSettings
from autotune.workloads.workload import Workload
from tests.rehearsal import Counts, Rehearsal
from tests.tiny_models import Pair

DIGITS = SearchSize(
    num_priced=7,
    num_variants=230,
    num_survivors=4,
    num_drafts=2,
    answer_tokens=[24] * 36 + [160] * 12,
    num_evaluate_prompts=64,
    num_processes=2,
)
FAST = Rates(prefill_s=0.02, step_s=0.004)
SLOW = Rates(prefill_s=0.4, step_s=0.1)
"""A target of 0.3 B parameters on two cores."""
TEXTS = SearchSize(
    num_priced=1,
    num_variants=1,
    num_survivors=1,
    num_drafts=1,
    answer_tokens=[256] * 40,
    num_evaluate_prompts=40,
    num_processes=1,
)


def test_a_fast_target_needs_no_cuts() -> None:
    plan = make_plan(DIGITS, FAST, seconds=300, spent_s=10)
    assert (plan.num_tune_prompts, plan.max_new_tokens) == (48, None)
    assert "all 48 tuning prompts and their full answers" in plan.describe(DIGITS)


def test_a_slow_target_gets_fewer_and_shorter_answers() -> None:
    """The answers of the tuning prompts fit into their share of the budget, and the plan says what was cut."""
    plan = make_plan(TEXTS, SLOW, seconds=240, spent_s=15)
    assert MIN_TRACED_PROMPTS <= plan.num_tune_prompts < 40
    assert plan.max_new_tokens is not None and LEAST_TOKENS <= plan.max_new_tokens < 256
    answers_s = plan.num_tune_prompts * SLOW.answer_s(plan.max_new_tokens)
    assert answers_s <= 2 * ANSWERS_SHARE * STAGES["traces"] * 240, "they may end before their limits"
    text = plan.describe(TEXTS)
    assert f"at most {plan.num_tune_prompts} of 40 tuning prompts" in text
    assert f"answers of at most {plan.max_new_tokens} tokens instead of 256" in text
    assert f"would take about {plan.full_s / 60:.0f} min" in text and plan.full_s > 1200


def test_the_last_stages_keep_their_least() -> None:
    """At 60 ms a step, ten minutes have sixteen held-out prompts and eight of a finalist and a default, of 100 tokens,
    if no draft gains.
    """
    plan = make_plan(replace(TEXTS, num_processes=2), Rates(prefill_s=0.2, step_s=0.06), seconds=600, spent_s=5)
    assert (plan.max_new_tokens, plan.kept_prompts) == (100, (16, 8, 1, 1)) and plan.num_tune_prompts >= 12
    assert 0.7 * 600 < sum(plan.kept_s.values()) < 600
    assert plan.table_limit_s(90.0) == 22.5, "the table leaves them their time"
    for step_s in (0.004, 0.008):  # alone, and beside a busy core
        plan = make_plan(DIGITS, Rates(prefill_s=5 * step_s, step_s=step_s), seconds=120, spent_s=5)
        assert plan.kept_prompts == KEPT_PROMPTS[0]
    many = replace(DIGITS, num_priced=9, num_survivors=6, answer_tokens=[250] * 48)
    for step_s in (0.006, 0.007, 0.008, 0.01):
        plan = make_plan(many, Rates(prefill_s=0.045, step_s=step_s), seconds=120, spent_s=2)
        assert plan.kept_prompts[2:] == (2, 2), "where subnets are screened, many configurations compete"
    assert make_plan(TEXTS, SLOW, seconds=240, spent_s=15).kept_prompts == KEPT_PROMPTS[-1]


SMOLLM2 = Rates(prefill_s=0.3, step_s=0.116)
"""SmolLM2 in float32 on two cores."""


def test_a_plan_that_cannot_decide_says_with_which_budget_it_would() -> None:
    """The shortest in minutes that keeps eight prompts of finalists and sixteen held-out ones."""
    size = replace(TEXTS, num_priced=3, num_variants=3, num_survivors=3, answer_tokens=[128] * 48)
    text = make_plan(size, SMOLLM2, seconds=600, spent_s=4).describe(size)
    assert "4 prompts decide between finalists, and 8 held-out ones judge: the result will be a guess" in text
    minutes = int(text.partition("8 decide and 16 judge with --budget ")[2].rstrip("m"))
    enough, less = (make_plan(size, SMOLLM2, seconds=60 * n, spent_s=4) for n in (minutes, minutes - 1))
    assert enough.describe(size).endswith("8 prompts decide between finalists, and 16 held-out ones judge")
    assert less.kept_prompts[:2] == (8, 4)
    few = replace(DIGITS, num_evaluate_prompts=5)
    verdict = make_plan(few, FAST, seconds=300).describe(few)
    assert "and 5 held-out ones judge: the result will be a guess; give more prompts" in verdict


def test_prompts_with_images_are_timed_beside_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four prompts have an image, and take a second longer to read."""
    rates = {number: Rates(prefill_s=0.1 + number, step_s=0.05 + 0.01 * number) for number in (0, 1)}
    monkeypatch.setattr("autotune.search.plan._rates_of", lambda _, prompt: rates[len(prompt.pixels)])
    prompts = [SimpleNamespace(pixels=(None,) * number) for number in (0, 1, 1, 1)]
    mean = measure_rates(cast(Any, None), cast(Any, SimpleNamespace(prompts=prompts)))
    assert (mean.prefill_s, mean.step_s) == pytest.approx((0.85, 0.0575))


def test_a_cheap_chain_of_each_draft_is_kept() -> None:
    """On two prompts with two prefills each, of 32 positions; where nothing is screened, no time is kept for it."""
    kept_s = [replace(DIGITS, num_drafts=n).kept_s(SLOW, 100, KEPT_PROMPTS[0])["screening"] for n in (1, 4)]
    assert kept_s == pytest.approx([4 * 0.4 + 32 * 0.18 * 0.1, 4 * (4 * 0.4 + 32 * 0.18 * 0.1)])
    assert "screening" not in TEXTS.kept_s(SLOW, 100, KEPT_PROMPTS[0])
    assert set(replace(TEXTS, is_measured=False).kept_s(SLOW, 100, KEPT_PROMPTS[0])) == {"traces"}, "nothing is timed"


def test_more_time_cuts_less() -> None:
    plans = [make_plan(TEXTS, SLOW, seconds=seconds) for seconds in (240, 600, 3600, 36000)]
    tokens = [plan.max_new_tokens or 256 for plan in plans]
    assert tokens == sorted(tokens) and tokens[-1] == 256
    assert plans[-1].num_tune_prompts == 40
    assert len({plan.full_s for plan in plans}) == 1


def test_a_budget_below_the_least_is_refused_with_the_least() -> None:
    """The budget that the message asks for is enough."""
    with pytest.raises(
        UserError, match=r"--budget 20s: .*plain step 100\.0 ms\) a sound profile takes about"
    ) as refused:
        make_plan(TEXTS, SLOW, seconds=20, spent_s=5)
    needed = float(str(refused.value).split("give --budget ")[1].split("s ")[0])
    assert needed > 20
    make_plan(TEXTS, SLOW, seconds=needed, spent_s=5)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time that clocks see, ``s``."""
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(clocks, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def test_time_that_a_stage_leaves_goes_to_later_ones(now: SimpleNamespace) -> None:
    clock = StageClock(100)
    assert clock.deadline_of("cost table") == pytest.approx(now.s + 100 * STAGES["cost table"])
    assert clock.deadline_of("evaluation") == pytest.approx(now.s + 100), "the last stage has all the time left"
    only_table = clock.deadline_of("screening") - now.s
    assert only_table > 100 * STAGES["screening"], "nothing was spent on the table"
    now.s = 1200.0
    assert clock.deadline_of("finalists") == now.s, "no time is left"
    now.s = 1000.0
    clock.set_share("cost table", 0.6)
    assert clock.deadline_of("cost table") == pytest.approx(now.s + 60)
    traces, rest = STAGES["traces"], 1 - STAGES["cost table"] - STAGES["screening"]
    assert clock.deadline_of("traces") == pytest.approx(now.s + 100 * traces / rest)
    assert list(StageClock(100, is_timed=False).weights) == ["screening", "traces", "tree search"]


def test_a_stage_leaves_later_ones_what_they_keep(now: SimpleNamespace) -> None:
    clock = StageClock(100)
    clock.weights = {name: STAGES[name] for name in ("traces", "finalists", "evaluation")}
    clock.kept_s = {"traces": 10.0, "finalists": 20.0, "evaluation": 40.0}
    share = STAGES["traces"] / sum(STAGES[name] for name in clock.weights)
    assert clock.deadline_of("traces") == pytest.approx(now.s + 10 + share * 30)
    assert clock.limit_of("traces") == now.s + 40
    now.s = 1060.0  # the traces took too long
    assert clock.deadline_of("finalists") == pytest.approx(now.s + 40 / 3), "of 40 s, the later stage keeps two thirds"
    now.s = 1090.0
    assert clock.deadline_of("evaluation") == pytest.approx(1100.0) and clock.limit_of("evaluation") == 1100.0


def test_a_space_with_thousands_of_subnets_is_screened_longer() -> None:
    few, many = DIGITS, replace(DIGITS, num_variants=3200)
    rates = FAST
    assert make_plan(few, rates, seconds=300).screening_share == pytest.approx(STAGES["screening"], abs=0.02)
    assert make_plan(many, rates, seconds=300).screening_share == MAX_SCREENING_SHARE
    hour = make_plan(many, rates, seconds=3600).screening_share
    assert hour == pytest.approx(many.screening_s(rates) / 3600) and STAGES["screening"] < hour < 0.3


def test_the_budget_begins_when_the_models_are_loaded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps of trees are compiled in another thread meanwhile, whose error is not lost."""
    threads: list[Thread] = []
    monkeypatch.setattr(pipeline, "compile_steps", lambda: threads.append(current_thread()))
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(monotonic=iter([100.0, 141.0]).__next__))
    models = {"target": str(pair.target_folder), "drafts": (str(pair.draft_folder),)}
    settings = SearchSettings(**models, device="cpu", budget_s=90.5, folder=tmp_path)
    tuning = pipeline.begin(settings, Console())
    assert tuning.clock.spent_s < 1 and len(threads) == 1 and main_thread() not in threads
    assert "models loaded in 41 s; the budget of 90.5 s begins now" in capsys.readouterr().err
    monkeypatch.setattr(pipeline, "time", time)
    monkeypatch.setattr(pipeline, "compile_steps", Mock(side_effect=RuntimeError("of the compiler")))
    with pytest.raises(RuntimeError, match="of the compiler"):
        pipeline.begin(settings, Console())


def test_a_gpu_measures_and_answers_as_the_search_decodes(
    rehearsal: Rehearsal, pair: Pair, evaluate: Workload, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Weights go straight to the GPU; what is timed, and answers by themselves, replay captures."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.Module, "to", Mock(side_effect=AssertionError("loaded elsewhere, and moved")))
        pool = ModelPool(str(pair.target_folder), (), "cuda:0", mode="auto")
    assert {str(tensor.device) for tensor in pool.target.model.parameters()} == {"cuda:0"}
    timed: list[Counts] = []
    generate = Decoder.generate

    def counted(self: Decoder, **inputs: Any) -> Any:
        with rehearsal.counted() as counts:
            output = generate(self, **inputs)
        timed.append(counts)
        return output

    monkeypatch.setattr(Decoder, "generate", counted)
    assert measure_rates(pool.plain_decoder(), evaluate).step_s > 0
    assert {(counts.captures, counts.replays) for counts in timed} == {(0, RATE_TOKENS - 1)}
    (answer,) = recorder_of(pool, tmp_path).answers(evaluate.sampled(0.5).cut(1))
    assert timed[-1].replays + timed[-1].captures >= len(answer.tokens) - 1 > 0
