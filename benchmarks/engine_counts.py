"""Counts of an engine's n-gram speculation beside their replay, request by request, with the state carried.

    PYTHONPATH=. python benchmarks/engine_counts.py MODEL.gguf WORKLOAD... [--command 'llama-server -t 1']
    PYTHONPATH=. python benchmarks/engine_counts.py FOLDER WORKLOAD... --engine vllm

Every setting serves the prompts, and the first two again, in one server. A line is printed for each setting: requests
whose verifications, drafted and accepted tokens are those of the replay. A mismatch ends with exit code 1.
Takes about 20 minutes for a model of 135M parameters on one core.
"""

from __future__ import annotations

import sys

import click

from autotune.documents.speculation import OPTIONS, Speculation
from autotune.engines.engine import EngineBackend
from autotune.engines.llama_cpp import LlamaBackend
from autotune.engines.self_test import replayed_answers
from autotune.engines.vllm import VllmBackend
from autotune.workloads.workload import load_workload

ENGINES: dict[str, type[EngineBackend]] = {"llama.cpp": LlamaBackend, "vllm": VllmBackend}
TRIED: dict[str, dict[str, list[tuple[float, ...]]]] = {
    "llama.cpp": {
        "ngram-simple": [(3, 8), (5, 16), (1, 4), (8, 8), (2, 3)],
        "ngram-mod": [(4, 1, 8), (8, 4, 16), (16, 1, 64), (4, 0, 2), (1, 0, 64), (2, 0, 16)],
    },
    "vllm": {
        "suffix": [(8, 2.0, 0.25, 8), (24, 4.0, 0.05, 5), (24, 0.5, 0.1, 24), (4, 4.0, 0.5, 24), (64, 1.0, 0.02, 64)],
        "ngram": [(5, 5, 5), (1, 1, 3), (2, 8, 16), (1, 4, 8), (3, 3, 32), (2, 3, 1), (8, 16, 12)],
    },
}


def settings(engine: str) -> list[Speculation]:
    """The default of each type, and others."""
    rows = [(kind, OPTIONS[kind].values()) for kind in TRIED[engine]]
    rows += [(kind, values) for kind, found in TRIED[engine].items() for values in found]
    return [Speculation(type=kind, options=dict(zip(OPTIONS[kind], values, strict=True))) for kind, values in rows]


@click.command(help=__doc__)
@click.argument("model")
@click.argument("workloads", nargs=-1, required=True)
@click.option("--engine", "name", type=click.Choice(list(ENGINES)), default="llama.cpp")
@click.option("--command", default=None)
@click.option("--max-new-tokens", default=64)
@click.option("--prompts", "count", default=8)
def main(
    model: str, workloads: tuple[str, ...], name: str, command: str | None, max_new_tokens: int, count: int
) -> None:
    backend = ENGINES[name](model, command=command)
    by_workload = (load_workload(name, "evaluate").first_turns().prompts for name in workloads)
    mixed = [prompt for group in zip(*by_workload, strict=False) for prompt in group]
    prompts = [prompt.cut(max_new_tokens) for prompt in mixed[:count]]
    prompts += prompts[:2]  # asked again: what a server remembers of them drafts
    requests = exact = 0
    with backend.started(backend.tested[0]) as other:
        for one in settings(name):
            with backend.started(one) as server:
                answers = [server.ask(prompt) for prompt in prompts]
            pairs = list(zip(*replayed_answers(one, answers, other, prompts), strict=True))
            same = sum(answer.draft_counts == replayed.counts for answer, replayed in pairs)
            requests, exact = requests + len(pairs), exact + same
            print(f"{one.label:40} {same}/{len(pairs)}", flush=True)
    print(f"{exact} of {requests} requests exact")
    sys.exit(exact != requests)


if __name__ == "__main__":
    main()
