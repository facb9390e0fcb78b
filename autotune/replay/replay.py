"""Replay of a tree policy over a trace: the rounds that decoding would take and, by a cost table, their time, without
running a model.

The trees are grown by the code that grows them at inference (``trees/policy.py``), from the trace's proposals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.cost.table import DensePrices
from autotune.errors import UserError
from autotune.replay.trace import Trace
from autotune.trees import fallback as fallbacks
from autotune.trees import policy as policies
from autotune.trees.compilation import compiled
from autotune.trees.fallback import NO_FALLBACK, RoundPrice
from autotune.trees.limits import MAX_LEVEL_STEP, Floats, Ints
from autotune.trees.policy import Policy, kind_number
from autotune.trees.tree import ROOT, Proposals, Tree, Workspace, new_tree, new_workspace, set_root
from autotune.trees.verification import find_child

_ROUNDS, _DRAFT_FORWARDS, _NODES, _MISSING, _PLAIN_STEPS = range(5)  # columns of counts, [prompts, 5]
_DRAFT_MS, _VERIFY_MS = range(2)  # columns of times, [prompts, 2]
PLAIN, VERIFICATION, FIRST, LEVEL = range(4)  # kinds of steps, rows of ``Replay.step_ms``

MAX_MISSING = 0.01  # missing nodes per verified node, up to which predictions are trusted


@dataclass(frozen=True)
class Replay:
    """Predicted decoding of a trace's prompts with one policy. Arrays are per prompt."""

    tokens: Ints
    """Emitted after the prefill's first token."""
    rounds: Ints
    """Target forward passes, plain steps included."""
    plain_steps: Ints
    draft_forwards: Ints
    verified_nodes: Ints
    """Draft nodes sent to verification, over all rounds."""
    missing: Ints
    """Proposed nodes that the policy expanded and the trace does not hold; where there are none, replay is exact. None
    of them is on the answer, so accepted lengths are exact too, unless a node budget binds: the missing nodes'
    descendants would have taken room from other nodes. Always 0 for trees that have their shape whatever the draft
    proposes.
    """
    accepted_lengths: list[Ints]
    """τ of every round, an array for each prompt."""
    draft_ms: Floats
    verify_ms: Floats
    overhead_ms: Floats
    draft_prefill_ms: Floats
    step_ms: Floats
    """Time over all prompts by kind of step and number of tokens, [4, tokens]: plain steps, verifications, first
    passes, levels.
    """

    @property
    def is_covered(self) -> bool:
        """Whether the trace holds nearly all nodes that the policy expanded. Levels that are missing are not priced."""
        return bool(self.missing.sum() <= MAX_MISSING * max(1, self.verified_nodes.sum()))

    @property
    def decode_ms(self) -> Floats:
        """Predicted decoding time, from the first token to the last."""
        return self.draft_ms + self.verify_ms + self.overhead_ms + self.draft_prefill_ms

    @property
    def ms_per_token(self) -> float:
        """Pooled over prompts: the search's objective."""
        return float(self.decode_ms.sum() / self.tokens.sum())

    @property
    def tokens_per_round(self) -> float:
        """M, pooled over prompts."""
        return float(self.tokens.sum() / self.rounds.sum())


