"""Compares draft forward passes of a pruned prompt with those at the KV length that prices them
(``Trace.draft_kv_length``).

In a pruned prompt, cross-attention blocks attend to all tokens and the others to what is left; cost tables are measured
with one KV length for all blocks. Forward passes are interleaved; medians are printed. Takes about two minutes.

    python benchmarks/crossing_lengths.py [DRAFT] [--repeats 200]
"""

from __future__ import annotations

import random

import click
import numpy as np
import pandas as pd
import torch

from autotune.drafters.checkpoint import load_draft
from autotune.drafters.feature_draft import FeatureDraft
from autotune.modeling.host import now_ms
from autotune.modeling.loading import BUNDLED_TARGET, load_model
from autotune.modeling.step import Step
from autotune.modeling.target import Target

TOKENS = (1, 4, 10)
LENGTHS = ((128, 1024), (1024, 1024), (128, 4096), (1024, 4096), (2048, 8192), (256, 8192))
"""KV lengths of blocks without and with crossing."""


def forward_ms(draft: FeatureDraft, num_tokens: int, own: int, whole: int) -> float:
    """Latency of a draft level. The contents of the caches are arbitrary, because latency does not depend on them."""
    draft.cache.length, draft._num_condensed = own, whole - own
    tree_mask = np.where(np.eye(num_tokens, dtype=bool), 0.0, draft.mask_value).astype(np.float32)
    step = Step(np.ones(num_tokens, np.int64), np.zeros(num_tokens, np.int64), tree_mask)
    started = now_ms(draft.device)
    draft.forward(step, np.full(num_tokens, -1))
    return now_ms(draft.device) - started


@click.command()
@click.argument("draft", default="digits/dream")
@click.option("--repeats", default=200, show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--mode", default="eager", show_default=True)
def main(draft: str, repeats: int, threads: int, mode: str) -> None:
    torch.set_num_threads(threads)
    target = Target(load_model(BUNDLED_TARGET))
    loaded = load_draft(draft, target)
    assert isinstance(loaded, FeatureDraft) and loaded.network.has_cross_attention, (
        f"{draft} has no cross-attention block"
    )
    loaded.reserve(max(whole for _, whole in LENGTHS) + 256)
    loaded.use_mode(mode)
    share, rows, order = loaded.network.crossing_share, [], random.Random(0)
    cases = []
    for own, whole in LENGTHS:
        cases += [(n, (own, whole), name) for n in TOKENS for name in ("both lengths", "priced", "own length only")]
    for repeat in range(repeats + 3):
        for num_tokens, (own, whole), name in order.sample(cases, len(cases)):
            priced = own if name == "own length only" else round(own + share * (whole - own))
            lengths = (own, whole) if name == "both lengths" else (priced, priced)
            ms = forward_ms(loaded, num_tokens, *lengths)
            if repeat >= 3:
                rows.append({"tokens": num_tokens, "lengths": (own, whole), "case": name, "ms": ms})
    table = pd.DataFrame(rows).pivot_table(index=["lengths", "tokens"], columns="case", values="ms", aggfunc="median")
    for name in ("priced", "own length only"):
        table[f"{name}, error"] = [f"{100 * error:+.1f} %" for error in table[name] / table["both lengths"] - 1]
    click.echo(table.round(3).to_string())


if __name__ == "__main__":
    with torch.inference_mode():
        main()
