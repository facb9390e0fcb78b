"""The tree policies by name, and the three compiled calls through which the runtime and replay drive any of them.

Both drive the same code, which is why replay predicts rounds exactly: between them only the answer to "what are this
node's children?" differs. To add a policy: a file beside ``sage.py``, a line in ``TreePolicy`` and a branch in each of
the three calls.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numba import njit
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from autotune.errors import UserError, nearest
from autotune.files import describe
from autotune.trees import chain, sage
from autotune.trees.chain import ChainPolicy
from autotune.trees.sage import SagePolicy
from autotune.trees.tree import Floats, Ints, Tree

TreePolicy = Annotated[ChainPolicy | SagePolicy, Field(discriminator="policy")]
POLICIES: dict[str, type[ChainPolicy | SagePolicy]] = {"chain": ChainPolicy, "sage": SagePolicy}
STATE_SIZE = sage.STATE_SIZE

_CHAIN = ChainPolicy.KIND
_SAGE = SagePolicy.KIND


def parse_policy(tree: Any, *, source: str = "tree") -> ChainPolicy | SagePolicy:
    """A policy from ``{"policy": name, hyperparameter: value, ...}``; what is left out takes the paper's default.

    Raises:
        UserError: an unknown policy or hyperparameter, or a value out of range.
    """
    if isinstance(tree, ChainPolicy | SagePolicy):
        return tree
    name = tree.get("policy") if isinstance(tree, dict) else None
    if not isinstance(name, str) or name not in POLICIES:
        raise UserError(f"{source}: unknown tree policy {name!r}; {nearest(str(name), POLICIES)}")
    try:
        return TypeAdapter(POLICIES[name]).validate_python(tree)
    except ValidationError as error:
        raise UserError(f"{source}: {describe(error, POLICIES[name])}") from None


def new_state() -> Floats:
    """Room for what a policy remembers between rounds; ``reset`` fills it."""
    return np.zeros(STATE_SIZE)


@njit(cache=True)
def reset(kind: int, params: Floats, state: Floats) -> None:
    """Forget earlier rounds: a new prompt begins."""
    if kind == _SAGE:
        sage.reset(params, state)


@njit(cache=True)
def grow(
    kind: int,
    params: Floats,
    state: Floats,
    tree: Tree,
    frontier: Ints,
    num_frontier: int,
    tokens: Ints,
    logprobs: NDArray[np.float32],
    sources: Ints,
) -> int:
    """Grow one level from the proposals of the frontier's nodes.

    ``tokens``, ``logprobs`` and ``sources`` are [frontier, proposals], most probable first. The nodes to expand next
    are written to ``frontier``, their number is returned; 0 ends the tree.
    """
    if kind == _CHAIN:
        return chain.grow(params, tree, frontier, tokens, logprobs, sources)
    return sage.grow(params, state, tree, frontier, num_frontier, tokens, logprobs, sources)


@njit(cache=True)
def learn(kind: int, params: Floats, state: Floats, accepted: int) -> None:
    """Tell the policy the accepted length of the round that ended."""
    if kind == _SAGE:
        sage.learn(params, state, accepted)
