"""The code of the training asks a network what it can do, and never which kind it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.drafters.checkpoint import NETWORKS
from autotune.drafters.network import DraftNetwork
from autotune.drafters.trainable import TrainableNetwork
from tests.imports import MODULES

TRAINING = [path for name, path in MODULES.items() if name.startswith("autotune.training.")]


def network_classes(base: type = DraftNetwork) -> Iterator[str]:
    """Names of all networks of drafts, abstract ones included."""
    yield base.__name__
    for network in base.__subclasses__():
        yield from network_classes(network)


def questions_about_kinds(source: str) -> list[str]:
    """Names of networks, and of kinds, other than that of the interface."""
    names = {*network_classes(), *NETWORKS} - {TrainableNetwork.__name__}
    nodes = [*ast.walk(ast.parse(source))]
    found = [node.id for node in nodes if isinstance(node, ast.Name)]
    found += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    found += [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    return sorted(names & {*found})


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_training_does_not_ask_for_the_kind_of_a_network(path: Path) -> None:
    assert not questions_about_kinds(path.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(self.module, StarNetwork)",
        "isinstance(network, drafters.unrolled.UnrolledNetwork)",
        "isinstance(network, Eagle3Network | MtpNetwork)",
        "if recipe.model == 'mtp': pass",
    ],
)
def test_such_a_question_is_found(source: str) -> None:
    assert questions_about_kinds(source)
