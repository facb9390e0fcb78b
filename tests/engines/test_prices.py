"""Prices of verifications: what lies between and beyond those measured, and the factors of served requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from autotune.documents.deployment import PricedStep
from autotune.documents.speculation import OPTIONS, Speculation
from autotune.engines.prices import ALONE, EnginePrices, served_prices, with_draft
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
    prices = EnginePrices(priced({1: 10.0, 3: 20.0}).priced, factors=ALONE | {"plain": 0.5})
    assert prices.ms(EngineSteps(None, [request(8, 0, 8)], [8])).tolist() == [0.5 * 80.0]
    ngram = Speculation(type="ngram", options=OPTIONS["ngram"])
    assert prices.ms(EngineSteps(ngram, [request(2, 2, 4)], [4])).tolist() == [20.0 + 40.0]
    chain = Speculation(type="mtp", options=OPTIONS["mtp"])
    drafting = replace(prices, drafts={"mtp": {1: 1.0, 5: 5.0}})
    assert drafting.ms(EngineSteps(chain, [request(2, 2, 4)], [8, 2])).tolist() == [2 * 64.0, 0.5 * 64.0]


def test_the_time_of_a_draft_is_what_servers_of_two_depths_took_beside_their_passes() -> None:
    chain, pairs = Speculation(type="mtp", options=OPTIONS["mtp"]), {}
    for drafted, extra_ms in ((1, 3.0), (8, 10.0)):
        replayed = RequestReplay([(drafted, 0)] * 5, Counter({(3, 0): 5}), 5)
        times = [5 * (20.0 + extra_ms)] * 3 + [1000.0]  # the last one was disturbed
        pairs[drafted] = [(Served.of([1], [2] * 11, 11, decode_ms=2 * ms), replayed) for ms in times]
    assert with_draft(priced({1: 10.0, 3: 20.0}), chain, pairs).drafts == {"mtp": {1: 3.0, 8: 10.0}}


@pytest.mark.parametrize("has_one_loop", [True, False])
def test_prices_have_the_factors_of_served_requests(has_one_loop: bool) -> None:
    """Plain passes of 9 ms and verifications of 22 ms, which were priced at 10 and 20; one request was disturbed, and a
    step without speculation takes 8 ms where the engine runs another loop then.
    """
    plain_ms = 9.0 if has_one_loop else 8.0
    off = [(Served.of([1], [2] * 9, 9, decode_ms=8 * plain_ms), request(8, 0, 9))] * 4
    served = [
        (Served.of([1], [2] * (plain + verified + 1), 99, decode_ms=9.0 * plain + 22.0 * verified), (plain, verified))
        for plain, verified in ((8, 4), (4, 8), (6, 6), (9, 3), (3, 9))
    ]
    served.append((served[0][0].model_copy(update={"decode_ms": 1e4}), (8, 4)))
    pairs = [(answer, request(*passes, 9)) for answer, passes in served]
    prices = priced({1: 10.0, 3: 20.0})
    found = served_prices(prices, off, pairs, has_one_loop=has_one_loop)
    step, verification, alone = found.factors.values()
    assert (step, verification, step * alone) == pytest.approx((0.9, 1.1, plain_ms / 10.0), rel=0.01)
    step, verification, alone = served_prices(prices, off, pairs[:2], has_one_loop=has_one_loop).factors.values()
    assert verification == step == (0.9 if has_one_loop else 1.0) and step * alone == pytest.approx(plain_ms / 10.0)
