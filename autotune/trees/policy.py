"""The tree policies by name, and the compiled calls through which the runtime and replay drive any of them.

Both drive the same code and differ only in where the proposals come from, so replay predicts rounds exactly. To add a
policy: a file such as ``sage.py``, a name in ``Policy``, and a branch in each of the calls that concern it.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from autotune.files import parse_kind
from autotune.trees import chain, eagle2, priced, sage, static, wetap
from autotune.trees.chain import ChainPolicy
from autotune.trees.compilation import compiled, inlined
from autotune.trees.eagle2 import Eagle2Policy
from autotune.trees.limits import MAX_RETRIEVED, Floats, Ints
from autotune.trees.priced import PricedPolicy
from autotune.trees.sage import SagePolicy
from autotune.trees.static import StaticPolicy
from autotune.trees.tree import CHILD, ROOT, Proposals, Retrieved, Tree, Workspace, new_tree, new_workspace, plant
from autotune.trees.wetap import WetapPolicy

Policy = ChainPolicy | SagePolicy | Eagle2Policy | WetapPolicy | StaticPolicy | PricedPolicy
TreePolicy = Annotated[Policy, Field(discriminator="policy")]
POLICIES: dict[str, type[Policy]] = {kind.model_fields["policy"].default: kind for kind in get_args(Policy)}
NOTHING = Retrieved(np.full(MAX_RETRIEVED, -1), 0)
STATE_SIZE = max(sage.STATE_SIZE, wetap.STATE_SIZE, priced.STATE_SIZE)

_CHAIN, _SAGE, _EAGLE2, _WETAP = ChainPolicy.KIND, SagePolicy.KIND, Eagle2Policy.KIND, WetapPolicy.KIND
_PRICED = PricedPolicy.KIND


def parse_policy(tree: Any, *, source: str = "tree") -> Policy:
    """A policy from ``{"policy": name, hyperparameter: value, ...}``; the others take their published defaults.

    Raises:
        UserError: an unknown policy or hyperparameter, or a value out of range.
    """
    if isinstance(tree, Policy):
        return tree
    return parse_kind(tree, POLICIES, key="policy", what="tree policy", source=source)


@compiled
def reset(kind: int, params: Floats, state: Floats) -> None:
    """Begin a request: forget earlier rounds."""
    if kind == _SAGE:
        sage.reset(params, state)
    elif kind == _PRICED:
        priced.reset(params, state)


@compiled
def begin_round(kind: int, params: Floats, state: Floats, context_tokens: int, match_length: int) -> None:
    """Begin a round of a request with so many tokens in the target's KV cache, the last of which were matched."""
    if kind == _PRICED:
        priced.begin_round(params, state, context_tokens, match_length)


@compiled
def drafts(kind: int, params: Floats, state: Floats) -> bool:
    """Whether the draft is asked in this round."""
    return kind != _PRICED or priced.drafts(params, state)


@inlined
def grow(
    kind: int, params: Floats, state: Floats, tree: Tree, work: Workspace, num_frontier: int, proposals: Proposals
) -> int:
    """Grow one level from the proposals of the frontier's nodes, which are in the rows ``tree.row``.

    Writes the nodes to expand next to the frontier and returns their number; 0 ends the tree.
    """
    if kind == _CHAIN:
        return chain.grow(params, tree, work, proposals)
    if kind == _SAGE:
        return sage.grow(params, state, tree, work, num_frontier, proposals)
    if kind == _EAGLE2:
        return eagle2.grow(params, tree, work, num_frontier, proposals)
    if kind == _WETAP:
        return wetap.grow(params, state, tree, work, num_frontier, proposals)
    if kind == _PRICED:
        return priced.grow(params, state, tree, work, num_frontier, proposals)
    return static.grow(params, tree, work, proposals)


@compiled
def graft(kind: int, params: Floats, state: Floats, tree: Tree, work: Workspace, tokens: Ints) -> None:
    """Add the tokens that were retrieved to the grown tree."""
    if kind == _PRICED:
        priced.graft(params, state, tree, work, tokens)


@compiled
def prune(kind: int, params: Floats, state: Floats, tree: Tree, work: Workspace) -> None:
    """Prune the draft tree to the verification budget."""
    if kind == _CHAIN:
        chain.prune(params, tree)
    elif kind == _EAGLE2:
        eagle2.prune(params, tree, work)
    elif kind == _WETAP:
        wetap.prune(params, tree, work)
    elif kind == _PRICED:
        priced.prune(params, state, tree, work)


@compiled
def update(kind: int, params: Floats, state: Floats, accepted: int, is_retrieved: bool) -> None:
    """End a round with its accepted length; ``is_retrieved``: whether its first token is the first one that was retrieved."""
    if kind == _SAGE:
        sage.update(params, state, accepted)
    elif kind == _PRICED:
        priced.update(params, state, accepted, is_retrieved)


class TreeGrower:
    """Grows one tree at a time from proposals that arrive level by level.

    A round is ``plant``, then ``grow`` until ``frontier`` is empty, which it may be at once, then ``prune``, and ``update`` with
    the accepted length.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.tree = new_tree(policy.max_grown)
        self.frontier: Ints = np.zeros(0, np.int64)
        """Nodes whose children ``grow`` takes next."""
        self._params = policy.encode()
        self._state = np.zeros(STATE_SIZE)
        self._work = new_workspace(policy.max_grown)
        self._retrieved = NOTHING.tokens
        self._proposals = np.zeros((policy.max_width, policy.num_proposals), CHILD)
        self._proposals["row"] = -1
        self.reset()

    def reset(self) -> None:
        """Begin a request."""
        reset(self.policy.KIND, self._params, self._state)

    def plant(self, token: int, context_tokens: int = 0, retrieved: Retrieved = NOTHING) -> None:
        """Begin a round at the last committed token, with so many tokens before it."""
        self._retrieved = retrieved.tokens
        begin_round(self.policy.KIND, self._params, self._state, context_tokens, retrieved.match_length)
        plant(self.tree, token, -1)
        self._work.frontier[0] = ROOT
        self.frontier = self._work.frontier[: int(drafts(self.policy.KIND, self._params, self._state))]

    def grow(self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """Add a level from the proposals [frontier, proposals] of the frontier's nodes."""
        count = len(self.frontier)
        self.tree.row[self.frontier] = np.arange(count)
        proposals = self._proposals[:count]
        proposals["token"], proposals["logprob"], proposals["probability"] = tokens, logprobs, np.exp(logprobs)
        count = grow(self.policy.KIND, self._params, self._state, self.tree, self._work, count, proposals)
        self.frontier = self._work.frontier[:count]

    def prune(self) -> None:
        """Add the retrieved tokens, and prune the tree to the verification budget."""
        kind, params, state = self.policy.KIND, self._params, self._state
        graft(kind, params, state, self.tree, self._work, self._retrieved)
        prune(kind, params, state, self.tree, self._work)

    def update(self, accepted: int, first_token: int = -1) -> None:
        """End the round with its accepted length and the first token that it emits."""
        is_retrieved = bool(self._retrieved[0] == first_token)
        update(self.policy.KIND, self._params, self._state, accepted, is_retrieved)
