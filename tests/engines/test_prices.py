"""Prices of verifications: what lies between and beyond those measured, and the factors of served requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from autotune.documents.deployment import PricedStep
from autotune.documents.speculation import OPTIONS, Speculation
from autotune.engines.prices import ALONE, EnginePrices, TimedRequest, served_prices, with_draft
from autotune.engines.replay import EngineSteps, RequestReplay
from autotune.engines.served import Served


def priced(ms: dict[int, float], context: int = 1) -> EnginePrices:
    return EnginePrices([PricedStep(tokens=n, context=context, wall_ms=[x], cpu_ms=[0.0]) for n, x in ms.items()])


def request(plain: int, verified: int, tokens: int) -> RequestReplay:
    """Plain passes, and verifications of drafts of two tokens without an accepted one."""
    return RequestReplay([(2, 0)] * verified, Counter({(1, 0): plain, (3, 0): verified}), tokens)


def test_times_are_interpolated_between_those_that_were_priced() -> None:
    prices = priced({1: 10.0, 4: 10.0, 8: 12.0, 16: 20.0, 32: 40.0})
    assert [prices.pass_ms(n, 100) for n in (1, 2, 8, 12, 48)] == [10.0, 10.0, 12.0, 16.0, 40.0]


def test_times_of_a_configuration_are_those_of_the_plain_answers() -> None:
    """A chain's own answer may have another length; a prompt that its server did not decode takes others' time."""
    prices = EnginePrices(priced({1: 10.0, 3: 20.0}).priced, factors=ALONE | {"step": 2.0})
    assert prices.ms(EngineSteps(None, [request(8, 0, 8)], [8])).tolist() == [80.0]
    ngram = Speculation(type="ngram", options=OPTIONS["ngram"])
    assert prices.ms(EngineSteps(ngram, [request(2, 2, 4)], [4])).tolist() == [2 * 20.0 + 40.0]
    chain = Speculation(type="mtp", options=OPTIONS["mtp"])
    drafting = replace(prices, drafts={"mtp": (0.0, 1.0)})
    assert drafting.ms(EngineSteps(chain, [request(2, 2, 4)], [8, 2])).tolist() == [2 * 84.0, 0.5 * 84.0]


def timed(new_tokens: int, ms: float, replayed: RequestReplay, slower: float = 1.0) -> TimedRequest:
    """A request on a machine that is slower than when passes were priced, beside one of eight plain passes of 10 ms."""
    answer = Served.of([1], [2] * (new_tokens + 1), new_tokens + 1, decode_ms=slower * ms)
    return TimedRequest(answer, Served.of([1], [2] * 9, 9, decode_ms=slower * 8 * 10.0), replayed)


@pytest.mark.parametrize(("draft_ms", "fitted"), [(2.0, (2.0, 1.0)), (-8.0, (0.0, 0.0))])
def test_the_time_of_a_draft_is_what_servers_of_two_depths_took_beside_their_passes(
    draft_ms: float, fitted: tuple[float, float]
) -> None:
    """A draft takes some time and 1 ms a token; the last draft of a request is short, and some requests were disturbed.
    Where the passes of a draft were priced too high, the draft takes no time, and not less.
    """
    chain, requests = Speculation(type="mtp", options=OPTIONS["mtp"]), []
    for depth in (1, 8):
        drafts = [*[(depth, 0)] * 4, (1, 0)]
        replayed = RequestReplay(drafts, Counter({(3, 0): 5}), 5)
        ms = 5 * 20.0 + 5 * draft_ms + sum(drafted for drafted, _ in drafts)
        requests += [timed(10, 2 * spent, replayed, slower=1.25) for spent in (ms, ms, ms, 1000.0)]
    drafts = with_draft(priced({1: 10.0, 3: 20.0}), chain, requests).drafts
    assert drafts["mtp"] == pytest.approx(fitted, rel=0.05, abs=1e-6)


@pytest.mark.parametrize("has_one_loop", [True, False])
def test_prices_have_the_factors_of_served_requests(has_one_loop: bool) -> None:
    """Verifications of 22 ms, which were priced at 20; one request was disturbed, the machine became slower, and a pass
    over one token takes 12 ms in place of 10 where the engine runs another loop without speculation.
    """
    step_ms = 10.0 if has_one_loop else 12.0
    requests = [
        timed(plain + verified, step_ms * plain + 22.0 * verified, request(plain, verified, 9), slower)
        for plain, verified, slower in ((8, 4, 1.0), (4, 8, 1.1), (6, 6, 1.2), (9, 3, 1.3), (3, 9, 1.4))
    ]
    requests.append(timed(12, 1e4, request(8, 4, 9)))
    prices = priced({1: 10.0, 3: 20.0})
    factors = served_prices(prices, requests, has_one_loop=has_one_loop).factors
    assert factors == pytest.approx({"step": step_ms / 10.0, "verification": 1.1}, rel=0.01)
    few = served_prices(prices, requests[:2], has_one_loop=has_one_loop).factors
    assert few["step"] == few["verification"] == pytest.approx(1.0 if has_one_loop else (184 / 160 + 224 / 200) / 2)
