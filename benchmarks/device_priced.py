"""Prices rounds of ``priced`` trees that the device would lead against those that the host leads, from datasheets.

The host-led round pays ``overhead.level_ms`` for the transfers of a level and runs the levels that pay. A device-led round has
no transfer before its end, but its launches have fixed sizes. Three kinds of it are priced, each for the trees that are fastest with it:

* ``all levels``: one launch, in which every level up to ``depth`` runs with ``width`` nodes. Its trees are grown at no price
  for levels, which are paid anyway.
* ``one late``: a launch for every level, and the host reads without waiting whether the level before had a frontier, so that one
  level more than needed runs.
* ``in time``: exactly the levels of the host, as conditional nodes of a CUDA graph could run them. It bounds all other kinds that
  decide as the host does.

The tree operations of a device-led level (survivals, choice of the frontier) are kernels in its graph. They are free in the
printed times; the last column has the time of a level's operations below which the kind pays. All rounds are replayed over a
recorded trace of a bundled pair, with the shapes of published models in 16 bits. Nothing is measured, and the figures do not
depend on the machine. Takes about 2 minutes, and as long to record a trace.

    python benchmarks/device_priced.py [--temperature 0.7] [--target code/target --draft code/eagle3 --workload code]
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from autotune.acceptance.replay import Replay, plain_decode_ms, replay
from autotune.acceptance.trace import Trace, bounds_for, load_trace
from autotune.console import Console
from autotune.cost.roofline import estimate_table
from autotune.cost.table import DensePrices
from autotune.documents.provenance import ModelReference
from autotune.documents.subnet import Subnet
from autotune.execution import capture_sizes_for
from autotune.search.model_pool import ModelPool
from autotune.search.prices import TreePricing, tree_prices
from autotune.search.traces import record_traces
from autotune.trees.policy import Policy
from autotune.trees.priced import PricedPolicy
from autotune.workloads.workload import load_workload

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.published_speedups import load, shape_of

MODE = "cuda-graph"
MODELS = {"SmolVLM-2B": 1, "LLaVA-1.6-7B": 1, "LLaVA-1.6-13B": 3}  # with the blocks of the draft
DEVICES = ("l40s", "a100", "h100", "b200")
DEPTHS = (2, 4, 6, 8, 10)
WORTHS = (0.25, 0.35, 0.5, 0.7)
KINDS = ("all levels", "one late", "in time")
LARGEST = PricedPolicy(depth=DEPTHS[-1], width=4, k=4, budget=32, retrieval=True)


class Pair(NamedTuple):
    """Prices of a target and a draft with the sizes of published models, and the trees that know these prices."""

    trace: Trace
    host: DensePrices
    pricing: TreePricing

    def trees(self, *, depths: tuple[int, ...], free_levels: bool) -> list[PricedPolicy]:
        """Trees for every ``worth``, width and depth; ``free_levels``: levels are paid whether they are used or not."""
        found = []
        for worth, width, depth in itertools.product(WORTHS, (1, 2, 4), depths):
            tree = LARGEST.model_dump(exclude={"prices", "calibration"})
            tree |= {"worth": worth, "lookahead": 0.9, "width": width, "depth": depth, "retrieval": False}
            prices = tree_prices(self.trace, self.host, width=width, nodes=LARGEST.budget)
            if free_levels:
                prices = prices.model_copy(update={"level": tuple((0.0,) * len(row) for row in prices.level)})
            completed = {**tree, "prices": prices, "calibration": self.pricing.calibration}
            found.append(PricedPolicy.model_validate(completed))
        return found

    def device(self, kind: str, policy: PricedPolicy) -> DensePrices:
        """Prices of a device-led round, with tree operations that take no time."""
        host = replace(self.host, overhead_level_ms=0.0)
        if kind == "in time":
            return host
        if kind == "one late":
            return replace(host, draft_first_ms=_with(host.draft_first_ms, host.draft_level_ms[1]))
        others = (policy.depth - 1) * host.draft_level_ms[policy.width]
        return replace(host, draft_first_ms=_with(host.draft_first_ms, others), draft_level_ms=0 * host.draft_level_ms)

    def num_levels(self, kind: str, policy: PricedPolicy, replayed: Replay) -> float:
        """Levels of a token whose tree operations the device would run."""
        levels, num_rounds = replayed.draft_forwards.sum(), replayed.rounds.sum()
        ran = {"all levels": policy.depth * num_rounds, "one late": levels + num_rounds, "in time": levels}[kind]
        return float(ran / replayed.tokens.sum())


def _with(first: Any, others: Any) -> Any:
    """Draft forwards [tokens, KV lengths] that are followed by others [KV lengths]. No token takes no time."""
    return np.concatenate([first[:1], first[1:] + others])


def fastest(trees: list[PricedPolicy], ms_of: Any) -> tuple[PricedPolicy, Replay]:
    """The tree of least time per token, and its replay."""
    results = [(tree, ms_of(tree)) for tree in trees]
    return min(results, key=lambda result: result[1].ms_per_token)


def pair_of(trace: Trace, model: str, device: str, level_us: float | None) -> Pair:
    """The prices of a model of ``MODELS`` and its draft on a device. ``level_us``: a level of the host outside the draft; None: as
    estimated.
    """
    shapes = load()[1]["models"]
    draft = trace.header.draft
    table = estimate_table(
        device,
        target=ModelReference(id=model, sha256=""),
        target_shape=shape_of(shapes[model]),
        draft=draft,
        draft_shape=shape_of(shapes[model], MODELS[model]),
        precision="bfloat16",
        mode=MODE,
        capture_sizes=capture_sizes_for(MODE, ()),
    )
    longest = int((trace.prompt_length + np.diff(trace.answer_start)).max())
    prices = table.prices(draft, max_tokens=64, max_kv_length=longest)
    if level_us is not None:
        prices = replace(prices, overhead_level_ms=level_us / 1e3)
    return Pair(trace, prices, TreePricing(trace, prices))


def rows_of(pair: Pair, name: list[str]) -> list[list[str]]:
    """A row for the host and for every kind of device-led rounds."""
    trace, plain_ms = pair.trace, plain_decode_ms(pair.trace, pair.host).sum() / pair.trace.num_tokens
    adaptive = pair.trees(depths=DEPTHS[-1:], free_levels=False)
    tree, led_by_host = fastest(adaptive, lambda tree: replay(trace, tree, pair.host))

    def row(kind: str, tree: Policy, found: Replay, margin: str) -> list[str]:
        ratio = led_by_host.ms_per_token / found.ms_per_token
        levels = found.draft_forwards.sum() / found.rounds.sum()
        shape = f"depth {tree.max_depth}, width {tree.max_width}"
        figures = f"{plain_ms / found.ms_per_token:.2f}x", f"{100 * (ratio - 1):+.1f} %", f"{levels:.1f}"
        return [*name, kind, shape, *figures, margin]

    rows = [row("host", tree, led_by_host, "-")]
    fixed = pair.trees(depths=DEPTHS, free_levels=True)
    for kind in KINDS:
        trees = fixed if kind == "all levels" else adaptive
        tree, found = fastest(trees, lambda tree, kind=kind: replay(trace, tree, pair.device(kind, tree)))
        saved_ms = led_by_host.ms_per_token - found.ms_per_token
        margin = 1e3 * saved_ms / pair.num_levels(kind, tree, found)
        rows.append(row(kind, tree, found, f"{margin:.0f} us" if margin > 0 else "never pays"))
    return rows


@click.command()
@click.option("--target", default="digits/target", show_default=True)
@click.option("--draft", default="digits/star", show_default=True)
@click.option("--workload", default="digits", show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--prompts", default=32, show_default=True)
@click.option("--tokens", default=96, show_default=True, help="Limit of the answers' length.")
@click.option("--level-us", type=float, help="A level of the host outside the draft; by default as estimated, 50.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path(".autotune/device-priced"), show_default=True)
def main(
    target: str,
    draft: str,
    workload: str,
    temperature: float,
    prompts: int,
    tokens: int,
    level_us: float | None,
    folder: Path,
) -> None:
    """Compare the predicted times of rounds led by the host and by the device."""
    console = Console()
    chosen = load_workload(workload, "tune", num_prompts=prompts).cut(prompts, tokens)
    chosen = chosen.sampled(temperature) if temperature > 0 else chosen
    folder = folder / f"{draft.replace('/', '-')}-{temperature:g}"
    paths = list(folder.glob("traces/*/*.trace.json"))
    if not paths:
        pool = ModelPool(target, [draft], "cpu")
        record_traces(pool, [(draft, Subnet())], chosen, folder, console, bounds=bounds_for([LARGEST]))
        paths = list(folder.glob("traces/*/*.trace.json"))
    trace = load_trace(paths[0])
    assert trace.header.workload_sha256 == chosen.sha256, f"{folder} has traces of other prompts; give another --folder"
    rows = [
        row
        for model, device in itertools.product(MODELS, DEVICES)
        for row in rows_of(pair_of(trace, model, device, level_us), [model, device])
    ]
    columns = ["shapes", "device", "rounds led", "tree", "speedup", "over host", "levels used", "pays below, a level"]
    title = f"{draft}, temperature {temperature:g}, {trace.num_prompts} prompts"
    console.table(title, columns, rows)


if __name__ == "__main__":
    main()
