"""Small workloads, traces, cost tables and profiles for tests. Loads no torch."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from autotune.cost.joint_fit import refitted
from autotune.cost.request_costs import Overhead, PrefillCost
from autotune.cost.surface import Observation, Point, Surface
from autotune.cost.table import CostTable, DensePrices, DraftCosts
from autotune.documents.decoding_profile import (
    DecodingProfile,
    DraftChoice,
    Evidence,
    OperatingPoint,
    Predicted,
    WorkloadReference,
)
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance
from autotune.documents.subnet import Subnet
from autotune.replay.trace import Forest, ForestBounds, RecordedPrompt, Trace, TraceHeader, join
from autotune.trees.policy import parse_policy

PROVENANCE = Provenance(autotune="0", created="2025-01-01T00:00:00+00:00", python="3", torch="2", transformers="5")
TARGET = ModelReference(id="tests/target", sha256="a" * 64)
DRAFT = ModelReference(id="tests/draft", sha256="b" * 64)
DEVICE = Fingerprint(name="abacus", kind="cpu", model="An abacus", num_cores=1, memory_bytes=100)
NO_PREFILL = PrefillCost(intercept_ms=0, per_token_ms=0, image_ms=0, samples=[])


# -------- workloads


def write_image(path: Path, seed: int, *, size: int = 32) -> str:
    """Write a PNG of noise, of the tiny pair's image size, and return its name."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path.name


def write_workload(folder: Path, prompts: Iterable[dict[str, Any] | str], *, name: str = "workload.jsonl") -> Path:
    """Write a JSONL workload; strings are written as they are."""
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in prompts))
    return path


# -------- traces


def header(
    num_prompts: int, *, bounds: ForestBounds | None = None, subnet: Subnet | None = None, **fields: Any
) -> TraceHeader:
    """A trace's header with numbered prompts of the task ``prompt``."""
    known: dict[str, Any] = {
        "provenance": PROVENANCE,
        "target": TARGET,
        "draft": DRAFT,
        "draft_kind": "independent",
        "subnet": (subnet or Subnet()).model_dump(),
        "workload": "by hand",
        "workload_sha256": "c" * 64,
        "bounds": bounds or ForestBounds(),
        "prompts": [str(number) for number in range(num_prompts)],
        "tasks": ["prompt"] * num_prompts,
    }
    return TraceHeader(**{**known, **fields})


def forest_of(answer: list[int], nodes: list[list[tuple[int, float, int]]]) -> Forest:
    """A forest: each node is a list of (child token, probability, child node or -1), most probable first."""
    rows = np.array(nodes, np.float64).reshape(len(nodes), -1, 3)
    return Forest(
        np.array(answer, np.int64),
        rows[:, :, 0].astype(np.int64),
        np.log(rows[:, :, 1]).astype(np.float32),
        rows[:, :, 2].astype(np.int64),
    )


def random_forest(rng: np.random.Generator, num_tokens: int, *, k: int = 4, depth: int = 4) -> Forest:
    """A full forest in which the next answer token is among a node's children nine times out of ten."""
    answer = rng.integers(0, 50, num_tokens)
    child_token, child_logprob, child_node = [], [], []
    # (answer tokens before the node's children, level of the children, whether the path is the answer)
    waiting = deque((position + 1, 1, True) for position in range(num_tokens - 1))
    num_nodes = len(waiting)
    while waiting:
        following, level, is_answer = waiting.popleft()
        tokens = rng.permutation(50)[:k]
        is_on = is_answer and following < num_tokens
        if is_on and rng.random() < 0.9 and answer[following] not in tokens:
            tokens[min(k - 1, rng.geometric(0.6) - 1)] = answer[following]
        child_token.append(tokens)
        child_logprob.append(np.log(0.95 * np.sort(rng.dirichlet(np.full(k, 0.5)) + 1e-6)[::-1]))
        child_node.append(np.full(k, -1))
        if level < depth:
            child_node[-1] = num_nodes + np.arange(k)
            num_nodes += k
            waiting.extend((following + 1, level + 1, bool(is_on and token == answer[following])) for token in tokens)
    return Forest(answer, np.array(child_token), np.array(child_logprob, np.float32), np.array(child_node))


