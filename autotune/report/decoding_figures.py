"""Figures that the papers show of decoding, for the operating points of a profile: entropy of the root over rounds and gain by
answer length (SAGE, figures 2 and 3), acceptance by layer and position and parents by entropy (WETAP, figures 2 and 3), and
shares of time (SAGE, table 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autotune.acceptance.replay import plain_decode_ms
from autotune.acceptance.rounds import Round
from autotune.acceptance.trace import Trace
from autotune.documents.configuration import configuration_of
from autotune.evaluation.runs import length_bands, time_shares
from autotune.report.acceptance import evidence_runs
from autotune.report.points import condition_label
from autotune.report.sources import Sources
from autotune.trees.tree import ROOT, Floats, Ints

if TYPE_CHECKING:
    import pandas as pd

MAX_LAG = 10
MAX_POSITION = 16  # as in WETAP, figure 2
MIN_PAIRS = 10  # of a correlation
ENTROPY_BANDS = {"low, below 0.3": (0.0, 0.3), "middle, 0.3 to 0.6": (0.3, 0.6), "high, from 0.6": (0.6, 1.01)}
"""Normalised entropies of WETAP, figure 3. Its caption gives the middle one as 0 to 0.6."""
PARENTS = (3, 6)
RANKS = (1, 3, 6)


@dataclass(frozen=True)
class DecodingFigures:
    """The figures of one operating point."""

    number: int
    condition: str
    num_replayed: int
    """Tuning prompts that the point decodes."""
    autocorrelation: pd.DataFrame
    positions: pd.DataFrame
    parents: pd.DataFrame
    ranks: pd.DataFrame
    lengths: pd.DataFrame
    num_measured: int
    """Held-out prompts of the shares of time."""
    time_shares: dict[str, float]


def normalised_entropy(probabilities: Floats) -> float:
    """Entropy of the renormalised probabilities over that of the uniform distribution (SAGE, eq. 7-9; WETAP, eq. 3-4); 0 for
    fewer than two.
    """
    p = probabilities[probabilities > 0]
    if len(p) < 2:
        return 0.0
    p = p / p.sum()
    return float(-(p * np.log(p)).sum() / np.log(len(probabilities)))


def autocorrelation(sequences: Sequence[Floats], max_lag: int = MAX_LAG) -> pd.DataFrame:
    """Pearson correlation of values that are ``lag`` places apart in the same sequence, pooled over sequences.

    Index ``lag``; columns ``correlation`` and ``pairs``. Lags with fewer than MIN_PAIRS pairs, or constant values, are left out.
    """
    import pandas as pd

    rows = []
    for lag in range(1, max_lag + 1):
        before = np.concatenate([np.zeros(0), *(sequence[:-lag] for sequence in sequences)])
        after = np.concatenate([np.zeros(0), *(sequence[lag:] for sequence in sequences)])
        if len(before) >= MIN_PAIRS and before.std() > 0 and after.std() > 0:
            rows.append((lag, float(np.corrcoef(before, after)[0, 1]), len(before)))
    return pd.DataFrame(rows, columns=["lag", "correlation", "pairs"]).set_index("lag")


def accepted_positions(decoded: Sequence[Round]) -> pd.DataFrame:
    """Accepted nodes by position in the layer, the most probable node first (WETAP, figure 2).

    Index ``position`` from 1 to MAX_POSITION, columns layers from 1; both up to the last that was verified.
    """
    import pandas as pd

    verified: dict[tuple[int, int], int] = {}
    for one in decoded:
        if one.tree is None:
            continue
        accepted = set(one.path.tolist())
        for layer in range(1, int(one.tree.depth[: one.num_nodes + 1].max()) + 1):
            for position, node in enumerate(_layer(one, layer)[:MAX_POSITION], start=1):
                verified[position, layer] = verified.get((position, layer), 0) + (int(node) in accepted)
    frame = pd.DataFrame([(*key, count) for key, count in verified.items()], columns=["position", "layer", "accepted"])
    return frame.pivot(index="position", columns="layer", values="accepted").fillna(0).astype(int)


def parents_by_entropy(decoded: Sequence[Round]) -> pd.DataFrame:
    """Share of a layer's nodes that are children of the most probable 3 and 6 nodes of the layer before, by the normalised
    entropy of the cumulative probabilities of the layer before (WETAP, figure 3).

    Index: ENTROPY_BANDS; columns ``layers``, ``nodes`` (mean number in the layer before), ``top_3``, ``top_6``. Layers of
    one node are left out.
    """
    import pandas as pd

    rows = []
    for one in decoded:
        if one.tree is None:
            continue
        for layer in range(1, int(one.tree.depth[: one.num_nodes + 1].max())):
            nodes, children = _layer(one, layer), _layer(one, layer + 1)
            if len(nodes) > 1:
                parents = one.tree.parent[children]
                shares = [float(np.isin(parents, nodes[:number]).mean()) for number in PARENTS]
                rows.append((_band(normalised_entropy(one.tree.path_probability[nodes])), len(nodes), *shares))
    columns = ["nodes", *(f"top_{number}" for number in PARENTS)]
    frame = pd.DataFrame(rows, columns=["entropy", *columns]).astype(dict.fromkeys(columns, float))
    means = frame.groupby("entropy").mean()
    means.insert(0, "layers", frame.groupby("entropy").size())
    return means.reindex([band for band in ENTROPY_BANDS if band in means.index])


def ranks_by_entropy(entropies: Floats, ranks: Ints) -> pd.DataFrame:
    """Share of roots whose next token is among the draft's 1, 3 or 6 most probable ones, by the entropy of the proposals.

    Args:
        ranks: rank of the target's next token from 0; -1 if the draft does not propose it.

    Index: ENTROPY_BANDS; columns ``roots``, ``top_1``, ``top_3``, ``top_6``.
    """
    import pandas as pd

    frame = pd.DataFrame({"entropy": [_band(entropy) for entropy in entropies]}, dtype=object)
    for number in RANKS:
        frame[f"top_{number}"] = (ranks >= 0) & (ranks < number)
    means = frame.groupby("entropy").mean()
    means.insert(0, "roots", frame.groupby("entropy").size())
    return means.reindex([band for band in ENTROPY_BANDS if band in means.index])


def _band(entropy: float) -> str:
    return next(band for band, (low, high) in ENTROPY_BANDS.items() if low <= entropy < high)


def _layer(verified: Round, layer: int) -> Ints:
    """The nodes of a layer of the verified tree, most probable first."""
    tree = verified.tree
    assert tree is not None
    nodes = ROOT + 1 + np.flatnonzero(tree.depth[ROOT + 1 : verified.num_nodes + 1] == layer)
    return nodes[np.argsort(-tree.path_logprob[nodes], kind="stable")]


def root_proposals(trace: Trace, prompt: int, decoded: Sequence[Round]) -> tuple[Floats, Ints]:
    """Normalised entropy of the recorded proposals of every round's root, and the rank of the target's next token among
    them; -1 if it is not proposed.
    """
    begin, forest = int(trace.answer_start[prompt]), trace.forest
    positions = np.array([one.position for one in decoded], np.int64)
    nodes = trace.first_node[prompt] + positions
    entropies = np.array([normalised_entropy(np.exp(row.astype(np.float64))) for row in forest.child_logprob[nodes]])
    is_next = forest.child_token[nodes] == forest.answer[begin + positions + 1][:, None]
    return entropies, np.where(is_next.any(1), is_next.argmax(1), -1)


def gain_by_length(
    new_tokens: Ints, num_rounds: Ints, ms: Floats | None = None, plain_ms: Floats | None = None
) -> pd.DataFrame:
    """Tokens per round M, and the predicted speedup if there are times, by the number of an answer's tokens (SAGE, figure 3).

    Index: bands of lengths; columns ``prompts``, ``tokens_per_round``, ``speedup``. Answers of one token are left out.
    """
    import pandas as pd

    frame = pd.DataFrame({"length": length_bands(new_tokens), "tokens": new_tokens - 1, "rounds": num_rounds})
    frame["prompts"] = 1
    frame["ms"], frame["plain_ms"] = (np.nan, np.nan) if ms is None or plain_ms is None else (ms, plain_ms)
    sums = frame[frame.tokens > 0].groupby("length", observed=True).sum(min_count=1)
    return pd.DataFrame(
        {"prompts": sums.prompts, "tokens_per_round": sums.tokens / sums.rounds, "speedup": sums.plain_ms / sums.ms}
    )


def decoding_figures(sources: Sources) -> list[DecodingFigures]:
    """The figures of every point whose draft was recorded."""
    found = []
    for number, point in enumerate(sources.points):
        trace, prompts = sources.trace_of(point), sources.prompts_of(number)
        if trace is None or point.tree is None or not prompts:
            continue
        decoded = {prompt: sources.rounds_of(number, trace, prompt) for prompt in prompts}
        decoded = {prompt: of_prompt for prompt, of_prompt in decoded.items() if of_prompt}
        roots = [root_proposals(trace, prompt, of_prompt) for prompt, of_prompt in decoded.items()]
        pooled = [one for of_prompt in decoded.values() for one in of_prompt]
        if not pooled:
            continue
        runs = [run for run in evidence_runs(sources, number) if run.get("verify_ms")]
        found.append(
            DecodingFigures(
                number,
                condition_label(sources.points, number),
                len(prompts),
                autocorrelation([entropies for entropies, _ in roots]),
                accepted_positions(pooled),
                parents_by_entropy(pooled),
                ranks_by_entropy(*(np.concatenate(parts) for parts in zip(*roots, strict=True))),
                _gain(sources, number, trace, decoded),
                len(runs),
                time_shares(runs),
            )
        )
    return found


def _gain(sources: Sources, number: int, trace: Trace, decoded: dict[int, list[Round]]) -> pd.DataFrame:
    """Gain by the length of answers."""
    prompts = np.array([*decoded], np.int64)
    new_tokens = np.diff(trace.answer_start)[prompts]
    evaluator, point = sources.evaluator, sources.points[number]
    num_rounds = np.array([len(of_prompt) for of_prompt in decoded.values()])
    configuration = configuration_of(point)
    if evaluator is None or configuration is None or not evaluator.can_replay(configuration):
        return gain_by_length(new_tokens, num_rounds)
    prices = evaluator.prices[trace.header.draft.id, trace.header.subnet]
    ms, plain_ms = evaluator.replay(configuration).decode_ms, plain_decode_ms(trace, prices)
    return gain_by_length(new_tokens, num_rounds, ms[prompts], plain_ms[prompts])
