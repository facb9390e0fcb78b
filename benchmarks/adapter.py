"""Measures the overhead of the adapter: a round through ``Target.forward`` against the text model alone on the same
tensors, and a plain step against transformers' own, interleaved. Takes about a minute.

    python benchmarks/adapter.py [--prefix 300] [--repeats 200]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np
import torch
import transformers as hf
from transformers import DynamicCache

from autotune.console import Console
from autotune.modeling.loading import BUNDLED_TARGET, load_model
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.step import Step
from autotune.modeling.target import Target

WARM_UPS = 10
SIZES: dict[str, Any] = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def gemma3() -> Any:
    """Five layers of six have a sliding window, so each round needs two masks."""
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZES, head_dim=64, sliding_window=128))


def qwen2_5_vl() -> Any:
    """Positions have three coordinates: time, height and width."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 256}
    return hf.Qwen2_5_VLForConditionalGeneration(
        hf.Qwen2_5_VLConfig(text_config={**SIZES, "rope_parameters": rope}, vision_config=vision)
    )


def star_mask(count: int, mask_value: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Tree mask of a root and its children, which do not see each other."""
    mask = np.full((count, count), mask_value, np.float32)
    np.fill_diagonal(mask, 0.0)
    mask[:, 0] = 0.0
    return mask


def interleaved_us(repeats: int, *functions: Callable[[], Any]) -> list[list[float]]:
    """Times of each function in microseconds; in every repeat all functions run one after the other."""
    samples: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats + WARM_UPS):
        for function, times in zip(functions, samples, strict=True):
            started = time.perf_counter()
            function()
            if repeat >= WARM_UPS:
                times.append(1e6 * (time.perf_counter() - started))
    return samples


@torch.inference_mode()
def measure(model: Any, prefix: int, repeats: int) -> list[list[str]]:
    """Rows of the table: rounds of several sizes, and a plain step."""
    target, rows = Target(model), []
    ids = torch.arange(prefix) % 300
    target.reserve(prefix + 200)
    target.prefill_prompt(EncodedPrompt(ids, torch.zeros_like(ids, dtype=torch.bool)))
    for count in (8, 33, 65):
        step = Step(np.arange(count) % 300, np.minimum(np.arange(count), 1), star_mask(count, target.mask_value))
        mask = target._masks.write(step.tree_mask, prefix, step.offsets, step.offsets)
        inputs = torch.from_numpy(step.tokens)[None], torch.from_numpy(step.offsets + prefix)[None]

        def adapted(step: Step = step) -> Any:
            return target.forward(step)

        def text_model(inputs: Any = inputs, mask: Any = mask) -> Any:
            out = target.text.module(
                input_ids=inputs[0],
                position_ids=inputs[1],
                attention_mask=mask,
                past_key_values=target.cache,
                use_cache=True,
            )
            return target.text.logits(out.last_hidden_state[0])

        rows.append(row_of(f"a round of {count} tokens", *interleaved_us(repeats, adapted, text_model)))

    cache = DynamicCache(config=target.text.config)
    model(input_ids=ids[None], past_key_values=cache)
    token = torch.tensor([[5]])

    def plain_step() -> Any:
        target.step(5)
        target.cache.length = prefix

    def transformers_step() -> Any:
        return model(input_ids=token, past_key_values=cache).logits

    # The dynamic cache grows by a token per repeat: with few repeats it stays about as long as ours.
    rows.append(
        row_of(
            "a plain step, against transformers' own", *interleaved_us(min(repeats, 40), plain_step, transformers_step)
        )
    )
    return rows


def row_of(name: str, adapted: list[float], alone: list[float]) -> list[str]:
    # Differences of pairs, because the machine may change its speed between repeats.
    added = statistics.median(a - b for a, b in zip(adapted, alone, strict=True))
    base = statistics.median(alone)
    return [name, f"{base:,.0f}", f"{added:+,.0f}", f"{100 * added / base:+.1f} %"]


@click.command()
@click.option("--prefix", default=300, help="Tokens in the cache.")
@click.option("--repeats", default=200, help="Samples of each size.")
def main(prefix: int, repeats: int) -> None:
    torch.manual_seed(0)
    models = {
        "digits/target (Llama in LLaVA)": load_model(BUNDLED_TARGET),
        "Gemma 3, windows": gemma3().eval(),
        "Qwen2.5-VL": qwen2_5_vl().eval(),
    }
    rows = [[name, *row] for name, model in models.items() for row in measure(model, prefix, repeats)]
    console = Console()
    console.table("Time added by the adapter", ["model", "what", "text model, us", "added, us", "share"], rows)


if __name__ == "__main__":
    main()
