"""Traces of draft variants along the target's answers, recorded by one process per core."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.console import Console
from autotune.documents.configuration import DraftVariant
from autotune.recording.answers import ANSWERS_AT_ONCE
from autotune.recording.recorder import Recorder, Report
from autotune.replay.degenerate_answers import degenerate_answers
from autotune.replay.trace import ForestBounds, Trace, save_trace
from autotune.runtime.model_pool import ModelPool
from autotune.table import Table, percent
from autotune.workloads.workload import Workload

PROMPTS_AT_ONCE = 2  # between two looks at the clock
BATCHED_SHARE = 0.4  # of the time of an answer, where it is one of many in a batch
BATCH_SHARE = 0.25  # largest share of the stage's time for one batch


def recorder_of(pool: ModelPool, folder: Path) -> Recorder:
    """A recorder with the target of a pool, which keeps its documents in ``folder``."""
    return Recorder(pool.target, pool.target_reference, pool.processor, folder, mode=pool.mode, keys=pool.answer_keys)


def record_trace(
    recorder: Recorder, pool: ModelPool, variant: DraftVariant, workload: Workload, bounds: ForestBounds
) -> Trace:
    """The trace of a draft variant of a pool."""
    draft, subnet = variant
    pruning = subnet.model_dump(include={"visual_keep", "visual_ranking"})
    return recorder.trace(pool.draft(draft, subnet), pool.references[draft], workload, bounds=bounds, **pruning)


def record_traces(
    pool: ModelPool,
    variants: Sequence[DraftVariant],
    workload: Workload,
    folder: Path,
    console: Console,
    *,
    jobs: int | None = None,
    answer_s: float = 0.0,
    deadline: float = math.inf,
    **options: Any,
) -> list[Trace]:
    """Record the target's answers, then a trace of every variant, and save them under ``folder``.

    Where that takes long, ``jobs`` processes share the work (None: one per core). The traces are of the first prompts
    of the workload, the same for all variants: those whose records end in time. Fewer answers are decoded together
    where one takes so long, ``answer_s``, that a batch may end too late. Other ``options`` are those of ``Recording``.
    """
    at_once = ANSWERS_AT_ONCE if pool.target.text.is_exact else PROMPTS_AT_ONCE  # the latter are not batched
    left_s = deadline - time.monotonic()
    while at_once > PROMPTS_AT_ONCE and at_once * BATCHED_SHARE * answer_s > BATCH_SHARE * left_s:
        at_once //= 2
    shared = {"num_processes": 1 + pool.worker_limits(jobs)[0], "answers_at_once": at_once, "deadline": deadline}
    work = {"variants": variants, "workload": workload, "folder": folder, **shared, **options}
    recording = Recording(pool, **work)
    with pool.worker_pool(jobs, record_in_worker, work, deadline=deadline) as workers:
        with console.stage("target's answers", len(workload.prompts)) as update:
            num_forests = len(variants) * len(workload.prompts)
            answered = recording.answer_all(workers.reporting(update, after=num_forests))
        with console.stage("traces", answered) as update:
            num_prompts = recording.trace_all(answered, workers.reporting(update, before=answered))
    if num_prompts < len(workload.prompts):
        console.say(f"{num_prompts} of {len(workload.prompts)} prompts were recorded in their share of the budget")
    traces = recording.traces(workload.cut(num_prompts))
    for trace in traces:
        save_trace(folder / trace.header.file, trace)
    if warning := degenerate_in(traces[0], workload):
        console.say(warning)
    return traces


def degenerate_in(trace: Trace, workload: Workload) -> str | None:
    """The line about the degenerate answers of a trace to the first prompts of a workload, if there are any."""
    limits = [prompt.settings.max_new_tokens for prompt in workload.prompts[: trace.num_prompts]]
    return degenerate_answers(trace.answers, limits)


def record_in_worker(pool: ModelPool, rank: int, work: Mapping[str, Any]) -> None:
    """Record the prompts of this worker."""
    recording = Recording(pool, rank=rank, **work)
    recording.trace_all(recording.answer_all())


@dataclass
class Recording:
    """Answers and forests that processes record together, in the order of the one with this ``rank``.

    Every process takes its own prompts first, so that no two record the same; the first one (rank 0) ends with those
    that others have not made yet.
    """

    pool: ModelPool
    variants: Sequence[DraftVariant]
    workload: Workload
    folder: Path
    """Keeps the traces."""
    rank: int = 0
    num_processes: int = 1
    bounds: ForestBounds = field(default_factory=ForestBounds)
    answers_at_once: int = ANSWERS_AT_ONCE
    deadline: float = math.inf
    """A value of ``time.monotonic``."""
    answers_share: float = 1.0
    """Share of the time until then in which answers are decoded."""
    limit: float = math.inf
    """The deadline of the first ``num_least`` prompts, which may pass the other one."""
    num_least: int = 0

    def __post_init__(self) -> None:
        drafts = [self.pool.draft(*variant) for variant in self.variants]
        self.recorder = recorder_of(self.pool, self.folder)
        self.recorder.layers = tuple(sorted({layer for draft in drafts for layer in draft.aux_layers}))

    def answer_all(self, report: Report | None = None) -> int:
        """Record answers; returns how many of the first prompts have one."""
        now = time.monotonic()
        deadline = now + self.answers_share * (self.deadline - now)
        return self.record(self.workload, self.answers_at_once, deadline, self.recorder.answers, report)

    def trace_all(self, num_prompts: int, report: Report | None = None) -> int:
        """Record forests of all variants for the first prompts; returns for how many."""
        first = self.workload.cut(num_prompts)
        return self.record(first, PROMPTS_AT_ONCE, self.deadline, self.traces, report)

    def traces(self, workload: Workload) -> list[Trace]:
        """The traces of all variants; what is on disk is not recorded again."""
        return [record_trace(self.recorder, self.pool, variant, workload, self.bounds) for variant in self.variants]

    def record(
        self,
        workload: Workload,
        size: int,
        deadline: float,
        record_part: Callable[[Workload], object],
        report: Report | None = None,
    ) -> int:
        """Record parts of ``size`` prompts until the deadline; returns the number of the first prompts that are
        recorded.
        """
        prompts, total, num_processes = workload.prompts, len(workload.prompts), self.num_processes
        # Parts that other processes have made are read, in no time: one part in so many is this process's own.
        durations = deque([0.0], maxlen=2 * num_processes)
        # The first process records all that others have not made, in order, and so knows how many of the first prompts
        # are done.
        for begin in range(self.rank % num_processes * size, total, size if self.rank == 0 else size * num_processes):
            began, until = time.monotonic(), deadline if begin >= self.num_least else self.limit
            if begin > 0 and began + max(durations) > until:
                return begin
            end = min(begin + size, total)
            record_part(replace(workload, prompts=prompts[begin:end]))
            durations.append(time.monotonic() - began)
            if report is not None:
                report(end, total)
        return total


def agreement_table(traces: Sequence[Trace]) -> Table:
    """How often the most probable token of each draft, at its first subnet in ``traces``, is the target's, by task."""
    import pandas as pd

    of_draft: dict[str, Trace] = {}
    for trace in traces:
        of_draft.setdefault(trace.header.draft.id, trace)
    shares = pd.concat([trace.agreement([1]).assign(draft=draft) for draft, trace in of_draft.items()])
    table = shares.pivot_table(values="share", index="task", columns="draft", sort=False)
    rows = [[task, *map(percent, row)] for task, *row in table.itertuples()]
    return Table("Agreement of drafts with the target", ["task", *of_draft], rows)
