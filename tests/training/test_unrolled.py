"""Unrolled drafting of EAGLE-3 and multi-token prediction heads, against drafting token by token."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from autotune.documents.loss_settings import LossSettings
from autotune.drafters.checkpoint import NETWORKS, load_draft
from autotune.drafters.eagle3 import Eagle3Network, layers_for, published_layers
from autotune.drafters.feature_draft import FeatureDraft
from autotune.drafters.mtp import MtpNetwork
from autotune.drafters.network import UnrolledNetwork
from autotune.drafters.teacher_batch import divergence
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.target import Target
from autotune.training.examples import Example
from autotune.training.teacher import Teacher
from tests.obvious import refused
from tests.training.conftest import SIZES as BLOCK_SIZES

SIZES = {**BLOCK_SIZES, "num_kv_heads": 2, "layers": [1, 2, 3]}
STEPS = 4
SETTINGS = LossSettings(unrolled_steps=STEPS)


def new_head(kind: str, target: Target) -> UnrolledNetwork:
    torch.manual_seed(0)
    head = NETWORKS[kind].new(SIZES if kind == "eagle3" else {}, target, source="test")
    assert isinstance(head, UnrolledNetwork)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=1.0 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5)
    return head


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
@torch.no_grad()
def test_every_step_is_what_drafting_token_by_token_would_read(target: Target, kind: str) -> None:
    """Row i of step k: the target's features up to row i - k, then k tokens drafted from the head's own states."""
    head = new_head(kind, target)
    num_rows, width = 9, head.config.width
    stream, features = torch.randn(2, num_rows, width), torch.randn(2, num_rows, width)
    unrolled = list(head.unrolled_states(stream, features, STEPS))
    for step, found in enumerate(unrolled):
        for row in range(step, num_rows):
            read = features[:, : row - step + 1]
            for _ in range(step):
                count = read.shape[1]
                states = head(head.fuse(stream[:, :count], read), read, head.factors(torch.arange(count))[None])
                read = torch.cat([read, states[:, -1:]], 1)
            whole = head(head.fuse(stream[:, : row + 1], read), read, head.factors(torch.arange(row + 1))[None])
            torch.testing.assert_close(found[:, row], whole[:, -1], atol=1e-5, rtol=1e-4)
    first = 3
    for step, found in enumerate(head.unrolled_states(stream, features, STEPS, first=first)):
        assert found.shape[1] == (num_rows if step == 0 else num_rows - first)
        expected = unrolled[step][:, first + step :]
        torch.testing.assert_close(found[:, -expected.shape[1] :], expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_new_mtp_head_begins_with_the_inputs_of_the_targets_last_layer(
    target: Target, encoded: list[EncodedPrompt]
) -> None:
    """By regression row by row, over the rows of the answers, with a ridge of a thousandth of the inputs' mean
    square.
    """
    head = NETWORKS["mtp"].new({}, target, source="test")
    assert (
        isinstance(head, MtpNetwork)
        and NETWORKS["eagle3"].new(SIZES, target, source="test").layers_in_preparation == ()
    )
    (layer,) = head.layers_in_preparation
    batches = [Teacher(target).read([Example(prompt, 3)], layers={layer}) for prompt in encoded]
    inputs, outputs = [], []
    for batch in batches:
        for row in range(3, int(batch.lengths[0])):
            feature = batch.hidden[layer + 1][0, row - 1]
            inputs.append(torch.cat([head.enorm(batch.embeddings[0, row]), head.hnorm(feature)]))
            outputs.append(batch.hidden[layer][0, row])
    x, y = torch.stack(inputs).double(), torch.stack(outputs).double()
    penalty = (1e-3 * (x**2).sum(0).mean()).sqrt() * torch.eye(x.shape[1], dtype=x.dtype)
    zeros = torch.zeros(x.shape[1], y.shape[1], dtype=y.dtype)
    expected = torch.linalg.lstsq(torch.cat([x, penalty]), torch.cat([y, zeros])).solution.t()
    before = sum(float(head.loss(batch, SETTINGS, torch.Generator())[0]) for batch in batches)
    head.prepare(iter(batches))
    torch.testing.assert_close(head.eh_proj.weight, expected.float(), atol=1e-4, rtol=1e-3)
    assert sum(float(head.loss(batch, SETTINGS, torch.Generator())[0]) for batch in batches) < before


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_the_loss_ignores_padding_and_reaches_every_weight(
    target: Target, encoded: list[EncodedPrompt], kind: str
) -> None:
    head, generator = new_head(kind, target), torch.Generator()
    layers = head.layers_in_training
    examples = [Example(prompt, len(prompt) - 9) for prompt in encoded]
    teacher = Teacher(target)
    together = head.loss(teacher.read(examples, layers=layers), SETTINGS, generator)[0]
    alone = [head.loss(teacher.read([one], layers=layers), SETTINGS, generator)[0] for one in examples]
    torch.testing.assert_close(together, torch.stack(alone).mean(), atol=1e-4, rtol=1e-4)
    together.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in head.parameters())


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
@torch.no_grad()
def test_a_head_is_trained_saved_and_loaded_on_the_axes_of_its_target(qwens: Any, tmp_path: Path, name: str) -> None:
    target, found = Target(qwens[name][0]), []
    head = new_head("eagle3", target)
    (prompt,) = target.encode(qwens[name][1]).prompts
    batch = Teacher(target).read([Example(prompt, len(prompt) - 2)], layers=head.layers_in_training)
    compare = lambda logits, teacher: found.append(logits[-1]) or divergence(logits, teacher)  # noqa: E731
    head.loss(batch, LossSettings(unrolled_steps=1), torch.Generator(), compare)
    draft, before = FeatureDraft(head), prompt.keep(torch.arange(len(prompt) - 1))
    draft.attach(target)
    target.output_layers = draft.aux_layers
    target.reserve(len(prompt))
    target.prefill_prompt(before)
    draft.prefill(before, None, capacity=len(prompt))
    draft.append(int(prompt.tokens[-1]))
    torch.testing.assert_close(found[0], draft.read_pending().logits[0], atol=1e-4, rtol=1e-4)
    head.save(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert {"fc.weight", "lm_head.weight", "norm.weight", "midlayer.self_attn.q_proj.weight"} <= names.keys()
    assert "d2t" not in names, "vLLM refuses the offsets of a head with the target's whole vocabulary"
    architecture = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert architecture == ["LlamaForCausalLMEagle3"], (
        "vLLM refuses a head without, as one of an architecture that it does not know"
    )
    saved = load_draft(str(tmp_path), target)
    assert isinstance(saved, FeatureDraft) and isinstance(saved.network, Eagle3Network)
    assert saved.network.config == head.config and torch.equal(saved.network.axes, head.axes)
    for part, value in saved.network.state_dict().items():
        torch.testing.assert_close(value, head.state_dict()[part].to(value.dtype), atol=0.03, rtol=0.01)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({**SIZES, "num_haeds": 2}, "recipe.yaml: draft: .*num_haeds"),
        *(
            (
                {**SIZES, "layers": layers},
                r"recipe.yaml: .* reads three different layers of the target in ascending order, of 0 to 4, .*; got "
                + re.escape(f"{layers}; name such layers in draft"),
            )
            for layers in ([1, 2, 9], [1, 2, 2], [3, 1, 2], [1, 3])
        ),
    ],
)
def test_sizes_that_cannot_be(target: Target, sizes: dict[str, object], message: str) -> None:
    with refused(message):
        Eagle3Network.new(sizes, target, source="recipe.yaml")


def test_a_new_head_reads_three_different_layers() -> None:
    """The published ones of deep targets; of shallower ones none is read twice, which serving engines cannot do."""
    found = {num_layers: layers_for(num_layers) for num_layers in (4, 5, 6, 7, 8, 32)}
    assert list(found.values()) == [(1, 2, 3), (1, 2, 4), (1, 3, 5), (2, 3, 4), (2, 4, 5), (2, 16, 29)]
    assert {num_layers: published_layers(num_layers) for num_layers in (7, 8, 32)}.items() <= found.items()


def test_divergence_is_that_of_the_distributions() -> None:
    """Against the definition, and zero of equal distributions."""
    logits, teacher = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    found, agrees = divergence(logits, teacher.log_softmax(-1))
    draft_share, share = logits.softmax(-1), teacher.softmax(-1)
    torch.testing.assert_close(found, (share * (share / draft_share).log()).sum(-1))
    assert agrees.tolist() == [float(a == b) for a, b in zip(logits.argmax(-1), teacher.argmax(-1), strict=True)]
    same, all_agree = divergence(teacher, teacher.log_softmax(-1))
    assert same.abs().max() < 1e-6 and all_agree.all()
