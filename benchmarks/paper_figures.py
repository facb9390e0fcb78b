"""Writes the figures that the papers show of their own runs, for a profile or study, as one CSV file for each.

Replayed from the tuning prompts: correlation of the root's entropy between rounds and gain
by answer length (SAGE, figures 2 and 3), accepted nodes by layer and position and parents by entropy (WETAP, figures 2
and 3), and the children that the root needs. Measured: shares of time (SAGE, table 6). Estimated from datasheets:
operations of every screened subnet, and its speedup on every device (STAR, figure 3a and table 3); these rank subnets
and do not predict a speedup.

Takes seconds.

    python benchmarks/paper_figures.py profile.json|.autotune/STUDY [-o paper-figures]
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from autotune.cost.roofline import DatasheetLimits, datasheets, find_limits, operations, step_ms
from autotune.cost.table import ModelShape
from autotune.documents.configuration import configuration_of
from autotune.files import write_table
from autotune.replay.evaluator import Evaluator
from autotune.replay.reference_replay import ReplayedRound, rounds
from autotune.replay.replay import plain_decode_ms
from autotune.replay.trace import Trace
from autotune.report.sources import Sources, find_sources
from autotune.report.tables import heads_label
from autotune.study.records import ScreenedSubnet
from autotune.trees.tree import ROOT, Floats, Ints

MAX_LAG, MIN_PAIRS = 10, 10  # of correlations
MAX_POSITION = 16  # as in WETAP, figure 2
ENTROPY_BANDS = {"low, below 0.3": (0.0, 0.3), "middle, 0.3 to 0.6": (0.3, 0.6), "high, from 0.6": (0.6, 1.01)}
"""Normalised entropies of WETAP, figure 3. Its caption gives the middle one as 0 to 0.6."""
PARENTS, RANKS = (3, 6), (1, 3, 6)


# -------- decoding (SAGE, WETAP)


def normalised_entropy(probabilities: Floats) -> float:
    """Entropy of the renormalised probabilities over that of the uniform distribution (SAGE, eq. 7-9; WETAP, eq. 3-4);
    0 for fewer than two.
    """
    p = probabilities[probabilities > 0]
    if len(p) < 2:
        return 0.0
    p = p / p.sum()
    return float(-(p * np.log(p)).sum() / np.log(len(probabilities)))


def entropy_band(entropy: float) -> str:
    return next(band for band, (low, high) in ENTROPY_BANDS.items() if low <= entropy < high)


def autocorrelation(sequences: Sequence[Floats], max_lag: int = MAX_LAG) -> pd.DataFrame:
    """Pearson correlation of values that are ``lag`` places apart in the same sequence, pooled over sequences."""
    rows = []
    for lag in range(1, max_lag + 1):
        before = np.concatenate([np.zeros(0), *(sequence[:-lag] for sequence in sequences)])
        after = np.concatenate([np.zeros(0), *(sequence[lag:] for sequence in sequences)])
        if len(before) >= MIN_PAIRS and before.std() > 0 and after.std() > 0:
            rows.append((lag, float(np.corrcoef(before, after)[0, 1]), len(before)))
    return pd.DataFrame(rows, columns=["lag", "correlation", "pairs"])


def layer_nodes(one: ReplayedRound, layer: int) -> Ints:
    """The nodes of a layer of the verified tree, most probable first."""
    assert one.tree is not None
    nodes = ROOT + 1 + np.flatnonzero(one.tree.depth[ROOT + 1 : one.num_nodes + 1] == layer)
    return nodes[np.argsort(-one.tree.path_logprob[nodes], kind="stable")]


def num_layers(one: ReplayedRound) -> int:
    return 0 if one.tree is None else int(one.tree.depth[: one.num_nodes + 1].max())


def accepted_positions(decoded: Sequence[ReplayedRound]) -> pd.DataFrame:
    """Accepted nodes by layer, and by position in the layer with the most probable node first (WETAP, figure 2)."""
    rows = [
        (position, layer, int(node) in one.path.tolist())
        for one in decoded
        for layer in range(1, num_layers(one) + 1)
        for position, node in enumerate(layer_nodes(one, layer)[:MAX_POSITION], start=1)
    ]
    frame = pd.DataFrame(rows, columns=["position", "layer", "accepted"])
    return frame.groupby(["position", "layer"], as_index=False).accepted.sum()


def parents_by_entropy(decoded: Sequence[ReplayedRound]) -> pd.DataFrame:
    """Share of a layer's nodes below the 3 and 6 most probable nodes of the layer before, by the normalised entropy of
    the cumulative probabilities of that layer (WETAP, figure 3). Layers of one node are left out.
    """
    rows = []
    for one in decoded:
        for layer in range(1, num_layers(one)):
            nodes, children = layer_nodes(one, layer), layer_nodes(one, layer + 1)
            if one.tree is not None and len(nodes) > 1:
                shares = [float(np.isin(one.tree.parent[children], nodes[:number]).mean()) for number in PARENTS]
                entropy = normalised_entropy(one.tree.path_probability[nodes])
                rows.append((entropy_band(entropy), 1, len(nodes), *shares))
    names = [f"top_{number}" for number in PARENTS]
    frame = pd.DataFrame(rows, columns=["entropy", "layers", "nodes", *names])
    return frame.groupby("entropy", as_index=False).agg(
        {"layers": "sum", "nodes": "mean"} | dict.fromkeys(names, "mean")
    )


def ranks_by_entropy(entropies: Floats, ranks: Ints) -> pd.DataFrame:
    """Share of roots whose next token is among the draft's 1, 3 or 6 most probable ones, by the entropy of the
    proposals; a rank of -1 is not proposed.
    """
    frame = pd.DataFrame({"entropy": [entropy_band(entropy) for entropy in entropies], "roots": 1})
    names = {f"top_{number}": (ranks >= 0) & (ranks < number) for number in RANKS}
    return frame.assign(**names).groupby("entropy", as_index=False).agg({"roots": "sum"} | dict.fromkeys(names, "mean"))


def root_proposals(trace: Trace, prompt: int, decoded: Sequence[ReplayedRound]) -> tuple[Floats, Ints]:
    """Normalised entropy of the recorded proposals of every round's root, and the rank of the target's next token among
    them; -1 if it is not proposed.
    """
    begin, forest = int(trace.answer_start[prompt]), trace.forest
    positions = np.array([one.position for one in decoded], np.int64)
    nodes = trace.first_node[prompt] + positions
    entropies = np.array([normalised_entropy(np.exp(row.astype(np.float64))) for row in forest.child_logprob[nodes]])
    is_next = forest.child_token[nodes] == forest.answer[begin + positions + 1][:, None]
    return entropies, np.where(is_next.any(1), is_next.argmax(1), -1)


def evaluator_of(sources: Sources) -> Evaluator | None:
    """Replays configurations; None without traces whose drafts the cost table prices."""
    if sources.table is None:
        return None
    traces = [
        trace
        for trace in sources.traces
        if trace.num_tokens and sources.table.holds(trace.header.draft, trace.header.subnet)
    ]
    return Evaluator(traces, sources.table) if traces else None


PARTS = {
    "target prefill": "target_prefill_ms",
    "verification": "verify_ms",
    "draft prefill": "draft_prefill_ms",
    "draft forward passes": "draft_ms",
}
REST = "tree building and the rest"


def time_shares(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Share of each part in the time of all runs, prefill included (SAGE, table 6); empty where parts are not
    measured.
    """
    total_ms = sum(run["target_prefill_ms"] + run["decode_ms"] for run in runs)
    if total_ms == 0 or not any(run["verify_ms"] > 0 for run in runs):
        return {}
    shares = {part: float(sum(run[name] for run in runs) / total_ms) for part, name in PARTS.items()}
    return {**shares, REST: 1.0 - sum(shares.values())}


