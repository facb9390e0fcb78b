"""Summary statistics of an arm against plain decoding, and interim looks at paired runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from autotune.documents.decoded import Decoded
from autotune.errors import UserError

NUM_RESAMPLES = 2000  # of a bootstrap
DISAGREEMENT = 0.05  # between speedups of wall and of CPU time, above which other processes used the machine


@dataclass(frozen=True)
class Summary:
    """An arm against plain decoding on the same prompts.

    Speedups are ratios of decoding time per token, pooled: times and tokens are summed over prompts before they are
    divided.
    """

    name: str
    speedup: float
    ci95: tuple[float, float]
    tokens_per_second: float
    tokens_per_round: float | None
    num_prompts: int
    num_tokens: int
    identical_outputs: int
    perplexity: float | None
    """Under the target, pooled over the tokens of all answers; None where it was not requested."""
    agreement: float | None
    """Share of the tokens of all answers that plain decoding emits after the same tokens; None as ``perplexity``."""


def summarize(name: str, runs: Sequence[Decoded], baseline: Sequence[Decoded], *, seed: int = 0) -> Summary:
    """Compare ``runs`` with the ``baseline`` runs of the same prompts; the interval is a paired bootstrap over prompts.

    Raises:
        UserError: no answer has more than one token.
    """
    if not decoded_pairs(runs, baseline).size:
        raise UserError("every answer has one token, so nothing was decoded that could be timed; raise max_new_tokens")
    total_ms = sum(run.decode_ms for run in runs)
    num_tokens = sum(run.new_tokens - 1 for run in runs)
    rounds = sum(run.rounds for run in runs)
    log_perplexity = _mean_over_tokens(runs, [run.perplexity and math.log(run.perplexity) for run in runs])
    return Summary(
        name=name,
        speedup=speedup(runs, baseline),
        ci95=time_ratio(baseline, runs, seed=seed),
        tokens_per_second=1e3 * num_tokens / total_ms,
        tokens_per_round=num_tokens / rounds if rounds else None,
        num_prompts=len(runs),
        num_tokens=num_tokens,
        identical_outputs=sum(a.tokens_sha256 == b.tokens_sha256 for a, b in zip(runs, baseline, strict=True)),
        perplexity=None if log_perplexity is None else math.exp(log_perplexity),
        agreement=_mean_over_tokens(runs, [run.agreement for run in runs]),
    )


def in_one_clock(runs: Mapping[str, Sequence[Decoded]]) -> Mapping[str, Sequence[Decoded]]:
    """Runs whose ``decode_ms`` can be compared.

    These are wall times, unless every run has a CPU time and a speedup over the first arm is another one by it. Then
    other processes used the machine, and they are CPU times.
    """
    has_both = all(run.cpu_ms > 0 for of_arm in runs.values() for run in of_arm if run.new_tokens > 1)
    if not runs or not has_both:
        return runs
    by_cpu = {
        name: [run.model_copy(update={"decode_ms": run.cpu_ms}) for run in of_arm] for name, of_arm in runs.items()
    }
    first = next(iter(runs))
    ratios = [speedup(runs[name], runs[first]) / speedup(by_cpu[name], by_cpu[first]) for name in runs]
    return by_cpu if any(abs(ratio - 1) > DISAGREEMENT for ratio in ratios) else runs


def _mean_over_tokens(runs: Sequence[Decoded], values: Sequence[float | None]) -> float | None:
    """Mean of the runs' values, each with the weight of its answer's tokens; None where a value is missing."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return sum(run.new_tokens * x for run, x in zip(runs, known, strict=True)) / sum(run.new_tokens for run in runs)


def speedup(runs: Sequence[Decoded], baseline: Sequence[Decoded]) -> float:
    """Pooled decoding time per token of the baseline over the time of ``runs``; NaN where nothing was decoded.

    Time per token, not time: a lossy arm gains nothing by a shorter answer.
    """
    ms, tokens, baseline_ms, baseline_tokens = decoded_pairs(runs, baseline).sum(1)
    return float((baseline_ms / baseline_tokens) / (ms / tokens)) if tokens else float("nan")