def replay(
    trace: Trace, policy: Policy, prices: DensePrices, fallback: RoundPrice | None = None, prompts: Ints | None = None
) -> Replay:
    """Replay ``policy`` over ``prompts``, indices of the trace's prompts; None: all. The others have counts of 0.

    Raises:
        UserError: the policy looks at more children, or grows deeper trees, than the trace holds.
    """
    check_reach(trace, policy)
    counts = np.zeros((trace.num_prompts, 5), np.int64)
    times = np.zeros((trace.num_prompts, 2))
    step_ms = np.zeros((4, len(prices.verify_ms)))
    accepted = np.zeros(len(trace.forest.answer), np.int64)
    tokens = np.zeros(trace.num_prompts, np.int64)
    prompts = np.arange(trace.num_prompts) if prompts is None else prompts
    tokens[prompts] = (np.diff(trace.answer_start) - 1)[prompts]
    _replay_prompts(
        kind_number(policy),
        policy.encode(),
        NO_FALLBACK if fallback is None else fallback.encode(),
        prompts,
        trace.forest.answer,
        trace.forest.retrieved,
        trace.forest.match_length,
        trace.packed.root_row,
        trace.packed.proposals,
        trace.answer_start,
        trace.prompt_length,
        trace.draft_kv_length(prices.crossing_share),
        *prices.of_steps,
        bool(trace.header.aux_layers),  # such a draft reads accepted nodes again, with the target's features
        new_tree(policy.size.grown),
        new_workspace(policy.size.grown),
        np.zeros(policies.STATE_SIZE),
        np.zeros(fallbacks.STATE_SIZE),
        counts,
        times,
        step_ms,
        accepted,
    )
    rounds, draft_forwards, nodes, missing, plain_steps = counts.T
    overhead = prices.overhead
    return Replay(
        tokens=tokens,
        rounds=rounds,
        plain_steps=plain_steps,
        draft_forwards=draft_forwards,
        verified_nodes=nodes,
        missing=0 * missing if policy.keeps_empty_nodes else missing,
        accepted_lengths=[
            accepted[begin : begin + count] for begin, count in zip(trace.answer_start, rounds, strict=False)
        ],
        draft_ms=times[:, _DRAFT_MS],
        verify_ms=times[:, _VERIFY_MS],
        overhead_ms=overhead.round_ms * (rounds - plain_steps)
        + overhead.level_ms * draft_forwards
        + overhead.node_ms * nodes,
        draft_prefill_ms=prices.draft_prefill.ms(trace.draft_prompt_length, trace.num_patches) * (rounds > 0),
        step_ms=step_ms,
    )


def check_reach(trace: Trace, policy: Policy) -> None:
    """Refuse a policy that looks at more children, or grows deeper trees, than the trace holds."""
    bounds = trace.header.bounds
    if policy.size.proposals > bounds.num_proposals or policy.size.depth > bounds.depth:
        raise UserError(
            f"this trace holds {bounds.num_proposals} children per node to depth {bounds.depth}; {policy.policy} asks for "
            f"{policy.size.proposals} to depth {policy.size.depth}; record a larger one, or narrow the space"
        )


