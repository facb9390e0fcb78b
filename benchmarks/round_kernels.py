"""Kernels of a round that the device leads, in the modes ``cuda-graph`` (without and with Triton) and ``compile``, by draft and tree policy.

    python benchmarks/round_kernels.py [--layers 32] [--draft independent ...]

The target is a Llama with grouped queries, random weights and a small hidden size, in bfloat16; an ``independent`` draft is one of its layers. ``cuda-graph``: operations of
torch in the captured graphs, on a rehearsed CUDA device, where an operation counts as one kernel. ``Triton``: the same with the kernels of tree operations, which run in Triton's
interpreter; one launch counts as one kernel. ``compile``: kernels and operations in the code that torch generates
for a CPU; what it generates for a GPU may be fused otherwise. The counts do not depend on the machine. It takes about two minutes for each row.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

TREES: dict[str, dict[str, Any]] = {
    "eagle2": {"policy": "eagle2", "depth": 6, "k": 8, "budget": 60},
    "chain": {"policy": "chain", "depth": 6},
}
DRAFTS = ("independent", "eagle3", "dream")
MEASURES = ("cuda-graph", "Triton", "ratio", "compile", "ratio")  # ratios to the first
COLUMNS = ("draft", "tree", *(f"{step}: {measure}" for step in ("drafting", "verification") for measure in MEASURES))


@click.command()
@click.option("--layers", default=32, show_default=True, help="Layers of the target.")
@click.option("--draft", "drafts", multiple=True, type=click.Choice(DRAFTS), default=DRAFTS, show_default=True)
@click.option("--tree", "trees", multiple=True, type=click.Choice(list(TREES)), default=list(TREES), show_default=True)
def main(layers: int, drafts: tuple[str, ...], trees: tuple[str, ...]) -> None:
    """Print one row for every draft and tree."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    from autotune.drafters.eagle3 import new_eagle3
    from autotune.drafters.feature_draft import FeatureDraft
    from autotune.modeling.target import Target
    from autotune.runtime.points import as_draft
    from tests.drafters.test_feature_draft import new_draft
    from tests.kernels import captured_kernels, compiled_kernels
    from tests.tiny_models import new_llama

    torch.set_num_threads(1)

    def model(num_layers: int) -> Any:
        return new_llama(num_layers, hidden_size=64, intermediate_size=128).bfloat16()

    def draft_for(kind: str, target: Target) -> Any:
        if kind == "independent":
            return as_draft(model(1).to(target.device))
        if kind == "eagle3":
            sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "mlp_size": 128}
            return FeatureDraft(new_eagle3(sizes, target, source="benchmark"))
        return new_draft(kind, target, injection_layer=layers)

    click.echo(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for kind in drafts:
        for tree in trees:
            given = functools.partial(model, layers), functools.partial(draft_for, kind), TREES[tree]
            row = [kind, tree]
            counts = captured_kernels(*given), captured_kernels(*given, triton=True), compiled_kernels(*given)
            for captured, launched, compiled in zip(*counts, strict=True):
                row.append(str(captured))
                for count in (launched, compiled):
                    row += [str(count), f"{count / captured:.2f}"]
            click.echo(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
