"""The code of the training asks a network what it can do, and never which kind it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.drafters.checkpoint import NETWORKS
from autotune.drafters.network import DraftNetwork
from tests.imports import MODULES

TRAINING = [path for name, path in MODULES.items() if name.startswith("autotune.training.")]


def network_classes(base: type = DraftNetwork) -> Iterator[str]:
    """Names of all networks of drafts, abstract ones included."""
    yield base.__name__
    for network in base.__subclasses__():
        yield from network_classes(network)


def is_question(node: ast.AST, names: set[str]) -> bool:
    """Whether a part of a program tests the class of a network, or names a kind."""
    match node:
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, classes]):
            return bool(names & {*re.findall(r"\w+", ast.unparse(classes))})
        case ast.Constant(value=value):
            return value in (*NETWORKS, *names)
        case ast.Attribute(attr=attribute):
            return attribute in ("__class__", "__name__")
    return False


def questions_about_kinds(source: str) -> list[str]:
    names = {*network_classes()}
    return [ast.unparse(node) for node in ast.walk(ast.parse(source)) if is_question(node, names)]


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_training_does_not_ask_for_the_kind_of_a_network(path: Path) -> None:
    assert not questions_about_kinds(path.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(self.module, StarNetwork)",
        "isinstance(network, drafters.unrolled.UnrolledNetwork)",
        "isinstance(network, (nn.Linear, BlocksNetwork))",
        "isinstance(network, Eagle3Network | MtpNetwork)",
        "issubclass(NETWORKS[kind], TrainableBlocks)",
        "type(self.module).__name__ == kind",
        "if recipe.model == 'mtp': pass",
        "UNROLLED = ('eagle3', *others)",
    ],
)
def test_such_a_question_is_found(source: str) -> None:
    assert questions_about_kinds(source)


def test_other_types_may_be_asked_for() -> None:
    assert not questions_about_kinds("isinstance(stage.distillation, int) and isinstance(part, nn.Linear)")
