"""Writes a workload of the first turns of MT-Bench, HumanEval and GSM8K, of 40 prompts each, from the files as they are
published.

The prompts are drawn at random with a fixed seed, and the three benchmarks take turns; two of five tune, the others
evaluate. Answers have at most 128 tokens. The files are not part of this repository. Takes about 10 seconds.

    python benchmarks/published_prompts.py mt_bench.jsonl HumanEval.jsonl.gz gsm8k_test.jsonl -o
    .autotune/results/benchmarks.jsonl
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import click

from autotune.workloads.workload import load_workload

TASKS = ("mt-bench", "humaneval", "gsm8k")
PROMPTS, TOKENS = 40, 128


def drawn(path: Path) -> list[str]:
    """The first turns of the prompts that are drawn from a file, each once."""
    prompts = list(load_workload(str(path), "evaluate", is_whole=True).prompts)
    random.Random(0).shuffle(prompts)
    firsts = (prompt.settings.turns[0] if prompt.settings.turns else prompt.settings.text for prompt in prompts)
    return list(dict.fromkeys(firsts))[:PROMPTS]


@click.command()
@click.argument("files", nargs=len(TASKS), type=click.Path(path_type=Path, exists=True))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
def main(files: tuple[Path, ...], output: Path) -> None:
    """Write the workload of the files of MT-Bench, HumanEval and GSM8K."""
    rounds = zip(*map(drawn, files), strict=True)
    rows = [
        {"prompt": text, "task": task, "split": "tune" if number % 5 < 2 else "evaluate", "max_new_tokens": TOKENS}
        for number, texts in enumerate(rounds)
        for task, text in zip(TASKS, texts, strict=True)
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
