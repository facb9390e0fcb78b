"""Interim looks at paired runs: which share of an error probability a look may spend, and the test that it makes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.documents.run import Run
from autotune.evaluation.summary import decoded_pairs


def spent_share(look: int, num_looks: int) -> float:
    """Share of an error probability for a look, from 0: more for later looks, 1 over all of them."""
    return (look + 1) / (num_looks * (num_looks + 1) / 2)


def is_significantly_slower(runs: Sequence[Run], than: Sequence[Run], *, risk: float) -> bool:
    """Whether runs take longer per token than others of the same prompts: a one-sided paired t-test of log times per token.

    Prompts for which nothing was decoded after the first token do not count. The test keeps its ``risk`` with the eight
    prompts of a block; a bootstrap of so few does not.
    """
    from scipy.special import stdtr

    ms, tokens, than_ms, than_tokens = decoded_pairs(runs, than)
    log_ratios = np.log(ms / tokens) - np.log(than_ms / than_tokens)
    count = len(log_ratios)
    if count < 2:
        return False
    if np.ptp(log_ratios) < 1e-12:  # the statistic needs a variance
        return bool(log_ratios[0] > 1e-12)
    statistic = log_ratios.mean() / (log_ratios.std(ddof=1) / count**0.5)
    return bool(stdtr(count - 1, -statistic) < risk)
