"""Calibrations follow the frequencies with which drafts are accepted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autotune.replay.calibration import Children, _fit, calibrate, calibrated, children_on_answers
from autotune.replay.trace import RecordedPrompt, Trace, join
from autotune.trees.priced import GRID, MAX_SURVIVAL
from tests.sample_documents import forest_of, header, random_trace


def children(acceptance: list[float], *, num_each: int = 4000) -> Children:
    """Children of which the draft thinks 0.2, 0.5 and 0.9, of ranks 0 and 1 at depths 1 and 2."""
    rng = np.random.default_rng(0)
    shape = (3, 2, 2, num_each)
    probability = np.broadcast_to(np.array([0.2, 0.5, 0.9])[:, None, None, None], shape)
    rank = np.broadcast_to(np.arange(2)[None, :, None, None], shape)
    depth = np.broadcast_to(np.arange(1, 3)[None, None, :, None], shape)
    accepted = rng.random(shape) < np.array(acceptance)[:, None, None, None]
    prompt = np.broadcast_to(np.arange(num_each) % 8, shape)
    return Children(*(a.ravel() for a in (prompt, depth, rank, np.log(probability), accepted)))


def test_curves_are_frequencies() -> None:
    found = children([0.05, 0.6, 0.97])
    for num_depths in (1, 2):
        curves = _fit(found, num_depths)
        assert curves.shape == (num_depths, 3, len(GRID)) and (np.diff(curves, axis=-1) >= 0).all()
        estimate = calibrated(curves, found)
        for probability, frequency in ((0.5, 0.6), (0.9, 0.97)):
            of_it = np.isclose(found.logprob, np.log(probability))
            assert abs(estimate[of_it].mean() - frequency) < 0.06
    untouched = _fit(found, 1)[0, 2]  # there is no child of rank 2
    np.testing.assert_allclose(untouched, 1 / (1 + np.exp(-GRID)))


def test_children_are_those_of_the_answers_own_path() -> None:
    """The draft proposes the answer's token second at the first root, and below it the next token first."""
    # Nodes 0 and 1 are the tokens 5 and 6 of the answer; node 2 is the second child of node 0.
    nodes = [[(9, 0.5, -1), (6, 0.25, 2)], [(7, 0.75, -1), (8, 0.125, -1)], [(7, 0.5, -1), (8, 0.25, -1)]]
    trace = join(header(1), [RecordedPrompt(forest_of([5, 6, 7], nodes), 4, 4, 0)])
    found = children_on_answers(trace)
    rows = sorted(zip(found.depth, found.rank, np.exp(found.logprob).round(6), found.is_accepted, strict=True))
    first = [(1, 0, 0.5, False), (1, 0, 0.75, True), (1, 1, 0.125, False), (1, 1, 0.25, True)]
    assert rows == [*first, (2, 0, 0.5, True), (2, 1, 0.25, False)]


def test_a_calibration_names_its_draft_and_prompts_and_its_held_out_loss() -> None:
    trace: Trace = random_trace(0, num_prompts=12, num_tokens=60)
    found = calibrate(trace)
    assert (found.draft, found.draft_sha256) == (trace.header.draft.id, trace.header.draft.sha256)
    assert found.workload_sha256 == trace.header.workload_sha256
    assert found.num_tokens == trace.num_tokens
    assert 0 < found.log_loss < found.raw_log_loss
    assert max(map(max, found.curves[0])) <= MAX_SURVIVAL
    some = calibrate(random_trace(1, num_prompts=4, num_tokens=60))
    assert some.num_tokens < found.num_tokens and some.curves != found.curves


def test_retrieved_tokens_are_calibrated_by_the_length_of_the_match() -> None:
    """A match of four tokens finds the next token four times of five, and of one token once in five."""
    trace: Trace = random_trace(0, num_prompts=20, num_tokens=60)
    answer, rng = trace.forest.answer, np.random.default_rng(0)
    length = rng.choice([0, 1, 4], len(answer))
    is_found = rng.random(len(answer)) < np.where(length == 4, 0.8, 0.2)
    following = np.append(answer[1:], -1)
    retrieved = np.full((len(answer), 2), -1)
    retrieved[:, 0] = np.where(length == 0, -1, np.where(is_found, following, 777))
    forest = replace(trace.forest, retrieved=retrieved, match_length=length)
    found = calibrate(replace(trace, forest=forest)).retrieved
    assert found is not None and list(found[0]) == sorted(found[0])
    assert abs(found[0][0] - 0.2) < 0.06 and abs(found[0][3] - 0.8) < 0.06
    assert calibrate(trace).retrieved is None


def test_a_draft_that_proposes_nothing_is_calibrated() -> None:
    """As retrieval does for a text without repetitions."""
    trace = random_trace(0)
    shape = trace.forest.child_token.shape
    empty = replace(
        trace.forest,
        child_token=np.full(shape, -1),
        child_logprob=np.full(shape, -np.inf, np.float32),
        child_node=np.full(shape, -1),
    )
    found = calibrate(replace(trace, forest=empty))
    assert np.isfinite(found.log_loss)
