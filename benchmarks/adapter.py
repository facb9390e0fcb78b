"""What the adapter adds to a round: a tree through ``Target.forward`` against the text model alone on the same tensors,
and a plain step against transformers' own, interleaved.

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
from autotune.modeling.prompt import Prompt
from autotune.modeling.step import Step
from autotune.modeling.target import Target

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
    """Windows in five layers of six: two masks a round."""
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZES, head_dim=64, sliding_window=128))


def qwen2_5_vl() -> Any:
    """Positions in time, height and width."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 256}
    return hf.Qwen2_5_VLForConditionalGeneration(
        hf.Qwen2_5_VLConfig(text_config={**SIZES, "rope_parameters": rope}, vision_config=vision)
    )


def star_block(count: int, closed: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A star: the root, and its children, which do not see each other."""
    block = np.full((count, count), closed, np.float32)
    np.fill_diagonal(block, 0.0)
    block[:, 0] = 0.0
    return block


def interleaved_us(repeats: int, *points: Callable[[], Any]) -> list[list[float]]:
    """Microseconds of each way, one after the other in every repeat."""
    samples: list[list[float]] = [[] for _ in points]
    for repeat in range(repeats + 10):
        for point, found in zip(points, samples, strict=True):
            started = time.perf_counter()
            point()
            if repeat >= 10:
                found.append(1e6 * (time.perf_counter() - started))
    return samples


@torch.inference_mode()
def measure(model: Any, prefix: int, repeats: int) -> list[list[str]]:
    """Rows of the table: a round of several sizes, and a plain step."""
    target, rows = Target(model), []
    ids = torch.arange(prefix) % 300
    target.reserve(prefix + 200)
    target.prefill_prompt(Prompt(ids, torch.zeros_like(ids, dtype=torch.bool)))
    for count in (8, 33, 65):
        tokens, variants = np.arange(count) % 300, np.minimum(np.arange(count), 1)
        block = star_block(count, target.mask_value)
        mask = target._masks.write(block, prefix, variants, variants)
        inputs = torch.from_numpy(tokens)[None], torch.from_numpy(variants + prefix)[None]

        def whole(tokens: Any = tokens, variants: Any = variants, block: Any = block) -> Any:
            return target.forward(Step(tokens, variants, block))

        def alone(inputs: Any = inputs, mask: Any = mask) -> Any:
            out = target.text.module(
                input_ids=inputs[0],
                position_ids=inputs[1],
                attention_mask=mask,
                past_key_values=target.cache,
                use_cache=True,
            )
            return target.text.logits(out.last_hidden_state[0])

        rows.append(row_of(f"a round of {count} tokens", *interleaved_us(repeats, whole, alone)))

    cache = DynamicCache(config=target.text.config)
    model(input_ids=ids[None], past_key_values=cache)
    token = torch.tensor([[5]])

    def step() -> Any:
        target.step(5)
        target.cache.length = prefix

    def stock() -> Any:
        return model(input_ids=token, past_key_values=cache).logits

    # The dynamic cache grows by a token a repeat: few repeats, so that it stays about as long as ours.
    rows.append(row_of("a plain step, against transformers' own", *interleaved_us(min(repeats, 40), step, stock)))
    return rows


def row_of(name: str, ours: list[float], alone: list[float]) -> list[str]:
    # Of pairs, as the machine may change its speed between repeats.
    added = statistics.median(a - b for a, b in zip(ours, alone, strict=True))
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
