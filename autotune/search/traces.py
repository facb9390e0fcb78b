"""Traces of every draft variant that a search continues with, recorded by one process per core."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from autotune.acceptance.recorder import Recorder, Report
from autotune.acceptance.trace import ForestBounds, Trace, save_trace
from autotune.console import Console
from autotune.documents.configuration import DraftVariant
from autotune.search.model_pool import ModelPool
from autotune.workloads.workload import Workload


def record_traces(
    model_pool: ModelPool,
    variants: Sequence[DraftVariant],
    workload: Workload,
    folder: Path,
    console: Console,
    *,
    bounds: ForestBounds | None = None,
    jobs: int | None = None,
) -> list[Trace]:
    """Record the target's answers, then a trace of every variant, and save them under ``folder``.

    Where that takes long, ``jobs`` processes share the work (None: one per core).
    """
    bounds = bounds or ForestBounds()
    recorder = model_pool.recorder(folder)
    recorder.layers = _layers_read(model_pool, variants)
    num_prompts = len(workload.prompts)
    total = num_prompts * (1 + len(variants))
    traces: list[Trace] = []
    with model_pool.worker_pool(jobs, _record_in_worker, list(variants), workload, folder, bounds) as workers:
        with console.stage("target's answers") as update:

            def report_answers(done: int, of: int) -> None:
                update(done, of, "")
                workers.report(done, total)

            recorder.answers(workload, report_answers)
        with console.stage("traces") as update:
            for number, (draft, subnet) in enumerate(variants):

                def report(done: int, _: int, before: int = number * num_prompts) -> None:
                    update(before + done, total - num_prompts, "")
                    workers.report(num_prompts + before + done, total)

                trace = record_trace(model_pool, recorder, (draft, subnet), workload, bounds, report)
                path = folder / "traces" / draft.replace("/", "-") / f"{trace.header.subnet.name}.trace.json"
                save_trace(path, trace)
                traces.append(trace)
    return traces


def record_trace(
    model_pool: ModelPool,
    recorder: Recorder,
    variant: DraftVariant,
    workload: Workload,
    bounds: ForestBounds,
    report: Report | None = None,
) -> Trace:
    """The trace of one variant."""
    model, reference = model_pool.draft(*variant), model_pool.references[variant[0]]
    return recorder.trace(
        model,
        reference,
        workload,
        visual_keep=variant[1].visual_keep,
        visual_ranking=variant[1].visual_ranking,
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
) -> None:
    """Record what is missing, in a random order: workers with the same order would record the same pieces."""
    recorder = model_pool.recorder(folder)
    recorder.layers = _layers_read(model_pool, variants)
    order = random.Random(rank)
    shuffled = order.sample(workload.prompts, len(workload.prompts))
    recorder.answers(Workload(workload.name, workload.split, tuple(shuffled)))
    prompts = [Workload(workload.name, workload.split, (prompt,)) for prompt in workload.prompts]
    pieces = [(draft, subnet, prompt) for draft, subnet in variants for prompt in prompts]
    for draft, subnet, prompt in order.sample(pieces, len(pieces)):
        record_trace(model_pool, recorder, (draft, subnet), prompt, bounds)


def _layers_read(model_pool: ModelPool, variants: Sequence[DraftVariant]) -> tuple[int, ...]:
    """The target's layers that the variants read, which the recorder reads together."""
    return tuple(sorted({layer for variant in variants for layer in model_pool.draft(*variant).aux_layers}))


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
