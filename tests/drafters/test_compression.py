"""The elastic compressor, operator by operator, and its gates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autotune.drafters.compression import CompressionConfig, Compressor
from tests.obvious import refused

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
    share = 0.5 * float(made.gate.bias.detach().softmax(-1)[1]) + 0.5 / 5
    assert sizes.count(3) / 60 == pytest.approx(share, abs=0.15) and len(set(sizes)) > 1


def test_the_expected_cost_is_that_of_the_drawn_operators() -> None:
    """Plus the weighted entropy, at the temperature of the draws."""
    made = compressor()
    made.config = made.config.model_copy(update={"temperature": 2.0})
    questions, costs = torch.randn(3, HIDDEN), torch.rand(3, 5)
    shares = (made.scores(questions) / 2.0).softmax(-1)
    entropy = -(shares * shares.log()).sum(-1)
    torch.testing.assert_close(
        made.expected_cost(questions, costs, 0.3), ((shares * costs).sum(-1) - 0.3 * entropy).mean()
    )


@pytest.mark.parametrize("gate", ["select", "weigh", "concatenate"])
def test_a_fixed_operator_is_the_operator_alone(rows: Tensor, gate: str) -> None:
    question = torch.randn(HIDDEN)
    for name in CompressionConfig(gate=gate).operators:
        made = compressor(gate)
        expected = made.operate(name, rows, POSITIONS, None)
        made.fix(name)
        for found, wanted in zip(made(rows, POSITIONS, question), expected, strict=True):
            assert torch.equal(found, wanted)


def test_the_ratio_of_a_fixed_operator(rows: Tensor) -> None:
    made = compressor()
    made.fix("pool", 2)
    found, positions = made(rows, POSITIONS, torch.randn(HIDDEN))
    torch.testing.assert_close(found, rows.unflatten(0, (5, 2)).mean(1))
    assert positions.tolist() == [4, 6, 20, 22, 24]


def test_operators_and_ratios_that_do_not_exist_are_refused() -> None:
    with refused(r"\(gate: weigh\) combines prune, pool, convolve; got operator resample"):
        compressor("weigh").fix("resample")
    with refused(r"\(gate: none\) does not compress visual tokens; got operator pool"):
        compressor("none").fix("pool")
    with refused("only prune and pool have a ratio to choose; got 5 for convolve"):
        compressor().fix("convolve", 5)
    with refused("got 5 for the gate's choice"):
        compressor().fix(None, 5)


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
