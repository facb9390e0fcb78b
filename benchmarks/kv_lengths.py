"""Captures, and KV tokens that a step reads, in the modes ``cuda-graph`` and ``cuda-graph-flex``.

    python benchmarks/kv_lengths.py [--context 2048 --context 8192]

Captures: what ``Decoder.prepare`` makes for a context, with an ``independent`` draft on a rehearsed CUDA device, for trees in rounds that the device leads (``eagle2``) and
that the host leads (``sage``). KV tokens: of the padded length that masks cover, and of the blocks that a block mask lists, for a verification of 64 tokens; layers with a
window of 1,024 tokens apart. The counts do not depend on the machine; they say nothing about time. It takes about two minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

MODES = ("cuda-graph", "cuda-graph-flex")
TREES: dict[str, dict[str, Any]] = {
    "eagle2": {"policy": "eagle2", "depth": 6, "k": 8, "budget": 60},
    "sage": {"policy": "sage", "d_max": 6, "n_max": 60},
}
NUM_TOKENS, WINDOW = 64, 1024


def num_captures(tree: dict[str, Any], mode: str, context: int) -> int:
    """Captures that are made ahead."""
    from autotune.runtime.decoder import Decoder
    from tests.rehearsal import Rehearsal
    from tests.tiny_models import new_llama

    with Rehearsal():
        target, draft = (new_llama(layers, max_position_embeddings=1 << 14).to("cuda:0") for layers in (2, 1))
        return Decoder(target, draft, tree=tree, mode=mode).prepare(context).num_captures


def tokens_read(context: int, capacity: int) -> tuple[int, int, int]:
    """KV tokens that a layer reads for ``NUM_TOKENS`` tokens that end at ``context``: under masks, and under block masks without and with
    a window.
    """
    from autotune.modeling.flex_attention import BLOCK, block_masks, mask_inputs
    from autotune.modeling.graph_runner import padded_length

    prefix, offsets = context - NUM_TOKENS, torch.arange(NUM_TOKENS)
    windows = {"full": None, "sliding": WINDOW}
    step = torch.zeros(NUM_TOKENS, NUM_TOKENS), torch.tensor(prefix), offsets, offsets
    masks = block_masks(mask_inputs(windows, *step, mask_value=-1.0), prefix + offsets, windows, capacity=capacity)
    full, sliding = (BLOCK * int(masks[name].num_blocks) for name in windows)
    return padded_length(context, capacity), full, sliding


@click.command()
@click.option("--context", "contexts", multiple=True, type=int, default=(2048, 8192), show_default=True)
def main(contexts: tuple[int, ...]) -> None:
    """Print captures by tree and context, and KV tokens by length."""
    torch.set_num_threads(1)
    click.echo(f"| tree | context | {' | '.join(MODES)} |\n|---|---|---|---|")
    for name, tree in TREES.items():
        for context in contexts:
            counts = [str(num_captures(tree, mode, context)) for mode in MODES]
            click.echo(f"| {name} | {context} | {' | '.join(counts)} |")
    click.echo("\n| KV length | masks | block masks | block masks, sliding |\n|---|---|---|---|")
    lengths = [length for length in (100, 300, 600, 1100, 2100, 3000, 5000, 8000) if length <= max(contexts)]
    for length in lengths:
        click.echo(f"| {length} | {' | '.join(map(str, tokens_read(length, max(contexts))))} |")


if __name__ == "__main__":
    main()
