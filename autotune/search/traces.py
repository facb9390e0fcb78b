"""Traces of every draft and subnet that a search goes on with, recorded on all cores."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

from autotune.acceptance.recorder import Recorder
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
    """The target's answers, then a trace of every draft and subnet, saved under ``folder``; by ``jobs`` processes where that
    takes long (None: one for each core).
    """
    bounds = bounds or ForestBounds()
    recorder = _recorder(model_pool, folder)
    each = len(workload.prompts)
    of_all = (1 + len(variants)) * each
    traces: list[Trace] = []
    with model_pool.helped(jobs, _help, list(variants), workload, folder, bounds) as helpers:
        with console.stage("answers of the target") as update:

            def answered(done: int, of: int) -> None:
                update(done, of, "")
                helpers.report(done, of_all)

            recorder.answers(workload, answered)
        with console.stage("traces of the draft" if len(model_pool.references) == 1 else "traces of drafts") as update:
            for count, (draft, subnet) in enumerate(variants):

                def report(done: int, _: int, before: int = count * each) -> None:
                    update(before + done, len(variants) * each, "")
                    helpers.report(each + before + done, of_all)

                trace = recorder.trace(
                    model_pool.draft(draft, subnet),
                    model_pool.references[draft],
                    workload,
                    visual_keep=subnet.visual_keep,
                    bounds=bounds,
                    report=report,
                )
                path = folder / "traces" / draft.replace("/", "-") / f"{trace.header.subnet.name}.trace.json"
                save_trace(path, trace)
                traces.append(trace)
    return traces


def _recorder(model_pool: ModelPool, folder: Path) -> Recorder:
    return Recorder(model_pool.target, model_pool.target_reference, model_pool.processor, folder)


def _help(
    model_pool: ModelPool,
    rank: int,
    variants: list[DraftVariant],
    workload: Workload,
    folder: Path,
    bounds: ForestBounds,
) -> None:
    """Record what is not there yet, in an order of its own: two that went the same way would make the same pieces."""
    recorder = _recorder(model_pool, folder)
    order = random.Random(rank)
    alone = [Workload(workload.name, workload.split, (prompt,)) for prompt in workload.prompts]
    for prompt in order.sample(alone, len(alone)):
        recorder.answers(prompt)
    pieces = list(itertools.product(variants, alone))
    for (draft, subnet), prompt in order.sample(pieces, len(pieces)):
        recorder.trace(
            model_pool.draft(draft, subnet),
            model_pool.references[draft],
            prompt,
            visual_keep=subnet.visual_keep,
            bounds=bounds,
        )
