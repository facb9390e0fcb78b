"""Every depth of an engine's draft model or head, predicted from one recording and counted in a server of each depth.

    PYTHONPATH=. python benchmarks/engine_depths.py MODEL.gguf WORKLOAD --draft DRAFT.gguf
    PYTHONPATH=. python benchmarks/engine_depths.py FOLDER WORKLOAD --draft FOLDER --engine vllm

A row for each depth: requests whose verifications, drafted and accepted tokens are those of the replay, tokens per pass
and speedup over plain decoding, predicted and counted. The servers of all depths and a plain one run at once, and every
prompt is asked in them in random order, so that the machine's other work meets them alike. The last line has the
largest difference of tokens per pass and the median difference of the speedup.

Takes about 15 minutes for a model of 135M parameters on two cores.

With ``--load 4 --load 16`` instead, depths are measured at these numbers of requests at once: first as ``search
--load`` does it, which leaves out those that cannot be the best, and then the others. A row for each depth: whether the
search measured it, its throughput over that of depth 0, and the chosen depth's over its own, with 95 % intervals.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import median

import click
import numpy as np

from autotune.console import Console
from autotune.documents.decoded import Decoded, tokens_per_pass
from autotune.documents.loads import LoadRun
from autotune.documents.speculation import DEEPEST, Speculation
from autotune.engines.engine import EngineBackend
from autotune.engines.prices import EnginePrices
from autotune.engines.replay import EngineRecorded
from autotune.search.engine_loads import LoadServers, chosen_depth, client_ms_per_token, throughput_ratio
from autotune.table import Table, number, percent, times
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import load_workload
from benchmarks.engine_counts import ENGINES


def rate_of(answers: list[Decoded]) -> float:
    """Milliseconds of a token after the first, pooled over answers."""
    return sum(answer.decode_ms for answer in answers) / sum(answer.new_tokens - 1 for answer in answers)


def measured(
    backend: EngineBackend, chains: list[Speculation], prompts: list[WorkloadPrompt], at_once: int
) -> dict[str, tuple[list[Decoded], float]]:
    """Answers of a server of each chain, and its speedup over the plain server that ran beside it, by label.

    Args:
        at_once: chains whose servers run at the same time.
    """
    found = dict[str, tuple[list[Decoded], float]]()
    for begin in range(0, len(chains), at_once):
        with ExitStack() as stack:
            arms = [stack.enter_context(backend.arm(c)) for c in (None, *chains[begin : begin + at_once])]
            answers: dict[str, list[Decoded]] = {arm.name: [] for arm in arms}
            for prompt in prompts:
                for arm in random.sample(arms, len(arms)):
                    answers[arm.name].append(arm.decode(prompt))
        plain_ms = rate_of(answers.pop("off"))
        found |= {name: (rows, plain_ms / rate_of(rows)) for name, rows in answers.items()}
    return found


def rows_of(
    backend: EngineBackend,
    recorded: EngineRecorded,
    prices: EnginePrices,
    chains: list[Speculation],
    served: dict[str, tuple[list[Decoded], float]],
) -> list[tuple[list[str], float, float]]:
    """A row of the table for each chain, with the relative differences of tokens per pass and of the speedup."""
    plain_ms, rows = prices.ms(backend.replay(None, recorded)).sum(), list[tuple[list[str], float, float]]()
    for chain in chains:
        steps, (answers, speedup) = backend.replay(chain, recorded), served[chain.label]
        counts = [(answer.rounds, answer.verified_nodes, answer.accepted_tokens) for answer in answers]
        exact = sum(map(np.array_equal, counts, steps.counts))
        predicted = tokens_per_pass((request.num_tokens, *request.counts[::2]) for request in steps.requests)
        counted = tokens_per_pass((answer.new_tokens - 1, answer.rounds, answer.accepted_tokens) for answer in answers)
        expected = float(plain_ms / prices.ms(steps).sum())
        cells = [f"{exact}/{len(counts)}", number(predicted, 3), number(counted, 3), times(expected), times(speedup)]
        rows.append(
            ([chain.type, backend.name, str(chain.depth), *cells], predicted / counted - 1, expected / speedup - 1)
        )
    return rows


def at_loads(backend: EngineBackend, recorded: EngineRecorded, kind: str, loads: Sequence[int]) -> None:
    """Show all depths of a type at each load, beside those that ``search --load`` measures and the one it chooses."""
    servers, given = (
        LoadServers(backend, recorded, backend.console),
        next(c for c in backend.configurations() if c.type == kind),
    )
    runs = servers.by_depth(given, loads, math.inf)
    everywhere = runs
    for depth in range(DEEPEST + 1):
        if any(depth not in of_load for of_load in everywhere.values()):
            everywhere = servers.serve(everywhere, given.at_depth(depth), depth)
    for load, of_load in everywhere.items():
        chosen, best = chosen_depth(runs[load]), min(of_load, key=lambda depth: client_ms_per_token(of_load[depth]))
        rows = [load_row(depth, of_load, chosen, is_measured=depth in runs[load]) for depth in sorted(of_load)]
        columns = ["depth", "measured by the search", "over depth 0", "chosen depth over it"]
        backend.console.show(Table(f"{kind}, {load} requests at once", columns, rows))
        high = throughput_ratio(of_load[chosen], of_load[best])[2]
        print(f"{load} at once: depth {chosen} is chosen, {best} is the fastest; its interval holds it: {high >= 1.0}")


def load_row(depth: int, of_load: Mapping[int, LoadRun], chosen: int, *, is_measured: bool) -> list[str]:
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
@click.option("--max-new-tokens", default=48)
@click.option("--prompts", "count", default=12)
@click.option("--depth", "depths", type=int, multiple=True, default=range(1, DEEPEST + 1))
@click.option("--at-once", default=2, help="Chains whose servers run at the same time.")
@click.option("--load", "loads", type=int, multiple=True, help="Requests at once, of which all depths are measured.")
@click.option("--type", "kind", default=None, help="With --load: the type, if it is not the draft's.")
def main(
    model: str,
    workload: str,
    name: str,
    draft: str | None,
    command: str | None,
    max_new_tokens: int,
    count: int,
    depths: tuple[int, ...],
    at_once: int,
    loads: tuple[int, ...],
    kind: str | None,
) -> None:
    console = Console()
    backend = ENGINES[name](model, command=command, draft=draft, console=console)
    prompts = [p.cut(max_new_tokens) for p in load_workload(workload, "evaluate").first_turns().prompts[:count]]
    if kind is not None:
        backend.heads = {name: head for name, head in backend.heads.items() if name == kind}
    if loads:
        at_loads(backend, backend.record(prompts), kind or next(iter(backend.heads)), loads)
        return
    begun = time.monotonic()
    with backend.kept_open():
        recorded = backend.record(prompts)
        prices = backend.price(recorded)
        console.say(f"{time.monotonic() - begun:.0f} s for the recording and the prices")
        replayed = [c for c in backend.configurations() if c.is_chain and c.type not in prices.left_out]
        chains = [chain for chain in replayed if chain.depth in depths]
        rows = rows_of(backend, recorded, prices, chains, measured(backend, chains, prompts, at_once))
    columns = ["head", "engine", "depth", "counts exact", "tokens per pass", "counted", "speedup", "measured"]
    console.show(Table("Depths, predicted from one recording", columns, [cells for cells, *_ in rows]))
    print(
        f"tokens per pass differ by {percent(max(abs(row[1]) for row in rows), 1)} at most, and speedups by "
        f"{percent(median(abs(row[2]) for row in rows), 1)} in the median"
    )


if __name__ == "__main__":
    main()
