"""Configurations of draft, subnet and tree policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field, field_validator

from autotune.documents.decoding_profile import OperatingPoint
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.files import Document, content_key
from autotune.trees.fallback import RoundPrice
from autotune.trees.policy import parse_policy
from autotune.trees.verification import LosslessVerification, Verification

Tree = dict[str, Any]
"""A tree policy and its hyperparameters, as in documents."""

DraftVariant = tuple[str, Subnet]
"""A draft's id and a subnet."""


def variants_json(variants: Iterable[DraftVariant]) -> list[list[Any]]:
    """Draft variants as JSON, of which keys are made."""
    return [[draft, subnet.model_dump(mode="json")] for draft, subnet in variants]


class Configuration(Document):
    """A draft, its subnet, and a tree policy with its hyperparameters: one candidate of a search."""

    tree: Tree
    draft: str | None = None
    """The draft's id; None for any draft."""
    subnet: Subnet = Subnet()
    verification: Verification = Field(default_factory=LosslessVerification)
    fallback: RoundPrice | None = None

    @field_validator("tree")
    @classmethod
    def _is_policy(cls, tree: Tree) -> Tree:
        try:
            parse_policy(tree)
        except UserError as error:
            raise ValueError(str(error)) from None
        return tree

    @property
    def key(self) -> str:
        """Content hash, equal for equal configurations."""
        return content_key([parse_policy(self.tree).model_dump(), self.model_dump(mode="json", exclude={"tree"})])

    @property
    def tree_label(self) -> str:
        """The policy with the hyperparameters that differ from its defaults."""
        label = parse_policy(self.tree).label
        return label if self.verification.is_lossless else f"{label} LOSSY"

    @property
    def label(self) -> str:
        """Draft, tree and subnet on one line."""
        return " ".join(filter(None, [self.draft, self.tree_label, self.subnet.label]))


def configuration_of(point: OperatingPoint) -> Configuration | None:
    """The configuration of an operating point; None for plain decoding."""
    if point.draft is None or point.tree is None:
        return None
    return Configuration(
        tree=point.tree.model_dump(),
        draft=point.draft.id,
        subnet=point.draft.subnet,
        verification=point.verification,
        fallback=point.fallback,
    )
