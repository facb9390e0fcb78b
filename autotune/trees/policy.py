"""The table of tree policies, and the compiled calls through which the runtime and replay drive any of them.

Both drive the same code and differ only in where the proposals come from, so replay predicts rounds exactly. A policy
is one file of this package and its entry in ``KINDS`` (``docs/adding-a-policy.md``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Union

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from autotune.files import parse_kind
from autotune.trees.base import TreePolicy
from autotune.trees.chain import ChainPolicy
from autotune.trees.compilation import compiled, dispatcher, inlined
from autotune.trees.eagle2 import Eagle2Policy
from autotune.trees.limits import MAX_RETRIEVED, Floats, Ints
from autotune.trees.priced import PricedPolicy
from autotune.trees.sage import SagePolicy
from autotune.trees.static import StaticPolicy
from autotune.trees.tree import CHILD, ROOT, Proposals, Retrieved, Tree, Workspace, new_tree, new_workspace, set_root
from autotune.trees.wetap import WetapPolicy

KINDS: tuple[type[TreePolicy], ...] = (
    # In the order in which messages name them.
    ChainPolicy,
    SagePolicy,
    Eagle2Policy,
    WetapPolicy,
    StaticPolicy,
    PricedPolicy,
)
if TYPE_CHECKING:
    Policy = TreePolicy
else:  # so that a document reads a policy by its name
    Policy = Annotated[Union[KINDS], Field(discriminator="policy")]  # noqa: UP007
POLICIES: dict[str, type[TreePolicy]] = {kind.name(): kind for kind in KINDS}
NOTHING = Retrieved(np.full(MAX_RETRIEVED, -1), 0)
STATE_SIZE = max(kind.state_size for kind in KINDS)


def parse_policy(tree: Any, *, source: str = "tree") -> Policy:
    """A policy from ``{"policy": name, hyperparameter: value, ...}``; the others take their published defaults."""
    if isinstance(tree, TreePolicy):
        return tree
    return parse_kind(tree, POLICIES, key="policy", what="tree policy", source=source)


def kind_number(policy: Policy) -> int:
    """The policy's index in ``KINDS``, by which the compiled calls choose its steps."""
    return KINDS.index(type(policy))


# The compiled steps: functions of these names in a policy's file, which take those of the arguments that they need.
# Only ``grow`` is required.
STEPS: dict[str, tuple[str, ...]] = {
    "reset": ("params", "state"),
    "begin_round": ("params", "state", "context_tokens", "match_length"),
    "drafts": ("params", "state"),
    "grow": ("params", "state", "tree", "work", "num_frontier", "proposals"),
    "add_retrieved": ("params", "state", "tree", "work", "tokens"),
    "prune": ("params", "state", "tree", "work"),
    "update": ("params", "state", "accepted", "is_retrieved"),
}


def _call(name: str, *, default: str = "None", decorate: Any = compiled) -> Any:
    steps = [getattr(sys.modules[kind.__module__], name, None) for kind in KINDS]
    return dispatcher(name, STEPS[name], steps, default=default, decorate=decorate)


reset: Callable[[int, Floats, Floats], None] = _call("reset")
"""Begin a request: forget earlier rounds."""

begin_round: Callable[[int, Floats, Floats, int, int], None] = _call("begin_round")
"""Begin a round of a request with so many tokens in the target's KV cache, the last of which were matched."""

drafts: Callable[[int, Floats, Floats], bool] = _call("drafts", default="True")
"""Whether the draft is asked in this round."""

grow: Callable[[int, Floats, Floats, Tree, Workspace, int, Proposals], int] = _call(
    "grow", default="0", decorate=inlined
)
"""Grow one level from the proposals of the frontier's nodes, which are in the rows ``tree.row``.

Writes the nodes to expand next to the frontier and returns their number; 0 ends the tree.
"""

add_retrieved: Callable[[int, Floats, Floats, Tree, Workspace, Ints], None] = _call("add_retrieved")
"""Add the tokens that were retrieved to the grown tree."""

prune: Callable[[int, Floats, Floats, Tree, Workspace], None] = _call("prune")
"""Prune the draft tree to the verification budget."""

update: Callable[[int, Floats, Floats, int, bool], None] = _call("update")
"""End a round with its accepted length; ``is_retrieved``: whether its first token is the first one that was retrieved.
"""


@compiled
def _grow_level(
    kind: int,
    params: Floats,
    state: Floats,
    tree: Tree,
    work: Workspace,
    count: int,
    proposals: Proposals,
    tokens: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    probabilities: NDArray[np.float32],
) -> int:
    """``grow`` from the proposals [count, proposals] of the frontier's nodes."""
    for row in range(count):
        tree.row[work.frontier[row]] = row
        for rank in range(tokens.shape[1]):
            child = proposals[row, rank]
            child.token, child.logprob, child.probability = (
                tokens[row, rank],
                logprobs[row, rank],
                probabilities[row, rank],
            )
    return int(grow(kind, params, state, tree, work, count, proposals[:count]))


class TreeGrower:
    """Grows one tree at a time from proposals that arrive level by level.

    A round is ``set_root``, then ``grow`` until ``frontier`` is empty, which it may be at once, then ``prune``, and
    ``update`` with the accepted length.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.tree = new_tree(policy.size.grown)
        self.frontier: Ints = np.zeros(0, np.int64)
        """Nodes whose children ``grow`` takes next."""
        self._kind = kind_number(policy)
        self._params = policy.encode()
        self._state = np.zeros(STATE_SIZE)
        self._work = new_workspace(policy.size.grown)
        self._retrieved = NOTHING.tokens
        self._proposals = np.zeros((policy.size.width, policy.size.proposals), CHILD)
        self._proposals["row"] = -1
        self.reset()

    def reset(self) -> None:
        reset(self._kind, self._params, self._state)

    def set_root(self, token: int, context_tokens: int = 0, retrieved: Retrieved = NOTHING) -> None:
        """Begin a round at the last committed token, with so many tokens before it."""
        self._retrieved = retrieved.tokens
        begin_round(self._kind, self._params, self._state, context_tokens, retrieved.match_length)
        set_root(self.tree, token, -1)
        self._work.frontier[0] = ROOT
        self.frontier = self._work.frontier[: int(drafts(self._kind, self._params, self._state))]

    def grow(self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """Add a level from the proposals [frontier, proposals] of the frontier's nodes."""
        count = _grow_level(
            self._kind,
            self._params,
            self._state,
            self.tree,
            self._work,
            len(self.frontier),
            self._proposals,
            tokens,
            logprobs,
            np.exp(logprobs),  # by numpy, as in replay: numba rounds otherwise
        )
        self.frontier = self._work.frontier[:count]

    def prune(self) -> None:
        """Add the retrieved tokens, and prune the tree to the verification budget."""
        add_retrieved(self._kind, self._params, self._state, self.tree, self._work, self._retrieved)
        prune(self._kind, self._params, self._state, self.tree, self._work)

    def update(self, accepted: int, first_token: int = -1) -> None:
        """End the round with its accepted length and the first token that it emits."""
        is_retrieved = bool(self._retrieved[0] == first_token)
        update(self._kind, self._params, self._state, accepted, is_retrieved)


def compile_steps() -> None:
    """Compile the steps of all policies, or read them from numba's cache. They hold Python's lock for about half of the
    time.
    """
    grower = TreeGrower(ChainPolicy(depth=1))
    grower.set_root(0)
    grower.grow(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32))
    grower.prune()
    grower.update(0)