def length_bands(new_tokens: Sequence[int] | NDArray[np.int64]) -> pd.Categorical:
    """The band of each answer's number of tokens, in order: ``1-16``, ``17-32``, ``33-64``, and so on."""
    tokens = np.asarray(new_tokens, np.int64)
    ends = [0, 16]
    while ends[-1] < tokens.max(initial=0):
        ends.append(2 * ends[-1])
    labels = [f"{first + 1}-{last}" for first, last in itertools.pairwise(ends)]
    numbers = np.maximum(np.searchsorted(ends, tokens) - 1, 0)
    return pd.Categorical([labels[number] for number in numbers], categories=labels, ordered=True)


def gain_by_length(sources: Sources, trace: Trace, prompts: Sequence[int]) -> pd.DataFrame:
    """Tokens per round, and the predicted speedup where replay has prices, by the number of an answer's tokens (SAGE,
    figure 3).
    """
    assert sources.profile is not None
    evaluator, point = evaluator_of(sources), sources.profile.point
    configuration = configuration_of(point)
    assert point.tree is not None and configuration is not None
    tokens = np.diff(trace.answer_start)[prompts]
    num_rounds = [len(list(rounds(trace, prompt, point.tree, point.fallback))) for prompt in prompts]
    ms = plain_ms = np.full(trace.num_prompts, np.nan)
    if evaluator is not None and evaluator.can_replay(configuration):
        plain_ms = plain_decode_ms(trace, evaluator.prices[trace.header.draft.id, trace.header.subnet])
        ms = evaluator.replay(configuration).decode_ms
    frame = pd.DataFrame({"length": length_bands(tokens), "prompts": 1, "tokens": tokens - 1, "rounds": num_rounds})
    frame["ms"], frame["plain_ms"] = ms[prompts], plain_ms[prompts]
    sums = frame[frame.tokens > 0].groupby("length", observed=True).sum(min_count=1)
    gains = {"tokens_per_round": sums.tokens / sums.rounds, "speedup": sums.plain_ms / sums.ms}
    return sums[["prompts"]].assign(**gains).reset_index()


