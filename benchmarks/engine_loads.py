"""The depth that ``search --load`` chooses for each number of requests at once, beside all depths from 0 to 8.

    PYTHONPATH=. python benchmarks/engine_loads.py MODEL.gguf WORKLOAD --draft DRAFT.gguf --load 4 --load 16
    PYTHONPATH=. python benchmarks/engine_loads.py FOLDER WORKLOAD --engine vllm --type ngram

The depths are first measured as the search does it, which leaves out those that cannot be the best, and then the others
are. A row for each load and depth: whether the search measured it, its throughput over that of no speculation, and the
chosen depth's throughput over its own, with 95 % intervals. The last line of a load says whether the interval of the
chosen depth holds the best one. Takes about a minute for a depth of a model of 135M parameters on two cores.
"""

from __future__ import annotations

import math

import click

from autotune.console import Console
from autotune.documents.loads import LoadRun
from autotune.documents.speculation import DEEPEST
from autotune.search.engine_loads import LoadServers, chosen_depth, client_ms_per_token, throughput_ratio
from autotune.table import Table
from autotune.workloads.workload import load_workload
from benchmarks.engine_counts import ENGINES


def row_of(depth: int, of_load: dict[int, LoadRun], chosen: int, *, is_measured: bool) -> list[str]:
    ratios = throughput_ratio(of_load[depth], of_load[0]), throughput_ratio(of_load[chosen], of_load[depth])
    shown = ["{:.2f} ({:.2f}-{:.2f})".format(*ratio) for ratio in ratios]
    name = f"{depth}, chosen" if depth == chosen else str(depth)
    return [name, "yes" if is_measured else "no", *shown]


@click.command(help=__doc__)
@click.argument("model")
@click.argument("workload")
@click.option("--engine", "name", type=click.Choice(list(ENGINES)), default="llama.cpp")
@click.option("--draft", default=None)
@click.option("--command", default=None)
@click.option("--type", "kind", default=None, help="Of the speculation; by default the draft's.")
@click.option("--max-new-tokens", default=48)
@click.option("--prompts", "count", default=16)
@click.option("--load", "loads", type=int, multiple=True, default=(4, 16))
def main(
    model: str,
    workload: str,
    name: str,
    draft: str | None,
    command: str | None,
    kind: str | None,
    max_new_tokens: int,
    count: int,
    loads: tuple[int, ...],
) -> None:
    console = Console()
    backend = ENGINES[name](model, command=command, draft=draft, console=console)
    kind = kind or next(iter(backend.heads))
    backend.heads = {chain: head for chain, head in backend.heads.items() if chain == kind}
    prompts = [p.cut(max_new_tokens) for p in load_workload(workload, "evaluate").first_turns().prompts[:count]]
    servers = LoadServers(backend, backend.record(prompts), console)
    given = next(c for c in backend.configurations() if c.type == kind)
    runs = servers.by_depth(given, loads, math.inf)
    everywhere = runs
    for depth in range(DEEPEST + 1):
        if any(depth not in of_load for of_load in everywhere.values()):
            everywhere = servers.serve(everywhere, given.at_depth(depth), depth)
    for load, of_load in everywhere.items():
        chosen = chosen_depth(runs[load])
        rows = [row_of(depth, dict(of_load), chosen, is_measured=depth in runs[load]) for depth in sorted(of_load)]
        columns = ["depth", "measured by the search", "over depth 0", "chosen depth over it"]
        console.show(Table(f"{given.type}, {load} requests at once", columns, rows))
        best = min(of_load, key=lambda depth, of_load=of_load: client_ms_per_token(of_load[depth]))  # type: ignore[misc]
        high = throughput_ratio(of_load[chosen], of_load[best])[2]
        print(f"{load} at once: depth {chosen} is chosen, {best} is the fastest; its interval holds it: {high >= 1.0}")


if __name__ == "__main__":
    main()
