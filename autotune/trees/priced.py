"""``priced``: a tree grows while what its nodes are worth pays for the rows that they add to draft levels and to the
verification. No paper has this policy.

Costs and gains are in plain decoding steps. A node is worth its *survival*, the calibrated probability that the target
accepts it, times ``worth``. For a rate, tokens over time, the ``worth`` that maximises it is the time of a token under
the policy itself (Dinkelbach 1967, "On nonlinear fractional programming"), the inverse of its speedup.

* A level expands the m most probable new nodes, for the m that maximises ``worth`` times ``level_value`` times their
  survivals minus the price of a level of m nodes and of m more nodes verified; drafting ends where no m gains anything.
* The n most probable nodes are verified, for the n that maximises ``worth`` times their survivals minus the price of a
  verification of n nodes.

With ``retrieval``, what followed the longest match of the context (``drafters/retrieval.py``) is added as a branch from
the root whose survival is calibrated by the length of the match. It competes with the draft's nodes in the
verification. A round whose first retrieved token survives with at least ``skip_draft_above`` asks the draft for
nothing.

Prices are those of the cost table at the request's context length, with the steps of kernels and capture sizes, so a
larger n may be better than n + 1. A node's survival is at most its parent's, so the most probable nodes are a tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from autotune.files import Document
from autotune.trees.base import ForestBounds, TreePolicy, TreeSize, Tuples
from autotune.trees.compilation import compiled
from autotune.trees.limits import MAX_CHILDREN, MAX_DEPTH, MAX_MATCH, MAX_NODES, Floats, Ints
from autotune.trees.tree import ROOT, Proposals, Tree, Workspace, add_child, best_first, keep_marked
from autotune.trees.verification import find_child

# params: hyperparameters, sizes, the index of the retrieved curves; then contexts, levels, verifications, curves
_WORTH, _LEVEL_VALUE, _DEPTH, _WIDTH, _K, _BUDGET, _RATE, _RETRIEVES, _SKIP_DRAFT_ABOVE = range(9)
_NUM_CONTEXTS, _NUM_WIDTHS, _NUM_SIZES = range(9, 12)
_NUM_RANKS, _NUM_DEPTHS, _RETRIEVED, _NUM_HEADER = range(12, 16)
# state: index of the prices' context, length of the match (0: nothing was retrieved), accepted tokens expected, and the
# adaptations of the draft's and of retrieved survivals
_CONTEXT, _MATCH, _EXPECTED, _LOG_EXPONENT, _LOG_EXPONENT_RETRIEVED = range(5)

# Of the grid of calibration curves.
MAX_LOGIT = 10.0
LOGIT_STEP = 0.5
GRID = np.arange(-MAX_LOGIT, MAX_LOGIT + LOGIT_STEP, LOGIT_STEP)
GRID_SIZE = len(GRID)
MAX_SURVIVAL = 0.9995  # of a child: strictly below its parent's
MAX_LOG_EXPONENT = 0.7  # limit on the online adaptation
RETRIEVED_RATE = 4.0  # times ``rate``: a request copies or it does not
# Share of the mean price of a verified row: nodes worth less are not added, even where padding makes rows free.
MIN_ROW_SHARE = 0.25
# Times the level: nodes of less cumulative probability are not expanded, as in ``ForestBounds.floor``.
MIN_PROBABILITY = 0.1 / 12


class TreePrices(Document):
    """Prices of draft levels and verifications, in plain decoding steps at the same context length, by cost table."""

    contexts: Annotated[tuple[int, ...], Tuples] = Field(default=(0,), min_length=1)
    """Context lengths, ascending; a round is priced at the nearest one."""
    level: Annotated[tuple[tuple[float, ...], ...], Tuples] = ((0.0, 0.2, 0.21, 0.22, 0.23),)
    """Price of a draft level by its number of nodes, from 0: [contexts, nodes]. Wider levels cost as the last one."""
    verify: Annotated[tuple[tuple[float, ...], ...], Tuples] = ((1.0, 1.02, 1.04, 1.06, 1.08),)
    """Price of a verification by its number of draft nodes, from 0: [contexts, nodes]. The last two are extrapolated.
    """

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if sorted(set(self.contexts)) != list(self.contexts):
            raise ValueError("contexts must be ascending")
        for name in ("level", "verify"):
            table = getattr(self, name)
            if len(table) != len(self.contexts) or len({len(row) for row in table}) != 1 or len(table[0]) < 2:
                raise ValueError(
                    f"{name} must have one row of at least two prices for each of the contexts, all equally long"
                )
        return self


class Calibration(Document):
    """Probability that the target accepts a child whose parent it accepts, by the draft's own probability of
    the child.
    """

    curves: Annotated[tuple[tuple[tuple[float, ...], ...], ...], Tuples] = Field(min_length=1)
    """[depths, ranks, grid]: for children of depth 1, 2, ... and rank 0, 1, ...; the last of each stands for larger
    ones. ``GRID`` has the logits of the draft's probability.
    """
    retrieved: Annotated[tuple[tuple[float, ...], tuple[float, ...]] | None, Tuples] = None
    """Probability that the target accepts the first retrieved token, and that it accepts a later one after those before
    it, by the length of the match up to that token: [2, ``MAX_MATCH``], from length 1. None: nothing was retrieved.
    """
    draft: str
    """The draft's id."""
    draft_sha256: str
    workload_sha256: str
    """Prompts on which it was fitted."""
    num_tokens: int
    log_loss: float
    """Mean over children of prompts that were not fitted."""
    raw_log_loss: float
    """Log loss of the draft's own probabilities on the same children."""

    @model_validator(mode="after")
    def _has_the_grid(self) -> Self:
        ranks = {len(of_depth) for of_depth in self.curves}
        if len(ranks) != 1 or any(len(curve) != len(GRID) for of_depth in self.curves for curve in of_depth):
            raise ValueError(f"curves must have {len(GRID)} values for each rank, and as many ranks at every depth")
        if self.retrieved is not None and any(len(curve) != MAX_MATCH for curve in self.retrieved):
            raise ValueError(f"retrieved must have {MAX_MATCH} values for each of its two curves")
        return self


