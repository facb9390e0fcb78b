"""Compares this code with another checkout: the same tokens, rounds and nodes, and the time of decoding.

Two processes, one with each checkout's code, decode the same held-out prompts in turns, in an order drawn for each
prompt, with several trees at temperature 0 and 1. Any difference in tokens or counts is an error. Prints the median
ratio of the decoding times with a bootstrap interval over prompts. Takes about 10 minutes for one draft and 12 prompts.

    git worktree add /tmp/base REVISION python benchmarks/revisions.py /tmp/base [--target digits/target --draft
    digits/independent] [--prompts 12] [--tree eagle2]
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

TREES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "chain": {"policy": "chain", "depth": 5},
    "eagle2": {"policy": "eagle2", "depth": 6, "k": 10, "budget": 60},
    "sage": {"policy": "sage"},
    "wetap": {"policy": "wetap"},
    "priced": {"policy": "priced"},
    "priced+retrieval": {"policy": "priced", "retrieval": True, "rate": 0.05},
}
TEMPERATURES = (0.0, 1.0)
COUNTS = ("rounds", "draft_forwards", "target_forwards", "verified_nodes", "accepted_lengths")


def serve(target_name: str, draft_name: str, workload_name: str, num_prompts: int, threads: int) -> None:
    """Decode what lines on standard input ask for. It uses only interfaces that checkouts share."""
    import torch

    from autotune.drafters.checkpoint import load_draft
    from autotune.modeling.loading import load_model, load_processor
    from autotune.modeling.target import Target
    from autotune.runtime.decoder import Decoder
    from autotune.workloads.workload import load_workload

    torch.set_num_threads(threads)
    processor, target = load_processor(target_name), Target(load_model(target_name, device="cpu"))
    workload = load_workload(workload_name, "evaluate", num_prompts=num_prompts)
    draft = load_draft(draft_name, target)
    decoders: dict[str, Decoder] = {}
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        name = request["tree"]
        if name not in decoders:
            options = {"tree": TREES[name], "mode": "eager", "processor": processor}
            decoders[name] = Decoder(target, None if TREES[name] is None else draft, **options)  # type: ignore[arg-type]
        prompt = workload.sampled(request["temperature"]).prompts[request["number"]]
        output = decoders[name].generate(**prompt.inputs(processor, "cpu"), **prompt.settings.generation)
        counts = {key: np.asarray(getattr(output.stats, key)).tolist() for key in COUNTS}
        answer = {"tokens": output.sequences[0].tolist(), **counts}
        print(json.dumps({"answer": answer, "decode_ms": output.stats.decode_ms}), flush=True)


class Side:
    """A process with one checkout's code."""

    def __init__(self, checkout: Path, arguments: list[str]) -> None:
        command = [sys.executable, __file__, str(checkout), "--serve", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
        self.process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        while self._line() != "ready":
            pass

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise click.ClickException("a process ended; see its error above")
        return line.strip()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self._line())
        return found


def median_interval(logs: list[float]) -> tuple[float, float, float]:
    """Median ratio and its 95 % bootstrap interval, from logarithms of ratios."""
    values, rng = np.array(logs), np.random.default_rng(0)
    medians = [np.median(rng.choice(values, len(values))) for _ in range(1000)]
    low, high = np.percentile(medians, (2.5, 97.5))
    return float(np.exp(np.median(values))), float(np.exp(low)), float(np.exp(high))


@click.command()
@click.argument("base", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--target", default="digits/target", show_default=True)
@click.option("--draft", default="digits/independent", show_default=True)
@click.option("--workload", default="digits", show_default=True)
@click.option("--prompts", "num_prompts", default=12, show_default=True)
@click.option("--passes", default=2, show_default=True, help="Timed passes over the prompts; one more warms up.")
@click.option("--tree", "trees", multiple=True, type=click.Choice(list(TREES)), help="May be repeated; default: all.")
@click.option(
    "--threads", default=2, show_default=True, help="CPU threads of each process, of which one works at a time."
)
@click.option("--serve", "is_server", is_flag=True, hidden=True)
def main(
    base: Path,
    target: str,
    draft: str,
    workload: str,
    num_prompts: int,
    passes: int,
    trees: tuple[str, ...],
    threads: int,
    is_server: bool,
) -> None:
    """Compare this code with the checkout BASE."""
    if is_server:
        serve(target, draft, workload, num_prompts, threads)
        return
    arguments = ["--target", target, "--draft", draft, "--workload", workload]
    arguments += ["--prompts", str(num_prompts), "--threads", str(threads)]
    sides = {"base": Side(base, arguments), "this": Side(Path(__file__).parents[1], arguments)}
    rng, num_different, num_compared = random.Random(0), 0, 0
    for tree in trees or TREES:
        for temperature in TEMPERATURES:
            logs: list[float] = []
            for number in range(num_prompts):
                for timed_pass in range(passes + 1):
                    request = {"tree": tree, "temperature": temperature, "number": number}
                    found = {name: sides[name].ask(request) for name in rng.sample(list(sides), 2)}
                    if timed_pass:
                        logs.append(float(np.log(found["this"]["decode_ms"] / found["base"]["decode_ms"])))
                num_compared += 1
                if found["this"]["answer"] != found["base"]["answer"]:
                    num_different += 1
                    print(f"DIFFERENT: {tree}, temperature {temperature:g}, prompt {number}")
            ratio, low, high = median_interval(logs)
            print(
                f"{tree}, temperature {temperature:g}: time {ratio:.3f} ({low:.3f}-{high:.3f}) of the base's",
                flush=True,
            )
    print(f"{num_different} of {num_compared} answers differ in tokens, rounds or nodes")
    sys.exit(1 if num_different else 0)


if __name__ == "__main__":
    main()
