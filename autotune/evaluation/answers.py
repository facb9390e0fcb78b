"""Decodes prompts with a profile, for ``autotune run``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import TextStreamer

from autotune.console import Console
from autotune.evaluation.divergence import quality
from autotune.modeling.loading import Dtype
from autotune.runtime.load import load
from autotune.workloads.conversations import Conversations
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload


def answer_prompts(
    profile: Path, prompts: Sequence[WorkloadPrompt], *, device: str, dtype: Dtype | None = None, prints: bool = False
) -> Iterator[dict[str, Any]]:
    """Decode prompts one after the other; yields the text of each answer, its statistics and a summary line. The turns
    of a conversation are given in their order, and follow the answers of the profile.

    With ``prints``, each answer is printed to stdout while it is decoded, word by word.
    """
    console = Console()
    decoder = load(profile, device=device, dtype=dtype, console=console)
    assert decoder.profile is not None
    if len(prompts) > 1:  # of one, generate tells its lengths
        given = Workload("the workload", "evaluate", tuple(prompts))
        prompts = given.fitting(decoder.processor, decoder.target.max_context, console.say).prompts
    point = decoder.profile.point
    conversations = Conversations(decoder.processor, decode=lambda prompts: [])  # each turn is added before the next
    for prompt in map(conversations.follow, prompts):
        inputs = prompt.inputs(decoder.processor, decoder.target.device)
        tokenizer = getattr(decoder.processor, "tokenizer", decoder.processor)
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if prints else None
        output = decoder.generate(**inputs, **prompt.settings.generation, streamer=streamer)
        stats = output.stats
        tokens = output.sequences[0, stats.prompt_tokens :]
        conversations.add(prompt, tokens.tolist())
        speed = 1e3 * (stats.new_tokens - 1) / stats.decode_ms if stats.decode_ms else 0.0
        has_rounds = stats.tokens_per_round and point.draft is not None
        per_round = f", {stats.tokens_per_round:.2f} tokens a round" if has_rounds else ""
        summary = f"{stats.new_tokens} tokens in {stats.decode_ms:.0f} ms ({speed:.0f} tokens/s{per_round})"
        measured = (
            None if point.verification.is_lossless else quality(decoder.target, inputs, tokens.tolist()).perplexity
        )
        if measured is not None:
            summary += f"; LOSSY, perplexity {measured:.3f}"
        yield {
            "prompt": prompt.settings.text,
            "text": decoder.processor.decode(tokens, skip_special_tokens=True).strip(),
            "lossless": point.verification.is_lossless,
            "perplexity": measured,
            "stats": stats.to_json(),
            "summary": summary,
        }