def decoding_figures(sources: Sources) -> dict[str, pd.DataFrame]:
    """The figures of a profile by name; empty if its draft was not recorded."""
    trace = sources.trace
    if trace is None:
        return {}
    decoded = {prompt: sources.rounds_of(prompt) for prompt in range(trace.num_prompts)}
    decoded = {prompt: of_prompt for prompt, of_prompt in decoded.items() if of_prompt}
    if not decoded:
        return {}
    roots = [root_proposals(trace, prompt, of_prompt) for prompt, of_prompt in decoded.items()]
    pooled = list(itertools.chain.from_iterable(decoded.values()))
    shares = time_shares([run for run in sources.evidence_runs if run.get("verify_ms")])
    return {
        "autocorrelation": autocorrelation([entropies for entropies, _ in roots]),
        "accepted-positions": accepted_positions(pooled),
        "parents-by-entropy": parents_by_entropy(pooled),
        "children-by-entropy": ranks_by_entropy(*(np.concatenate(parts) for parts in zip(*roots, strict=True))),
        "gain-by-length": gain_by_length(sources, trace, [*decoded]),
        "time-shares": pd.DataFrame(shares.items(), columns=["part", "share"]),
    }


# -------- operations (STAR)


def round_operations(shape: ModelShape, *, depth: int, tokens_per_round: float, kv_length: float) -> float:
    """Operations of the draft in a round of a chain: a forward pass of the M tokens that the round before emitted, then
    one of a single token for every further level.
    """
    levels = sum(operations(shape, 1, kv_length + level) for level in range(1, depth))
    return operations(shape, tokens_per_round, kv_length) + levels


