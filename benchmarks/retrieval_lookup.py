"""Measures what a lookup of a retrieval draft costs by length of the text, and how many tokens a round it earns by
task.

Times are medians over a text whose tokens are drawn from a Zipf distribution. Tokens
per round are counted along held-out answers of the bundled target, so they do not depend on the machine.
Takes about two minutes.

    python benchmarks/retrieval_lookup.py [--prompts 64] [--depth 5] [--folder .autotune/retrieval-lookup]
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import numpy as np

from autotune.console import Console
from autotune.documents.provenance import ModelReference
from autotune.drafters.retrieval import MAX_MATCH, RetrievalDraft
from autotune.evaluation.runtime_arms import PROMPT_LOOKUP_MATCH
from autotune.modeling.loading import BUNDLED_TARGET, RETRIEVAL
from autotune.recording.traces import recorder_of
from autotune.replay.reference_replay import rounds
from autotune.replay.trace import Trace, bounds_for
from autotune.runtime.model_pool import ModelPool
from autotune.trees.chain import ChainPolicy
from autotune.trees.policy import Policy
from autotune.trees.tree import ROOT, new_tree, set_root
from autotune.workloads.workload import load_workload

TEXT_LENGTHS = (300, 4_000, 32_000)
NUM_ROUNDS = 2_000
VOCAB_SIZE = 150_000
ZIPF = 1.2  # exponent
PROPOSALS = 4


def time_lookups(length: int) -> list[str]:
    """Microseconds to index a prompt of ``length`` tokens, to append a token, and to look up: median and 99th
    percentile.
    """
    config = SimpleNamespace(image_token_id=None)
    draft = RetrievalDraft()
    draft.attach(cast(Any, SimpleNamespace(vocab_size=VOCAB_SIZE, model=SimpleNamespace(config=config))))
    tokens = np.random.default_rng(0).zipf(ZIPF, length + NUM_ROUNDS)
    text = np.minimum(tokens, VOCAB_SIZE - 1).astype(np.int32)
    tree, root = new_tree(1), np.array([ROOT])
    set_root(tree, 0, -1)
    draft.prefill(text[:100], None, capacity=0)
    draft.propose(tree, root, PROPOSALS)  # compiles
    started = time.perf_counter()
    draft.prefill(text[:length], None, capacity=0)
    prefill_s = time.perf_counter() - started
    appends, lookups = [], []
    for token in text[length:]:
        started = time.perf_counter()
        draft.append(int(token))
        appends.append(time.perf_counter() - started)
        started = time.perf_counter()
        draft.propose(tree, root, PROPOSALS)
        lookups.append(time.perf_counter() - started)
    figures = prefill_s, np.median(appends), np.median(lookups), np.percentile(lookups, 99)
    return [f"{length:,}", *(f"{1e6 * seconds:.1f}" for seconds in figures)]


def tokens_per_round(trace: Trace, policy: Policy) -> dict[str, float]:
    """M by task, and of all tasks."""
    num_rounds = np.array([len(list(rounds(trace, prompt, policy))) for prompt in range(trace.num_prompts)])
    num_tokens, tasks = np.diff(trace.answer_start) - 1, np.array(trace.header.tasks)
    of_task = {task: tasks == task for task in dict.fromkeys(trace.header.tasks)} | {"all": np.ones(len(tasks), bool)}
    return {task: float(num_tokens[is_in].sum() / num_rounds[is_in].sum()) for task, is_in in of_task.items()}


@click.command()
@click.option("--prompts", default=64, show_default=True)
@click.option("--depth", default=5, show_default=True, help="Tokens of the chain.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path(".autotune/retrieval-lookup"))
def main(prompts: int, depth: int, folder: Path) -> None:
    """Time lookups, and count tokens per round by task for prompt lookup and for retrieval."""
    console = Console()
    rows = [time_lookups(length) for length in TEXT_LENGTHS]
    columns = ["tokens of text", "index the prompt", "append", "lookup, median", "99th percentile"]
    console.table("Microseconds", columns, rows)
    pool = ModelPool(BUNDLED_TARGET, (RETRIEVAL,), "cpu")
    workload = load_workload("digits", "evaluate", num_prompts=prompts)
    policy = ChainPolicy(depth=depth)
    by_task = {}
    for max_match in (PROMPT_LOOKUP_MATCH, MAX_MATCH):
        draft = RetrievalDraft(max_match=max_match)
        draft.attach(pool.target)
        named = ModelReference(id=f"{RETRIEVAL}, matches of at most {max_match} tokens", sha256="")
        trace = recorder_of(pool, folder).trace(draft, named, workload, visual_keep=1.0, bounds=bounds_for([policy]))
        by_task[max_match] = tokens_per_round(trace, policy)
    tasks = list(next(iter(by_task.values())))
    rows = [[f"at most {match} tokens", *(f"{m[task]:.2f}" for task in tasks)] for match, m in by_task.items()]
    console.table(f"Tokens per round, {policy.label}", ["match", *tasks], rows)


if __name__ == "__main__":
    main()
