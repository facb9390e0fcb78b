"""Every request of a decoder is logged and counted: finished, abandoned, with a draft and without."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

import autotune
from autotune.errors import UserError
from autotune.runtime.decoder import Decoder
from autotune.runtime.metrics import PrometheusMetrics
from autotune.runtime.stats import DecodingStats
from autotune.trees.fallback import RoundPrice
from tests.tiny_models import Inputs, Pair

CHAIN = {"policy": "chain", "depth": 3}
NEVER_PAYS = RoundPrice(round_steps=90.0, level_steps=9.0, node_steps=9.0)


@pytest.fixture
def decoder(pair: Pair) -> Decoder:
    return Decoder(pair.target, pair.draft, tree=CHAIN)


def decode(decoder: Decoder, inputs: Inputs, **settings: Any) -> DecodingStats:
    return decoder.generate(**inputs, max_new_tokens=12, temperature=0.0, **settings).stats


def test_requests_are_logged(decoder: Decoder, prompts: dict[str, Inputs], caplog: pytest.LogCaptureFixture) -> None:
    inputs = next(iter(prompts.values()))
    decode(decoder, inputs)
    assert not caplog.records, "nothing is logged unless the service asks for it"
    with caplog.at_level(logging.INFO, logger="autotune.requests"):
        stats = decode(decoder, inputs)
        stream = decoder.stream(**inputs, max_new_tokens=12)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    finished, stopped = caplog.records
    assert finished.message.startswith(f"finished: {stats.prompt_tokens} prompt tokens, {stats.new_tokens} new tokens")
    assert finished.stats == stats.to_json()  # type: ignore[attr-defined]
    assert stopped.message.startswith("stopped: ") and "1 new tokens, 0 rounds" in stopped.message


def test_prometheus_metrics_add_up_to_the_statistics(decoder: Decoder, pair: Pair, prompts: dict[str, Inputs]) -> None:
    """Chains, plain decoding, and requests that soon fall back to it are counted together."""
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    without_draft = Decoder(decoder.target)
    dear = Decoder(decoder.target, decoder.draft, tree=CHAIN, fallback=NEVER_PAYS)
    for observed in (decoder, without_draft, dear):
        observed.observers.append(metrics)

    def value(name: str, **labels: Any) -> float:
        found = registry.get_sample_value(f"autotune_{name}", {key: str(label) for key, label in labels.items()})
        assert found is not None, (name, labels)
        return found

    assert value("rounds_total") == 0
    inputs = next(iter(prompts.values()))
    chain, plain = decode(decoder, inputs), decode(without_draft, inputs)
    every = [chain, plain, *(decode(dear, inputs) for _ in range(3))]
    stream = decoder.stream(**inputs, max_new_tokens=12)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert chain.acceptance_counts.by_depth[1, 0] == chain.rounds > 0
    assert value("requests_total", outcome="finished") == 5 and value("requests_total", outcome="stopped") == 1
    assert value("new_tokens_total") == sum(stats.new_tokens for stats in every) + 1
    assert value("prompt_tokens_total") == 6 * chain.prompt_tokens
    assert value("rounds_total") == sum(stats.rounds for stats in every)
    assert value("plain_steps_total") == sum(stats.plain_steps for stats in every) >= plain.rounds
    assert value("draft_tokens_total") == sum(sum(stats.verified_nodes) for stats in every)
    assert value("accepted_tokens_total") == sum(sum(stats.accepted_lengths) for stats in every)
    depths = sum(stats.acceptance_counts.by_depth for stats in every)
    for depth in range(1, 4):
        assert [value("offered_total", depth=depth), value("accepted_total", depth=depth)] == depths[depth].tolist()
    spent = sum(stats.target_prefill_ms + stats.decode_ms for stats in every) / 1e3
    phases = ("vision", "prefill", "draft_prefill", "draft", "verification", "rest")
    assert sum(value("seconds_total", phase=phase) for phase in phases) >= spent * 0.999
    assert value("first_token_seconds_count") == 6 and value("token_seconds_count") == 5
    with pytest.raises(UserError, match="the registry counts another decoder; give each decoder a registry of its own"):
        PrometheusMetrics(registry)


def test_without_the_package_metrics_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "autotune.runtime.metrics")
    with pytest.raises(UserError, match=r"needs the extra metrics: pip install 'autotune-speculative\[metrics\]'"):
        _ = autotune.PrometheusMetrics
