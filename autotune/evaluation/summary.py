"""Summary statistics of arms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.errors import UserError
from autotune.evaluation.runs import Run


@dataclass(frozen=True)
class Summary:
    """An arm against plain decoding on the same prompts. Speedups are of decoding time per token. Pooled: times and
    tokens are summed over prompts before they are divided. Times are medians over prompts.
    """

    name: str
    speedup: float
    """Pooled."""
    ci95: tuple[float, float]
    median_speedup: float
    """Of the prompts' own speedups."""
    tokens_per_second: float
    tokens_per_round: float | None
    prefill_ms: float
    """Of the target's text model: without vision."""
    vision_ms: float
    draft_prefill_ms: float
    decode_ms: float
    """From the first token to the last, the draft's prefill included."""
    num_prompts: int
    num_tokens: int
    identical_outputs: int
    outside_share: float | None
    """Share of decoding time outside the two models; None where their parts are not measured."""
    outside_us_per_round: float | None
    perplexity: float | None
    """Of all answers' tokens under the target, pooled; None where it was not asked for."""


def summarize(
    name: str, runs: Sequence[Run], baseline: Sequence[Run], *, num_resamples: int = 2000, seed: int = 0
) -> Summary:
    """``runs`` against ``baseline``, prompt for prompt the same, with a paired bootstrap interval over prompts."""
    pairs = decoded_pairs(runs, baseline)
    if not pairs:
        raise UserError("every answer has one token, so nothing was decoded that could be timed; raise max_new_tokens")
    ms, tokens, baseline_ms, baseline_tokens = _columns(pairs)
    total_ms = sum(run.decode_ms for run in runs)
    num_tokens = sum(run.new_tokens - 1 for run in runs)
    rounds = sum(run.rounds for run in runs)
    outside_ms = sum(run.decode_ms - run.draft_prefill_ms - run.draft_ms - run.verify_ms for run in runs)
    is_measured = any(run.verify_ms > 0 for run in runs)
    return Summary(
        name=name,
        speedup=speedup(runs, baseline),
        ci95=bootstrap_ratio(
            baseline_ms,
            ms,
            above_units=baseline_tokens,
            below_units=tokens,
            num_resamples=num_resamples,
            seed=seed,
        ),
        median_speedup=float(np.median((baseline_ms / baseline_tokens) / (ms / tokens))),
        tokens_per_second=1e3 * num_tokens / total_ms,
        tokens_per_round=num_tokens / rounds if rounds else None,
        prefill_ms=float(np.median([run.target_prefill_ms - run.vision_ms for run in runs])),
        vision_ms=float(np.median([run.vision_ms for run in runs])),
        draft_prefill_ms=float(np.median([run.draft_prefill_ms for run in runs])),
        decode_ms=float(np.median([run.decode_ms for run in runs])),
        num_prompts=len(runs),
        num_tokens=num_tokens,
        identical_outputs=sum(
            run.tokens_sha256 == other.tokens_sha256 for run, other in zip(runs, baseline, strict=True)
        ),
        outside_share=outside_ms / total_ms if is_measured else None,
        outside_us_per_round=1e3 * outside_ms / rounds if is_measured and rounds else None,
        perplexity=_pooled_perplexity(runs),
    )


def _pooled_perplexity(runs: Sequence[Run]) -> float | None:
    if any(run.perplexity is None for run in runs):
        return None
    total = sum(run.new_tokens * math.log(run.perplexity or 1.0) for run in runs)
    return math.exp(total / sum(run.new_tokens for run in runs))


def decoded_pairs(runs: Sequence[Run], baseline: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Runs with their baseline, where both decoded: an answer that ends with its first token is all prefill."""
    return [(a, b) for a, b in zip(runs, baseline, strict=True) if a.new_tokens > 1 and b.new_tokens > 1]


def speedup(runs: Sequence[Run], baseline: Sequence[Run]) -> float:
    """Pooled decoding time per token of the baseline over that of ``runs``. Of equal tokens it is the ratio of times; a
    lossy arm gains nothing by answering at another length. NaN where nothing was decoded.
    """
    pairs = decoded_pairs(runs, baseline)
    if not pairs:
        return float("nan")
    ms, tokens, baseline_ms, baseline_tokens = (column.sum() for column in _columns(pairs))
    return float((baseline_ms / baseline_tokens) / (ms / tokens))


def _columns(pairs: Sequence[tuple[Run, Run]]) -> NDArray[np.float64]:
    """Decoding times and decoded tokens of the runs, and of their baseline: [4, pairs]."""
    rows = [(a.decode_ms, a.new_tokens - 1, b.decode_ms, b.new_tokens - 1) for a, b in pairs]
    return np.array(rows, np.float64).T


def bootstrap_ratio(
    above: NDArray[np.float64],
    below: NDArray[np.float64],
    *,
    above_units: NDArray[np.float64] | None = None,
    below_units: NDArray[np.float64] | None = None,
    num_resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """95 % interval of ``sum(above) / sum(below)``, resampling the pairs; where units are given, of the ratio of both
    sums per unit.
    """
    draws = np.random.default_rng(seed).integers(len(above), size=(num_resamples, len(above)))
    ratios = above[draws].sum(1) / below[draws].sum(1)
    if above_units is not None and below_units is not None:
        ratios *= below_units[draws].sum(1) / above_units[draws].sum(1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)