def estimated_speedup(
    draft: ModelShape,
    target: ModelShape,
    limits: DatasheetLimits,
    subnet: ScreenedSubnet,
    kv_lengths: tuple[float, float],
) -> float:
    """Speedup of a subnet's chain over plain decoding by the roofline of a device, with the host's times as in
    ``estimate_table``; ``kv_lengths`` are those of the draft and of the target.
    """
    draft_kv, kv = kv_lengths
    round_ms = step_ms(draft, limits, subnet.tokens_per_round, draft_kv)
    round_ms += (subnet.depth - 1) * step_ms(draft, limits, 1, draft_kv)
    round_ms += step_ms(target, limits, subnet.depth + 1, kv) + limits.round_ms * (1 + subnet.depth / 8)
    return step_ms(target, limits, 1, kv) * subnet.tokens_per_round / round_ms


def mean_kv_lengths(trace: Trace, visual_keep: float, crossing_share: float) -> tuple[float, float]:
    """Mean tokens in the KV caches of a draft that keeps this share of the visual tokens, and of the target, in the
    middle of the answers. Of a draft's keys and values, the ``crossing_share`` is kept for pruned tokens too.
    """
    lengths = trace.prompt_length + np.diff(trace.answer_start) / 2
    pruned = (1 - crossing_share) * (1 - visual_keep) * trace.num_visual_tokens
    return float((lengths - pruned).mean()), float(lengths.mean())


def subnet_operations(sources: Sources) -> pd.DataFrame:
    """A row for every screened subnet and device, the search's own device first. Every subnet drafts the chain that was
    best for it there; subnets without a shape in the cost table are left out.
    """
    rows, table, study = [], sources.table, sources.study
    target = study.target_shape if study is not None else table.target_shape if table is not None else None
    traces = {trace.header.draft.id: trace for trace in sources.traces}
    for subnet in sources.screened if table is not None and target is not None else ():
        assert table is not None and target is not None
        of_subnet = (c.shape for c in table.drafts if c.draft.id == subnet.draft and c.is_of(c.draft, subnet.subnet))
        trace, shape = traces.get(subnet.draft), next(of_subnet, None)
        if trace is None or shape is None or not shape.has_forward_pass:
            continue
        lengths = mean_kv_lengths(trace, subnet.subnet.visual_keep, shape.crossing_share)
        flops = round_operations(
            shape, depth=subnet.depth, tokens_per_round=subnet.tokens_per_round, kv_length=lengths[0]
        )
        first = {
            "draft": subnet.draft,
            "heads": heads_label(subnet.subnet),
            "layer": subnet.subnet.injection_layer or 0,
            "keep": subnet.subnet.visual_keep,
            "mflops_per_round": flops / 1e6,
            "mflops_per_token": flops / 1e6 / subnet.tokens_per_round,
        }
        rows.append(first | {"device": table.device.name, "estimated": table.estimated, "speedup": subnet.speedup})
        for name in (name for name in datasheets() if name != table.device.name):
            speedup = estimated_speedup(shape, target, find_limits(name), subnet, lengths)
            rows.append(first | {"device": name, "estimated": True, "speedup": speedup})
    frame = pd.DataFrame(rows)
    for _, group in frame.groupby(["draft", "device"]) if rows else ():
        front = on_front(group.mflops_per_token.to_numpy(), group.speedup.to_numpy())
        frame.loc[group.index, "is_on_front"] = front
    return frame


def on_front(costs: NDArray[np.number], gains: NDArray[np.number]) -> NDArray[np.bool_]:
    """Whether no other point has at most the cost and a higher gain, or a lower cost and the same gain."""
    found = np.zeros(len(costs), bool)
    highest = -np.inf
    for index in np.lexsort((-gains, costs)):
        found[index] = gains[index] > highest
        highest = max(highest, gains[index])
    return found


@click.command(help=__doc__)
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("paper-figures"), show_default=True)
def main(source: Path, output: Path) -> None:
    sources = find_sources(source)
    tables = {"subnet-operations": subnet_operations(sources), **decoding_figures(sources)}
    output.mkdir(parents=True, exist_ok=True)
    for name, frame in tables.items():
        if len(frame):
            write_table(output / f"{name}.csv", frame)
            click.echo(output / f"{name}.csv")


if __name__ == "__main__":
    main()
