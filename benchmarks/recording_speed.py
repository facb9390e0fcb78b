"""Measures the CPU time of recording a prompt: the target's answer, its reading, and the forests of every draft.

Two ways are interleaved: one prompt at a time with every node of every forest evaluated, as recording was before; and
answers in batches, tokens that several forests share evaluated once, and one reading of an answer for all drafts.
Answers of both ways are checked to be equal. Takes about 3 minutes.

    OMP_NUM_THREADS=1 python benchmarks/recording_speed.py [--prompts 32] [--draft digits/independent ...]
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from autotune.console import Console
from autotune.modeling.loading import BUNDLED_TARGET
from autotune.recording.answers import ANSWERS_AT_ONCE, AnswerRecorder
from autotune.recording.recorder import record_forest, run_target
from autotune.recording.traces import recorder_of
from autotune.runtime.model_pool import ModelPool
from autotune.study.spaces import bounds_of, load_space
from autotune.workloads.workload import load_workload

DRAFTS = ("digits/independent", "digits/star", "digits/dream", "digits/specvlm")


@click.command()
@click.option("--prompts", default=32, show_default=True)
@click.option("--draft", "drafts", multiple=True, default=DRAFTS, show_default=True)
@click.option("--space", default="quick", show_default=True, help="Search space whose bounds the forests have.")
def main(prompts: int, drafts: tuple[str, ...], space: str) -> None:
    pool, console = ModelPool(BUNDLED_TARGET, drafts, "cpu"), Console()
    workload, bounds = load_workload("digits", "tune", num_prompts=prompts), bounds_of(load_space(space))
    seconds: dict[tuple[str, str], float] = defaultdict(float)

    def timed(part: str, way: str, work: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = work()
        seconds[part, way] += time.process_time() - started
        return result

    recorder = AnswerRecorder(pool.target, pool.processor)
    answers = {}
    for first in range(0, prompts, ANSWERS_AT_ONCE):
        part = workload.prompts[first : first + ANSWERS_AT_ONCE]
        alone = timed("answers", "before", lambda part=part: [recorder.record_alone(prompt) for prompt in part])
        together = timed("answers", "now", lambda part=part: dict(_by_key(recorder, part)))
        assert [together[prompt.sha256] for prompt in part] == alone, "answers differ from those of plain decoding"
        answers |= together
    models = {name: pool.draft(name) for name in drafts}
    layers = sorted({layer for model in models.values() for layer in model.aux_layers})
    with tempfile.TemporaryDirectory() as folder:  # compiles what is compiled at the first call
        few = type(workload)(workload.name, workload.split, workload.prompts[:1])
        for name, model in models.items():
            recorder_of(pool, Path(folder)).trace(model, pool.references[name], few, visual_keep=1.0, bounds=bounds)
    for prompt in workload.prompts:
        inputs, answer = prompt.inputs(pool.processor), answers[prompt.sha256]
        reading = None
        if layers:
            reading = timed("reading", "now", lambda i=inputs, a=answer: run_target(pool.target, i, a, layers))
        for name, model in models.items():
            model.visual_keep = 1.0
            own = None
            if model.aux_layers:
                own = timed(
                    "reading", "before", lambda i=inputs, a=answer, m=model: run_target(pool.target, i, a, m.aux_layers)
                )
            arguments = pool.target, model, inputs, answer, bounds
            timed(name, "before", lambda a=arguments, r=own: record_forest(*a, r, shares_tokens=False))
            timed(name, "now", lambda a=arguments, r=reading if model.aux_layers else None: record_forest(*a, r))
    rows, parts = [], ["answers", *(["reading"] if layers else []), *drafts]
    for label, members in [*((part, [part]) for part in parts), ("all", parts)]:
        before, now = (1e3 * sum(seconds[part, way] for part in members) / prompts for way in ("before", "now"))
        rows.append([label, f"{before:.0f}", f"{now:.0f}", f"{before / now:.2f}x"])
    console.table(f"CPU time of a prompt, {prompts} prompts", ["part", "before, ms", "now, ms", "ratio"], rows)


def _by_key(recorder: AnswerRecorder, prompts: Any) -> list[tuple[str, Any]]:
    return [(prompt.sha256, answer) for prompt, answer in recorder.record(prompts)]


if __name__ == "__main__":
    main()
