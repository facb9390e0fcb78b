"""Draws of the decoding times that configurations may truly have, as far as a cost table and its prompts leave them
open.

Every draw takes prices from the posterior of the table's joint fit (``prices.PriceDraws``) and weights of the prompts
from a Bayesian bootstrap (Rubin, 1981). All configurations of a draw share both, so that errors which they share cancel
in comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.documents.configuration import Configuration
from autotune.replay.evaluator import Evaluator
from autotune.replay.prices import NUM_DRAWS
from autotune.trees.limits import Floats


def time_draws(evaluator: Evaluator, configurations: Sequence[Configuration], *, other_prompts: bool = True) -> Floats:
    """Decoding times in ms over the evaluator's prompts, or over ``other_prompts`` like them, [configurations,
    draws].
    """
    results = evaluator.replay_many(configurations)
    weights = _prompt_weights(len(evaluator.tasks)) if other_prompts else None
    times = []
    for configuration, result in zip(map(evaluator.resolve, configurations), results, strict=True):
        draft = evaluator.traces[configuration.draft or "", configuration.subnet].header.draft
        factors = evaluator.price_draws.of(draft, configuration.subnet, result.step_ms.shape[1])
        ms = np.einsum("ij,kij->k", result.step_ms, factors.steps)
        ms += result.overhead_ms.sum() * factors.overhead + result.draft_prefill_ms.sum() * factors.prefill
        times.append(ms if weights is None else ms * (weights @ result.decode_ms) / result.decode_ms.mean())
    return np.array(times)


def speedup_draws(evaluator: Evaluator, configuration: Configuration, *, other_prompts: bool = False) -> Floats:
    """Speedups over plain decoding, [draws]."""
    plain = evaluator.ar_ms.sum() * evaluator.price_draws.plain()
    if other_prompts:
        plain = plain * (_prompt_weights(len(evaluator.tasks)) @ evaluator.ar_ms) / evaluator.ar_ms.mean()
    speedups: Floats = plain / time_draws(evaluator, [configuration], other_prompts=other_prompts)[0]
    return speedups


def _prompt_weights(num_prompts: int) -> Floats:
    """[draws, prompts]; a single prompt says nothing about others, and keeps its weight."""
    return np.random.default_rng(1).dirichlet(np.ones(num_prompts), NUM_DRAWS)
