"""The elastic compressor, operator by operator, and its gates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autotune.drafters.compression import CompressionConfig, Compressor

HIDDEN = 8
COUNT = 10
POSITIONS = torch.tensor([3, 4, 5, 6, 7, 20, 21, 22, 23, 24])  # two images of five tokens


@pytest.fixture
def rows() -> Tensor:
    return torch.randn(COUNT, HIDDEN, generator=torch.Generator().manual_seed(0))


def compressor(gate: str = "select", **changes: int) -> Compressor:
    torch.manual_seed(1)
    config = CompressionConfig(gate=gate, **{"prune_ratio": 5, "pool_ratio": 4, "convolve_ratio": 3, **changes})
    return Compressor(config, HIDDEN)


def test_pruning_keeps_tokens_as_they_are(rows: Tensor) -> None:
    """Random ones in training; evenly spaced ones when decoding, so that runs and replays agree."""
    found, positions = compressor().operate("prune", rows, POSITIONS, None)
    assert torch.equal(found, rows[[4, 9]]) and positions.tolist() == [7, 24]
    drawn = [compressor().operate("prune", rows, POSITIONS, torch.Generator().manual_seed(seed)) for seed in range(20)]
    assert {len(one) for one, _ in drawn} == {2}
    assert len({tuple(at.tolist()) for _, at in drawn}) > 10
    for one, at in drawn:
        assert at.tolist() == sorted(at.tolist()) and torch.equal(one, rows[torch.isin(POSITIONS, at)])


def test_pooling_is_the_mean_of_neighbours(rows: Tensor) -> None:
    found, positions = compressor().operate("pool", rows, POSITIONS, None)
    last = torch.cat([rows[8:], rows[9:], rows[9:]])  # padded with the last token
    torch.testing.assert_close(found, torch.stack([rows[:4].mean(0), rows[4:8].mean(0), last.mean(0)]))
    assert positions.tolist() == [6, 22, 24]


def test_convolution_mixes_neighbours(rows: Tensor) -> None:
    made = compressor()
    found, positions = made.operate("convolve", rows, POSITIONS, None)
    assert made.convolution is not None and positions.tolist() == [5, 20, 23, 24]
    by_hand = torch.einsum("ock,kc->o", made.convolution.weight, rows[3:6]) + made.convolution.bias
    torch.testing.assert_close(found[1], by_hand)


def test_the_resampler_is_one_cross_attention(rows: Tensor) -> None:
    made = compressor()
    found, positions = made.operate("resample", rows, POSITIONS, None)
    assert made.queries is not None and made.keys_values is not None and positions.tolist() == [24, 24]
    keys, values = made.keys_values(rows).chunk(2, -1)
    torch.testing.assert_close(found, (made.queries @ keys.T / HIDDEN**0.5).softmax(-1) @ values)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", ["prune", "pool", "convolve", "resample", "text_only"])
def test_few_tokens_are_compressed(rows: Tensor, name: str, count: int) -> None:
    """Fewer than a group: one row."""
    found, positions = compressor().operate(name, rows[:count], POSITIONS[:count], None)
    assert len(found) == len(positions) == {"resample": 2, "text_only": 0}.get(name, 1)
    assert found.isfinite().all() and set(positions.tolist()) <= {int(POSITIONS[count - 1])}


def test_selection_follows_the_gate(rows: Tensor) -> None:
    """The best operator when decoding; in training one drawn by its score."""
    made = compressor()
    assert made.gate is not None
    with torch.no_grad():
        made.gate.weight.zero_()
        made.gate.bias.copy_(torch.tensor([0.0, 2.0, 0.0, 0.0, -9.0]))
    question = torch.randn(HIDDEN)
    found, _ = made(rows, POSITIONS, question)
    torch.testing.assert_close(found, made.operate("pool", rows, POSITIONS, None)[0])
    sizes = [len(made(rows, POSITIONS, question, torch.Generator().manual_seed(seed))[0]) for seed in range(60)]
    shares = made.gate.bias.softmax(-1)
    assert sizes.count(3) / 60 == pytest.approx(float(shares[1]), abs=0.15)
    assert len(set(sizes)) > 1 and 0 not in sizes, "text_only is all but impossible here"


def test_the_gate_gets_the_gradient_of_its_selection(rows: Tensor) -> None:
    """Straight-through estimator: the operator's rows with the gradient of its share."""
    made = compressor()
    assert made.gate is not None
    generator = torch.Generator().manual_seed(3)
    noise = -torch.empty(5).exponential_(generator=torch.Generator().manual_seed(3)).log()
    question = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5))
    found, _ = made(rows, POSITIONS, question, generator)
    shares = (made.gate(question) + noise).softmax(-1)
    chosen = int(shares.argmax())
    assert chosen < 4
    found.sum().backward()
    (expected,) = torch.autograd.grad(found.detach().sum() * shares[chosen], made.gate.bias)
    torch.testing.assert_close(made.gate.bias.grad, expected)
    assert float(expected.abs().sum()) > 0


def test_weighing_adds_up_operators_of_one_ratio(rows: Tensor) -> None:
    made = compressor("weigh", weigh_ratio=3)
    assert made.gate is not None
    question = torch.randn(HIDDEN)
    found, positions = made(rows, POSITIONS, question)
    weights = made.gate(question).softmax(-1)
    parts = [made.operate(name, rows, POSITIONS, None)[0] for name in ("prune", "pool", "convolve")]
    torch.testing.assert_close(found, sum(w * part for w, part in zip(weights, parts, strict=True)))
    assert positions.tolist() == [5, 20, 23, 24]


def test_concatenation_keeps_every_operator_in_its_place(rows: Tensor) -> None:
    made = compressor("concatenate")
    assert made.gate is None
    found, positions = made(rows, POSITIONS, torch.randn(HIDDEN))
    assert len(found) == 2 + 3 + 4 + 2 and positions.tolist() == sorted(positions.tolist())
    assert any(torch.equal(one, rows[4]) for one in found), "a token kept by prune is one of them"


def test_without_a_gate_tokens_stay(rows: Tensor) -> None:
    found, positions = compressor("none")(rows, POSITIONS, torch.randn(HIDDEN))
    assert found is rows and positions is POSITIONS


def test_the_ratios_are_the_papers() -> None:
    config = CompressionConfig()
    assert (config.prune_ratio, config.pool_ratio, config.convolve_ratio, config.num_queries) == (20, 20, 3, 2)
    assert config.operators == ("prune", "pool", "convolve", "resample", "text_only")
