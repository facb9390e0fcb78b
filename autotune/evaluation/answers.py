"""Decodes prompts with a profile, for ``autotune run``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.evaluation.perplexity import perplexity
from autotune.runtime.load import load
from autotune.workloads.workload import WorkloadPrompt


def answer_prompts(profile: Path, prompts: Sequence[WorkloadPrompt], *, device: str) -> Iterator[dict[str, Any]]:
    """For every prompt its text, statistics, and a line that sums them up."""
    decoder = load(profile, device=device)
    points = decoder.profile.points
    for prompt in prompts:
        inputs = prompt.inputs(decoder.processor, decoder.target.device)
        output = decoder.generate(**inputs, **prompt.settings.generation, workload=prompt.settings.task)
        stats = output.stats
        point = points[stats.point]
        text = decoder.processor.decode(output.sequences[0, stats.prompt_tokens :], skip_special_tokens=True).strip()
        speed = 1e3 * (stats.new_tokens - 1) / stats.decode_ms if stats.decode_ms else 0.0
        rounds = (
            f", {stats.tokens_per_round:.2f} tokens a round"
            if stats.tokens_per_round and point.draft is not None
            else ""
        )
        by_point = f"; point {stats.point}: {point.when.label}" if len(points) > 1 else ""
        measured = (
            None
            if point.lossless
            else perplexity(decoder.target, inputs, output.sequences[0, stats.prompt_tokens :].tolist())
        )
        lossy = "" if measured is None else f"; LOSSY, perplexity {measured:.3f}"
        yield {
            "prompt": prompt.settings.text,
            "text": text,
            "lossless": point.lossless,
            "perplexity": measured,
            "stats": stats.to_json(),
            "summary": f"{stats.new_tokens} tokens in {stats.decode_ms:.0f} ms ({speed:.0f} tokens/s{rounds}){by_point}{lossy}",
        }
