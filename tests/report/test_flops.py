"""Operations of subnets by hand, and estimated speedups against a replay of an estimated cost table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autotune.acceptance.replay import plain_decode_ms, replay
from autotune.acceptance.trace import ForestBounds, RecordedPrompt, join
from autotune.cost.draft_costs import ModelShape
from autotune.cost.roofline import datasheets, estimate_table, load_limits, operations
from autotune.report.flops import estimated_speedup, on_front, round_operations, subnet_flops
from autotune.report.sources import Sources
from autotune.trees.policy import parse_policy
from tests.report.conftest import EVIL, SHAPE
from tests.sample_documents import DEVICE, DRAFT, TARGET, forest_of, header


def test_operations_of_a_round_by_hand() -> None:
    """One layer of width 2 with 10 parameters: 20 operations a token, and 8 for every token attended to."""
    shape = ModelShape(
        num_layers=1,
        hidden_size=2,
        text_parameters=10,
        vision_parameters=0,
        kv_bytes_per_token=1,
        bytes_per_parameter=2,
    )
    assert operations(shape, 3, 100) == 3 * 20 + 8 * 3 * 103
    first, second, third = 3 * 20 + 8 * 3 * 103, 20 + 8 * 102, 20 + 8 * 103
    assert round_operations(shape, depth=3, tokens_per_round=3, kv_length=100) == first + second + third
    assert round_operations(shape, depth=1, tokens_per_round=3, kv_length=100) == first


def test_estimated_speedup_equals_a_replay_with_the_estimated_table() -> None:
    """Every round accepts a chain of 2. Both models are so small that kernel launches alone take time."""
    num_tokens, draft_shape = 31, SHAPE.model_copy(update={"num_layers": 1})
    last = num_tokens - 1
    nodes = [[(1, 0.9, last + position)] for position in range(last)] + [[(1, 0.9, -1)]] * last
    trace = join(
        header(1, bounds=ForestBounds(depth=2, num_proposals=1), aux_layers=(4,)),
        [RecordedPrompt(forest_of([1] * num_tokens, nodes), 20, 20, 0)],
    )
    policy = parse_policy({"policy": "chain", "depth": 2})
    for device in datasheets():
        table = estimate_table(
            device, target=TARGET, target_shape=SHAPE, draft=DRAFT, draft_shape=draft_shape, precision="float32"
        )
        prices = table.prices(DRAFT, max_tokens=8, max_kv_length=64)
        result = replay(trace, policy, prices)
        assert result.tokens_per_round == 3
        expected = plain_decode_ms(trace, prices).sum() / (result.decode_ms - result.draft_prefill_ms).sum()
        found = estimated_speedup(
            draft_shape, SHAPE, load_limits(device), depth=2, tokens_per_round=3.0, draft_kv_length=35.0, kv_length=35.0
        )
        assert found == pytest.approx(expected, rel=1e-3), device


def test_front_is_not_dominated() -> None:
    rng = np.random.default_rng(0)
    costs, gains = rng.integers(0, 12, 60), rng.integers(0, 12, 60)
    found = on_front(costs, gains)
    points = list(zip(costs.tolist(), gains.tolist(), strict=True))
    for (cost, gain), is_on in zip(points, found, strict=True):
        beaten = any((c <= cost and g > gain) or (c < cost and g >= gain) for c, g in points)
        assert not (is_on and beaten)
    kept = {point for point, is_on in zip(points, found, strict=True) if is_on}
    best = {p for p in points if not any((c <= p[0] and g > p[1]) or (c < p[0] and g >= p[1]) for c, g in points)}
    assert kept == best and found.sum() == len(kept)


def test_rows_of_every_subnet_and_device(sources: Sources) -> None:
    frame = subnet_flops(sources)
    devices = [DEVICE.name, *datasheets()]
    assert frame.device.drop_duplicates().tolist() == devices and len(frame) == len(devices) * len(sources.screened)
    own = frame[frame.device == DEVICE.name]
    assert not own.estimated.any() and frame[frame.device != DEVICE.name].estimated.all()
    assert own.speedup.tolist() == [subnet.speedup for subnet in sources.screened]
    trace = sources.traces[0]
    for row, subnet in zip(own.itertuples(), sources.screened, strict=True):
        halves = 0.5 if subnet.subnet.heads else 1.0
        shape = SHAPE.model_copy(update={"text_parameters": int(SHAPE.text_parameters * halves)})
        self_share = 0.75 if subnet.subnet.heads else 1.0  # of the keys and values, in blocks that do not cross
        visual = [self_share * (1 - subnet.subnet.visual_keep) * n for n in trace.num_visual_tokens]
        lengths = [
            n - v + a / 2 for n, v, a in zip(trace.prompt_length, visual, np.diff(trace.answer_start), strict=True)
        ]
        kv = sum(lengths) / len(lengths)
        flops = round_operations(shape, depth=3, tokens_per_round=2.5, kv_length=kv)
        assert row.mflops_per_round == pytest.approx(flops / 1e6)
        assert row.mflops_per_token == pytest.approx(flops / 1e6 / 2.5)
    assert frame.groupby("device").is_on_front.any().all()
    assert set(frame.draft) == {EVIL.id}


def test_without_shapes_or_subnets_there_are_no_rows(sources: Sources) -> None:
    assert subnet_flops(Sources()).empty
    assert sources.table is not None
    bare = [costs.model_copy(update={"shape": None}) for costs in sources.table.drafts]
    assert subnet_flops(replace(sources, table=sources.table.model_copy(update={"drafts": bare}))).empty
