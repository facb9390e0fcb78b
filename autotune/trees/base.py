"""The facts that every tree policy states, and the bounds of the traces that its replay needs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from autotune.files import Document
from autotune.trees.limits import MAX_DEPTH, MAX_LEVEL_STEP, MAX_NODES, MAX_WIDTH, Floats


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


Tuples = BeforeValidator(_tuples)
"""Accepts the lists of JSON and YAML as tuples."""


class ForestBounds(Document):
    """The nodes that a trace records at every position of an answer.

    The path of most probable tokens and the answer itself are recorded whatever their probability, so that accepted
    lengths are exact for every tree whose node budget does not bind. The fields below say which other nodes are
    expanded; ``Replay.missing`` counts the nodes that a tree asks for beyond them.
    """

    depth: int = Field(default=12, ge=1, le=MAX_DEPTH)
    """Deepest level of children."""
    num_proposals: int = Field(default=10, ge=1, le=32)
    """Children of a node."""
    floor: float = Field(default=0.1 / 12, gt=0, lt=1)
    """A node of level l is expanded if its cumulative probability exceeds ``floor * l``. The default is SAGE's
    threshold in trees of depth 12.
    """
    width: int = Field(default=16, ge=1, le=MAX_NODES)
    """Limit on the nodes of a level that ``floor`` expands."""
    beam: int = Field(default=0, ge=0, le=MAX_NODES)
    """The most probable nodes of a level that are expanded whatever their probability."""
    beam_depth: int = Field(default=0, ge=0, le=MAX_DEPTH)
    """Depth of the trees that need ``beam``."""
    nucleus: float = Field(default=0.0, ge=0, le=1)
    """The most probable children of a nucleus node, until their probabilities sum to this, are expanded as nucleus
    nodes. The root is one.
    """
    nucleus_width: int = Field(default=0, ge=0, le=MAX_WIDTH)
    """Limit on the nucleus nodes of a level."""
    is_renormalised: bool = False
    """Whether ``nucleus`` is a share of the probability of the ``num_proposals`` children, not of all tokens. A policy
    that renormalises over fewer children needs no more nodes.
    """
    nucleus_depth: int = Field(default=0, ge=0, le=MAX_DEPTH)
    """Depth of the trees that need ``nucleus``."""
    answer_tokens: int | None = Field(default=None, ge=2)
    """Tokens recorded of each answer; None: all."""

    @property
    def largest(self) -> int:
        """Most nodes of a root's forest, itself not counted."""
        levels = range(1, self.depth)
        return sum(
            2  # most probable path and answer
            + self.width
            + (self.beam if level < self.beam_depth else 0)
            + (self.nucleus_width if level < self.nucleus_depth else 0)
            for level in levels
        )


class TreeSize(NamedTuple):
    """How large the trees of a policy can become."""

    depth: int
    """Draft levels."""
    nodes: int
    """Draft nodes sent to verification in a round, the root not counted."""
    grown: int
    """Draft nodes before pruning."""
    width: int
    """Nodes expanded in one level."""
    proposals: int
    """Children of a node that the policy looks at."""


class TreePolicy(Document):
    """Hyperparameters of a tree policy, and what the runtime, replay and search must know about it.

    A policy is complete with the compiled steps of its file (``policy.STEPS``; ``grow``, and others where it needs
    them) and its entry in ``policy.KINDS``.
    """

    source: ClassVar[str]
    """Publication of the defaults."""
    ordered: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of hyperparameters of which the first must be at most the second."""
    state_size: ClassVar[int] = 0
    """Numbers that the steps remember within a request."""
    needs_prices: ClassVar[bool] = False
    """Whether a search gives each tree its ``prices``, from a cost table, and its ``calibration``, from a trace."""
    template_sizes: ClassVar[Mapping[str, int]] = {}
    """The dimensions by which a search chooses among trees that it computes from the acceptance of ranks (Sequoia),
    each with its largest value; empty: a search chooses the hyperparameters.
    """
    as_chain: ClassVar[Mapping[str, Any] | None] = None
    """Values of hyperparameters with which all trees are chains, None for the default; None: there are none."""

    policy: str = ""
    """The name of the kind."""

    @model_validator(mode="after")
    def _pairs_are_ordered(self) -> Self:
        for low, high in self.ordered:
            limit = getattr(self, high)
            if limit is not None and getattr(self, low) > limit:
                raise ValueError(f"{low} must be at most {high}, which is {limit}")
        return self

    @classmethod
    def name(cls) -> str:
        return str(cls.model_fields["policy"].default)

    @classmethod
    def largest(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Hyperparameters of the largest tree of a search whose dimensions end at these values."""
        return dict(values)

    @property
    @abstractmethod
    def size(self) -> TreeSize:
        """How large the policy's trees can become."""

    @property
    def keeps_empty_nodes(self) -> bool:
        """Whether the tree's shape is known before the draft proposes its nodes, and kept: a node for which the draft
        proposes nothing holds ``NO_TOKEN``.
        """
        return False

    @property
    def uses_retrieval(self) -> bool:
        """Whether a round may verify what followed an earlier occurrence of its context."""
        return False

    @property
    def is_chain(self) -> bool:
        """Whether no node of its trees has two children."""
        return self.size.proposals == 1 and not self.uses_retrieval

    @property
    def max_evaluated(self) -> int:
        """Nodes that the draft evaluates in a round, the root not counted."""
        return min(self.size.grown, (self.size.depth - 1) * self.size.width)

    @property
    def max_step(self) -> int:
        """Tokens of the largest forward pass of a round: a verified tree with its root, or a draft level."""
        return max(self.size.nodes + 1, min(self.size.width, MAX_LEVEL_STEP))

    @property
    def forest_bounds(self) -> ForestBounds:
        """Bounds of a trace in which replay of this policy misses next to nothing. By default nothing is expanded but
        what every trace holds.
        """
        return ForestBounds(depth=self.size.depth, num_proposals=self.size.proposals, floor=0.99, width=1)

    @property
    def hyperparameters(self) -> dict[str, Any]:
        return self.model_dump(exclude={"policy"})

    def encode(self) -> Floats:
        """The hyperparameters in the order of the fields, as the compiled steps read them."""
        return np.array(list(self.hyperparameters.values()), np.float64)

    @property
    def changed(self) -> dict[str, Any]:
        """The hyperparameters that differ from the defaults."""
        defaults = type(self)().hyperparameters
        return {name: value for name, value in self.hyperparameters.items() if value != defaults[name]}

    @property
    def label(self) -> str:
        """Short description for tables, as ``sage(d_max=12, lower=1.50)``."""
        words = [f"{n}={v:.2f}" if isinstance(v, float) else f"{n}={v}" for n, v in self.changed.items()]
        return f"{self.policy}({', '.join(words)})"


def bounds_for(policies: Iterable[TreePolicy]) -> ForestBounds:
    """The bounds of a trace in which replays of all these policies, and of smaller ones, miss next to nothing."""
    bounds = [policy.forest_bounds for policy in policies]
    largest = {
        name: max(getattr(b, name) for b in bounds) for name in ForestBounds.model_fields if name != "answer_tokens"
    }
    is_renormalised = all(b.is_renormalised for b in bounds if b.nucleus_width > 0)
    least = {"floor": min(b.floor for b in bounds), "is_renormalised": is_renormalised and largest["is_renormalised"]}
    return ForestBounds(**largest | least)
