"""Estimates from datasheets: by hand, for every shipped device, and marked as what they are."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.cost.device import short_name
from autotune.cost.roofline import DeviceLimits, ModelShape, datasheets, estimate_table, load_limits, step_ms
from autotune.files import dump_document
from autotune.subnet import Subnet
from tests.documents import DRAFT, TARGET

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
    assert dump_document("cost-table", table)
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
