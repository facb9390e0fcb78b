"""SpecVLM's gate in training: its gradient through the whole draft, and what it learns."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from autotune.documents.loss_settings import LossSettings
from autotune.documents.subnet import Operator
from autotune.drafters.block_network import TwoReadings, rows_of
from autotune.drafters.specvlm import SpecVlmNetwork
from autotune.drafters.teacher_batch import TeacherBatch
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.target import Target
from autotune.training.examples import Example
from autotune.training.recipe import Stage
from autotune.training.teacher import Teacher
from tests.tiny_models import NUM_VISUAL_TOKENS
from tests.training.conftest import SIZES

LAST = 4
SETTINGS = LossSettings(gate_cost=0.0)
OPERATORS: tuple[Operator, ...] = ("prune", "pool", "convolve", "resample", "text_only")


@pytest.fixture(scope="module")
def batch(target: Target, encoded: list[EncodedPrompt]) -> TeacherBatch:
    """The two prompts with images, with answers of 6 and 8 tokens."""
    with_image = [prompt for prompt in encoded if prompt.num_visual_tokens]
    return Teacher(target).read([Example(p, len(p) - 6 - 2 * n) for n, p in enumerate(with_image[:2])], layers=())


def new_specvlm(target: Target, *, std: float | None = None) -> SpecVlmNetwork:
    """A draft with random weights; ``std``: of larger ones, with which the visual rows matter."""
    torch.manual_seed(3)
    sizes = {**SIZES, "compression": {"prune_ratio": 5, "pool_ratio": 4}}
    network = SpecVlmNetwork.new(sizes, target, source="test")
    if std is not None:
        for name, parameter in network.named_parameters():
            if parameter.dim() > 1 and name != "feature_norms":
                torch.nn.init.normal_(parameter, std=std * parameter[0].numel() ** -0.5)
    return network


def test_the_gate_has_a_gradient_through_the_whole_draft(target: Target, batch: TeacherBatch) -> None:
    """At initialization, at least a thousandth of the median parameter's; the gate's loss reaches the gate alone."""
    network = new_specvlm(target).train()
    loss, figures = network.loss(batch, SETTINGS, torch.Generator().manual_seed(0))
    loss.backward()
    norms = {n: float(p.grad.norm()) for n, p in network.named_parameters() if p.grad is not None}
    assert norms["compressor.gate.weight"] > 1e-3 * statistics.median(norms.values())
    assert "gate_regret" in figures and figures["loss"] < float(loss.detach()), "the logged loss is the draft's own"
    found = network.gate_loss(batch, SETTINGS, torch.Generator().manual_seed(0))
    assert found is not None
    network.zero_grad(set_to_none=True)
    found[0].backward()
    assert {n for n, p in network.named_parameters() if p.grad is not None} == {
        "compressor.gate.weight",
        "compressor.gate.bias",
    }


def test_operator_losses_are_those_of_each_example_alone(target: Target, batch: TeacherBatch) -> None:
    network = new_specvlm(target, std=1.5)
    measured = network.operator_losses(batch, SETTINGS, torch.Generator().manual_seed(0))
    losses = measured.losses
    n = NUM_VISUAL_TOKENS
    expected = torch.tensor([-(-n // 5) / n, -(-n // 4) / n, -(-n // 3) / n, 2 / n, 0.0])
    torch.testing.assert_close(measured.shares, expected.expand(2, -1))
    offsets = torch.randint(6, (2, 1), generator=torch.Generator().manual_seed(0))
    for row in range(2):
        alone = batch.select([row])
        for number, name in enumerate(OPERATORS):
            with torch.no_grad():
                rows = rows_of(network, alone, visual_keep=1.0, injection_layer=LAST, operators=[name])
                follows = rows.loss_mask.clone()
                follows[:, 1:] &= rows.loss_mask[:, :-1]
                follows[:, 0] = False
                is_own = follows & ((rows.positions + offsets[row]) % 6 != 0)
                found = network.token_losses(alone, rows, SETTINGS, None, is_own)
            torch.testing.assert_close(found.losses.mean(), losses[row, number])
            torch.testing.assert_close(found.agrees[0].mean(), measured.agreement[row, number])
    assert float((losses.max(1).values / losses.min(1).values).min()) > 1.01, "the operators differ"


@torch.no_grad()
def taught_by(network: SpecVlmNetwork, batch: TeacherBatch, operators: list[Operator]) -> TeacherBatch:
    """A batch whose target is the draft itself with one operator for each example: this operator's loss is zero.

    The draft reads the target's features of the token before, so the target's states are set token by token.
    """
    hidden = batch.hidden[LAST].clone()
    made = replace(batch, hidden={LAST: hidden})
    for column in range(int(batch.loss_start.min()), hidden.shape[1]):
        rows = rows_of(network, made, visual_keep=1.0, injection_layer=LAST, operators=operators)
        states = TwoReadings(network, rows, None).with_target_features([])
        is_set = rows.loss_mask & (rows.positions == column)
        hidden[is_set.any(1), column] = states[is_set]
    return made


def choices_after(
    network: SpecVlmNetwork, batch: TeacherBatch, num_steps: int, loss_of: Callable[[torch.Generator], Any]
) -> list[Operator]:
    """The operators that the gate chooses for the examples of a batch after some steps of its training."""
    assert network.compressor.gate is not None
    optimizer = torch.optim.AdamW(network.compressor.gate.parameters(), lr=0.05, weight_decay=0.0)
    network.train()
    for step in range(num_steps):
        loss, _ = loss_of(torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    questions = network.target_features({LAST: batch.hidden[LAST][torch.arange(2), batch.loss_start]})
    return [network.compressor.choice(question) for question in questions]


@pytest.mark.parametrize("best", [["convolve", "text_only"], ["resample", "prune"]])
def test_training_teaches_the_gate_the_best_operator_of_each_question(
    target: Target, batch: TeacherBatch, best: list[Operator]
) -> None:
    network = new_specvlm(target, std=1.5)
    made = taught_by(network, batch, best)
    losses = network.operator_losses(made, SETTINGS, torch.Generator().manual_seed(0)).losses
    assert [OPERATORS[int(row.argmin())] for row in losses] == best and float(losses.min()) < 1e-4
    torch.nn.init.normal_(network.compressor.gate.weight, std=0.01)  # type: ignore[union-attr]
    assert choices_after(network, made, 40, lambda generator: network.loss(made, SETTINGS, generator)) == best


def test_texts_without_images_do_not_train_the_gate(target: Target, encoded: list[EncodedPrompt]) -> None:
    texts = [prompt for prompt in encoded if not prompt.num_visual_tokens]
    batch = Teacher(target).read([Example(prompt, len(prompt) - 6) for prompt in texts], layers=())
    network = new_specvlm(target).train()
    loss, figures = network.loss(batch, SETTINGS, torch.Generator().manual_seed(0))
    loss.backward()
    assert network.compressor.gate is not None and network.compressor.gate.weight.grad is None
    assert "gate_regret" not in figures


def test_the_entropy_bonus_falls_to_zero_over_the_stage() -> None:
    stage = Stage(steps=4, batch_size=2, learning_rate=1e-3, gate_entropy=0.2)
    assert [stage.at(step / 4).gate_entropy for step in range(4)] == pytest.approx([0.2, 0.15, 0.1, 0.05])
