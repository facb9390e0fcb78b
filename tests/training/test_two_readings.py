"""The two readings of a batch, against readings of whole texts in which a mask hides the pruned tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autotune.documents.loss_settings import LossSettings
from autotune.drafters.block_network import TwoReadings, own_feature_mask, rows_of
from autotune.drafters.checkpoint import NETWORKS
from autotune.drafters.dream import DreamNetwork
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.target import Target
from autotune.training.examples import Example
from autotune.training.teacher import Teacher
from tests.obvious import read_whole_text
from tests.training.conftest import SIZES

LAST = 4


@pytest.fixture(scope="module")
def examples(encoded: list[EncodedPrompt]) -> list[Example]:
    """Three examples of different lengths; the answers have 5, 7 and 9 tokens."""
    return [Example(prompt, len(prompt) - 6 - 2 * number) for number, prompt in enumerate(encoded)]


@pytest.mark.parametrize("visual_keep", [1.0, 0.25])
@pytest.mark.parametrize("kind", ["dream", "star", "specvlm"])
def test_pruned_and_padded_readings_equal_readings_of_whole_texts(
    target: Target, examples: list[Example], kind: str, visual_keep: float
) -> None:
    torch.manual_seed(3)
    sizes = {"compression": {"gate": "none"}} if kind == "specvlm" else {}
    network = NETWORKS[kind].new({**SIZES, **sizes}, target, source="test")
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=1.0 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5)
    batch = Teacher(target).read(examples, layers=())
    with torch.no_grad():
        rows = rows_of(network, batch, visual_keep=visual_keep, injection_layer=LAST)
        is_own = own_feature_mask(rows, torch.Generator().manual_seed(1))
        readings = TwoReadings(network, rows, None)
        states = readings.with_target_features([])
        again = readings.with_own_features(states, is_own)
        for row, length in enumerate(batch.lengths.tolist()):
            num_rows = length - (12 if visual_keep < 1 and batch.is_visual[row].any() else 0)
            kept = rows.positions[row, :num_rows]
            is_kept = torch.zeros(length, dtype=torch.bool).scatter(0, kept, True)
            features, embeddings = rows.all_features[row, :length], batch.embeddings[row, :length]
            expected = read_whole_text(network, network.fuse(embeddings, features), features, is_kept)
            torch.testing.assert_close(states[row, :num_rows], expected[kept])
            own = network.own_features(torch.cat([expected[:1], expected[:-1]]))
            reads_own = torch.zeros(length, dtype=torch.bool).scatter(0, kept, is_own[row, :num_rows])[:, None]
            assert reads_own.any()
            features = torch.where(reads_own, own, features)
            expected = read_whole_text(network, network.fuse(embeddings, features), features, is_kept)
            answer = batch.loss_mask[row, :length].nonzero()[:, 0]
            torch.testing.assert_close(again[row, readings.is_again[row]], expected[answer])


def test_a_crossing_block_reads_features_of_pruned_tokens(target: Target, examples: list[Example]) -> None:
    """DREAM, section 3.1; STAR, section 3.1: only the draft's own stream is pruned."""
    network = DreamNetwork.new(SIZES, target, source="test")
    batch = Teacher(target).read(examples, layers=())
    rows = rows_of(network, batch, visual_keep=0.25, injection_layer=LAST)
    features = rows.all_features.detach().requires_grad_()
    states = TwoReadings(network, replace(rows, all_features=features), None).with_target_features([])
    states[rows.loss_mask].pow(3).sum().backward()
    assert features.grad is not None
    is_read = features.grad.abs().sum(-1) > 0
    assert rows.is_pruned and is_read[batch.is_visual].all(), "every visual token, pruned or not, reaches the answer"


def test_loss_weights_are_those_of_the_paper_of_each_draft(target: Target, examples: list[Example]) -> None:
    """The loss is linear in the weights, and its default is that of the paper's weights."""
    papers = {"specvlm": (0.1, 1.0), "star": (1.0, 0.2), "dream": (1.0, 0.2)}
    batch = Teacher(target).read(examples, layers=NETWORKS["star"].new(SIZES, target, source="test").layers_in_training)
    for kind, (logits, features) in papers.items():
        network = NETWORKS[kind].new(SIZES, target, source="test").eval()

        def loss(**weights: float) -> torch.Tensor:
            return network.loss(batch, LossSettings(**weights), torch.Generator().manual_seed(0))[0]  # noqa: B023

        parts = loss(logit_weight=1.0, feature_weight=0.0), loss(logit_weight=0.0, feature_weight=1.0)
        torch.testing.assert_close(loss(), logits * parts[0] + features * parts[1])
        torch.testing.assert_close(loss(feature_weight=0.5), logits * parts[0] + 0.5 * parts[1])
