"""Roofline estimates: computed by hand, for every shipped device, and scaled to measurements."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from autotune.cost.roofline import (
    KERNELS_OUTSIDE,
    REACHED_LINK,
    REDUCE_MS,
    DatasheetLimits,
    anchored,
    datasheets,
    device_bound_ms,
    estimate_table,
    find_limits,
    step_ms,
    step_parts,
)
from autotune.cost.surface import Surface
from autotune.cost.table import CostTable, ModelShape
from autotune.documents.execution import CUDA_GRAPH, DEFAULT_CAPTURE_SIZES, EAGER
from autotune.documents.subnet import Subnet
from autotune.machine.device import short_name
from autotune.replay.trace import Forest, RecordedPrompt, join
from tests.sample_documents import DRAFT, TARGET, header

# One layer of a billion parameters of two bytes, and a kilobyte of keys and values per token.
SHAPE = ModelShape(
    num_layers=1,
    hidden_size=1,
    text_parameters=10**9,
    vision_parameters=0,
    kv_bytes_per_token=1000,
    bytes_per_parameter=2,
)
# So large that memory bounds its steps on every device.
LARGE = SHAPE.model_copy(update={"text_parameters": 10**11})
LIMITS = DatasheetLimits(
    model="A slide rule",
    source="by hand",
    memory_gb=80,
    memory_gb_per_second=1000,
    bfloat16_tflops=100,
    float32_tflops=10,
    eager_layer_ms=0.1,
    layers_outside=2,
    kernel_ms=0.002,
    round_ms=0.4,
    link_gb_per_second=100,
    link_hop_ms=0.001,
)


def estimated(
    draft_shape: ModelShape,
    target_shape: ModelShape = LARGE,
    name: str = "h100",
    *,
    subnet: Subnet = Subnet(),  # noqa: B008
    **options: Any,
) -> CostTable:
    models: dict[str, Any] = {"target": TARGET, "target_shape": target_shape, "drafts": [(DRAFT, subnet, draft_shape)]}
    return estimate_table(name, precision="bfloat16", **models, **options)


def test_one_token_is_bound_by_memory() -> None:
    """Two gigabytes of weights and a megabyte of KV cache, at what is reached of a terabyte per second."""
    assert step_ms(SHAPE, LIMITS, 1, 999) == pytest.approx(2.001 / 0.88)
    assert device_bound_ms(SHAPE, LIMITS, 1, 999) == pytest.approx(2.001)


def test_many_tokens_are_bound_by_arithmetic() -> None:
    """1,000 tokens take 2e12 operations and those of attention, at 1e14 per second; in float32 at a tenth of that."""
    operations = 2e12 + 4 * 1000 * 1000
    assert step_ms(SHAPE, LIMITS, 1000, 0) == pytest.approx(operations / 1e11)
    wide = SHAPE.model_copy(update={"bytes_per_parameter": 4})
    assert step_ms(wide, LIMITS, 1000, 0) == pytest.approx(operations / 1e10)


def test_tiny_model_is_bound_by_launches() -> None:
    """Its 24 layers launch kernels, and as many as two more are launched outside them."""
    tiny = SHAPE.model_copy(update={"text_parameters": 1000, "num_layers": 24})
    assert step_ms(tiny, LIMITS, 1, 0) == pytest.approx(2.6)


def test_every_shipped_datasheet_gives_a_table() -> None:
    """Files are named as the device is, and latencies increase with tokens and KV length."""
    small = SHAPE.model_copy(update={"text_parameters": 10**8})
    for name in datasheets():
        assert short_name(find_limits(name).model) == name
        table = estimated(small, name=name)
        assert table.estimated and table.device.name == name and find_limits(name).source
        assert {"link_gb_per_second", "link_hop_ms"} <= find_limits(name).model_fields_set, name
        assert table.dump()
        prices = table.prices(DRAFT, max_tokens=65, max_kv_length=4096)
        for ms in (prices.verify_ms, prices.draft_level_ms):
            assert (np.diff(ms[1:], axis=0) >= 0).all() and (np.diff(ms[1:], axis=1) >= 0).all(), name
        assert (prices.draft_level_ms[1:] < prices.verify_ms[1:]).all(), name


def test_captured_forward_passes_are_estimated_at_the_sizes_of_captures() -> None:
    """Steps take the time of their kernels, 40 of a layer and those outside, and of the host, besides that of their
    traffic; prefills are eager.
    """
    kernels_ms = (40 + KERNELS_OUTSIDE) * 0.002
    assert step_ms(SHAPE, LIMITS, 1, 999, CUDA_GRAPH) == pytest.approx(2.001 / 0.88 + kernels_ms + LIMITS.host_ms)
    eager = estimated(SHAPE, SHAPE)
    captured = estimated(SHAPE, SHAPE, mode=CUDA_GRAPH, capture_sizes=(1, 8, 160))
    assert (eager.mode, captured.mode, captured.capture_sizes) == ("eager", "cuda-graph", (1, 8, 160))
    for point in (*captured.decode.points, *captured.drafts[0].draft_level.points):
        assert point.latency_ms == step_ms(SHAPE, find_limits("h100"), point.tokens, point.kv_length, CUDA_GRAPH)
    assert {point.tokens for point in captured.verify.points} == {1, 8, 160}
    assert {point.kv_length for point in captured.verify.points} == {64, 512, 4096}
    deep = SHAPE.model_copy(update={"num_layers": 32})
    assert step_ms(deep, find_limits("h100"), 1, 256) > 3 * step_ms(deep, find_limits("h100"), 1, 256, CUDA_GRAPH)
    assert captured.prefill == eager.prefill


def test_a_small_independent_draft_pays_for_its_kernels() -> None:
    """Qwen3-8B and chains of 5 of Qwen3-0.6B on an H100: 28 layers of 56 kernels take most of a level's 5 ms."""
    known = {"vision_parameters": 0, "bytes_per_parameter": 2, "layer_kernels": 56}
    target = {"num_layers": 36, "hidden_size": 4096, "text_parameters": 7_568_000_000, "kv_bytes_per_token": 147_456}
    draft = {"num_layers": 28, "hidden_size": 1024, "text_parameters": 596_000_000, "kv_bytes_per_token": 114_688}
    shapes = [ModelShape(**known, **sizes) for sizes in (draft, target)]
    table = estimated(*shapes, mode=CUDA_GRAPH, capture_sizes=DEFAULT_CAPTURE_SIZES)
    prices = table.prices(DRAFT, max_tokens=6, max_kv_length=400)
    plain, level = prices.decode_ms[-1], prices.draft_level_ms[1, -1]
    assert level == pytest.approx(5.1, rel=0.05) and plain == pytest.approx(11.1, rel=0.05)
    round_ms = 5 * (level + prices.overhead.level_ms) + prices.verify_ms[6, -1] + prices.overhead.round_ms
    assert 3.5 * plain / round_ms < 1.2 * 1.3


