"""Counts of llama-server's n-gram speculation beside their replay, request by request, with the state carried and cleared.

    PYTHONPATH=. python benchmarks/engine_counts.py MODEL.gguf WORKLOAD... [--engine-command 'llama-server -t 1']

Every setting serves the prompts in one server, and then the first ones each in a server of its own. A line is printed for each setting:
requests whose drafted and accepted tokens are those of the replay, and whether all verifications, drafts and acceptances equal the
server's /metrics. A mismatch ends with exit code 1. Takes about 20 minutes for a model of 135M parameters on one core.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from autotune.documents.engine_profile import OPTIONS, Speculation
from autotune.serving.engine_runs import is_exact, with_replays
from autotune.serving.llama_server import EngineCommand, find_engine, started_llama
from autotune.serving.ngram_replay import total
from autotune.serving.verification_prices import PRICING
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import load_workload

TRIED = {
    "ngram-simple": [(3, 8), (5, 16), (1, 4), (8, 8), (2, 3)],
    "ngram-map-k": [(3, 8), (5, 16), (2, 4), (8, 12), (1, 2)],
    "ngram-map-k4v": [(3, 8, 1), (8, 24, 2), (2, 4, 2), (4, 8, 3), (1, 2, 1)],
    "ngram-mod": [(4, 1, 8), (8, 4, 16), (16, 1, 64), (4, 0, 2), (1, 0, 64), (2, 0, 16)],
    "ngram-cache": [],
}


def settings() -> list[list[Speculation]]:
    """One server of all types, and one for each setting: the defaults of all types, then the others of each in turn."""
    by_type = [
        [
            Speculation(type=name, options=dict(zip(defaults, values, strict=True)))
            for values in (defaults.values(), *TRIED[name])
        ]
        for name, defaults in OPTIONS.items()
    ]
    in_turn = (one for row in itertools.zip_longest(*by_type) for one in row if one is not None)
    return [list(PRICING), *([one] for one in in_turn)]


@click.command(help=__doc__)
@click.argument("model", type=click.Path(path_type=Path, exists=True))
@click.argument("workloads", nargs=-1, required=True)
@click.option("--engine-command", default=None)
@click.option("--max-new-tokens", default=64)
@click.option("--carried", default=10)
@click.option("--cleared", default=4)
def main(
    model: Path, workloads: tuple[str, ...], engine_command: str | None, max_new_tokens: int, carried: int, cleared: int
) -> None:
    command = find_engine(engine_command, model)
    by_workload = (load_workload(name, "evaluate").first_turns().prompts for name in workloads)
    mixed = [prompt for group in zip(*by_workload, strict=False) for prompt in group]
    prompts = [prompt.cut(max_new_tokens) for prompt in mixed[: carried - 2]]
    prompts += prompts[:2]  # asked again: what a server remembers of them drafts
    requests = exact = 0
    totals = True
    for chosen in settings():
        rows = [compare(command, chosen, prompts), *(compare(command, chosen, [one]) for one in prompts[:cleared])]
        num, same = sum(len(row[0]) for row in rows), sum(sum(row[0]) for row in rows)
        requests, exact, totals = requests + num, exact + same, totals and all(row[1] for row in rows)
        label = " ".join(one.label for one in chosen)
        print(
            f"{label:40} {same}/{num}; totals {'equal' if all(row[1] for row in rows) else 'DIFFER'}; {rows[0][2]}",
            flush=True,
        )
    print(
        f"{exact} of {requests} requests exact; totals {'equal' if totals else 'differ from'} /metrics in every server"
    )
    sys.exit(exact != requests or not totals)


def compare(
    command: EngineCommand, chosen: Sequence[Speculation], prompts: Sequence[WorkloadPrompt]
) -> tuple[list[bool], bool, str]:
    """Whether each request's counts are the replay's, whether the totals are, and the totals in words."""
    with started_llama(command, chosen) as server:
        rows = with_replays([server.ask(prompt) for prompt in prompts], chosen, server.context)
        counted = server.counts()
    shown = f"{counted.verifications} verifications, {counted.drafted} drafted, {counted.accepted} accepted"
    return [is_exact(*row) for row in rows], counted == total(replayed.counts for _, replayed in rows), shown


if __name__ == "__main__":
    main()
