"""Training of block-diffusion drafts, against drafting one block at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from autotune.drafters.block_draft import BlockDraft
from autotune.drafters.dflash import DFlashNetwork, block_embeddings, new_dflash
from autotune.errors import UserError
from autotune.modeling.target import Target
from autotune.training.block_loss import GAMMA, block_loss, block_states, choose_anchors
from autotune.training.recipe import load_recipe
from autotune.training.teacher import Example, Teacher, TeacherBatch
from tests.tiny_models import Inputs

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "mlp_size": 32, "layers": [1, 4], "block_size": 4}
ANSWER = 9  # tokens


def new_draft(target: Target) -> DFlashNetwork:
    torch.manual_seed(0)
    network = new_dflash(SIZES, target, source="test")
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=1.0 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5)
    return network


def mask_embedding(target: Target) -> Tensor:
    return block_embeddings(target.text.module.get_input_embeddings(), torch.tensor(0)).detach()


@torch.no_grad()
def examples_of(target: Target, prompts: dict[str, Inputs]) -> list[Example]:
    encoded = [target.encode(inputs).prompts[0] for inputs in prompts.values()]
    return [Example(prompt, len(prompt) - ANSWER) for prompt in encoded]


def read(target: Target, examples: list[Example]) -> TeacherBatch:
    return Teacher(target).read(examples, layers=SIZES["layers"])  # type: ignore[arg-type]


@torch.inference_mode()
def test_blocks_are_those_of_decoding(target: Target, prompts: dict[str, Inputs]) -> None:
    """Every block of a batch has the logits of a block that is drafted after the tokens before it alone."""
    network = new_draft(target)
    examples = examples_of(target, prompts)
    batch = read(target, examples)
    anchors, is_block = choose_anchors(batch, torch.Generator().manual_seed(0))
    states = block_states(network, batch, anchors, mask_embedding(target))
    draft = BlockDraft(network.eval())
    draft.attach(target)
    num_checked = 0
    for row, example in enumerate(examples):
        target.hidden = {layer: batch.hidden[layer][row] for layer in draft.aux_layers}
        for number, anchor in enumerate(anchors[row].tolist()):
            if not is_block[row, number]:
                continue
            before = example.prompt.keep(torch.arange(anchor))
            draft.prefill(before, None, capacity=64)
            whole = target.hidden
            target.hidden = {layer: rows[:anchor] for layer, rows in whole.items()}
            draft.append(int(example.prompt.tokens[anchor]))
            target.hidden = whole
            found = network.logits(states[row, number, 1:], batch.head)
            torch.testing.assert_close(found, draft.read_pending(), atol=1e-4, rtol=1e-3)
            num_checked += 1
    assert num_checked == len(examples) * (ANSWER - 1)


def test_blocks_begin_in_the_answers(target: Target, prompts: dict[str, Inputs]) -> None:
    batch = read(target, examples_of(target, prompts))
    anchors, is_block = choose_anchors(batch, torch.Generator().manual_seed(1), most=3)
    assert anchors.shape == (len(prompts), 3) and is_block.all()
    assert (anchors > batch.loss_start[:, None]).all() and (anchors < batch.lengths[:, None]).all()
    assert (anchors.diff(dim=1) > 0).all()
    other, _ = choose_anchors(batch, torch.Generator().manual_seed(2), most=3)
    assert not torch.equal(anchors, other), "chosen at random"


def test_the_loss_ignores_padding_weighs_depths_and_reaches_every_weight(
    target: Target, prompts: dict[str, Inputs]
) -> None:
    network, rng, mask = new_draft(target), torch.Generator(), mask_embedding(target)
    examples = examples_of(target, prompts)
    together, figures = block_loss(network, read(target, examples), mask, rng)
    alone = [block_loss(network, read(target, [one]), mask, rng)[0] for one in examples]
    torch.testing.assert_close(together, torch.stack(alone).mean(), atol=1e-4, rtol=1e-4)
    assert figures["loss"] == together.item() and 0 <= figures["agreement"] <= 1
    together.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in network.parameters())

    def by_depth(logits: Tensor, teacher_logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """A loss that tells the depth of every token: blocks of 1 to 3 known tokens, in the order of their first ones."""
        depths = [depth for count in [3] * (ANSWER - 3) + [2, 1] for depth in range(1, count + 1)]
        return torch.tensor(depths, dtype=torch.float32), torch.ones(len(depths))

    found, _ = block_loss(network, read(target, examples[:1]), mask, rng, compare=by_depth)
    counts = torch.tensor([ANSWER - 1, ANSWER - 2, ANSWER - 3.0])
    depth = torch.tensor([1.0, 2.0, 3.0])
    weights = counts * torch.exp(-(depth - 1) / GAMMA)
    assert found.item() == pytest.approx(float((weights * depth).sum() / weights.sum()))


def test_training_reduces_the_loss(target: Target, prompts: dict[str, Inputs]) -> None:
    network = new_dflash(SIZES, target, source="test")
    batch, mask = read(target, examples_of(target, prompts)), mask_embedding(target)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    losses = []
    for step in range(25):
        loss, _ = block_loss(network, batch, mask, torch.Generator().manual_seed(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_block_draft_imitates_no_features(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "schema: autotune.recipe/1\nname: a\ndescription: b\nmodel: dflash\nteacher: ../target\nstages:\n"
        "  - {objective: drafting, steps: 1, batch_size: 1, learning_rate: 1.0, distillation: entropy}\n"
    )
    with pytest.raises(UserError, match="a dflash draft has no subnets and imitates no features; remove distillation"):
        load_recipe(path)