def plain_decode_ms(trace: Trace, prices: DensePrices) -> Floats:
    """Predicted time of plain decoding of the same answers, per prompt."""
    times = np.zeros(trace.num_prompts)
    for p, num_tokens in enumerate(np.diff(trace.answer_start) - 1):
        contexts = trace.prompt_length[p] + np.arange(num_tokens)
        times[p] = prices.decode_ms[np.minimum(contexts // prices.kv_step, len(prices.decode_ms) - 1)].sum()
    return times


@compiled
def _price(table: Floats, tokens: int, kv_length: int, kv_step: int) -> float:
    return float(table[min(tokens, table.shape[0] - 1), min(kv_length // kv_step, table.shape[1] - 1)])


@compiled
def _level_price(table: Floats, tokens: int, kv_length: int, kv_step: int) -> float:
    """A level wider than ``MAX_LEVEL_STEP`` takes several forward passes."""
    ms = 0.0
    while tokens > MAX_LEVEL_STEP:
        ms += _price(table, MAX_LEVEL_STEP, kv_length, kv_step)
        tokens -= MAX_LEVEL_STEP
        kv_length += MAX_LEVEL_STEP
    return ms + _price(table, tokens, kv_length, kv_step)


@compiled
def _replay_prompts(
    kind: int,
    params: Floats,
    price: Floats,
    prompts: Ints,
    answer: Ints,
    retrieved: Ints,
    match_length: Ints,
    root_row: NDArray[np.int32],
    proposals: Proposals,
    answer_start: Ints,
    prompt_length: Ints,
    draft_kv_length: Ints,
    decode_ms: Floats,
    draft_first_ms: Floats,
    draft_ms: Floats,
    verify_ms: Floats,
    kv_step: int,
    rereads_accepted: bool,
    tree: Tree,
    work: Workspace,
    state: Floats,
    fallback: Floats,
    counts: Ints,
    times: Floats,
    step_ms: Floats,
    accepted: Ints,
) -> None:
    """The decoding loop of ``runtime/decoder.py`` over some prompts, with recorded proposals. ``rounds.py`` is the
    readable version.
    """
    unrecorded = len(proposals) - 1
    for p in prompts:
        begin, num_answer = answer_start[p], answer_start[p + 1] - answer_start[p]
        policies.reset(kind, params, state)
        fallbacks.reset(fallback)
        position = 0  # index of the root in the answer
        num_rounds = 0
        draft_length = draft_kv_length[p]
        pending = 1  # committed tokens that the draft has not read, the root included
        while position < num_answer - 1:
            if fallbacks.is_plain(price, fallback):
                ms = decode_ms[min((prompt_length[p] + position) // kv_step, len(decode_ms) - 1)]
                times[p, _VERIFY_MS] += ms
                step_ms[PLAIN, 1] += ms
                accepted[begin + num_rounds] = 0
                num_rounds += 1
                counts[p, _ROUNDS] += 1
                counts[p, _PLAIN_STEPS] += 1
                fallbacks.count_plain_step(fallback)
                pending += 1
                position += 1
                continue
            # Draft.
            policies.begin_round(kind, params, state, prompt_length[p] + position, match_length[begin + position])
            set_root(tree, answer[begin + position], root_row[begin + position])
            work.frontier[0] = ROOT
            num_frontier = 1 if policies.drafts(kind, params, state) else 0
            num_read = num_levels = 0
            if num_frontier:
                ms = _price(draft_first_ms, pending, draft_length, kv_step)
                times[p, _DRAFT_MS] += ms
                step_ms[FIRST, min(pending, step_ms.shape[1] - 1)] += ms
                draft_length += pending
                pending = 0
            while num_frontier:
                if num_levels:
                    ms = _level_price(draft_ms, num_frontier, draft_length + num_read, kv_step)
                    times[p, _DRAFT_MS] += ms
                    step_ms[LEVEL, min(num_frontier, MAX_LEVEL_STEP, step_ms.shape[1] - 1)] += ms
                    num_read += num_frontier
                num_levels += 1
                for i in range(num_frontier):
                    node = work.frontier[i]
                    tree.kv_slot[node] = num_read + i
                    counts[p, _MISSING] += tree.row[node] == unrecorded and tree.path_logprob[node] > -np.inf
                num_frontier = policies.grow(kind, params, state, tree, work, num_frontier, proposals)
            policies.add_retrieved(kind, params, state, tree, work, retrieved[begin + position])
            policies.prune(kind, params, state, tree, work)
            # Verify.
            size = tree.size[0]
            ms = _price(verify_ms, size, prompt_length[p] + position, kv_step)
            times[p, _VERIFY_MS] += ms
            step_ms[VERIFICATION, min(size, step_ms.shape[1] - 1)] += ms
            counts[p, _NODES] += size - 1
            counts[p, _DRAFT_FORWARDS] += num_levels
            # Accept.
            node, length, num_kept = ROOT, 0, 0
            while position + length + 1 < num_answer:
                child = find_child(tree, node, answer[begin + position + length + 1])
                if child < 0:
                    break
                length += 1
                num_kept += tree.kv_slot[child] >= 0 and not rereads_accepted
                node = child
            # Commit.
            accepted[begin + num_rounds] = length
            num_rounds += 1
            counts[p, _ROUNDS] += 1
            is_retrieved = retrieved[begin + position, 0] == answer[begin + position + 1]
            policies.update(kind, params, state, length, is_retrieved)
            fallbacks.update(price, fallback, num_levels, size - 1, length)
            draft_length += num_kept
            pending += length - num_kept + 1
            position += length + 1
