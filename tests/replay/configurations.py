"""Random configurations of every policy, and the trace of a draft whose proposals are hashed from the last two
tokens.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np

from autotune.replay.trace import Forest, ForestBounds, PackedForest, Trace
from autotune.trees.fallback import RoundPrice
from autotune.trees.priced import MAX_MATCH, identity_curves
from autotune.trees.tree import CHILD
from tests.sample_documents import header

HASH_TOKENS, HASH_PROPOSALS, HASH_DEPTH = 20, 16, 24


class Sizes(NamedTuple):
    """Largest hyperparameters to draw."""

    depth: int
    beam_depth: int
    k: int
    width: int
    top_k: int
    top_p: float


def random_tree_policy(name: str, rng: random.Random, sizes: Sizes) -> dict[str, Any]:
    if name == "chain":
        depth = rng.randint(1, sizes.depth)
        floor = {"p_min": rng.choice([0.0, 0.3, 0.6]), "n_min": rng.choice([0, 0, min(2, depth)])}
        return {"policy": name, "depth": depth, **floor}
    if name == "eagle2":
        tree: dict[str, Any] = {"depth": rng.randint(1, sizes.beam_depth), "k": rng.randint(1, sizes.k)}
        tree |= {"budget": rng.choice([1, 3, 8, 16, 24]), "floor": rng.choice([0, 0, 0.01, 0.1])}
        return {"policy": name, **tree}
    if name == "wetap":
        w_min, w_max = sorted(rng.choices(range(1, sizes.width + 1), k=2))
        tree = {"length": rng.randint(1, sizes.beam_depth), "w_min": w_min, "w_max": w_max}
        tree |= {"gamma": rng.choice([0.2, 1.2, 4.0]), "alpha": rng.random(), "budget": rng.choice([1, 4, 9, 24])}
        tree |= {"top_k": rng.randint(1, sizes.top_k), "top_p": rng.uniform(0.1, sizes.top_p)}
        return {"policy": name, **tree}
    if name == "priced":
        levels = [0.0, *np.cumsum([rng.choice([0.0, 0.05, 0.2]) for _ in range(4)]).tolist()]
        rows = np.cumsum([1.0, *(rng.choice([0.0, 0.01, 0.1]) for _ in range(12))]).tolist()
        prices = {"contexts": [10, 40], "level": [levels, levels[::-1]], "verify": [rows, rows]}
        tree = {"worth": rng.uniform(0.3, 1.5), "level_value": rng.uniform(0.4, 1.4), "rate": rng.choice([0.0, 0.1])}
        tree |= {"depth": rng.randint(1, sizes.depth), "width": rng.randint(1, 6), "k": rng.randint(1, sizes.k)}
        tree |= {"retrieval": rng.random() < 0.6, "skip_draft_above": rng.choice([0.5, 0.8, 1.0])}
        retrieved = np.linspace(0.2, 0.9, MAX_MATCH).tolist()
        calibration = {"curves": identity_curves().tolist(), "retrieved": [retrieved, retrieved], "num_tokens": 1}
        calibration |= {"draft": "", "draft_sha256": "", "workload_sha256": "", "log_loss": 0.1, "raw_log_loss": 0.1}
        tree |= {"prices": prices, "calibration": calibration}
        return {"policy": name, **tree, "budget": rng.choice([1, 4, 9, 24])}
    if name == "static":
        paths: list[tuple[int, ...]] = []
        for _ in range(rng.randint(1, 20)):
            parent = rng.choice([(), *(path for path in paths if len(path) < sizes.depth)])
            paths.append((*parent, rng.randint(0, 4)))
        return {"policy": name, "paths": tuple(dict.fromkeys(paths))}
    d_min, d_max = sorted(rng.choices(range(1, sizes.depth + 1), k=2))
    w_min, w_max = sorted(rng.choices(range(1, 17), k=2))
    lower, upper = sorted(rng.choices([0.5, 1.0, 1.5, 2.0, 3.0], k=2))
    tree = {"d_min": d_min, "d_max": d_max, "w_min": w_min, "w_max": w_max, "lower": lower, "upper": upper}
    tree |= {"window": rng.choice([1, 2, 3, 10]), "k": rng.randint(2, 16), "n_max": rng.choice([3, 8, 24, 64, 128])}
    tree |= {
        "confidence": rng.choice(["previous", "current"]),
        "depth_cap": rng.choice([None, rng.randint(d_min, sizes.depth)]),
        "below_threshold": rng.choice(["leaf", "drop"]),
        "rounding": rng.choice(["nearest", "floor", "ceil"]),
        "plan": rng.choice(["current", "previous"]),
    }
    if tree["plan"] == "previous":  # other trees leave a trace, whose nodes have high cumulative probabilities
        tree["threshold_on"] = rng.choice(["path", "token"])
    return {"policy": "sage", **tree}


def random_price(rng: random.Random) -> RoundPrice:
    """A price at which requests fall back now and then."""
    return RoundPrice(round_steps=rng.uniform(0.5, 2), level_steps=rng.uniform(0, 0.4), node_steps=0.02)


def hash_trace(seed: int, *, num_prompts: int, num_tokens: int) -> Trace:
    """The target follows the draft's most probable tokens most of the time. One row of proposals serves every position
    after the same two tokens, so that the trace holds any tree; a third of the rows have exact ties.
    """
    rng, vocabulary = np.random.default_rng(seed), HASH_TOKENS
    num_rows = vocabulary**2
    tokens = np.argsort(rng.random((num_rows, vocabulary)))[:, :HASH_PROPOSALS]
    probabilities = -np.sort(-rng.dirichlet(np.full(vocabulary, 0.15), num_rows))[:, :HASH_PROPOSALS]
    probabilities[::3] = np.repeat([0.25, 0.125, 0.0625, 0.0], [2, 2, 4, 8])
    proposals = np.zeros((num_rows + 1, HASH_PROPOSALS), CHILD)
    with np.errstate(divide="ignore"):
        proposals["logprob"][:-1] = np.log(probabilities)
    proposals["probability"], proposals["token"][:-1] = np.exp(proposals["logprob"]), tokens
    proposals["row"][:-1] = np.arange(num_rows)[:, None] % vocabulary * vocabulary + tokens
    proposals[-1] = (-np.inf, 0.0, -1, num_rows)
    answer, root_row = [], []
    for _ in range(num_prompts):
        row = int(rng.integers(num_rows))
        for _ in range(num_tokens):
            answer.append(row % vocabulary)
            root_row.append(row)
            row = int(proposals["row"][row, min(rng.geometric(0.65), 6) - 1])
        root_row[-1] = num_rows
    lengths = np.full(num_prompts, 10)
    bounds = ForestBounds(depth=HASH_DEPTH, num_proposals=HASH_PROPOSALS)
    nothing = np.zeros((0, HASH_PROPOSALS), np.int64)
    forest = Forest(np.array(answer), nothing, nothing.astype(np.float32), nothing)
    starts = np.arange(num_prompts + 1) * num_tokens
    trace = Trace(
        header(num_prompts, bounds=bounds), forest, starts, starts[:-1], lengths, lengths, 0 * lengths, 0 * lengths
    )
    trace.__dict__["packed"] = PackedForest(proposals, np.array(root_row, np.int32))
    return trace
