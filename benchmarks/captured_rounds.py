"""Copies, waits and replays of captured rounds, and captures made ahead, by draft and tree policy, on a rehearsed CUDA
device.

    python benchmarks/captured_rounds.py [--tokens 24] [--context-tokens 1000] [--temperature 0]

The counts are exact for these models and do not depend on the machine. *Level*: one draft level. *Verification*:
everything else of a round, commits included. Uploads are copies to the device; waits include copies to the host. It
takes about a minute.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

DRAFTS = ("independent", "eagle3", "star")
TREES = ("chain", "eagle2", "sage", "priced")
PARTS = ("level", "verification")
COUNTS = {"to_device": "uploads", "waits": "waits", "replays": "replays"}


@click.command()
@click.option("--tokens", type=int, default=24, show_default=True, help="Tokens of the answer.")
@click.option("--context-tokens", type=int, default=1000, show_default=True, help="Tokens that captures are made for.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="Temperature of the request.")
def main(tokens: int, context_tokens: int, temperature: float) -> None:
    """Print one row for every draft and tree."""
    from transformers import AutoProcessor

    from autotune.modeling.graph_memory import graph_memory
    from autotune.modeling.target import Target
    from autotune.runtime.decoder import Decoder
    from tests.rehearsal import Rehearsal
    from tests.runtime.test_captured_rounds import TREES as POLICIES
    from tests.runtime.test_captured_rounds import counted_parts, make_draft
    from tests.tiny_models import example_prompts, inputs_on, on_device, vision_pair

    columns = ["draft", "tree", "captures", "levels a round"]
    columns += [f"{part}: {name}" for part in PARTS for name in COUNTS.values()]
    click.echo(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    with tempfile.TemporaryDirectory() as folder:
        pair = vision_pair(Path(folder))
        prompt = example_prompts(AutoProcessor.from_pretrained(pair.target_folder))["image"]
        for kind in DRAFTS:
            for name in TREES:
                with Rehearsal() as rehearsal:
                    on_gpu, inputs = on_device(pair, "cuda:0"), inputs_on(prompt, "cuda:0")
                    target = Target(on_gpu.target)
                    draft: Any = make_draft(kind, on_gpu, target, Path(tempfile.mkdtemp(dir=folder)))
                    decoder = Decoder(target, draft, tree=POLICIES[name], visual_keep=0.5)
                    num_captures = decoder.prepare(context_tokens).num_captures
                    before = graph_memory(target.device).num_kept
                    with counted_parts(rehearsal) as counts:
                        decoder.generate(**inputs, max_new_tokens=tokens, temperature=temperature)
                    assert graph_memory(target.device).num_kept == before, "everything was captured ahead"
                    cells = [kind, name, f"{num_captures}", f"{len(counts['level']) / len(counts['verification']):.2f}"]
                    for part in PARTS:
                        found = counts[part]
                        cells += [f"{sum(getattr(one, field) for one in found) / len(found):.3g}" for field in COUNTS]
                    click.echo(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
