"""Compares verification with and without copies of keys and values, of a model with grouped queries and random weights.

Both are timed in turns in one run; outputs are compared bit for bit. Takes a minute.

    python benchmarks/grouped_attention.py [--layers 24] [--heads 14] [--kv-heads 2]
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from unittest.mock import patch

import click
import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from autotune.modeling.step import Step
from autotune.modeling.text_model import TextModel
from autotune.modeling.tree_model import TreeModel

HEAD_SIZE = 64


@click.command()
@click.option("--layers", default=24, show_default=True)
@click.option("--heads", default=14, show_default=True)
@click.option("--kv-heads", default=2, show_default=True)
@click.option("--kv-length", "kv_lengths", multiple=True, type=int, default=(256, 1024, 4096), show_default=True)
@click.option("--tokens", default=33, show_default=True, help="Root and nodes of the tree.")
@click.option("--repeats", default=15, show_default=True)
def main(layers: int, heads: int, kv_heads: int, kv_lengths: tuple[int, ...], tokens: int, repeats: int) -> None:
    width = heads * HEAD_SIZE
    sizes = {"hidden_size": width, "intermediate_size": 5 * width, "vocab_size": 4096}
    config = Qwen2Config(num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, **sizes)
    model = TreeModel(Qwen2ForCausalLM(config))
    copying = patch.object(TextModel, "has_grouped_queries", False)
    click.echo(
        f"{layers} layers, {heads} heads on {kv_heads} KV heads, {tokens} tokens, {torch.get_num_threads()} threads"
    )
    for kv_length in kv_lengths:
        model.reserve(kv_length + tokens)
        model.cache.length = kv_length
        step = Step.causal(np.arange(tokens), model.mask_value)
        times: tuple[list[float], list[float]] = ([], [])
        logits = []
        for number in range(repeats + 1):
            for without, of_kind in enumerate(times):
                with copying if not without else nullcontext():
                    started = time.perf_counter()
                    out = model.forward(step)
                    elapsed = time.perf_counter() - started
                if number == 0:
                    logits.append(out.clone())
                else:
                    of_kind.append(1e3 * elapsed)
        ratios = [before / after for before, after in zip(*times, strict=True)]
        is_same = torch.equal(*logits)
        click.echo(
            f"KV length {kv_length:5}: {statistics.median(times[0]):.1f} ms with copies, {statistics.median(times[1]):.1f} ms "
            f"without, {statistics.median(ratios):.2f}x; outputs {'identical' if is_same else 'DIFFER'}"
        )


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