def test_mig_slices_have_shares_of_their_gpu() -> None:
    """Seven slices of compute, and eight of memory with its bandwidth (NVIDIA's MIG user guide)."""
    whole = find_limits("h100")
    for profile, compute, memory in (("1g.10gb", 1, 1), ("1g.20gb", 1, 2), ("3g.40gb", 3, 4), ("1c.3g.40gb", 1, 4)):
        part = find_limits(f"h100-mig-{profile}")
        assert part.memory_gb_per_second == pytest.approx(whole.memory_gb_per_second * memory / 8)
        assert part.bfloat16_tflops == pytest.approx(whole.bfloat16_tflops * compute / 7)
        assert part.memory_gb == int(profile.split(".")[-1].removesuffix("gb"))
        assert short_name(part.model) == f"h100-mig-{profile}"
    assert find_limits("h200-mig-1g.18gb").memory_gb_per_second == find_limits("h200").memory_gb_per_second / 8
    for missing in ("h100-mig-9g.10gb", "h100-mig-1g.50gb", "h100-mig-2c.1g.10gb", "h100-mig-", "l4-mig-1g.3gb", "x"):
        assert find_limits(missing) is None, missing


def test_estimate_of_a_draft_with_blocks_that_cross() -> None:
    """Bound by memory, a forward pass takes the time of reading the weights and the keys and values of both KV
    lengths.
    """
    shape = LARGE.model_copy(update={"crossing_share": 0.25, "kv_bytes_per_token": 10**6})
    table = estimated(shape)
    assert table.prices(DRAFT, max_tokens=2, max_kv_length=4096).crossing_share == 0.25
    forest = Forest(
        np.zeros(2, np.int64), np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32), -np.ones((1, 1), np.int64)
    )
    trace = join(header(1), [RecordedPrompt(forest, 3000, 1000, 2400)])
    (kv_length,) = trace.draft_kv_length(0.25)
    num_bytes = 2 * 10**11 + 10**6 * (0.75 * (1000 + 1) + 0.25 * (3000 + 1))
    limits = find_limits("h100")
    assert step_ms(shape, limits, 1, kv_length) == pytest.approx(num_bytes / (0.88 * limits.memory_gb_per_second * 1e6))


