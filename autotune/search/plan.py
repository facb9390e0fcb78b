"""The plan of a search: what fits into its budget on this machine.

The number of prompts, the length of answers and the least of every stage are planned from the target's measured speed
before the long part begins. Every stage then has its least and a share of the time that nothing needs: it does its work
in the order of its value until its deadline, and time that it does not need goes to later stages.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from autotune.errors import UserError
from autotune.evaluation.runtime_arms import WARM_UP_S
from autotune.files import Document
from autotune.machine.device import usable_threads
from autotune.measuring.tables import priced_variants
from autotune.modeling.host import limited_threads
from autotune.recording.traces import recorder_of
from autotune.runtime.decoder import Decoder
from autotune.runtime.stats import DecodingStats
from autotune.search import thresholds
from autotune.search.tuning import Tuning
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload

KeptPrompts = tuple[int, int, int, int]
"""One of ``KEPT_PROMPTS``."""


class Rates(Document):
    """Measured speed of plain decoding, in seconds."""

    prefill_s: float
    step_s: float

    def answer_s(self, num_tokens: float) -> float:
        """Duration of a plain answer of ``num_tokens``."""
        return self.prefill_s + num_tokens * self.step_s

    def table_s(self, num_priced: int) -> float:
        """Duration of the smallest cost table."""
        return (thresholds.TABLE_STEPS + thresholds.TABLE_STEPS_OF_DRAFT * num_priced) * self.step_s

    def describe(self) -> str:
        """Both, in milliseconds."""
        return f"prefill {1e3 * self.prefill_s:.0f} ms, plain step {1e3 * self.step_s:.1f} ms"


def measure_rates(plain: Decoder, workload: Workload) -> Rates:
    """Time plain decoding of the first prompt with images and of the first without: the mean by their shares of the
    workload.
    """
    first = {bool(prompt.pixels): prompt for prompt in reversed(workload.prompts)}
    rates = {kind: _rates_of(plain, prompt) for kind, prompt in first.items()}
    of_prompts = [rates[bool(prompt.pixels)] for prompt in workload.prompts]
    return Rates(prefill_s=fmean(r.prefill_s for r in of_prompts), step_s=fmean(r.step_s for r in of_prompts))


def _rates_of(plain: Decoder, prompt: WorkloadPrompt) -> Rates:
    """The shortest of a few runs, each with one CPU thread and with all. The processor's time counts as prefill."""
    began = time.monotonic()
    inputs = prompt.inputs(plain.processor, plain.target.device)
    processing_s = time.monotonic() - began
    plain.prepare(inputs["input_ids"].shape[1] + thresholds.RATE_TOKENS)  # what is captured now is not in the times
    generation = {
        **prompt.settings.generation,
        "max_new_tokens": thresholds.RATE_TOKENS,
        "min_new_tokens": thresholds.RATE_TOKENS,
    }
    runs: list[DecodingStats] = []
    for _ in range(thresholds.RATE_RUNS):
        for threads in sorted({1, usable_threads()}):
            with limited_threads(threads):
                runs.append(plain.generate(**inputs, **generation).stats)
    steps_ms = (stats.decode_ms / max(1, stats.new_tokens - 1) for stats in runs)
    prefill_s = processing_s + min(stats.target_prefill_ms for stats in runs) / 1e3
    return Rates(prefill_s=prefill_s, step_s=min(steps_ms) / 1e3)