class PricedPolicy(TreePolicy):
    source: ClassVar[str] = "autotune"
    state_size: ClassVar[int] = 5
    needs_prices: ClassVar[bool] = True
    as_chain: ClassVar[Mapping[str, Any] | None] = {"width": 1, "k": 1, "retrieval": False, "skip_draft_above": None}

    policy: Literal["priced"] = "priced"
    worth: float = Field(default=0.6, gt=0)
    """Plain steps that an accepted token is worth."""
    level_value: float = Field(default=1.0, gt=0)
    """Tokens that an accepted node is expected to gain by being expanded."""
    depth: int = Field(default=10, ge=1, le=MAX_DEPTH)
    """Limit on the draft levels."""
    width: int = Field(default=4, ge=1, le=MAX_CHILDREN)
    """Limit on the nodes expanded in a level."""
    k: int = Field(default=4, ge=1, lt=MAX_CHILDREN)
    """Children of a node that are looked at; a retrieved child has rank k."""
    budget: int = Field(default=32, ge=1, le=MAX_NODES)
    """Limit on the draft nodes sent to verification, the root not counted."""
    rate: float = Field(default=0.0, ge=0, le=1)
    """How fast survivals adapt to the lengths that are accepted in a request; 0: not at all."""
    retrieval: bool = False
    """Whether what followed an earlier occurrence of the context competes with the draft."""
    skip_draft_above: float = Field(default=1.0, gt=0, le=1)
    """Survival of the first retrieved token from which a round drafts nothing; 1: every round drafts."""
    prices: TreePrices = TreePrices()
    calibration: Calibration | None = None
    """None: the draft's own probabilities."""

    @property
    def size(self) -> TreeSize:
        grown = self.k + (self.depth - 1) * self.width * self.k + self.retrieval * self.depth
        return TreeSize(self.depth, nodes=min(self.budget, grown), grown=grown, width=self.width, proposals=self.k)

    @property
    def uses_retrieval(self) -> bool:
        return self.retrieval

    @property
    def hyperparameters(self) -> dict[str, Any]:
        return self.model_dump(exclude={"policy", "prices", "calibration"})

    @property
    def forest_bounds(self) -> ForestBounds:
        return ForestBounds(depth=self.depth, num_proposals=self.k, floor=MIN_PROBABILITY)

    def encode(self) -> Floats:
        prices = self.prices
        curves = identity_curves() if self.calibration is None else np.array(self.calibration.curves)
        level, verify = np.array(prices.level), np.array(prices.verify)
        found = None if self.calibration is None else self.calibration.retrieved
        retrieved = np.zeros((2, MAX_MATCH)) if found is None else np.array(found)
        sizes = [len(prices.contexts), level.shape[1], verify.shape[1], *curves.shape[1::-1]]
        tables = [np.array(prices.contexts), level, verify, curves]
        first_retrieved = _NUM_HEADER + sum(table.size for table in tables)
        parts = [np.array([*self.hyperparameters.values(), *sizes, first_retrieved]), *tables, retrieved]
        return np.concatenate([part.astype(np.float64).ravel() for part in parts])


def identity_curves() -> Floats:
    """Curves [1, 1, grid] that leave probabilities as they are."""
    return (1 / (1 + np.exp(-GRID)))[None, None]