def measured_table(limits: DatasheetLimits, mode: str = EAGER, **fields: object) -> CostTable:
    """A table of a device with the given limits, whose steps take the time of memory, arithmetic and kernels."""
    draft = SHAPE.model_copy(update={"text_parameters": 10**6, "num_layers": 2})
    table = estimated(draft, mode=mode)

    def surface(shape: ModelShape, known: Surface) -> Surface:
        points = [
            p.model_copy(update={"samples_ms": [step_ms(shape, limits, p.tokens, p.kv_length, mode)]})
            for p in known.points
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
    own = {"decode": surface(LARGE, table.decode), "verify": surface(LARGE, table.verify), "drafts": [costs]}
    return table.model_copy(update={**own, "estimated": False, **fields})


@pytest.mark.parametrize(("mode", "kernel_time"), [(EAGER, "eager_layer_ms"), (CUDA_GRAPH, "kernel_ms")])
def test_limits_are_scaled_to_measurements(mode: str, kernel_time: str) -> None:
    """Three quarters of the bandwidth, a thirtieth of the peak, twice the time of kernels: each is found from steps
    that it bounds.
    """
    known = find_limits("h100")
    reached = known.model_copy(
        update={
            "memory_gb_per_second": 0.75 * known.memory_gb_per_second,
            "bfloat16_tflops": known.bfloat16_tflops / 30,
            kernel_time: 2 * getattr(known, kernel_time),
            "host_ms": (1 if mode == EAGER else 2) * known.host_ms,
        }
    )
    scaled = anchored(known, [measured_table(reached, mode)], mode)
    for name in ("memory_gb_per_second", "bfloat16_tflops", kernel_time, "host_ms"):
        assert getattr(scaled, name) == pytest.approx(getattr(reached, name), rel=0.01), name
    assert scaled.round_ms == 0.7
    assert anchored(known, []) == known


def test_estimate_is_scaled_to_tables_of_other_models() -> None:
    """Tables of another precision or mode, estimates, and tables without shapes are not used."""
    known = find_limits("h100")
    slow = known.model_copy(update={"memory_gb_per_second": known.memory_gb_per_second / 2})
    other = LARGE.model_copy(update={"text_parameters": 3 * 10**11})

    def estimate(*tables: CostTable) -> CostTable:
        return estimated(LARGE, other, measured=tables)

    def step(table: CostTable) -> float:
        return table.decode.points[0].latency_ms

    anchored_table = estimate(measured_table(slow))
    assert anchored_table.estimated and anchored_table.num_anchors == 1
    assert step(anchored_table) == pytest.approx(2 * step(estimate()), rel=0.01)
    unusable = [
        measured_table(slow, precision="float32"),
        measured_table(slow, CUDA_GRAPH),
        measured_table(slow, estimated=True),
        measured_table(slow, target_shape=None),
    ]
    table = estimate(*unusable)
    assert table.num_anchors == 0 and step(table) == step(estimate())


def test_an_image_costs_its_patches_and_the_launches_of_the_tower() -> None:
    """OneVision's largest image has 7,290 patches: twice a gigaflop and more for each, and 26 layers of launches."""
    text, seeing = LARGE, LARGE.model_copy(update={"vision_parameters": 4 * 10**8, "vision_layers": 26})
    limits = find_limits("h100")
    assert limits is not None
    patches = np.array([0, 1, 729, 7290])
    without, with_tower = (estimated(SHAPE, shape).prefill.ms(np.zeros(4), patches) for shape in (text, seeing))
    tower_ms = 26 * limits.eager_layer_ms * (patches > 0) + patches * 2 * 4e8 / (limits.bfloat16_tflops * 1e9)
    np.testing.assert_allclose(with_tower - without, tower_ms)
    assert not np.ptp(without), "a model without a tower"


NUMBERS = (1, 2, 4, 8)
# The text model of Qwen2.5-VL-72B: 80 layers of 8,192 hidden units with 8 KV heads, which are divided, and its head.
LARGE_TARGET = ModelShape(
    num_layers=80,
    hidden_size=8192,
    text_parameters=71_460_487_168,
    vision_parameters=704_573_696,
    kv_bytes_per_token=327_680,
    bytes_per_parameter=2,
    divided_parameters=70_213_468_160,
    embedding_parameters=1_245_708_288,
    device_numbers=NUMBERS,
)


def on_devices(shape: ModelShape, num_devices: int, tokens: int = 1, name: str = "h100") -> dict[str, float]:
    limits = find_limits(f"{num_devices}x{name}")
    assert limits is not None and limits.num_devices == num_devices
    parts = step_parts(shape, limits, tokens, 1024, CUDA_GRAPH)
    assert sum(parts.values()) == pytest.approx(step_ms(shape, limits, tokens, 1024, CUDA_GRAPH))
    return parts


def test_one_device_is_what_it_was() -> None:
    """Whatever a plan divides: the same numbers, to the bit."""
    limits, plain = find_limits("h100"), LARGE_TARGET.model_copy(update={"divided_parameters": 0})
    assert find_limits("1xh100") == limits is not None
    for mode, tokens in ((EAGER, 1), (CUDA_GRAPH, 1), (CUDA_GRAPH, 61), (EAGER, 1024)):
        assert step_ms(LARGE_TARGET, limits, tokens, 777, mode) == step_ms(plain, limits, tokens, 777, mode)
    assert on_devices(LARGE_TARGET, 1)["all-reduces"] == 0
    read_ms = (71_460_487_168 * 2 + 1025 * 327_680) / (0.88 * 3350e6)
    kernels_ms = (80 * 40 + KERNELS_OUTSIDE) * limits.kernel_ms + limits.host_ms
    assert step_ms(LARGE_TARGET, limits, 1, 1024, CUDA_GRAPH) == pytest.approx(read_ms + kernels_ms)


@pytest.mark.parametrize("tokens", [1, 6, 61, 1024])
@pytest.mark.parametrize("name", ["h100", "h200", "a100", "l40s"])
def test_more_devices_read_and_multiply_less_and_sum_longer(tokens: int, name: str) -> None:
    """Weights, keys and values and operations are divided, but for what every device reads whole; a ring has two more
    hops for each device.
    """
    limits = find_limits(name)
    parts = [on_devices(LARGE_TARGET, number, tokens, name) for number in NUMBERS]
    for more, fewer in itertools.pairwise(reversed(parts)):
        for part in ("weights", "keys and values", "arithmetic"):
            assert more[part] <= fewer[part], part
        assert more["all-reduces"] > fewer["all-reduces"] and more["kernels and host"] == fewer["kernels and host"]
    whole_ms = (1_310_720 + 1_245_708_288) * 2 / (0.88 * limits.memory_gb_per_second * 1e6)  # norms and the head
    for number, each in zip(NUMBERS, parts, strict=True):
        assert each["weights"] - whole_ms == pytest.approx((parts[0]["weights"] - whole_ms) / number)
        hops = 2 * (number - 1)
        sent_ms = tokens * 8192 * 2 / number / (REACHED_LINK * limits.link_gb_per_second * 1e6)
        reduce_ms = 160 * (REDUCE_MS + hops * (limits.link_hop_ms + sent_ms)) if hops else 0
        assert each["all-reduces"] == pytest.approx(reduce_ms)


def test_a_small_target_is_slower_on_eight_devices() -> None:
    """SmolLM2-135M reads its weights in a tenth of a millisecond, and waits for 60 sums; a 72B is faster on eight."""
    known = {"vision_parameters": 0, "bytes_per_parameter": 2, "device_numbers": NUMBERS}
    small = ModelShape(
        num_layers=30,
        hidden_size=576,
        text_parameters=134_515_008,
        divided_parameters=106_168_320,
        kv_bytes_per_token=23_040,
        **known,
    )
    times = {shape: [sum(on_devices(shape, n).values()) for n in NUMBERS] for shape in (small, LARGE_TARGET)}
    assert times[small] == sorted(times[small]) and times[LARGE_TARGET] == sorted(times[LARGE_TARGET], reverse=True)


def test_a_table_of_four_devices_divides_the_target_and_not_the_drafts() -> None:
    """An independent draft too, which transformers could divide."""
    draft = LARGE_TARGET.model_copy(update={"num_layers": 2})
    one, four = (estimated(draft, LARGE_TARGET, cards, mode=CUDA_GRAPH) for cards in ("h100", "4xh100"))
    assert (four.device.name, four.device.key) == ("4xh100", f"cuda/4x{one.device.model}/0")
    assert one.device.shared_by(1) == one.device and one.device.shared_by(4) == four.device
    assert four.drafts == one.drafts
    target, limits = LARGE_TARGET, find_limits("4xh100")
    for point in four.verify.points:
        assert point.latency_ms == step_ms(target, limits, point.tokens, point.kv_length, CUDA_GRAPH)
    measured = one.model_copy(update={"estimated": False})
    assert estimated(draft, LARGE_TARGET, "4xh100", mode=CUDA_GRAPH, measured=[measured]).num_anchors == 0
    of_four = {"precision": "bfloat16", "mode": CUDA_GRAPH, "capture_sizes": ()}
    assert one.why_not_of("4xh100", TARGET, LARGE_TARGET, [], **of_four) == "it is of h100, not of 4xh100"
    assert four.why_not_of("8xh100", TARGET, LARGE_TARGET, [], **of_four) == "it is of 4xh100, not of 8xh100"
    assert four.why_not_of("4xh100", TARGET, LARGE_TARGET, [], **of_four) is None


@pytest.mark.parametrize("cards", ["0xh100", "65xh100", "4xnope", "2xh100-mig-1g.10gb", "x4xh100"])
def test_cards_without_limits(cards: str) -> None:
    assert find_limits(cards) is None


def test_devices_share_heads_and_memory() -> None:
    """A 72B in bfloat16: 140.4 GB of its layers are divided, and its embedding, head and vision tower are whole."""
    divided, kv_bytes = 2 * 70_213_468_160, 1000 * 327_680
    whole = 2 * (1_310_720 + 2 * 1_245_708_288 + 704_573_696)
    for number in NUMBERS:
        assert LARGE_TARGET.bytes_on_each(number, 1000) == pytest.approx(whole + (divided + kv_bytes) / number)
    text = LARGE_TARGET.cards_needed("slates", 80e9)
    assert (
        text
        == "cards of slates that hold the target, by tokens of context: 4 with 4,096, 4 with 32,768, 4 with 131,072"
    )
    assert LARGE_TARGET.cards_needed("slates", 20e9).endswith("none with 4,096, none with 32,768, none with 131,072")
