"""Traces of every draft variant that a search continues with, recorded by one process per core."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.acceptance.answers import ANSWERS_AT_ONCE
from autotune.acceptance.recorder import Recorder, Report, check_visual_input
from autotune.acceptance.trace import ForestBounds, Trace, save_trace
from autotune.console import Console
from autotune.documents.configuration import DraftVariant
from autotune.documents.subnet import VisualInput
from autotune.search.model_pool import ModelPool
from autotune.search.thresholds import ANSWERS_SHARE, MIN_TRACED_PROMPTS
from autotune.workloads.workload import Workload

PROMPTS_AT_ONCE = 2  # of each process, between two looks at the clock


def record_traces(
    model_pool: ModelPool,
    variants: Sequence[DraftVariant],
    workload: Workload,
    folder: Path,
    console: Console,
    *,
    visual_input: VisualInput = "features",
    bounds: ForestBounds | None = None,
    jobs: int | None = None,
    deadline: float | None = None,
) -> list[Trace]:
    """Record the target's answers, then a trace of every variant, and save them under ``folder``.

    Where that takes long, ``jobs`` processes share the work (None: one per core). Past ``deadline``, of
    ``time.monotonic``, no more than ``MIN_TRACED_PROMPTS`` prompts are recorded: the traces are of the first prompts of the
    workload, the same for all variants.
    """
    bounds = bounds or ForestBounds()
    num_processes = 1 + model_pool.worker_limits(jobs)[0]
    arguments = list(variants), workload, folder, bounds, num_processes, deadline, visual_input
    work = _RecordingWork(
        model_pool, variants, workload, folder, bounds, num_processes, deadline, visual_input=visual_input
    )
    with model_pool.worker_pool(jobs, _record_in_worker, *arguments) as workers:
        with console.stage("target's answers") as update:

            def report_answers(done: int, of: int) -> None:
                update(done, of, "")
                workers.report(done, of * (1 + len(variants)))

            answered = work.answer_all(report_answers)
        with console.stage("traces") as update:

            def report(done: int, of: int) -> None:
                update(done, of, "")
                workers.report(answered + done, answered + of)

            num_prompts = work.trace_all(answered, report)
    if num_prompts < len(workload.prompts):
        console.say(f"{num_prompts} of {len(workload.prompts)} prompts were recorded in their share of the budget")
    traces = []
    for draft, subnet in variants:
        part = workload.cut(num_prompts)
        trace = record_trace(model_pool, work.recorder, (draft, subnet), part, bounds, visual_input=visual_input)
        save_trace(folder / "traces" / draft.replace("/", "-") / f"{trace.header.name}.trace.json", trace)
        traces.append(trace)
    return traces


class _RecordingWork:
    """The answers and forests of a workload, in the order in which one of ``num_processes`` processes makes them.

    Every process takes its own prompts first, so that no two record the same; what others have not made yet comes last.
    """

    def __init__(
        self,
        model_pool: ModelPool,
        variants: Sequence[DraftVariant],
        workload: Workload,
        folder: Path,
        bounds: ForestBounds,
        num_processes: int,
        deadline: float | None,
        rank: int = 0,
        *,
        visual_input: VisualInput = "features",
    ) -> None:
        self.model_pool = model_pool
        self.variants = variants
        self.workload = workload
        self.bounds = bounds
        self.num_processes = num_processes
        self.deadline = math.inf if deadline is None else deadline
        self.visual_input = visual_input
        self.rank = rank
        for variant in variants:
            check_visual_input(model_pool.draft(*variant), variant[0], variant[1].visual_keep, visual_input)
        self.recorder = model_pool.recorder(folder)
        self.recorder.layers = tuple(
            sorted({layer for variant in variants for layer in model_pool.draft(*variant).aux_layers})
        )

    def answer_all(self, report: Report | None = None) -> int:
        """Record answers; returns how many of the first prompts have one."""
        now = time.monotonic()
        deadline = now + ANSWERS_SHARE * (self.deadline - now)
        return self._all(self.workload, ANSWERS_AT_ONCE, deadline, self.recorder.answers, report)

    def trace_all(self, num_prompts: int, report: Report | None = None) -> int:
        """Record forests of all variants for the first prompts; returns for how many."""

        def trace(part: Workload) -> None:
            for variant in self.variants:
                record_trace(self.model_pool, self.recorder, variant, part, self.bounds, visual_input=self.visual_input)

        return self._all(self.workload.cut(num_prompts), PROMPTS_AT_ONCE, self.deadline, trace, report)

    def _all(
        self,
        workload: Workload,
        size: int,
        deadline: float,
        record: Callable[[Workload], object],
        report: Report | None,
    ) -> int:
        """Record the parts of a workload until the deadline; returns the number of its first prompts that are recorded."""
        prompts, total, stride = workload.prompts, len(workload.prompts), size * self.num_processes
        for first in range(0, total, stride):
            end = min(first + stride, total)
            began = time.monotonic()
            # The own part of this group first; the parts of other processes are read, where these have made them.
            for number in range(self.num_processes):
                begin = first + (self.rank + number) % self.num_processes * size
                if begin < end and (number == 0 or self.rank == 0):
                    record(Workload(workload.name, workload.split, prompts[begin : min(begin + size, end)]))
            if report is not None:
                report(end, total)
            now = time.monotonic()
            if end >= MIN_TRACED_PROMPTS and now + (now - began) > deadline:
                return end
        return total


def record_trace(
    model_pool: ModelPool,
    recorder: Recorder,
    variant: DraftVariant,
    workload: Workload,
    bounds: ForestBounds,
    report: Report | None = None,
    *,
    visual_input: VisualInput = "features",
) -> Trace:
    """The trace of one variant."""
    model, reference = model_pool.draft(*variant), model_pool.references[variant[0]]
    return recorder.trace(
        model,
        reference,
        workload,
        visual_keep=variant[1].visual_keep,
        visual_ranking=variant[1].visual_ranking,
        visual_input=visual_input,
        bounds=bounds,
        report=report,
    )


def _record_in_worker(
    model_pool: ModelPool,
    rank: int,
    variants: list[DraftVariant],
    workload: Workload,
    folder: Path,
    bounds: ForestBounds,
    num_processes: int,
    deadline: float | None,
    visual_input: VisualInput,
) -> None:
    """Record the prompts of this worker."""
    work = _RecordingWork(
        model_pool, variants, workload, folder, bounds, num_processes, deadline, rank, visual_input=visual_input
    )
    work.trace_all(work.answer_all())


def print_agreement(traces: Sequence[Trace], console: Console) -> None:
    """Print how often each draft, at its first subnet in ``traces``, predicts the target's next token, by task."""
    import pandas as pd

    by_draft = {trace.header.draft.id: trace.agreement() for trace in reversed(traces)}
    drafts = list(dict.fromkeys(trace.header.draft.id for trace in traces))
    shares = pd.concat([by_draft[draft].assign(draft=draft) for draft in drafts])
    tasks = shares["task"].unique()
    if len(drafts) == 1:
        title, names = "Draft's agreement with the target", ["top-1", "top-4"]
        table = shares.pivot(index="task", columns="rank", values="share").loc[tasks]
    else:
        title, names = "Drafts' agreement with the target, top-1", drafts
        table = shares[shares["rank"] == 1].pivot(index="task", columns="draft", values="share").loc[tasks, drafts]
    rows = [[task, *(f"{100 * share:.1f} %" for share in row)] for task, *row in table.itertuples()]
    console.table(title, ["task", *names], rows)
