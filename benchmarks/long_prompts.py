"""A long prompt with many visual tokens: LLaVAs with random weights.

* Peak memory of the target's prefill, in one pass and in chunks, each in a process of its own, because peak memory
  never falls.
* The step of a draft of one layer that keeps all or some visual tokens, beside its price: interpolated between steps at
  the longest and the shortest context, as a cost table does. Steps are interleaved; medians are printed.

Takes three minutes.

    python benchmarks/long_prompts.py [--text-tokens 12288]
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from typing import Any

import click
import numpy as np
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from autotune.drafters.independent import IndependentDraft
from autotune.measuring.settings import CostSettings
from autotune.measuring.step_bench import StepBench
from autotune.modeling import tree_model
from autotune.modeling.target import Target

SIDE, PATCH = 512, 8  # pixels: 64 x 64 visual tokens
NUM_VISUAL = (SIDE // PATCH) ** 2
IMAGE_TOKEN = 9
LEVEL_TOKENS, STEPS = 4, 60


def new_model(num_layers: int) -> LlavaForConditionalGeneration:
    text = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=4096,
        max_position_embeddings=32_768,
    )
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=1,
        image_size=SIDE,
        patch_size=PATCH,
    )
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN, image_seq_length=NUM_VISUAL
    )
    return LlavaForConditionalGeneration(config).eval()


def inputs_of(text_tokens: int) -> dict[str, Any]:
    tokens = torch.randint(10, 4096, (1, text_tokens + NUM_VISUAL))
    tokens[0, 8 : 8 + NUM_VISUAL] = IMAGE_TOKEN
    return {"input_ids": tokens, "pixel_values": torch.rand(1, 3, SIDE, SIDE)}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def print_draft_steps(text_tokens: int) -> None:
    target, draft, inputs = Target(new_model(1)), IndependentDraft(new_model(1)), inputs_of(text_tokens)
    shortest, longest = text_tokens, text_tokens + NUM_VISUAL
    lengths = {}
    for keep in (1.0, 0.5, 0.1):
        draft.visual_keep = keep
        (prompt,) = draft.prompts(inputs, target.encode(inputs).prompts)
        scores = torch.rand(prompt.num_visual_tokens)
        draft.prefill(prompt, scores, capacity=longest + 256)
        lengths[keep] = draft.length
    bench = StepBench(target, draft, CostSettings(kv_lengths=(shortest, (shortest + longest) // 2, longest)))
    times: dict[int, list[float]] = {length: [] for length in (*lengths.values(), shortest, longest)}
    for _ in range(STEPS):
        for length in random.sample(list(times), len(times)):
            times[length].append(bench.draft_level_ms(LEVEL_TOKENS, length))
    medians = {length: float(np.median(ms)) for length, ms in times.items()}
    for keep, length in lengths.items():
        price = np.interp(length, [shortest, longest], [medians[shortest], medians[longest]])
        click.echo(
            f"draft that keeps {keep:.0%} of the visual tokens: {length} tokens of context, a level of {LEVEL_TOKENS} tokens "
            f"takes {medians[length] / medians[longest]:.3f} of that with all; its price says {price / medians[longest]:.3f}"
        )


@click.command()
@click.option("--text-tokens", default=12_288, show_default=True)
@click.option("--layers", default=4, show_default=True)
@click.option("--chunk", type=int, help="Measure the memory of a prefill in chunks of that many tokens, and end.")
def main(text_tokens: int, layers: int, chunk: int | None) -> None:
    torch.manual_seed(0)
    if chunk is None:
        whole = text_tokens + NUM_VISUAL
        for name, size in (("one pass", whole), ("chunks", tree_model.PREFILL_CHUNK)):
            arguments = ["--text-tokens", text_tokens, "--layers", layers, "--chunk", size]
            found = subprocess.run([sys.executable, __file__, *map(str, arguments)], capture_output=True, check=True)
            click.echo(f"{name}: {found.stdout.decode().strip()}")
        print_draft_steps(text_tokens)
        return
    tree_model.PREFILL_CHUNK = chunk
    target, inputs = Target(new_model(layers)), inputs_of(text_tokens)
    (prompt,) = target.encode(inputs).prompts
    planned = target.kv_bytes_per_token * (len(prompt) + 256) / 2**20
    target.reserve(len(prompt) + 256)
    before = peak_mib()
    target.prefill(prompt)
    click.echo(
        f"{len(prompt)} tokens, {prompt.num_visual_tokens} of them visual: planned KV cache {planned:.0f} MiB, "
        f"peak memory grew by {peak_mib() - before:.0f} MiB"
    )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