@compiled
def reset(params: Floats, state: Floats) -> None:
    state[_LOG_EXPONENT] = state[_LOG_EXPONENT_RETRIEVED] = 0.0
    state[_EXPECTED] = 0.0


@compiled
def begin_round(params: Floats, state: Floats, context_tokens: int, match_length: int) -> None:
    """Choose the prices of the nearest context length, and note the match."""
    state[_MATCH] = min(match_length, MAX_MATCH) if params[_RETRIEVES] else 0
    best, distance = 0, np.inf
    for i in range(int(params[_NUM_CONTEXTS])):
        gap = abs(params[_NUM_HEADER + i] - context_tokens)
        if gap < distance:
            best, distance = i, gap
    state[_CONTEXT] = best


@compiled
def _level_price(params: Floats, state: Floats, width: int) -> float:
    num_widths = int(params[_NUM_WIDTHS])
    first = _NUM_HEADER + int(params[_NUM_CONTEXTS]) + int(state[_CONTEXT]) * num_widths
    return float(params[first + min(width, num_widths - 1)])


@compiled
def _verify_price(params: Floats, state: Floats, nodes: int) -> float:
    contexts, num_sizes = int(params[_NUM_CONTEXTS]), int(params[_NUM_SIZES])
    first = _NUM_HEADER + contexts + contexts * int(params[_NUM_WIDTHS]) + int(state[_CONTEXT]) * num_sizes
    if nodes < num_sizes:
        return float(params[first + nodes])
    last = first + num_sizes - 1
    return float(params[last] + (nodes - num_sizes + 1) * (params[last] - params[last - 1]))


@compiled
def child_survival(params: Floats, depth: int, rank: int, logprob: float, probability: float) -> float:
    """Calibrated probability that a child is accepted once its parent is."""
    logit = MAX_LOGIT if probability >= 1.0 else logprob - np.log(1.0 - probability)
    logit = min(MAX_LOGIT, max(-MAX_LOGIT, logit))
    contexts, ranks, depths = int(params[_NUM_CONTEXTS]), int(params[_NUM_RANKS]), int(params[_NUM_DEPTHS])
    curve = min(depth, depths) * ranks - ranks + min(rank, ranks - 1)
    first = _NUM_HEADER + contexts * (1 + int(params[_NUM_WIDTHS]) + int(params[_NUM_SIZES])) + curve * GRID_SIZE
    at = (logit + MAX_LOGIT) / LOGIT_STEP
    below = min(int(at), GRID_SIZE - 2)
    share = at - below
    value = (1.0 - share) * params[first + below] + share * params[first + below + 1]
    return float(min(value, MAX_SURVIVAL))


@compiled
def _retrieved_survival(params: Floats, state: Floats, step: int) -> float:
    """Probability that retrieved token ``step`` is accepted once those before it are, before adaptation."""
    match_length = min(int(state[_MATCH]) + step, MAX_MATCH)
    return float(min(params[int(params[_RETRIEVED]) + (step > 0) * MAX_MATCH + match_length - 1], MAX_SURVIVAL))


@compiled
def drafts(params: Floats, state: Floats) -> bool:
    """Whether the draft is asked in this round."""
    if state[_MATCH] == 0:
        return True
    survival = _retrieved_survival(params, state, 0)
    return bool(_adapted(survival, np.exp(state[_LOG_EXPONENT_RETRIEVED])) < params[_SKIP_DRAFT_ABOVE])


@compiled
def add_retrieved(params: Floats, state: Floats, tree: Tree, work: Workspace, tokens: Ints) -> None:
    """Add the retrieved tokens to the grown tree as a path from the root, which it shares with the draft's nodes as far
    as they have the same tokens. A negative token ends it.
    """
    if state[_MATCH] == 0:
        return
    survival = work.score
    survival[ROOT] = 1.0
    retrieved_exponent = np.exp(state[_LOG_EXPONENT_RETRIEVED])
    exponent = retrieved_exponent / np.exp(state[_LOG_EXPONENT])  # the draft's adaptation is applied later, and cancels
    least = _least_worth(params, state)
    node, value = ROOT, 1.0
    for step in range(min(len(tokens), int(params[_DEPTH]))):
        value *= _retrieved_survival(params, state, step)
        if tokens[step] < 0 or _adapted(value, retrieved_exponent) * params[_WORTH] < least:
            return
        child = find_child(tree, node, tokens[step])
        if child < 0:
            child = tree.size[0]
            tree.size[0] = child + 1
            tree.token[child], tree.parent[child], tree.depth[child] = tokens[step], node, tree.depth[node] + 1
            tree.path_logprob[child], tree.path_probability[child] = np.log(value), value
            tree.rank[child], tree.row[child], tree.kv_slot[child] = int(params[_K]), -1, -1
            survival[child] = 0.0
        survival[child] = max(survival[child], _adapted(value, exponent))
        node = child


