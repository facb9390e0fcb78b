"""Calibration of a draft's probabilities: how often the target accepts a child that the draft gives a certain
probability, by the depth of the child and its rank; and how often it accepts what retrieval finds, by the length of the
match.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.replay.trace import Trace
from autotune.trees.limits import MAX_MATCH, Floats, Ints
from autotune.trees.priced import GRID, MAX_SURVIVAL, Calibration, identity_curves

MAX_DEPTH, MAX_RANK = 8, 8  # children beyond these are not looked at
NUM_RANKS = 3  # curves of a depth: ranks 0, 1, and the others
MAX_CURVES = 2  # of a rank by depth: of depth 1, and of the others
NUM_FOLDS = 4
LEAST = 1e-4  # probability of a curve
MIN_CHILDREN = 200  # that a curve is fitted to


class Children(NamedTuple):
    """Children of the nodes on the answers' own paths, [children] each."""

    prompt: Ints
    depth: Ints
    rank: Ints
    logprob: Floats
    is_accepted: NDArray[np.bool_]
    """Whether the child is the answer's next token."""

    def select(self, members: NDArray[np.bool_]) -> Children:
        return Children(*(array[members] for array in self))  # type: ignore[arg-type]


def children_on_answers(trace: Trace) -> Children:
    """The children, at all depths from every root, of nodes whose tokens are all the answer's."""
    forest = trace.forest
    prompt, token, node = trace.roots()
    end = trace.answer_start[1:][prompt]
    num_ranks = min(MAX_RANK, forest.child_token.shape[1])
    parts = []
    for depth in range(1, min(MAX_DEPTH, trace.header.bounds.depth) + 1):
        is_inside = (node >= 0) & (token + 1 < end)
        prompt, token, node, end = (array[is_inside] for array in (prompt, token, node, end))
        is_next = forest.child_token[node] == forest.answer[token + 1][:, None]
        logprob = forest.child_logprob[node][:, :num_ranks]
        depths, ranks = np.full(logprob.size, depth), np.tile(np.arange(num_ranks), len(logprob))
        logprobs, accepted = logprob.ravel().astype(np.float64), is_next[:, :num_ranks].ravel()
        parts.append(Children(np.repeat(prompt, num_ranks), depths, ranks, logprobs, accepted))
        rank = is_next.argmax(1)
        node = np.where(is_next.any(1), forest.child_node[node, rank], -1)
        token = token + 1
    return Children(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def calibrate(trace: Trace) -> Calibration:
    """Fit a calibration to a trace by isotonic regression.

    Curves are of every rank, or of every rank and depth: whichever predicts prompts better that were not fitted.
    """
    children = children_on_answers(trace)
    children = children.select(np.isfinite(children.logprob))
    folds = _folds(np.array(trace.header.tasks))[children.prompt]
    losses = {num_depths: _held_out_loss(children, folds, num_depths) for num_depths in range(1, MAX_CURVES + 1)}
    best = min(losses, key=lambda num_depths: losses[num_depths])
    header = trace.header
    return Calibration(
        curves=tuple(tuple(tuple(np.round(curve, 4).tolist()) for curve in depth) for depth in _fit(children, best)),
        retrieved=_retrieved(trace),
        draft=header.draft.id,
        draft_sha256=header.draft.sha256,
        workload_sha256=header.workload_sha256,
        num_tokens=trace.num_tokens,
        log_loss=round(losses[best], 5),
        raw_log_loss=round(_log_loss(np.exp(children.logprob), children.is_accepted), 5),
    )


def _folds(tasks: NDArray[np.str_]) -> Ints:
    """The fold of every prompt, so that each fold has prompts of each task."""
    folds = np.zeros(len(tasks), np.int64)
    for task in np.unique(tasks):
        members = np.flatnonzero(tasks == task)
        folds[members] = np.arange(len(members)) % NUM_FOLDS
    return folds


def _fit(children: Children, num_depths: int) -> Floats:
    """Curves [depths, ranks, grid]."""
    curves = np.tile(identity_curves(), (num_depths, NUM_RANKS, 1))
    rank, depth = np.minimum(children.rank, NUM_RANKS - 1), np.minimum(children.depth, num_depths) - 1
    logit = _logit(children.logprob)
    for d in range(num_depths):
        for r in range(NUM_RANKS):
            members = (rank == r) & ((depth == d) | (num_depths == 1))
            if members.sum() >= MIN_CHILDREN:
                curves[d, r] = _isotonic(logit[members], children.is_accepted[members], GRID)
    return curves


def _isotonic(x: Floats | Ints, is_accepted: NDArray[np.bool_], at: Floats | Ints) -> Floats:
    """Probability of acceptance, which rises with ``x`` [children], fitted and read ``at`` [points]."""
    from sklearn.isotonic import IsotonicRegression

    regression = IsotonicRegression(y_min=LEAST, y_max=MAX_SURVIVAL, out_of_bounds="clip").fit(x, is_accepted)
    return np.asarray(regression.predict(at))


def _retrieved(trace: Trace) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """See ``Calibration.retrieved``."""
    forest = trace.forest
    prompt, token, _ = trace.roots()
    end = trace.answer_start[1:][prompt]
    lengths: list[list[Ints]] = [[], []]
    hits: list[list[NDArray[np.bool_]]] = [[], []]
    for step in range(forest.retrieved.shape[1]):
        is_offered = (token + step + 1 < end) & (forest.retrieved[token, step] >= 0)
        token, end = token[is_offered], end[is_offered]
        is_next = forest.retrieved[token, step] == forest.answer[token + step + 1]
        lengths[step > 0].append(np.minimum(forest.match_length[token] + step, MAX_MATCH))
        hits[step > 0].append(is_next)
        token, end = token[is_next], end[is_next]
    curves = [_by_match_length(np.concatenate(x), np.concatenate(y)) for x, y in zip(lengths, hits, strict=True)]
    return (curves[0], curves[1]) if len(lengths[0][0]) >= MIN_CHILDREN else None


def _by_match_length(length: Ints, is_hit: NDArray[np.bool_]) -> tuple[float, ...]:
    if len(length) < MIN_CHILDREN:
        return (LEAST,) * MAX_MATCH
    return tuple(np.round(_isotonic(length, is_hit, np.arange(1, MAX_MATCH + 1)), 4).tolist())


def _held_out_loss(children: Children, folds: Ints, num_depths: int) -> float:
    """Mean log loss of the children of each fold under curves of the other folds."""
    probability = np.exp(children.logprob)
    for fold in range(NUM_FOLDS):
        is_held = folds == fold
        if is_held.all() or not is_held.any():
            continue
        curves = _fit(children.select(~is_held), num_depths)
        probability[is_held] = calibrated(curves, children.select(is_held))
    return _log_loss(probability, children.is_accepted)


def calibrated(curves: Floats, children: Children) -> Floats:
    """The curves' probability of every child."""
    num_depths, num_ranks, _ = curves.shape
    curve = curves[np.minimum(children.depth, num_depths) - 1, np.minimum(children.rank, num_ranks - 1)]
    at = np.clip((_logit(children.logprob) - GRID[0]) / (GRID[1] - GRID[0]), 0, len(GRID) - 1)
    below = np.minimum(at.astype(np.int64), len(GRID) - 2)
    rows = np.arange(len(at))
    return np.asarray((1 - (at - below)) * curve[rows, below] + (at - below) * curve[rows, below + 1])


def _logit(logprob: Floats) -> Any:
    return logprob - np.log(np.maximum(-np.expm1(logprob), 1e-12))


def _log_loss(probability: Floats, is_accepted: NDArray[np.bool_]) -> float:
    """Mean over children; 0 where the draft proposed none."""
    p = np.clip(probability, LEAST, 1 - LEAST)
    return float(-np.log(np.where(is_accepted, p, 1 - p)).sum() / max(1, len(p)))
