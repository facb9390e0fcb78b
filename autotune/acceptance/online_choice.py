"""Choice among points of one draft while a request is decoded, by online replay.

The draft's proposals at the emitted tokens, and what a second source finds there, are kept as in a trace. Every candidate is
replayed along them: its rounds are those that it would have taken by itself from the beginning, and their price in plain
steps, spread over the tokens that they emit, is its cost. All candidates are thus compared on the same tokens, whichever of
them decoded.

The choice follows the leader, lazily: it moves to the candidate of least total cost when the present one has cost ``MARGIN``
plain steps more. It depends on counts only, so replay makes the same one, and a request is always decoded in the same rounds.
After S switches, the chosen candidates have cost at most ``MARGIN + S (MARGIN + B)`` plain steps more than the best candidate in
hindsight, where B is the largest difference of two candidates' costs in one comparison, and tokens count for the candidate that
is chosen when they are compared. This is the argument for following the best expert (Cesa-Bianchi and Lugosi 2006, "Prediction,
Learning, and Games", section 3.2): each stretch begins at the least total cost and ends at most ``MARGIN + B`` above it. Rules
whose bound does not depend on S, such as Hedge (Freund and Schapire 1997), choose at random.

Two things are not known and are assumed. A node off the emitted path proposes with the probabilities of the emitted token at
its depth; its tokens cannot be accepted, so only the tree's size depends on this. An emitted token that no round read, as
the last node of a tree that was accepted to its end and those of a round that drafted nothing, proposes as one that was read:
these are taken in turn.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.trees import policy as policies
from autotune.trees.compilation import compiled
from autotune.trees.fallback import RoundPrice
from autotune.trees.limits import MAX_RETRIEVED, Floats, Ints
from autotune.trees.policy import Policy, kind_number
from autotune.trees.static import NO_TOKEN
from autotune.trees.tree import CHILD, ROOT, Proposals, Retrieved, Tree, Workspace, new_tree, new_workspace, set_root
from autotune.trees.verification import find_child

MARGIN = 2.0  # plain steps
WINDOW = 1024  # tokens that are kept; the comparison begins anew after them


class _Candidate:
    """One point's tree policy, replayed along the emitted tokens."""

    def __init__(self, policy: Policy, price: RoundPrice) -> None:
        self.kind, self.params, self.price = kind_number(policy), policy.encode(), price.encode()
        self.state, self.saved_state = np.zeros((2, policies.STATE_SIZE))
        self.tree, self.work = new_tree(policy.max_grown), new_workspace(policy.max_grown)
        self.token_cost = np.zeros(WINDOW)
        """Plain steps that each token cost, by its index in the window."""
        self.position = 0
        """Index in the window of the root of the next round to replay."""

    def begin_request(self) -> None:
        policies.reset(self.kind, self.params, self.state)
        self.position = 0


