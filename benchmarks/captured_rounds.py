"""Copies, waits, replays and operations of captured rounds, and captures made ahead, by draft and tree policy, on a
rehearsed CUDA device; and the time of the host between the result of a level and the launch of the next one.

    python benchmarks/captured_rounds.py [--tokens 24] [--context-tokens 1000] [--temperature 0] [--host-time]

The counts are exact for these models and do not depend on the machine. *Level*: one draft level. *Verification*:
everything else of a round, commits included. Waits include copies to the host that wait; operations are those that the
host dispatches one by one, views not counted. It takes about three minutes. ``--host-time`` times levels of ten nodes
of an EAGLE-3 head on the CPU instead, without the forward pass, in seconds.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

DRAFTS = ("independent", "eagle3", "mtp", "star", "dream", "specvlm")
TREES = ("chain", "eagle2", "sage", "priced")
PARTS = ("level", "verification")
COUNTS = {
    **{"to_device": "copies in", "to_host": "copies out", "waits": "waits", "replays": "replays"},
    "operations": "operations",
}
NUM_TIMED = 2000


def level_times(folder: Path) -> list[float]:
    """Microseconds in which a warm level is proposed and grown, launch and forward pass left out."""
    import torch
    from transformers import AutoProcessor

    from autotune.drafters.cached_draft import CachedDraft
    from autotune.modeling.graph_runner import GraphRunner
    from autotune.modeling.target import Target
    from autotune.runtime.decoder import Decoder
    from tests.runtime.test_captured_rounds import make_draft
    from tests.tiny_models import example_prompts, vision_pair

    torch.set_num_threads(1)
    pair = vision_pair(folder)
    target = Target(pair.target)
    draft = make_draft("eagle3", pair, target, folder)
    decoder = Decoder(target, draft, tree={"policy": "eagle2", "depth": 6, "k": 10, "budget": 60}, mode="fixed")
    propose, launch, times = CachedDraft.propose, GraphRunner.launch, []

    def timed(self: Any, tree: Any, frontier: Any, *given: Any) -> Any:
        begin, found = self._num_evaluated, propose(self, tree, frontier, *given)
        if len(frontier) < 10 or times:
            return found
        grower, arrays = decoder.point.grower, (*tree, *decoder.point.grower._work)
        before = [array.copy() for array in arrays]
        GraphRunner.launch = lambda *_: None  # type: ignore[method-assign]
        for _ in range(NUM_TIMED):
            self._num_evaluated = begin
            started = time.perf_counter()
            grower.grow(*propose(self, tree, frontier, *given))
            times.append(1e6 * (time.perf_counter() - started))
            for array, content in zip(arrays, before, strict=True):
                array[:] = content
            grower.frontier = grower._work.frontier[: len(frontier)]
        GraphRunner.launch = launch  # type: ignore[method-assign]
        return found

    CachedDraft.propose = timed  # type: ignore[method-assign]
    decoder.generate(**example_prompts(AutoProcessor.from_pretrained(pair.target_folder))["image"], max_new_tokens=20)
    CachedDraft.propose = propose  # type: ignore[method-assign]
    return times


@click.command()
@click.option("--tokens", type=int, default=24, show_default=True, help="Tokens of the answer.")
@click.option("--context-tokens", type=int, default=1000, show_default=True, help="Tokens that captures are made for.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="Temperature of the request.")
@click.option("--host-time", is_flag=True, help="Time a level of the host alone, on the CPU.")
def main(tokens: int, context_tokens: int, temperature: float, host_time: bool) -> None:
    """Print one row for every draft and tree."""
    if host_time:
        with tempfile.TemporaryDirectory() as folder:
            times = level_times(Path(folder))
        click.echo(f"a level of ten nodes takes the host {statistics.median(times):.1f} us (median of {len(times)})")
        return
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
