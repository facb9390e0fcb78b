"""Kernels of Triton for tree operations, one for each: a level of ``eagle2`` or of a fixed tree, pruning, the input of the
verification, and acceptance. ``triton_trees`` launches them. A CUDA graph repeats torch's operations one by one, and these would
be about 30 a level.

Every kernel writes each value once and reads only what kernels before it wrote, so that its threads never wait for each other.
Sizes are arguments, blocks are the next powers of two; trees of similar size share compiled kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from autotune.runtime.device_trees import DeviceTree
from autotune.trees.static import NO_TOKEN

# Rows of a packed tree.
TOKEN, PARENT, DEPTH, RANK, KV_SLOT, PATH_LOGPROB, SIZE = (tl.constexpr(row) for row in range(len(DeviceTree._fields)))
EMPTY = tl.constexpr(NO_TOKEN)


@triton.jit
def _ordered(value: tl.tensor) -> tl.tensor:
    """An integer that orders float64 values as they order themselves. NaN has a place too, so that ranks are a permutation."""
    bits = value.to(tl.int64, bitcast=True)
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@triton.jit
def _ranked(
    index: tl.tensor,
    logprobs: tl.tensor,
    candidate_logprob: tl.tensor,
    candidate_at: tl.tensor,
    best: tl.tensor,
    first: tl.tensor,
    num_new: tl.tensor,
    first_slot: tl.tensor,
    k: tl.tensor,
    budget: tl.tensor,
    LOG_FLOOR: tl.constexpr,
) -> tl.tensor:
    """Candidates that a level ranks, the best ones before it and then its own: number, log-probability, whether there is one,
    and whether it is the level's own.
    """
    num_best = tl.minimum(first, budget)
    is_old = index < num_best
    is_new = (index >= num_best) & (index < num_best + num_new)
    kept = tl.load(best + index, mask=is_old, other=0)
    proposal = tl.where(is_new, index - num_best, 0)
    slot = first_slot + proposal // k
    parent = tl.load(candidate_at + slot, mask=is_new & (slot >= 0), other=-1)
    parent_logprob = tl.load(candidate_logprob + parent, mask=parent >= 0, other=float("-inf"))
    parent_logprob = tl.where(slot < 0, 0.0, parent_logprob)
    logprob = parent_logprob + tl.load(logprobs + proposal, mask=is_new, other=0.0).to(tl.float64)
    logprob = tl.where(logprob < tl.full([1], LOG_FLOOR, tl.float64), float("-inf"), logprob)
    logprob = tl.where(is_new, logprob, tl.load(candidate_logprob + kept, mask=is_old, other=0.0))
    return tl.where(is_new, first + proposal, kept), logprob, is_old | is_new, is_new


@triton.jit(do_not_specialize=["first", "num_new", "first_slot", "k", "width", "budget", "stride", "next_stride"])
def grow_eagle2(
    tokens: tl.tensor,  # proposals, [rows, k]
    logprobs: tl.tensor,
    candidate_token: tl.tensor,  # [candidates]
    candidate_logprob: tl.tensor,
    candidate_slot: tl.tensor,
    candidate_at: tl.tensor,  # the candidate at each KV slot, -1 in padding, [slots]
    best: tl.tensor,  # the best candidates before this level, best first
    next_best: tl.tensor,
    mask: tl.tensor,  # of the level, [rows, stride]
    next_tokens: tl.tensor,  # of the next level; its mask is [width, next_stride]
    next_parents: tl.tensor,
    next_mask: tl.tensor,
    first: int,  # number of candidates before this level
    num_new: int,
    first_slot: int,  # KV slot of the level's first row; -1 for the root
    k: int,
    width: int,  # of the next level; 0 after the last one
    budget: int,
    stride: int,
    next_stride: int,
    LOG_FLOOR: tl.constexpr,
    BLOCK: tl.constexpr,  # at least the best and the new candidates
    CHUNK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
) -> None:
    """Add a level's candidates, rank them among the best, and choose the next level: ``Eagle2Grower.grow``."""
    index = tl.arange(0, BLOCK)
    candidate, logprob, exists, is_new = _ranked(
        index, logprobs, candidate_logprob, candidate_at, best, first, num_new, first_slot, k, budget, LOG_FLOOR
    )
    # The rank of a candidate is the number of those before it: more probable ones, and equal ones that were proposed earlier.
    key = _ordered(logprob)
    rank, new_before = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, BLOCK, CHUNK):
        other, its_logprob, it_exists, it_is_new = _ranked(
            start + tl.arange(0, CHUNK),
            logprobs,
            candidate_logprob,
            candidate_at,
            best,
            first,
            num_new,
            first_slot,
            k,
            budget,
            LOG_FLOOR,
        )
        its_key = _ordered(its_logprob)[None, :]
        is_before = (its_key > key[:, None]) | ((its_key == key[:, None]) & (other[None, :] < candidate[:, None]))
        is_before = is_before & it_exists[None, :]
        rank += tl.sum(is_before.to(tl.int32), 1)
        new_before += tl.sum((is_before & it_is_new[None, :]).to(tl.int32), 1)
    tl.store(next_best + rank, candidate, mask=exists & (rank < budget))

    # The next level: new candidates first, of those that have room for a child among the best.
    has_room = exists & (rank < budget - 1)
    num_new_with_room = tl.sum((has_room & is_new).to(tl.int32), 0)
    place = tl.where(is_new, new_before, num_new_with_room + rank - new_before)
    is_next = has_room & (place < width)
    is_read = is_next & is_new
    proposal = tl.where(is_new, candidate - first, 0)
    row = proposal // k
    first_next_slot = tl.where(first_slot < 0, 0, first_slot + num_new // k)
    slot = first_next_slot + place
    tl.store(candidate_at + slot, tl.where(is_read, candidate, -1), mask=is_next)
    token = tl.load(tokens + proposal, mask=exists, other=0)
    tl.store(candidate_token + candidate, token, mask=is_new)
    tl.store(candidate_logprob + candidate, logprob, mask=is_new)
    tl.store(candidate_slot + candidate, tl.where(is_read, slot, -1), mask=is_new)
    tl.store(next_tokens + place, token, mask=is_next)
    tl.store(next_parents + place, first_slot + row, mask=is_next)

    # A node sees what its parent sees; that it sees itself is in the buffer already.
    column_of_row = tl.arange(0, WIDTH_BLOCK)
    chosen = is_next[:, None] & (place[:, None] == column_of_row[None, :])
    row_of_next = tl.sum(tl.where(chosen, row[:, None], 0), 0)
    for start in range(0, first_next_slot, COLUMN_BLOCK):
        column = start + tl.arange(0, COLUMN_BLOCK)
        inside = (column_of_row < width)[:, None] & (column < first_next_slot)[None, :]
        visible = tl.load(mask + row_of_next[:, None] * stride + column[None, :], mask=inside, other=0.0)
        tl.store(next_mask + column_of_row[:, None] * next_stride + column[None, :], visible, mask=inside)


@triton.jit(do_not_specialize=["num_kept", "k", "width"])
def prune_eagle2(
    tree: tl.tensor,  # packed, [fields, 1 + num_kept]
    root: tl.tensor,
    candidate_token: tl.tensor,
    candidate_logprob: tl.tensor,
    candidate_slot: tl.tensor,
    candidate_at: tl.tensor,
    best: tl.tensor,
    num_kept: int,
    k: int,
    width: int,  # of all levels below the root
    BLOCK: tl.constexpr,  # above ``num_kept``
    CHUNK: tl.constexpr,
) -> None:
    """Write the best candidates in the order in which they were proposed: ``Eagle2Grower.pruned``."""
    index = tl.arange(0, BLOCK)
    candidate = tl.load(best + index, mask=index < num_kept, other=0)
    logprob = tl.load(candidate_logprob + candidate, mask=index < num_kept, other=float("-inf"))
    exists = logprob != float("-inf")
    count = tl.sum(exists.to(tl.int32), 0)
    row = candidate // k
    parent = tl.load(candidate_at + row - 1, mask=exists & (row > 0), other=-1)
    # The number of a node is the number of kept candidates that were proposed before it, and the root.
    node, parent_node = tl.full([BLOCK], 1, tl.int32), (row > 0).to(tl.int32)
    for start in range(0, BLOCK, CHUNK):
        rank = start + tl.arange(0, CHUNK)
        other = tl.load(best + rank, mask=rank < num_kept, other=0)
        its_logprob = tl.load(candidate_logprob + other, mask=rank < num_kept, other=float("-inf"))
        it_exists = (its_logprob != float("-inf"))[None, :]
        node += tl.sum((it_exists & (other[None, :] < candidate[:, None])).to(tl.int32), 1)
        parent_node += tl.sum((it_exists & (other[None, :] < parent[:, None])).to(tl.int32), 1)

    stride = num_kept + 1
    tl.store(tree + TOKEN * stride + node, tl.load(candidate_token + candidate, mask=exists), mask=exists)
    tl.store(tree + PARENT * stride + node, parent_node, mask=exists)
    tl.store(tree + DEPTH * stride + node, 1 + (row + width - 1) // width, mask=exists)
    tl.store(tree + RANK * stride + node, candidate % k, mask=exists)
    tl.store(tree + KV_SLOT * stride + node, tl.load(candidate_slot + candidate, mask=exists), mask=exists)
    tl.store(tree + PATH_LOGPROB * stride + node, logprob.to(tl.int64, bitcast=True), mask=exists)
    # The root and the padding.
    is_root, inside = index == 0, index < stride
    rest = inside & (is_root | (index > count))
    tl.store(tree + TOKEN * stride + index, tl.where(is_root, tl.load(root), EMPTY), mask=rest)
    tl.store(tree + PARENT * stride + index, 0, mask=rest)
    tl.store(tree + DEPTH * stride + index, 0, mask=rest)
    tl.store(tree + RANK * stride + index, -1, mask=rest)
    tl.store(tree + KV_SLOT * stride + index, -1, mask=rest)
    root_logprob = tl.where(is_root, tl.zeros([BLOCK], tl.float64), float("-inf"))
    tl.store(tree + PATH_LOGPROB * stride + index, root_logprob.to(tl.int64, bitcast=True), mask=rest)
    tl.store(tree + SIZE * stride + index, count + 1, mask=inside)


@triton.jit
def _fixed_proposal(
    tree: tl.tensor,
    tokens: tl.tensor,
    logprobs: tl.tensor,
    row: tl.tensor,
    node: tl.tensor,
    inside: tl.tensor,
    stride: tl.tensor,
    num_proposals: tl.tensor,
) -> tl.tensor:
    """Token and log-probability of nodes whose frontier row is known."""
    parent = tl.load(tree + PARENT * stride + node, mask=inside, other=0)
    proposal = tl.load(row + node, mask=inside, other=0) * num_proposals
    proposal += tl.load(tree + RANK * stride + node, mask=inside, other=0)
    parent_logprob = tl.load(tree + PATH_LOGPROB * stride + parent, mask=inside, other=0).to(tl.float64, bitcast=True)
    logprob = parent_logprob + tl.load(logprobs + proposal, mask=inside, other=0.0).to(tl.float64)
    token = tl.load(tokens + proposal, mask=inside, other=0)
    return tl.where(logprob == float("-inf"), EMPTY, token), logprob


@triton.jit(do_not_specialize=["first", "count", "width", "stride", "num_proposals"])
def grow_fixed(
    tree: tl.tensor,  # packed, [fields, stride]; complete but for tokens, log-probabilities and size
    tokens: tl.tensor,  # proposals, [rows, num_proposals]
    logprobs: tl.tensor,
    row: tl.tensor,  # the row of each node's parent in the frontier, [stride]
    expanded: tl.tensor,  # the nodes of the next level, [width]
    next_tokens: tl.tensor,
    first: int,  # first node of the level
    count: int,
    width: int,
    stride: int,
    num_proposals: int,
    BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
) -> None:
    """Add a level of a tree of fixed shape: ``FixedGrower.grow``."""
    index = tl.arange(0, BLOCK)
    inside, node = index < count, first + index
    token, logprob = _fixed_proposal(tree, tokens, logprobs, row, node, inside, stride, num_proposals)
    tl.store(tree + TOKEN * stride + node, token, mask=inside)
    tl.store(tree + PATH_LOGPROB * stride + node, logprob.to(tl.int64, bitcast=True), mask=inside)
    place = tl.arange(0, WIDTH_BLOCK)
    is_next = place < width
    node = tl.load(expanded + place, mask=is_next, other=0)
    token, logprob = _fixed_proposal(tree, tokens, logprobs, row, node, is_next, stride, num_proposals)
    tl.store(next_tokens + place, tl.maximum(token, 0), mask=is_next)


@triton.jit(do_not_specialize=["stride"])
def prune_fixed(tree: tl.tensor, root: tl.tensor, stride: int, KEEPS_EMPTY: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Write the root's token and the size: ``FixedGrower.pruned``."""
    index = tl.arange(0, BLOCK)
    inside = index < stride
    logprob = tl.load(tree + PATH_LOGPROB * stride + index, mask=inside, other=0).to(tl.float64, bitcast=True)
    exists = inside & (KEEPS_EMPTY | (logprob > float("-inf")))
    tl.store(tree + SIZE * stride + index, tl.sum(exists.to(tl.int32), 0), mask=inside)
    tl.store(tree + TOKEN * stride, tl.load(root))


@triton.jit(do_not_specialize=["num_nodes", "num_tokens", "max_depth"])
def verification_step(
    tree: tl.tensor,
    tokens: tl.tensor,  # [num_tokens]
    offsets: tl.tensor,
    mask: tl.tensor,  # [num_tokens, num_tokens]
    hidden: tl.tensor,  # the value of what is not visible, [1]
    num_nodes: int,
    num_tokens: int,
    max_depth: int,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the target's input for ``ROWS`` nodes: ``TensorTrees.verification_step``."""
    node = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists, inside = node < num_nodes, node < num_tokens
    token = tl.load(tree + TOKEN * num_nodes + node, mask=exists, other=0)
    tl.store(tokens + node, tl.maximum(token, 0), mask=inside)
    tl.store(offsets + node, tl.load(tree + DEPTH * num_nodes + node, mask=exists, other=0), mask=inside)
    column = tl.arange(0, BLOCK)
    seen = node
    is_visible = seen[:, None] == column[None, :]
    for _ in range(max_depth):
        seen = tl.load(tree + PARENT * num_nodes + seen, mask=exists, other=0).to(tl.int32)
        is_visible = is_visible | (seen[:, None] == column[None, :])
    is_visible = is_visible & exists[:, None] & (column < num_nodes)[None, :]
    shown = tl.zeros([ROWS, BLOCK], mask.dtype.element_ty)
    at = mask + node[:, None] * num_tokens + column[None, :]
    tl.store(at, tl.where(is_visible, shown, tl.load(hidden)), mask=inside[:, None] & (column < num_tokens)[None, :])


@triton.jit(do_not_specialize=["num_nodes", "max_depth"])
def accept(
    tree: tl.tensor,
    target_tokens: tl.tensor,  # [num_nodes]
    report: tl.tensor,  # [fields + 2, num_nodes]
    slots: tl.tensor,  # [max_depth]
    path: tl.tensor,  # [max_depth + 1]
    num_nodes: int,
    max_depth: int,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Accept the nodes that hold the target's tokens, as all their ancestors do: ``TensorTrees.accepted``."""
    node = tl.arange(0, BLOCK)
    inside = node < num_nodes
    for field in tl.static_range(FIELDS):
        value = tl.load(tree + field * num_nodes + node, mask=inside)
        tl.store(report + field * num_nodes + node, value, mask=inside)
    is_on_path = inside
    seen = node
    for _ in range(max_depth):
        parent = tl.load(tree + PARENT * num_nodes + seen, mask=inside, other=0).to(tl.int32)
        token = tl.load(tree + TOKEN * num_nodes + seen, mask=inside, other=0)
        said = tl.load(target_tokens + parent, mask=inside, other=0)
        is_on_path = is_on_path & ((seen == 0) | (token == said))
        seen = parent
    said = tl.load(target_tokens + node, mask=inside, other=0)
    tl.store(report + FIELDS * num_nodes + node, said, mask=inside)
    tl.store(report + (FIELDS + 1) * num_nodes + node, is_on_path.to(tl.int64), mask=inside)
    # Accepted nodes in their order, then the others in theirs.
    num_until = tl.cumsum(is_on_path.to(tl.int32), 0)
    place = tl.where(is_on_path, num_until - 1, tl.sum(is_on_path.to(tl.int32), 0) + node - num_until)
    tl.store(path + place, node, mask=inside & (place <= max_depth))
    slot = tl.load(tree + KV_SLOT * num_nodes + node, mask=inside, other=0)
    tl.store(slots + place - 1, slot, mask=inside & (place >= 1) & (place <= max_depth))
