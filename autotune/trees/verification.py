"""The rule that accepts draft tokens: lossless, the walk down the tree along the target's own tokens
(``docs/concepts.md``), or lossy, WETAP's threshold from deep to shallow levels.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from autotune.files import Document, parse_kind
from autotune.trees.compilation import compiled
from autotune.trees.limits import Floats, Ints
from autotune.trees.tree import ROOT, Tree


class LosslessVerification(Document):
    """The output is the target's own."""

    is_lossless: ClassVar[bool] = True
    kind: Literal["lossless"] = "lossless"


class WetapVerification(Document):
    """WETAP section 3.3: a node is accepted if the target gives its whole path at least ``threshold`` times the draft's
    probability (eq. 9), and the deepest accepted node wins. The output is not the target's own. The paper gives no
    value; at 1 no path is accepted that the target finds less probable than the draft does.

    Both probabilities are of the models' own distributions at temperature 1, so that a ratio of 1 means that the models
    agree; the paper decodes at temperature 1 and does not say whether its top-k and top-p apply to them. Tokens that
    the request's own top-k, top-p or logits processors exclude are never accepted. Eq. 9 has "at least"; line 35 of
    algorithm 1, ``min(1, p / q) > threshold``, would accept nothing at 1.
    """

    is_lossless: ClassVar[bool] = False
    kind: Literal["wetap"] = "wetap"
    threshold: float = Field(default=1.0, gt=0, le=1)


VERIFICATIONS: dict[str, type[LosslessVerification | WetapVerification]] = {
    "lossless": LosslessVerification,
    "wetap": WetapVerification,
}
Verification = Annotated[LosslessVerification | WetapVerification, Field(discriminator="kind")]


def parse_verification(verification: Any) -> LosslessVerification | WetapVerification:
    """A verification from ``{"kind": "wetap", "threshold": 0.9}`` (see ``parse_kind``); None is lossless."""
    if verification is None:
        return LosslessVerification()
    if isinstance(verification, LosslessVerification | WetapVerification):
        return verification
    return parse_kind(verification, VERIFICATIONS, key="kind", what="kind", source="verification")


@compiled
def find_child(tree: Tree, node: int, token: int) -> int:
    """The child of ``node`` that holds ``token``, or -1."""
    for child in range(node + 1, tree.size[0]):
        if tree.parent[child] == node and tree.token[child] == token:
            return child
    return -1


@compiled
def accept_path(tree: Tree, target_token: Ints, path: Ints) -> int:
    """Walk from the root while the tree holds the target's token; return the accepted length τ.

    ``target_token[node]`` is the token that the target emits after ``node``. The accepted nodes are written to
    ``path[:τ]``. Verification also yields the token after the last of them, ``target_token[path[τ - 1]]`` (that of the
    root where τ = 0).
    """
    node, length = ROOT, 0
    while True:
        child = find_child(tree, node, target_token[node])
        if child < 0:
            return length
        path[length] = child
        length += 1
        node = child


@compiled
def accept_by_ratio(tree: Tree, target_logprob: Floats, log_threshold: float, path: Ints) -> int:
    """WETAP's acceptance (eq. 9, algorithm 1, lines 27 to 46): among the nodes whose cumulative target probability is
    at least the threshold times the draft's, the deepest, and of those the one most probable to the target.

    The paper does not say whose probability decides among the accepted nodes of a level; it is the target's here.
    ``target_logprob[node]`` is the target's log-probability of the node's token after its parent; it is summed along
    the paths in place. The path to the node is written to ``path``; its length is returned.
    """
    best = ROOT
    for node in range(1, tree.size[0]):
        if tree.parent[node] != ROOT:
            target_logprob[node] += target_logprob[tree.parent[node]]
        if tree.path_logprob[node] == -np.inf or target_logprob[node] - tree.path_logprob[node] < log_threshold:
            continue
        if tree.depth[node] > tree.depth[best] or target_logprob[node] > target_logprob[best]:
            best = node
    length = tree.depth[best]
    node = best
    for level in range(length - 1, -1, -1):
        path[level] = node
        node = tree.parent[node]
    return int(length)