@dataclass(frozen=True)
class SearchSize:
    """The size of a search that cuts nothing."""

    num_priced: int
    """Draft variants in the cost table."""
    num_variants: int
    """Draft variants that are screened."""
    num_survivors: int
    """Draft variants whose traces are recorded."""
    num_drafts: int
    answer_tokens: Sequence[int]
    """Limit of the answer of each tuning prompt."""
    num_evaluate_prompts: int
    num_processes: int
    """Processes that record."""
    is_measured: bool = True
    """Whether the device is this machine's, so that a cost table, finalists and held-out prompts are timed."""

    def full_s(self, rates: Rates) -> float:
        """Estimated duration of a search that cuts nothing, in seconds."""
        num_tokens = fmean(self.answer_tokens)
        traced_s = rates.answer_s(num_tokens) + self.num_survivors * num_tokens * thresholds.TRACE_STEPS * rates.step_s
        counted = len(self.answer_tokens) * traced_s + self.screening_s(rates) * self.num_processes
        num_runs = thresholds.FULL_FINALIST_RUNS + thresholds.EVALUATED_ARMS * self.num_evaluate_prompts
        timed = thresholds.FULL_TABLE * rates.table_s(self.num_priced) + num_runs * rates.answer_s(num_tokens)
        return (self.is_measured * timed + counted / self.num_processes) / (1 - thresholds.STAGES["tree search"])

    def screening_s(self, rates: Rates) -> float:
        """Estimated duration of screening all variants, in seconds; 0 where all of them are searched."""
        num_screened = self.num_variants if self.num_variants > self.num_survivors else 0
        return (
            num_screened
            * thresholds.SCREENED_PROMPTS
            * thresholds.SCREENED_TOKENS
            * thresholds.SCREENING_STEPS
            * rates.step_s
            / self.num_processes
        )

    def kept_s(self, rates: Rates, num_tokens: float, kept_prompts: KeptPrompts) -> dict[str, float]:
        """Estimated duration of the least of each stage, in seconds, with answers of ``num_tokens`` and drafts that
        gain nothing.
        """
        num_judged, num_raced, num_finalists, num_defaults = kept_prompts
        answer_s = rates.answer_s(num_tokens)
        traced_s = answer_s + self.num_survivors * num_tokens * thresholds.TRACE_STEPS * rates.step_s
        kept = {"traces": thresholds.MIN_TRACED_PROMPTS * traced_s}
        if self.num_variants > self.num_survivors:
            chains_s = (
                2 * thresholds.FIRST_CHAIN_PROMPTS * rates.prefill_s
                + thresholds.FIRST_CHAIN_PROMPTS
                * thresholds.FIRST_CHAIN_TOKENS
                * thresholds.SCREENING_STEPS
                * rates.step_s
            )
            kept["screening"] = self.num_drafts * chains_s
        if self.is_measured:
            kept["cost table"] = rates.table_s(self.num_priced)
            warm_up_s = min(WARM_UP_S, traced_s)
            kept["finalists"] = (1 + num_finalists + num_defaults) * (num_raced * answer_s + warm_up_s)
            # The best default and Hugging Face run fewer.
            num_runs = 2 * num_judged + thresholds.HELD_OUT_PROMPTS + thresholds.MIN_PROMPTS
            kept["evaluation"] = num_runs * answer_s + thresholds.EVALUATED_ARMS * warm_up_s
        return kept


