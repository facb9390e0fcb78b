"""Counts of an engine's n-gram speculation beside their replay, request by request, with the state carried and cleared.

    PYTHONPATH=. python benchmarks/engine_counts.py MODEL.gguf WORKLOAD... --record counts.jsonl [--engine-command
    'llama-server -t 1'] PYTHONPATH=. python benchmarks/engine_counts.py FOLDER WORKLOAD... --engine vllm --carried 14
    --cleared 0

Servers whose counts the record holds are not started again, so that an interrupted run goes on. Every setting serves
the prompts in one server, and then the first ones each in a server of its own. A line is printed for each setting:
requests whose drafted and accepted tokens are those of the replay, and whether all verifications, drafts and
acceptances equal the server's /metrics. A mismatch ends with exit code 1. Takes about 20 minutes for a model of 135M
parameters on one core.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from autotune.documents.engine_profile import OPTIONS, TYPES, EngineName, Speculation
from autotune.engines.engine import ServingEngine
from autotune.engines.engine_runs import is_exact, with_replays
from autotune.engines.engine_search import ENGINES
from autotune.engines.ngram_replay import total
from autotune.files import append_line, content_key, read_lines
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import load_workload

TRIED = {
    "ngram-simple": [(3, 8), (5, 16), (1, 4), (8, 8), (2, 3)],
    "ngram-map-k": [(3, 8), (5, 16), (2, 4), (8, 12), (1, 2)],
    "ngram-map-k4v": [(3, 8, 1), (8, 24, 2), (2, 4, 2), (4, 8, 3), (1, 2, 1)],
    "ngram-mod": [(4, 1, 8), (8, 4, 16), (16, 1, 64), (4, 0, 2), (1, 0, 64), (2, 0, 16)],
    "ngram-cache": [],
    "suffix": [(8, 2.0, 0.25, 8), (24, 4.0, 0.05, 5), (24, 0.5, 0.1, 24), (4, 4.0, 0.5, 24), (64, 1.0, 0.02, 64)],
    "ngram": [(5, 5, 5), (1, 1, 3), (2, 8, 16), (1, 4, 8), (3, 3, 32), (2, 3, 1), (8, 16, 12)],
}


def settings(engine: EngineName) -> list[list[Speculation]]:
    """The server of all types, and one for each setting: the defaults of all types, then the others of each in turn."""
    by_type = [
        [
            Speculation(type=name, options=dict(zip(OPTIONS[name], values, strict=True)))
            for values in (OPTIONS[name].values(), *TRIED[name])
        ]
        for name in TYPES[engine]
    ]
    in_turn = (one for row in itertools.zip_longest(*by_type) for one in row if one is not None)
    return [list(ENGINES[engine].pricing), *([one] for one in in_turn)]


@click.command(help=__doc__)
@click.argument("model")
@click.argument("workloads", nargs=-1, required=True)
@click.option("--engine", "name", type=click.Choice(list(ENGINES)), default="llama.cpp")
@click.option("--engine-command", default=None)
@click.option("--max-new-tokens", default=64)
@click.option("--carried", default=10)
@click.option("--cleared", default=4)
@click.option("--record", type=click.Path(path_type=Path), default=Path("counts.jsonl"), show_default=True)
def main(
    model: str,
    workloads: tuple[str, ...],
    name: EngineName,
    engine_command: str | None,
    max_new_tokens: int,
    carried: int,
    cleared: int,
    record: Path,
) -> None:
    if (found := ENGINES[name].find_model(model)) is None:
        raise click.UsageError(f"{model}: {name} loads {ENGINES[name].models}")
    engine = ENGINES[name].find(engine_command, found[0])
    by_workload = (load_workload(name, "evaluate").first_turns().prompts for name in workloads)
    mixed = [prompt for group in zip(*by_workload, strict=False) for prompt in group]
    prompts = [prompt.cut(max_new_tokens) for prompt in mixed[: carried - 2]]
    prompts += prompts[:2]  # asked again: what a server remembers of them drafts
    known = {row["key"]: row for row in read_lines(record)}
    requests = exact = 0
    totals = True
    for chosen in settings(name):
        rows = []
        for served in (prompts, *([one] for one in prompts[:cleared])):
            what = [engine.words(chosen), [[one.sha256, one.settings.max_new_tokens] for one in served]]
            if (key := content_key([found[1].sha256, *what])) not in known:
                known[key] = compare(engine, chosen, served) | {"key": key}
                append_line(record, known[key])
            rows.append(known[key])
        num, same = sum(len(row["exact"]) for row in rows), sum(sum(row["exact"]) for row in rows)
        is_total = all(row["counted"] == row["replayed"] for row in rows)
        requests, exact, totals = requests + num, exact + same, totals and is_total
        label = " ".join(one.label for one in chosen)
        counted = ", ".join(f"{sum(row['counted'][name] for row in rows)} {name}" for name in rows[0]["counted"])
        print(f"{label:40} {same}/{num}; totals {'equal' if is_total else 'DIFFER'}; {counted}", flush=True)
    print(
        f"{exact} of {requests} requests exact; totals {'equal' if totals else 'differ from'} /metrics in every server"
    )
    sys.exit(exact != requests or not totals)


def compare(engine: ServingEngine, chosen: Sequence[Speculation], prompts: Sequence[WorkloadPrompt]) -> dict[str, Any]:
    """Whether each request's counts are the replay's, and the totals of a new server and of the replay."""
    with ExitStack() as stack:
        server = stack.enter_context(engine.started(chosen))
        other = stack.enter_context(engine.started()) if server.keeps_answers else None
        rows = with_replays([server.ask(prompt, other) for prompt in prompts], chosen, server.context)
        counted, replayed = server.counts(), total(one.counts for _, one in rows)
    exact = [is_exact(*row) for row in rows]
    return {"exact": exact, "counted": counted.model_dump(), "replayed": replayed.model_dump()}


if __name__ == "__main__":
    main()
