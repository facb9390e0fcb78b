"""Straightforward implementations to compare compiled and cached code with, and random trees to compare them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import Generator
from torch import Tensor

from autotune.drafters.block_network import BlocksNetwork
from autotune.drafters.blocks import AttentionContext, Crossing
from autotune.errors import UserError
from autotune.trees.tree import ROOT, Tree, new_tree, set_root


def random_tree(rng: Generator, num_nodes: int, *, num_tokens: int, root_token: int = 0) -> Tree:
    """A tree of ``num_nodes`` draft nodes with random parents, level by level, whose siblings hold different tokens."""
    paths: list[tuple[int, ...]] = [()]
    while len(paths) <= num_nodes:
        path = (*paths[rng.integers(len(paths))], int(rng.integers(num_tokens)))
        if path not in paths:
            paths.append(path)
    tree, nodes = new_tree(num_nodes), {(): ROOT}
    set_root(tree, root_token, -1)
    for path in sorted(paths[1:], key=len):
        parent = nodes[path[:-1]]
        logprob, rank = float(tree.path_logprob[parent] - rng.exponential()), len(children_of(tree, parent))
        nodes[path] = add_node(tree, parent, path[-1], logprob, rank, -1)
    return tree


def add_node(tree: Tree, parent: int, token: int, path_logprob: float, rank: int, row: int) -> int:
    """Append a node with these fields, which the compiled ``add_child`` takes from proposals."""
    node = int(tree.size[0])
    fields = {"token": token, "parent": parent, "depth": tree.depth[parent] + 1, "rank": rank, "row": row}
    fields |= {"path_logprob": path_logprob, "path_probability": np.exp(path_logprob), "kv_slot": -1}
    for name, value in fields.items():
        getattr(tree, name)[node] = value
    tree.size[0] += 1
    return node


def children_of(tree: Tree, node: int) -> list[int]:
    return [child for child in range(1, int(tree.size[0])) if tree.parent[child] == node]


def ancestors_of(tree: Tree, node: int) -> list[int]:
    """The nodes from the root down to the node itself."""
    return [node] if node == ROOT else [*ancestors_of(tree, int(tree.parent[node])), node]


def tokens_to(tree: Tree, node: int) -> list[int]:
    """The tokens from the root down to the node, both included."""
    return [int(tree.token[ancestor]) for ancestor in ancestors_of(tree, node)]


def leaves_of(tree: Tree) -> list[int]:
    return [node for node in range(int(tree.size[0])) if not children_of(tree, node)]


def logits_after(model: Any, inputs: dict[str, Any], tokens: list[int]) -> Tensor:
    """Logits after the prompt's last token and after each of ``tokens``, [1 + tokens, vocabulary], by one forward pass
    without cache or mask.
    """
    more = torch.tensor([tokens], dtype=torch.long)
    extra = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    with torch.inference_mode():
        logits = model(input_ids=torch.cat([inputs["input_ids"], more], 1), **extra, use_cache=False).logits[0]
    return logits[inputs["input_ids"].shape[1] - 1 :]


def refused(message: str) -> Any:
    """Expects a ``UserError`` whose text matches."""
    return pytest.raises(UserError, match=message)


Seen = tuple[int, list[int], Any, Any]


def with_true_tokens(draft: Any, answer: list[int], num_committed: Callable[[], int], seen: list[Seen]) -> Any:
    """The draft's ``propose``, in which a true token takes the place of the best one now and then, so that rounds
    accept some.

    ``seen`` receives the number of committed tokens of the answer, the path from the root, and the draft's own tokens
    and log-probabilities of every node.
    """
    inner = draft.propose

    def propose(tree: Tree, frontier: Any, num_proposals: int, coupling: Any) -> Any:
        tokens, logprobs = inner(tree, frontier, num_proposals, coupling)
        committed = num_committed()
        for row, node in enumerate(frontier):
            path = tokens_to(tree, int(node))
            seen.append((committed, path, tokens[row].copy(), torch.from_numpy(logprobs[row].copy())))
            following = committed - 1 + len(path)
            if path == answer[committed - 1 : following] and following < len(answer) and len(seen) % 2:
                tokens[row, 0] = answer[following]
        return tokens, logprobs

    return propose


def read_whole_text(network: BlocksNetwork, stream: Tensor, features: Tensor, is_kept: Tensor) -> Tensor:
    """States of all tokens of one text: pruned tokens are hidden from self-attention, and their features are not."""
    causal = torch.ones(len(stream), len(stream), dtype=torch.bool).tril()
    visible = causal & (is_kept | torch.eye(len(stream), dtype=torch.bool))
    factors = network.factors(torch.arange(len(stream)))[None]
    context = AttentionContext(visible[None, None], crossing=Crossing(causal[None, None]))
    (states,) = network(stream[None], features[None], factors, context)
    return states


def assert_same_logits(actual: Tensor, expected: Tensor, row: Tensor | None = None) -> None:
    """Assert that logits are equal to 1e-4 of the largest, the effect of another order of summation, which reached 2e-5
    on processors with AMX, and 5e-5 with recurrent states. A wrong mask or position changes them by whole numbers.

    Args:
        row: all logits of the row, if ``expected`` are a few of them.
    """
    scale = (expected if row is None else row).abs().max()
    torch.testing.assert_close(actual / scale, expected / scale, atol=1e-4, rtol=0)


def chi_square_p_value(observed: np.ndarray, probabilities: np.ndarray) -> float:
    """P-value of counts under ``probabilities``. Outcomes expected fewer than five times are pooled."""
    from scipy.stats import chisquare

    assert observed[probabilities == 0].sum() == 0, "an outcome of probability 0 occurred"
    expected = probabilities * observed.sum()
    is_rare = expected < 5
    pooled = np.array([[*counts[~is_rare], counts[is_rare].sum()] for counts in (observed, expected)])
    pooled = pooled[:, pooled[1] >= 5]
    return float(chisquare(pooled[0], pooled[1] * pooled[0].sum() / pooled[1].sum()).pvalue)