class Plan(Document):
    """The amount of work that fits into a search's budget."""

    seconds: float
    """The budget."""
    rates: Rates
    num_tune_prompts: int
    max_new_tokens: int | None
    """Limit of every answer; None: the workload's own limits."""
    full_s: float
    """Estimated duration of a search that cuts nothing, in seconds."""
    kept_s: dict[str, float]
    """Time that earlier stages leave to each stage, in seconds."""
    kept_prompts: KeptPrompts
    """Held-out prompts, prompts of finalists, finalists and published defaults in that time."""
    screening_share: float
    """Share of the time that is not kept, in which subnets are screened."""

    def table_limit_s(self, limit_s: float) -> float:
        """``limit_s``, halved until the cost table leaves the other stages their time: similar searches share a
        table.
        """
        free_s = self.seconds - sum(self.kept_s.values())
        while limit_s > 2 * (self.kept_s.get("cost table", 0.0) + thresholds.STAGES["cost table"] * max(free_s, 0.0)):
            limit_s /= 2
        return limit_s

    def describe(self, size: SearchSize) -> str:
        """One line: what fits, and what a search that cuts nothing would take."""
        num_prompts, longest = len(size.answer_tokens), max(size.answer_tokens)
        cuts = []
        if self.num_tune_prompts < num_prompts:
            cuts.append(f"at most {self.num_tune_prompts} of {num_prompts} tuning prompts")
        if self.max_new_tokens is not None:
            cuts.append(f"answers of at most {self.max_new_tokens} tokens instead of {longest}")
        fits = ", ".join(cuts) or f"all {num_prompts} tuning prompts and their full answers"
        if self.full_s > self.seconds:
            fits += f"; a search that cuts nothing would take about {self.full_s / 60:.0f} min"
        verdict = f"\n{self._verdict(size)}" if size.is_measured else ""
        return f"plan for {self.seconds:.0f} s: {fits}{verdict}"

    @property
    def decides(self) -> bool:
        """Whether time is kept for as many prompts as an answer needs that is no guess."""
        return self.kept_prompts[:2] == thresholds.KEPT_PROMPTS[0][:2]

    def _verdict(self, size: SearchSize) -> str:
        """How many prompts decide and, of too few, which budget has time for enough."""
        num_judging = min(self.kept_prompts[0], size.num_evaluate_prompts)
        text = f"{self.kept_prompts[1]} prompts decide between finalists, and {num_judging} held-out ones judge"
        if self.decides:
            few = ": the result will be a guess; give more prompts in --workload"
            return text + (few if num_judging < thresholds.KEPT_PROMPTS[0][0] else "")
        spent_s = self.full_s - size.full_s(self.rates)
        minutes = next(
            number
            for number in itertools.count(int(self.seconds) // 60 + 1)
            if make_plan(size, self.rates, seconds=60 * number, spent_s=spent_s).decides
        )
        enough = "{1} decide and {0} judge".format(*thresholds.KEPT_PROMPTS[0])
        return f"{text}: the result will be a guess; {enough} with --budget {minutes}m"


def size_of(tuning: Tuning) -> SearchSize:
    """The size of a search, if it cuts nothing."""
    num_drafts = len(tuning.pool.references)
    return SearchSize(
        num_priced=len(priced_variants(tuning.variants)),
        num_variants=len(tuning.variants),
        num_drafts=num_drafts,
        num_survivors=min(len(tuning.variants), max(tuning.space.survivors, num_drafts)),
        answer_tokens=[prompt.settings.max_new_tokens for prompt in tuning.tune.prompts],
        num_evaluate_prompts=len(tuning.held_out.prompts),
        num_processes=tuning.num_processes,
        is_measured=tuning.device is not None,
    )


def plan_search(tuning: Tuning) -> Plan:
    """The plan of a search by the target's measured speed, to which its clock and its prompts are cut."""
    size, recorder = size_of(tuning), recorder_of(tuning.pool, tuning.folder)
    keys_of, budget_s = tuning.pool.answer_keys.of_workload, tuning.settings.budget_s
    documents = [keys_of(tuning.tune), keys_of(tuning.held_out), asdict(size)]

    def decide() -> dict[str, Any]:
        with tuning.turn("plan", is_timed=True):
            rates = measure_rates(tuning.pool.plain_decoder(), tuning.tune)
        return make_plan(size, rates, seconds=budget_s, spent_s=tuning.clock.spent_s).model_dump(mode="json")

    plan = Plan.model_validate(tuning.decided("plan", documents, decide), strict=False)
    tuning.console.say(plan.describe(size))
    tuning.console.detail(plan.rates.describe())
    tuning.clock.set_share("screening", plan.screening_share)
    tuning.clock.kept_s = plan.kept_s
    tuning.held_out = tuning.held_out.cut(len(tuning.held_out.prompts), plan.max_new_tokens)
    tune = tuning.tune.cut(plan.num_tune_prompts, plan.max_new_tokens)
    if any(prompt.earlier for prompt in tune.prompts):  # held-out turns follow their answers where they are run
        with tuning.turn("answers of conversations"):
            now = time.monotonic()
            deadline = now + thresholds.ANSWERS_SHARE * (tuning.clock.deadline_of("traces") - now)
            key = [*documents, keys_of(tune)]
            count = tuning.decided("num_followed", key, lambda: len(recorder.follow(tune, deadline).prompts))
            tune = recorder.follow(tune.cut(count))
    tuning.tune = tune
    return plan


def make_plan(size: SearchSize, rates: Rates, *, seconds: float, spent_s: float = 0.0) -> Plan:
    """The plan for a budget of ``seconds``, of which ``spent_s`` are over.

    Answers are shortened, by halves, until ``MIN_TUNE_PROMPTS`` answers and the first of ``KEPT_PROMPTS`` fit; below
    ``KEPT_TOKENS`` tokens only where the last of them does not fit otherwise. A search that screens has as many arms as
    that one.

    Raises:
        UserError: not even the smallest sound search fits; the message has its duration.
    """
    left_s = seconds - spent_s
    least = replace(size, num_survivors=1).kept_s(rates, thresholds.LEAST_TOKENS, thresholds.KEPT_PROMPTS[-1])
    if (least_s := sum(least.values()) / (1 - thresholds.STAGES["tree search"])) > left_s:
        raise UserError(
            f"--budget {seconds:.0f}s: on this machine ({rates.describe()}) a sound profile takes about "
            f"{spent_s + least_s:.0f} s; give --budget {1.1 * (spent_s + least_s):.0f}s or more"
        )
    num_prompts, longest = len(size.answer_tokens), max(size.answer_tokens)
    limits = [longest]
    while limits[-1] // 2 >= thresholds.LEAST_TOKENS:
        limits.append(
            max(limits[-1] // 2, thresholds.KEPT_TOKENS) if limits[-1] > thresholds.KEPT_TOKENS else limits[-1] // 2
        )
    trees_s = min(thresholds.MIN_TREE_SEARCH_S, thresholds.STAGES["tree search"] * left_s)
    whole = [limit for limit in limits if limit >= min(thresholds.KEPT_TOKENS, longest)]
    least_arms = min(thresholds.KEPT_PROMPTS[-1][2:]) if size.num_variants > size.num_survivors else 1
    counted = [kept for kept in thresholds.KEPT_PROMPTS if min(kept[2:]) >= least_arms]
    choices = [*itertools.product(counted, whole), *((counted[-1], limit) for limit in limits[len(whole) :])]
    for kept_prompts, limit in choices:
        num_tokens = fmean(min(limit, num_tokens) for num_tokens in size.answer_tokens)
        kept_s = size.kept_s(rates, num_tokens, kept_prompts) | {"tree search": trees_s}
        free_s = left_s - sum(kept_s.values())
        answers_s = (
            thresholds.ANSWERS_SHARE
            * size.num_processes
            * (kept_s["traces"] + thresholds.STAGES["traces"] * max(0.0, free_s))
        )
        is_answered = min(num_prompts, thresholds.MIN_TUNE_PROMPTS) * rates.answer_s(num_tokens) <= answers_s
        if is_answered and free_s >= (1 - thresholds.KEPT_SHARE) * left_s:
            break
    # Answers may end before their limits, so twice as many are tried; the deadline of their stage ends it.
    num_tried = int(2 * answers_s / rates.answer_s(num_tokens))
    screening_share = size.screening_s(rates) / seconds
    return Plan(
        seconds=seconds,
        rates=rates,
        num_tune_prompts=min(num_prompts, max(thresholds.MIN_TRACED_PROMPTS, num_tried)),
        max_new_tokens=None if limit == longest else limit,
        full_s=spent_s + size.full_s(rates),
        kept_s=kept_s,
        kept_prompts=kept_prompts,
        screening_share=min(thresholds.MAX_SCREENING_SHARE, max(thresholds.STAGES["screening"], screening_share)),
    )