@compiled
def _least_worth(params: Floats, state: Floats) -> float:
    """Worth of a node below which it is not added to the tree."""
    budget = int(params[_BUDGET])
    return (_verify_price(params, state, budget) - _verify_price(params, state, 0)) / budget * MIN_ROW_SHARE


@compiled
def _adapted(survival: float, exponent: float) -> float:
    return survival if exponent == 1.0 else survival**exponent


@compiled
def grow(params: Floats, state: Floats, tree: Tree, work: Workspace, num_frontier: int, proposals: Proposals) -> int:
    """Add the children of the frontier that can pay for their verification; returns the number of nodes to expand next
    (written to the frontier).
    """
    survival = work.score
    depth = tree.depth[work.frontier[0]] + 1
    if depth == 1:
        survival[ROOT] = 1.0
    exponent, worth = np.exp(state[_LOG_EXPONENT]), params[_WORTH]
    k, least = min(int(params[_K]), proposals.shape[1]), _least_worth(params, state)
    first = tree.size[0]
    for i in range(num_frontier):
        parent = work.frontier[i]
        row = tree.row[parent]
        for rank in range(k):
            child = proposals[row, rank]
            if child.logprob == -np.inf:
                break
            value = survival[parent] * child_survival(params, depth, rank, child.logprob, child.probability)
            if _adapted(value, exponent) * worth < least:
                continue
            survival[add_child(tree, parent, rank, proposals)] = value
    if depth >= params[_DEPTH]:
        return 0
    return _choose_frontier(params, state, tree, work, first, depth, exponent)


@compiled
def _choose_frontier(
    params: Floats, state: Floats, tree: Tree, work: Workspace, first: int, depth: int, exponent: float
) -> int:
    """Write the nodes of the last level, ``first`` and after, that are worth expanding to the frontier."""
    floor = MIN_PROBABILITY * depth
    count = tree.size[0] - first
    for i in range(count):
        node = first + i
        work.logprob[i] = work.score[node] if tree.path_probability[node] > floor else 0.0
    width = best_first(work.logprob, count, int(params[_WIDTH]), work.order)
    expanded = int(work.mark[0]) if depth > 1 else 0
    value = best_value = 0.0
    best_width = 0
    gain = params[_WORTH] * params[_LEVEL_VALUE]
    before = _verify_price(params, state, expanded)
    for m in range(width):
        survival = work.logprob[work.order[m]]
        if survival <= 0.0:
            break
        value += gain * _adapted(survival, exponent)
        cost = _level_price(params, state, m + 1) + _verify_price(params, state, expanded + m + 1) - before
        if value - cost > best_value:
            best_value, best_width = value - cost, m + 1
    for m in range(best_width):
        work.frontier[m] = first + work.order[m]
    work.mark[0] = expanded + best_width
    return best_width


@compiled
def prune(params: Floats, state: Floats, tree: Tree, work: Workspace) -> None:
    """Keep the nodes whose verification pays most."""
    count = tree.size[0] - 1
    survival, exponent = work.score, np.exp(state[_LOG_EXPONENT])
    for i in range(count):
        work.logprob[i] = survival[i + 1]
    ordered = best_first(work.logprob, count, int(params[_BUDGET]), work.order)
    total = expected = 0.0
    best_value, best_count = -_verify_price(params, state, 0), 0
    for n in range(ordered):
        total += _adapted(work.logprob[work.order[n]], exponent)
        value = params[_WORTH] * total - _verify_price(params, state, n + 1)
        if value > best_value:
            best_value, best_count, expected = value, n + 1, total
    state[_EXPECTED] = expected
    work.mark[: tree.size[0]] = 0
    for n in range(best_count):
        work.mark[work.order[n] + 1] = 1
    keep_marked(tree, work.mark)


@compiled
def update(params: Floats, state: Floats, accepted: int, is_retrieved: bool) -> None:
    """Make survivals larger where more was accepted than expected, within bounds.

    ``is_retrieved``: whether the first emitted token is the first retrieved one, known whether it was verified or not.
    """
    rate = params[_RATE]
    if rate == 0.0:
        return
    if state[_MATCH] > 0:
        expected = _adapted(_retrieved_survival(params, state, 0), np.exp(state[_LOG_EXPONENT_RETRIEVED]))
        _adapt(state, _LOG_EXPONENT_RETRIEVED, RETRIEVED_RATE * rate * (is_retrieved - expected))
    _adapt(state, _LOG_EXPONENT, rate * (accepted - state[_EXPECTED]))


@compiled
def _adapt(state: Floats, which: int, surplus: float) -> None:
    state[which] = min(MAX_LOG_EXPONENT, max(-MAX_LOG_EXPONENT, state[which] - surplus))
