"""Operations, transfers and waits of a round, by draft, tree policy and mode, on a rehearsed CUDA device.

    python benchmarks/device_rounds.py [--tokens 24]

The counts are exact for these models and do not depend on the machine. An operation is one call of torch that launches one or several kernels; a
replay launches all operations of a graph at once. Waits include transfers to the host. What a request needs once, its prefills, is not counted. It takes about a minute.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

TREES: dict[str, dict[str, Any]] = {
    "chain": {"policy": "chain", "depth": 5},
    "eagle2": {"policy": "eagle2", "depth": 5, "k": 4, "budget": 20},
    "sage": {"policy": "sage", "n_max": 20},
}
DRAFTS = ("independent", "dream", "specvlm")
COLUMNS = ("draft", "tree", "mode", "operations", "in graphs", "replays", "to device", "to host", "waits", "nodes", "M")


@click.command()
@click.option("--tokens", type=int, default=24, show_default=True, help="Tokens of the answer.")
def main(tokens: int) -> None:
    """Print one row for every draft, tree and mode."""
    from transformers import AutoProcessor

    from autotune.modeling.target import Target
    from autotune.runtime.decoder import Decoder
    from autotune.runtime.points import as_draft
    from tests.drafters.test_feature_draft import agreeing_draft
    from tests.rehearsal import Counts, Rehearsal
    from tests.tiny_models import example_prompts, inputs_on, on_device, vision_pair

    def per_round(decoder: Decoder, inputs: dict[str, Any]) -> list[str]:
        """Counts of the rounds after the first, which prefills the draft."""
        (request,) = decoder.requests(**inputs, max_new_tokens=tokens)
        stream = decoder._decode(request)
        next(stream), next(stream)
        num_rounds, total = 0, Counts()
        while True:
            with rehearsal.counted() as counts:
                if next(stream, None) is None:
                    break
            num_rounds, total = num_rounds + 1, total - (Counts() - counts)
        stats = request.stats
        shown = (total.operations, total.graph_operations, total.replays, total.to_device, total.to_host, total.waits)
        nodes = sum(stats.verified_nodes) / max(1, stats.rounds)
        return [*(f"{number / num_rounds:.3g}" for number in shown), f"{nodes:.3g}", f"{stats.tokens_per_round:.2f}"]

    click.echo(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    with tempfile.TemporaryDirectory() as folder:
        pair = vision_pair(Path(folder))
        prompts = example_prompts(AutoProcessor.from_pretrained(pair.target_folder))
        with Rehearsal() as rehearsal:
            on_gpu, inputs = on_device(pair, "cuda:0"), inputs_on(prompts["image"], "cuda:0")
            target = Target(on_gpu.target)
            for kind in DRAFTS:
                draft: Any = as_draft(on_gpu.draft)
                if kind != "independent":
                    draft = agreeing_draft(kind, target, injection_layer=4)
                for name, tree in TREES.items():
                    for mode in ("eager", "cuda-graph"):
                        decoder = Decoder(target, draft, tree=tree, mode=mode)
                        decoder.generate(**inputs, max_new_tokens=tokens)  # captures
                        click.echo(f"| {' | '.join([kind, name, mode, *per_round(decoder, inputs)])} |")


if __name__ == "__main__":
    main()
