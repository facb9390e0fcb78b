"""Prometheus metrics of a decoder in a service."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from prometheus_client import REGISTRY, Counter, Histogram

from autotune.errors import UserError
from autotune.runtime.stats import FINISHED, STOPPED, DecodingStats

PHASES: dict[str, Callable[[DecodingStats], float]] = {
    "vision": lambda stats: stats.vision_ms,
    "prefill": lambda stats: stats.target_prefill_ms - stats.vision_ms,
    "draft_prefill": lambda stats: stats.draft_prefill_ms,
    "draft": lambda stats: stats.draft_ms,
    "verification": lambda stats: stats.verify_ms,
    "rest": lambda stats: max(0.0, stats.overhead_ms),
}
"""Milliseconds of a request by what they were spent on."""
COUNTS: dict[str, tuple[str, Callable[[DecodingStats], int]]] = {
    "prompt_tokens": ("Tokens of prompts", lambda stats: stats.prompt_tokens),
    "new_tokens": ("Emitted tokens", lambda stats: stats.new_tokens),
    "rounds": ("Rounds, plain steps included", lambda stats: stats.rounds),
    "plain_steps": ("Steps without a draft, of plain decoding and of fallbacks", lambda stats: stats.plain_steps),
    "draft_tokens": ("Draft tokens sent to verification", lambda stats: sum(stats.verified_nodes)),
    "accepted_tokens": ("Draft tokens accepted", lambda stats: sum(stats.accepted_lengths)),
}
"""Counts of a request by the name of their metric."""
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SECONDS_A_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class PrometheusMetrics:
    """An observer that counts requests, as Prometheus metrics whose names begin with ``autotune_``::

        decoder.observers.append(PrometheusMetrics())

    Args:
        registry: a ``prometheus_client.CollectorRegistry``; None: the process's own. One registry takes one decoder.

    Raises:
        UserError: the registry has another decoder.
    """

    def __init__(self, registry: Any = None) -> None:
        registry = REGISTRY if registry is None else registry

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(f"autotune_{name}", text, labels, registry=registry)

        try:
            self._requests = counter("requests", "Requests by outcome", "outcome")
            self._counts = {name: counter(name, text) for name, (text, _) in COUNTS.items()}
            self._offered = counter("offered", "Rounds that offered a token at a depth of the accepted path", "depth")
            self._accepted = counter("accepted", "Rounds that accepted a token at a depth", "depth")
            self._seconds = counter("seconds", "Time of requests by what it was spent on", "phase")
            timed = partial(Histogram, registry=registry)
            self._first_token = timed("autotune_first_token_seconds", "Time to the first token", buckets=_SECONDS)
            self._token = timed("autotune_token_seconds", "Mean time per later token", buckets=_SECONDS_A_TOKEN)
        except ValueError:  # the registry's answer to a name that it knows
            raise UserError("the registry counts another decoder; give each decoder a registry of its own") from None

    def __call__(self, stats: DecodingStats, *, is_finished: bool) -> None:
        self._requests.labels(FINISHED if is_finished else STOPPED).inc()
        for name, (_, count) in COUNTS.items():
            self._counts[name].inc(count(stats))
        by_depth = stats.acceptance_counts.by_depth
        for depth in np.flatnonzero(by_depth[:, 0]):
            offered, accepted = by_depth[depth].tolist()
            self._offered.labels(int(depth)).inc(offered)
            self._accepted.labels(int(depth)).inc(accepted)
        for phase, milliseconds in PHASES.items():
            self._seconds.labels(phase).inc(milliseconds(stats) / 1e3)
        if stats.new_tokens:
            self._first_token.observe(stats.target_prefill_ms / 1e3)
        if stats.new_tokens > 1:
            self._token.observe(stats.decode_ms / 1e3 / (stats.new_tokens - 1))
