"""Estimates from datasheets: by hand, for every shipped device, and marked as what they are."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.cost.roofline import DeviceLimits, anchored, datasheets, estimate_table, load_limits, step_ms
from autotune.cost.surface import Surface
from autotune.cost.table import CostTable, ModelShape
from autotune.device import short_name
from autotune.documents.subnet import Subnet
from tests.sample_documents import DRAFT, TARGET

# One layer of a billion parameters in two bytes, a kilobyte of keys and values for a token.
SHAPE = ModelShape(
    num_layers=1,
    hidden_size=1,
    text_parameters=10**9,
    vision_parameters=0,
    kv_bytes_per_token=1000,
    bytes_per_parameter=2,
)
LIMITS = DeviceLimits(
    model="A slide rule",
    source="by hand",
    memory_gb=80,
    memory_gb_per_second=1000,
    bfloat16_tflops=100,
    float32_tflops=10,
    eager_layer_ms=0.1,
    round_ms=0.4,
)


def test_one_token_waits_for_the_memory() -> None:
    """Two gigabytes of weights and a megabyte of cache at a terabyte a second."""
    assert step_ms(SHAPE, LIMITS, 1, 999) == pytest.approx(2.001)


def test_many_tokens_wait_for_the_arithmetic() -> None:
    """1,000 tokens take 2e12 operations, at 1e14 a second, plus those of attention; in float32 ten times as long."""
    operations = 2e12 + 4 * 1000 * 1000
    assert step_ms(SHAPE, LIMITS, 1000, 0) == pytest.approx(operations / 1e11)
    wide = SHAPE.model_copy(update={"bytes_per_parameter": 4})
    assert step_ms(wide, LIMITS, 1000, 0) == pytest.approx(operations / 1e10)


def test_a_tiny_model_waits_for_the_host() -> None:
    tiny = SHAPE.model_copy(update={"text_parameters": 1000, "num_layers": 24})
    assert step_ms(tiny, LIMITS, 1, 0) == pytest.approx(2.4)


@pytest.mark.parametrize("name", datasheets())
def test_every_shipped_datasheet_makes_a_table(name: str) -> None:
    """Its file name is what the device itself is called, and latencies grow with tokens and cache."""
    assert short_name(load_limits(name).model).startswith(name)
    small = SHAPE.model_copy(update={"text_parameters": 10**8})
    table = estimate_table(
        name, target=TARGET, target_shape=SHAPE, draft=DRAFT, draft_shape=small, precision="bfloat16"
    )
    assert table.estimated and table.device.name == name and load_limits(name).source
    assert table.dump()
    prices = table.prices(DRAFT, max_tokens=65, max_kv_length=4096)
    for priced in (prices.verify_ms, prices.draft_ms):
        assert (np.diff(priced[1:], axis=0) >= 0).all() and (np.diff(priced[1:], axis=1) >= 0).all()
    assert (prices.draft_ms[1:] < prices.verify_ms[1:]).all()


def test_an_estimate_is_of_the_subnet_that_was_asked_for() -> None:
    """Else a search for another device would find no price of a slice."""
    half = Subnet(heads=0.5, injection_layer=3)
    table = estimate_table(
        "h100", target=TARGET, target_shape=SHAPE, draft=DRAFT, draft_shape=SHAPE, precision="bfloat16", subnet=half
    )
    assert table.costs_of(DRAFT, half).heads == 0.5 and table.holds(DRAFT, half)
    assert not table.holds(DRAFT, Subnet())


# -------------------------------------------------------------------------------------------------------------- anchors


def measured_table(limits: DeviceLimits, **fields: object) -> CostTable:
    """Of a device that reaches those limits: a large target and a draft, both waiting for memory, arithmetic or the host."""
    draft = SHAPE.model_copy(update={"text_parameters": 10**6, "num_layers": 2})
    table = estimate_table(
        "h100", target=TARGET, target_shape=SHAPE, draft=DRAFT, draft_shape=draft, precision="bfloat16"
    )

    def surface(shape: ModelShape, known: Surface) -> Surface:
        points = [
            p.model_copy(update={"samples_ms": [step_ms(shape, limits, p.tokens, p.kv_length)]}) for p in known.points
        ]
        return known.model_copy(update={"points": points})

    (costs,) = table.drafts
    costs = costs.model_copy(
        update={
            "draft_first": surface(draft, costs.draft_first),
            "draft_level": surface(draft, costs.draft_level),
            "overhead": costs.overhead.model_copy(update={"round_ms": 0.7}),
        }
    )
    own = {"decode": surface(SHAPE, table.decode), "verify": surface(SHAPE, table.verify), "drafts": [costs]}
    return table.model_copy(update={**own, "estimated": False, **fields})


def test_limits_are_scaled_to_what_was_measured() -> None:
    """Three quarters of the bandwidth, a thirtieth of the peak, twice as long for a launch: each is found from the steps that
    wait for it, whatever the datasheet says.
    """
    known = load_limits("h100")
    reached = known.model_copy(
        update={
            "memory_gb_per_second": 0.75 * known.memory_gb_per_second,
            "bfloat16_tflops": known.bfloat16_tflops / 30,
            "eager_layer_ms": 2 * known.eager_layer_ms,
        }
    )
    found = anchored(known, [measured_table(reached)])
    for name in ("memory_gb_per_second", "bfloat16_tflops", "eager_layer_ms"):
        assert getattr(found, name) == pytest.approx(getattr(reached, name), rel=0.01), name
    assert found.round_ms == 0.7
    assert anchored(known, []) == known


def test_an_estimate_goes_by_what_is_measured_on_the_device() -> None:
    """Of other models; tables of another precision, runner or device, and estimates, tell nothing."""
    known = load_limits("h100")
    slow = known.model_copy(update={"memory_gb_per_second": known.memory_gb_per_second / 2})
    other = SHAPE.model_copy(update={"text_parameters": 3 * 10**9})

    def estimate(*tables: CostTable) -> CostTable:
        return estimate_table(
            "h100",
            target=TARGET,
            target_shape=other,
            draft=DRAFT,
            draft_shape=SHAPE,
            precision="bfloat16",
            measured=tables,
        )

    def step(table: CostTable) -> float:
        return table.decode.points[0].latency_ms

    anchored_table = estimate(measured_table(slow))
    assert anchored_table.estimated and anchored_table.num_anchors == 1
    assert step(anchored_table) == pytest.approx(2 * step(estimate()), rel=0.01)
    strangers = [
        measured_table(slow, precision="float32"),
        measured_table(slow, mode="cuda-graph"),
        measured_table(slow, estimated=True),
        measured_table(slow, target_shape=None),
    ]
    table = estimate(*strangers)
    assert table.num_anchors == 0 and step(table) == step(estimate())
