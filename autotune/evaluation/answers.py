"""Decodes prompts with a profile, for ``autotune run``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import TextStreamer

from autotune.evaluation.perplexity import perplexity
from autotune.runtime.load import load
from autotune.workloads.workload import WorkloadPrompt


class _PieceStreamer(TextStreamer):
    """Passes an answer on in pieces, without the whitespace around it."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write
        self._whitespace = ""  # at the end of the last piece: written once text follows
        self._has_text = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        text = self._whitespace + text if self._has_text else text.lstrip()
        piece = text.rstrip()
        self._whitespace = text[len(piece) :]
        if piece:
            self._has_text = True
            self._write(piece)


def answer_prompts(
    profile: Path, prompts: Sequence[WorkloadPrompt], *, device: str, write: Callable[[str], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Decode prompts one after the other; yields the text of each answer, its statistics and a summary line.

    Args:
        write: called with pieces of each answer's text as soon as their tokens are verified.
    """
    decoder = load(profile, device=device)
    points = decoder.profile.points
    for prompt in prompts:
        inputs = prompt.inputs(decoder.processor, decoder.target.device)
        tokenizer = getattr(decoder.processor, "tokenizer", decoder.processor)
        streamer = None if write is None else _PieceStreamer(tokenizer, write)
        options = {**prompt.settings.generation, "workload": prompt.settings.task, "streamer": streamer}
        output = decoder.generate(**inputs, **options)
        stats = output.stats
        point = points[stats.point]
        tokens = output.sequences[0, stats.prompt_tokens :]
        speed = 1e3 * (stats.new_tokens - 1) / stats.decode_ms if stats.decode_ms else 0.0
        summary = f"{stats.new_tokens} tokens in {stats.decode_ms:.0f} ms ({speed:.0f} tokens/s"
        if stats.tokens_per_round and point.draft is not None:
            summary += f", {stats.tokens_per_round:.2f} tokens a round"
        summary += ")"
        if len(points) > 1:
            summary += f"; point {stats.point}: {point.when.label}"
        measured = None if point.lossless else perplexity(decoder.target, inputs, tokens.tolist())
        if measured is not None:
            summary += f"; LOSSY, perplexity {measured:.3f}"
        yield {
            "prompt": prompt.settings.text,
            "text": decoder.processor.decode(tokens, skip_special_tokens=True).strip(),
            "lossless": point.lossless,
            "perplexity": measured,
            "stats": stats.to_json(),
            "summary": summary,
        }