def decoded_pairs(runs: Sequence[Decoded], baseline: Sequence[Decoded]) -> NDArray[np.float64]:
    """Decoding times in ms and decoded tokens of runs and of their baseline, [4, prompts].

    Only the first prompts, that both have run, and only those for which both answers have more than one token; the
    prefill emits the first.
    """
    rows = [
        (run.decode_ms, run.new_tokens - 1, other.decode_ms, other.new_tokens - 1)
        for run, other in zip(runs, baseline, strict=False)
    ]
    columns = np.array(rows, np.float64).reshape(-1, 4).T
    return columns[:, (columns[1] > 0) & (columns[3] > 0)]


def ms_per_token(runs: Sequence[Decoded]) -> float:
    """Pooled decoding time per token after the first, in ms; infinite where nothing was decoded."""
    ms, tokens, *_ = decoded_pairs(runs, runs).sum(1)
    return float(ms / tokens) if tokens else math.inf


def time_ratio(runs: Sequence[Decoded], baseline: Sequence[Decoded], *, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the ratio of pooled decoding times per token of ``runs`` and of their baseline
    (``bootstrap_product``).
    """
    ms, tokens, baseline_ms, baseline_tokens = decoded_pairs(runs, baseline)
    return bootstrap_product([ms, baseline_tokens], [baseline_ms, tokens], seed=seed)


def bootstrap_ratio(above: NDArray[np.float64], below: NDArray[np.float64], *, seed: int = 0) -> tuple[float, float]:
    """95 % interval of ``sum(above) / sum(below)`` over resampled pairs (``bootstrap_product``)."""
    return bootstrap_product([above], [below], seed=seed)


def bootstrap_product(
    above: Sequence[NDArray[np.float64]], below: Sequence[NDArray[np.float64]], *, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of the product of the sums of some arrays over that of others, for prompts that are resampled
    together (percentile bootstrap).

    Args:
        above: arrays [prompts].
        below: arrays [prompts].
    """
    from scipy.stats import bootstrap  # takes a second to import

    def ratio(*arrays: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        sums = [array.sum(axis) for array in arrays]
        return np.asarray(np.prod(sums[: len(above)], axis=0) / np.prod(sums[len(above) :], axis=0))

    data = (*above, *below)
    if len(data[0]) == 1:  # scipy refuses a single prompt
        return (only := float(ratio(*data, axis=-1))), only
    interval = bootstrap(
        data, ratio, paired=True, vectorized=True, n_resamples=NUM_RESAMPLES, method="percentile", rng=seed
    ).confidence_interval
    return float(interval.low), float(interval.high)


def spent_share(look: int, num_looks: int) -> float:
    """Share of an error probability for a look, from 0: more for later looks, 1 over all of them."""
    return (look + 1) / (num_looks * (num_looks + 1) / 2)


def is_significantly_slower(
    runs: Sequence[Decoded], than: Sequence[Decoded], *, risk: float, tolerance: float = 0.0
) -> bool:
    """Whether runs take longer per token than others of the same prompts, by more than a relative ``tolerance``: a
    one-sided paired t-test of log times per token.

    Repeated runs of a prompt are averaged: arms differ from prompt to prompt, and only further prompts say by how much
    in general. Prompts for which nothing was decoded after the first token do not count. The test keeps its ``risk``
    with the eight prompts of a block; a bootstrap of so few does not.
    """
    from scipy.special import stdtr

    by_prompt: defaultdict[str, list[float]] = defaultdict(list)
    for run, other in zip(runs, than, strict=False):
        if run.new_tokens > 1 and other.new_tokens > 1:
            times = run.decode_ms / (run.new_tokens - 1), other.decode_ms / (other.new_tokens - 1)
            by_prompt[run.prompt_sha256].append(math.log(times[0] / times[1]))
    log_ratios = np.array([fmean(of_prompt) for of_prompt in by_prompt.values()]) - math.log1p(tolerance)
    count = len(log_ratios)
    if count < 2:
        return False
    if np.ptp(log_ratios) < 1e-12:  # the statistic needs a variance
        return bool(log_ratios[0] > 1e-12)
    statistic = log_ratios.mean() / (log_ratios.std(ddof=1) / count**0.5)
    return bool(stdtr(count - 1, -statistic) < risk)