class OnlineChoice:
    """Chooses a point before every round of a request.

    A request is ``begin_request``; then, for every round, ``observe_level`` for each draft level and ``end_round``, or
    ``skip`` for a plain step; and ``choose`` before each.

    Args:
        candidates: tree policy and price of a round, by number of the point, in the order that breaks ties.
    """

    def __init__(self, candidates: Mapping[int, tuple[Policy, RoundPrice]]) -> None:
        self.numbers = list(candidates)
        self.num_proposals = max(policy.num_proposals for policy, _ in candidates.values())
        """Children of a node that the draft must propose, so that every candidate can be replayed."""
        self._candidates = [_Candidate(policy, price) for policy, price in candidates.values()]
        self._answer: Ints = np.zeros(WINDOW, np.int64)
        self._proposals: Proposals = np.zeros((WINDOW, self.num_proposals), CHILD)
        self._retrieved, self._match_length = np.zeros((WINDOW, MAX_RETRIEVED), np.int64), np.zeros(WINDOW, np.int64)
        self._levels: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = []
        self._read: list[int] = []  # indices of the tokens whose proposals were read
        self._num_known = self._num_compared = self._num_copied = self._window_context = 0
        self.costs: Floats = np.zeros(len(self.numbers))
        """Plain steps that each candidate would have taken for the compared tokens of the request."""
        self._chosen = 0

    def begin_request(self, number: int) -> None:
        """Begin a request at the point ``number``, one of the candidates."""
        for candidate in self._candidates:
            candidate.begin_request()
        self.costs[:] = 0.0
        self._chosen = self.numbers.index(number)
        self._levels.clear()
        self.skip()

    def choose(self, eligible: Collection[int]) -> int:
        """The number of the point of the next round, one of ``eligible``."""
        allowed = [index for index, number in enumerate(self.numbers) if number in eligible]
        best = min(allowed, key=lambda index: float(self.costs[index]))  # the first of equal ones
        if self._chosen not in allowed or self.costs[self._chosen] > self.costs[best] + MARGIN:
            self._chosen = best
        return self.numbers[self._chosen]

    def observe_level(self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """Keep a level's proposals [frontier, ``num_proposals``]."""
        self._levels.append((tokens, logprobs))

    def end_round(
        self, tree: Tree, path: Ints, tokens: Sequence[int], context_tokens: int, retrieved: Sequence[Retrieved] = ()
    ) -> None:
        """End a round, and replay the candidates as far as its tokens tell.

        Args:
            tree: the verified tree, grown by a ``TreeGrower``.
            path: its accepted nodes.
            tokens: the emitted tokens, one more than accepted nodes.
            context_tokens: tokens in the target's KV cache at the start of the round.
            retrieved: what the second source finds after the root and after each emitted token, if there is one.
        """
        if self._num_known + len(tokens) > WINDOW:
            self.skip()
        if not self._levels and not self._read:  # no token's proposals can stand for those of this round
            return
        if self._num_known == 0:
            self._answer[0], self._num_known = tree.token[ROOT], 1
            self._window_context = context_tokens
        first = self._num_known - 1  # the root
        last = first + len(path)  # the last token whose successor is known
        self._answer[first + 1 : last + 2] = tokens
        self._num_known = last + 2
        for position, (found, match_length) in enumerate(retrieved, first):
            self._retrieved[position], self._match_length[position] = found, match_length
        for depth, node in enumerate((ROOT, *path.tolist())):
            self._keep_proposals(first + depth, depth, int(tree.row[node]))
        # The children of a token lead to the next one's proposals; those of the last one to its own.
        self._proposals["row"][first : last + 1] = np.minimum(np.arange(first, last + 1) + 1, last)[:, None]
        if first > 0:
            self._proposals["row"][first - 1] = first
        self._levels.clear()
        self._compare()

    def skip(self) -> None:
        """Begin the comparison anew at the next round: the draft does not read the tokens of plain steps for proposals."""
        self._num_known = self._num_compared = self._num_copied = 0
        self._read.clear()
        for candidate in self._candidates:
            candidate.position = 0

    def _keep_proposals(self, position: int, depth: int, row: int) -> None:
        """Keep the proposals for one token, which are in a row of the level ``depth``; -1: no level has them."""
        kept = self._proposals[position]
        if row >= 0:
            tokens, logprobs = self._levels[depth]
            kept["token"], kept["logprob"], kept["probability"] = tokens[row], logprobs[row], np.exp(logprobs[row])
            self._read.append(position)
        else:
            donor = self._read[self._num_copied % len(self._read)]
            self._num_copied += 1
            kept[:] = self._proposals[donor]
            is_emitted = kept["token"] == self._answer[donor + 1]
            kept["token"] = np.where(is_emitted, self._answer[position + 1], NO_TOKEN)

    def _compare(self) -> None:
        for candidate in self._candidates:
            candidate.position = _replay_known(
                candidate.kind,
                candidate.params,
                candidate.price,
                candidate.state,
                candidate.saved_state,
                candidate.tree,
                candidate.work,
                self._answer,
                self._proposals,
                self._num_known,
                self._window_context,
                self._retrieved,
                self._match_length,
                candidate.position,
                candidate.token_cost,
            )
        compared = slice(self._num_compared + 1, min(candidate.position for candidate in self._candidates) + 1)
        self.costs += [candidate.token_cost[compared].sum() for candidate in self._candidates]
        self._num_compared = compared.stop - 1


@compiled
def _copy(source: Floats, target: Floats) -> None:
    for i in range(len(source)):  # an assignment of slices would allocate
        target[i] = source[i]


@compiled
def _replay_known(
    kind: int,
    params: Floats,
    price: Floats,
    state: Floats,
    saved_state: Floats,
    tree: Tree,
    work: Workspace,
    answer: Ints,
    proposals: Proposals,
    num_known: int,
    context_tokens: int,
    retrieved: Ints,
    match_length: Ints,
    position: int,
    token_cost: Floats,
) -> int:
    """Replay the rounds from ``position`` whose accepted length follows from the known tokens; returns the next root's."""
    while position < num_known - 1:
        _copy(state, saved_state)
        policies.begin_round(kind, params, state, context_tokens + position, match_length[position])
        set_root(tree, answer[position], position)
        work.frontier[0] = ROOT
        num_frontier, num_levels = int(policies.drafts(kind, params, state)), 0
        while num_frontier:
            num_levels += 1
            num_frontier = policies.grow(kind, params, state, tree, work, num_frontier, proposals)
        policies.add_retrieved(kind, params, state, tree, work, retrieved[position])
        policies.prune(kind, params, state, tree, work)
        node, length = ROOT, 0
        while node >= 0 and position + length + 1 < num_known:
            node = find_child(tree, node, answer[position + length + 1])
            length += node >= 0
        if node >= 0:  # the next token may be accepted as well
            _copy(saved_state, state)
            break
        policies.update(kind, params, state, length, retrieved[position, 0] == answer[position + 1])
        cost = price[0] + price[1] * num_levels + price[2] * (tree.size[0] - 1)
        for i in range(position + 1, position + length + 2):
            token_cost[i] = cost / (length + 1)
        position += length + 1
    return position