def random_trace(
    seed: int, *, visual_keep: float = 1.0, num_prompts: int = 4, num_tokens: int = 12, depth: int = 4
) -> Trace:
    """Prompts of different lengths whose forests have 4 children of every node up to a depth."""
    rng = np.random.default_rng(seed)
    parts = [
        RecordedPrompt(
            random_forest(rng, num_tokens + number, depth=depth), 20 + number, 10 + number, 10 * (number % 2)
        )
        for number in range(num_prompts)
    ]
    return join(
        header(num_prompts, bounds=ForestBounds(depth=depth, num_proposals=4), subnet=Subnet(visual_keep=visual_keep)),
        parts,
    )


# -------- cost tables


def surface(
    latency_ms: Callable[[int, int], float],
    *,
    tokens: Iterable[int] = (1, 2, 8, 65),
    kv_lengths: Iterable[int] = (16, 256, 400),
) -> Surface:
    """A surface with one sample at every point."""

    def point(n: int, m: int) -> Point:
        return Point(tokens=n, kv_length=m, samples_ms=[latency_ms(n, m)])

    lengths = list(kv_lengths)
    return Surface(points=[point(n, m) for n in tokens for m in lengths])


def cost_table(draft: ModelReference = DRAFT, **fields: Any) -> CostTable:
    """A draft level costs a fifth of a target step; tokens and KV length cost little."""
    costs = DraftCosts(
        draft=draft,
        draft_first=surface(lambda n, m: 0.3 + 0.01 * n + 0.0001 * m),
        draft_level=surface(lambda n, m: 0.2 + 0.01 * n + 0.0001 * m),
        prefill=NO_PREFILL,
        overhead=Overhead(round_ms=0.05, level_ms=0.01),
    )
    known: dict[str, Any] = {
        "provenance": PROVENANCE,
        "device": DEVICE,
        "precision": "float32",
        "target": TARGET,
        "decode": surface(lambda n, m: 1.0 + 0.001 * m, tokens=(1,)),
        "verify": surface(lambda n, m: 1.0 + 0.02 * n + 0.001 * m),
        "prefill": NO_PREFILL,
        "drafts": [costs],
    }
    return CostTable(**{**known, **fields})


def observed_table(error: float, **fields: Any) -> CostTable:
    """``cost_table`` as if it had been measured: every price is observed with a relative standard error, and fitted."""

    def observed(of: Surface) -> Surface:
        points = [
            point.model_copy(update={"observed": Observation(ms=point.latency_ms, error=error)}) for point in of.points
        ]
        return of.model_copy(update={"points": points})

    table = cost_table(**fields)
    drafts = [
        costs.model_copy(
            update={"draft_first": observed(costs.draft_first), "draft_level": observed(costs.draft_level)}
        )
        for costs in table.drafts
    ]
    parts = {"decode": observed(table.decode), "verify": observed(table.verify), "drafts": drafts}
    return refitted(table.model_copy(update=parts))


def free_prices() -> DensePrices:
    """Prices of 0, for tests of counts."""
    nothing = np.zeros((2, 1))
    return DensePrices(nothing[0], nothing, nothing, nothing, 16, Overhead(round_ms=0, level_ms=0), NO_PREFILL)


# -------- profiles


def decoding_profile(
    target: ModelReference = TARGET,
    draft: ModelReference | None = DRAFT,
    *,
    tree: dict[str, Any] | None = None,
    visual_keep: float = 1.0,
    hardware: Fingerprint = DEVICE,
) -> DecodingProfile:
    """A profile without measurements; plain decoding if ``draft`` is None."""
    choice = None
    if draft is not None:
        subnet = Subnet(visual_keep=visual_keep)
        choice = DraftChoice(kind="independent", id=draft.id, sha256=draft.sha256, subnet=subnet)
    policy = parse_policy(tree or {"policy": "chain", "depth": 3}) if draft is not None else None
    predicted = Predicted(speedup=2.0, ms_per_token=1.0, tokens_per_round=2.5)
    workload = WorkloadReference(
        name="by hand", tune_sha256="d" * 64, evaluate_sha256="e" * 64, num_tune_prompts=1, num_evaluate_prompts=1
    )
    return DecodingProfile(
        provenance=PROVENANCE,
        target=target,
        workload=workload,
        hardware=hardware,
        precision="float32",
        point=OperatingPoint(draft=choice, tree=policy, predicted=predicted, measured=None),
        evidence=Evidence(),
    )
