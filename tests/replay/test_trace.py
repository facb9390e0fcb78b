"""Traces: joining prompts, files, and agreement."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from autotune.errors import UserError
from autotune.replay.replay import replay
from autotune.replay.trace import ForestBounds, RecordedPrompt, Trace, join, load_trace, save_trace
from autotune.trees.policy import parse_policy
from tests.sample_documents import forest_of, free_prices, header, random_trace

# Two answers, two children a node. Ranks of the answer's next tokens: 0, 1 | 0, none.
FIRST = forest_of([1, 2, 3], [[(2, 0.6, 2), (9, 0.3, -1)], [(8, 0.5, -1), (3, 0.4, -1)], [(3, 0.9, -1), (9, 0.1, -1)]])
SECOND = forest_of([4, 5, 6], [[(5, 0.7, -1), (9, 0.2, 2)], [(7, 0.5, -1), (8, 0.4, -1)], [(6, 0.9, -1), (9, 0.1, -1)]])


def two_prompts(tasks: tuple[str, str] = ("read", "count")) -> Trace:
    bounds = ForestBounds(depth=2, num_proposals=2)
    parts = [RecordedPrompt(FIRST, 10, 8, 4), RecordedPrompt(SECOND, 20, 20, 0)]
    return join(header(2, bounds=bounds, tasks=list(tasks)), parts)


def assert_equal(actual: Trace, expected: Trace) -> None:
    assert actual.header == expected.header
    for name, array in expected.forest.__dict__.items():
        np.testing.assert_array_equal(getattr(actual.forest, name), array)
        assert getattr(actual.forest, name).dtype == array.dtype, name
    arrays = ["answer_start", "first_node", "prompt_length", "draft_prompt_length", "num_visual_tokens"]
    for name in arrays:
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))
        assert getattr(actual, name).dtype == np.int64, name  # as the compiled replay takes it


def test_joined_prompts_keep_their_nodes() -> None:
    """The second prompt's nodes follow the first one's three; -1 stays -1."""
    trace = two_prompts()
    assert trace.forest.answer.tolist() == [1, 2, 3, 4, 5, 6]
    assert trace.forest.child_node.tolist() == [[2, -1], [-1, -1], [-1, -1], [-1, 5], [-1, -1], [-1, -1]]
    assert (trace.answer_start.tolist(), trace.first_node.tolist()) == ([0, 3, 6], [0, 3])
    assert (trace.prompt_length.tolist(), trace.draft_prompt_length.tolist()) == ([10, 20], [8, 20])
    assert trace.num_visual_tokens.tolist() == [4, 0]
    assert (trace.num_prompts, trace.num_tokens) == (2, 4)


def test_selected_prompts_are_those_of_a_trace_without_the_others() -> None:
    """One prompt, several in another order, and all of them."""
    trace = random_trace(0)
    assert_equal(trace.select(range(trace.num_prompts)), trace)
    selected = trace.select([3, 1])
    assert selected.header.prompts == [trace.header.prompts[3], trace.header.prompts[1]]
    assert selected.header.tasks == [trace.header.tasks[3], trace.header.tasks[1]]
    assert_equal(selected.select([1, 0]), trace.select([1, 3]))
    policy = parse_policy({"policy": "eagle2", "k": 3, "depth": 4})
    whole, part = (replay(one, policy, free_prices()) for one in (trace, selected))
    for mine, theirs in ((part.rounds, whole.rounds), (part.missing, whole.missing)):
        assert mine.tolist() == theirs[[3, 1]].tolist()
    for mine, theirs in zip(part.accepted_lengths, (whole.accepted_lengths[3], whole.accepted_lengths[1]), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_saved_trace_loads_equal(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "keep-0.5.trace.json"
    for trace in (two_prompts(), random_trace(0)):
        save_trace(path, trace)
        assert_equal(load_trace(path), trace)
    assert json.loads(path.read_text())["schema"] == "autotune.trace/2"
    assert sorted(p.name for p in path.parent.iterdir()) == ["keep-0.5.trace.json", "keep-0.5.trace.safetensors"]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Arrays that are cut, empty, of another trace or missing, or whose last bit differs; and a wrong header."""
    path = tmp_path / "a.trace.json"
    arrays = path.with_suffix(".safetensors")
    save_trace(path, random_trace(0))
    other = arrays.read_bytes()
    save_trace(path, two_prompts())
    whole, content = arrays.read_bytes(), json.loads(path.read_text())
    for damaged in (whole[: len(whole) // 2], b"", other, whole[:-1] + bytes([whole[-1] ^ 1]), None):
        arrays.unlink() if damaged is None else arrays.write_bytes(damaged)
        with pytest.raises(UserError, match=r"a\.trace\.safetensors: .* with a\.trace\.json; .* autotune record"):
            load_trace(path)
    for change, message in (
        ({"subnt": {}}, "unknown key 'subnt'; did you mean 'subnet'"),
        ({"subnet": {"visual_keep": 0.0}}, "subnet.visual_keep"),
        ({"schema": "autotune.trace/3"}, "this program reads schema 'autotune.trace/2'"),
    ):
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(UserError, match=message):
            load_trace(path)


def shares(trace: Trace, *ranks: int) -> dict[tuple[str, int], float]:
    frame = trace.agreement(ranks)
    assert list(frame.columns) == ["task", "rank", "share"]
    return {(task, rank): share for task, rank, share in frame.itertuples(index=False)}


def test_agreement_by_hand() -> None:
    expected = {("read", 1): 0.5, ("read", 4): 1.0, ("count", 1): 0.5, ("count", 4): 0.5}
    assert shares(two_prompts(), 1, 4) == expected


def test_a_task_whose_answers_have_one_token_has_no_agreement() -> None:
    single = RecordedPrompt(forest_of([1], [[(2, 0.6, -1), (9, 0.3, -1)]]), 10, 8, 4)
    assert shares(join(header(1), [single]), 1, 4) == {}
    parts = [RecordedPrompt(FIRST, 10, 8, 4), single]
    assert shares(join(header(2, tasks=["read", "count"]), parts), 1) == {("read", 1): 0.5}
