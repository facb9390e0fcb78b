"""Recorded answers and forests equal the models' outputs, and recording is idempotent and crash-safe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from autotune.documents.provenance import ModelReference
from autotune.documents.subnet import VISUAL_RANKINGS, VisualRanking
from autotune.drafters.draft import ROOTS_AT_ONCE
from autotune.drafters.forests import choose_expanded
from autotune.drafters.independent import IndependentDraft
from autotune.errors import UserError
from autotune.modeling.prompt import visual_tokens
from autotune.modeling.target import Target
from autotune.recording import recorder as recorder_module
from autotune.recording.answers import AnswerRecorder
from autotune.recording.recorder import Answer, Recorder, record_forest
from autotune.replay.trace import Forest, ForestBounds, Trace, bounds_for
from autotune.runtime.answer_batch import GreedyBatch
from autotune.runtime.decoder import Decoder
from autotune.trees.policy import parse_policy
from autotune.trees.tree import MAX_STEP
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload, load_workload
from tests.sample_documents import write_workload
from tests.tiny_models import NUM_VISUAL_TOKENS

TOLERANCE = 1e-5 * 16  # 1e-5 of the logits, which reach 16 in the tiny pair
SMALL = ForestBounds(depth=4, num_proposals=5, width=5)


@pytest.fixture
def fresh(recorder: Recorder, tmp_path: Path) -> Recorder:
    """A recorder without records."""
    return Recorder(recorder.target, recorder.target_reference, recorder.processor, tmp_path)


def record(
    recorder: Recorder, draft: IndependentDraft, reference: ModelReference, workload: Workload, **kw: Any
) -> Trace:
    return recorder.trace(draft, reference, workload, **{"visual_keep": 1.0, "bounds": SMALL, **kw})


@pytest.fixture
def num_forwards(target: Target, draft: IndependentDraft) -> Any:
    """Forward passes of the two models, prefills and steps alike."""
    calls = {"target": 0, "draft": 0}

    def counter(name: str) -> Callable[..., None]:
        def count(*_: Any) -> None:
            calls[name] += 1

        return count

    handles = [
        model.text.layers[0].register_forward_pre_hook(counter(name))
        for name, model in (("target", target), ("draft", draft))
    ]
    yield calls
    for handle in handles:
        handle.remove()


# -------- answers


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_name_the_prompt_and_lose_nothing(
    fresh: Recorder, workload: Workload, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch, alone, and in answers to train on."""
    first, text = workload.prompts[0], fresh.target.text
    kept = fresh.answers(replace(workload, prompts=(first,)))
    logits = type(text).logits
    monkeypatch.setattr(type(text), "logits", lambda self, hidden: torch.full_like(logits(self, hidden), value))
    with pytest.raises(UserError, match=r"^workload\.jsonl:[2-5]: .* at position \d+ are not finite in float32"):
        fresh.answers(workload)
    assert fresh.answers(replace(workload, prompts=(first,))) == kept
    for prompt in workload.prompts[1:4]:
        with pytest.raises(UserError, match=rf"^{prompt.name}: .* are not finite"):
            fresh.answers_to_train_on([prompt])
    assert len(list(fresh.folder.rglob("*.json"))) == 1


def test_answers_are_those_of_plain_decoding(
    recorder: Recorder, workload: Workload, target: Target, processor: Any
) -> None:
    plain = Decoder(target)
    for prompt, answer in zip(workload.prompts, recorder.answers(workload), strict=True):
        inputs = prompt.inputs(processor)
        output = plain.generate(**inputs, **prompt.settings.generation)
        assert answer.prompt_length == inputs["input_ids"].shape[1]
        assert answer.tokens == output.sequences[0, answer.prompt_length :].tolist()
        assert answer.num_visual_tokens == (NUM_VISUAL_TOKENS if prompt.pixels else 0)
        assert set(answer.visual_scores) == (set(VISUAL_RANKINGS) if prompt.pixels else set())


def test_an_answer_with_a_near_tie_is_decoded_again_by_itself(
    fresh: Recorder, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = Workload("x", "tune", workload.prompts[:3])
    expected = fresh.answers(greedy)
    monkeypatch.setattr("autotune.runtime.answer_batch.NEAR_TIE", 1.0)  # every token is one
    alone: list[WorkloadPrompt] = []
    again = AnswerRecorder(fresh.target, fresh.processor)
    decode = again._alone
    monkeypatch.setattr(again, "_alone", lambda prompt: alone.append(prompt) or decode(prompt))
    found = {prompt.sha256: answer for prompt, answer in again.record(greedy.prompts)}
    assert [prompt.sha256 for prompt in alone] == [prompt.sha256 for prompt in greedy.prompts]
    assert [found[prompt.sha256] for prompt in greedy.prompts] == expected


# -------- forest


class Alone:
    """The draft without cache, masks or batches: one forward pass over pruned prompt, answer so far and path."""

    def __init__(
        self,
        draft: IndependentDraft,
        inputs: dict[str, Any],
        answer: Answer,
        keep: float,
        ranking: VisualRanking = "text_after_image",
    ) -> None:
        self.draft = draft
        is_visual = visual_tokens(draft.model.config, inputs["input_ids"][0]).numpy()
        ranked = np.flatnonzero(is_visual)[np.argsort(answer.visual_scores.get(ranking, []))[::-1]]
        kept = max(1, round(keep * len(ranked))) if len(ranked) else 0
        self.positions = torch.tensor(sorted({*range(answer.prompt_length)} - {*ranked[kept:].tolist()}))
        captured: list[torch.Tensor] = []
        handle = draft.text.module.register_forward_pre_hook(
            lambda _module, _args, kwargs: captured.append(kwargs["inputs_embeds"]), with_kwargs=True
        )
        with torch.inference_mode():
            draft.model(**inputs, use_cache=False)
        handle.remove()
        self.prompt = captured[0][:, self.positions]
        self.length = answer.prompt_length

    @torch.inference_mode()
    def children(self, tokens: list[int], count: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        more = self.draft.model.get_input_embeddings()(torch.tensor([tokens]))
        positions = torch.cat([self.positions, self.length + torch.arange(len(tokens))])[None]
        embeddings = torch.cat([self.prompt, more], 1)
        # Without a mask of ones transformers takes the gaps of pruned tokens for boundaries of packed sequences.
        everything = torch.ones(positions.shape, dtype=torch.long)
        hidden = self.draft.text.module(
            inputs_embeds=embeddings, position_ids=positions, attention_mask=everything, use_cache=False
        )
        best = self.draft.text.logits(hidden.last_hidden_state[0, -1]).log_softmax(-1).topk(count)
        return best.indices.numpy(), best.values.numpy()


def paths_of(forest: Forest) -> dict[int, tuple[int, list[int]]]:
    """Every forest node by index: its root's index in the answer, and the tokens from the root's child to it."""
    paths: dict[int, tuple[int, list[int]]] = {root: (root, []) for root in range(len(forest.answer) - 1)}
    waiting = list(paths)
    while waiting:
        node = waiting.pop()
        root, path = paths[node]
        for token, child in zip(forest.child_token[node], forest.child_node[node], strict=True):
            if child >= 0:
                assert child not in paths, "a forest node has one parent"
                paths[int(child)] = (root, [*path, int(token)])
                waiting.append(int(child))
    return paths


@pytest.mark.parametrize(
    ("number", "keep", "ranking"),
    [
        (0, 1.0, "text_after_image"),
        (1, 1.0, "text_after_image"),
        (1, 0.5, "text_after_image"),
        (3, 0.5, "all_queries"),
        (3, 0.5, "random"),
    ],
)
def test_a_node_has_the_proposals_of_the_draft_alone(
    number: int,
    keep: float,
    ranking: VisualRanking,
    recorder: Recorder,
    draft: IndependentDraft,
    workload: Workload,
    processor: Any,
) -> None:
    prompt, answer = workload.prompts[number], recorder.answers(workload)[number]
    inputs = prompt.inputs(processor)
    draft.visual_keep = keep
    part = record_forest(recorder.target, draft, inputs, answer, SMALL, visual_ranking=ranking)
    alone = Alone(draft, inputs, answer, keep, ranking)
    paths = paths_of(part.forest)
    assert len(paths) == len(part.forest.child_token) > 5 * len(answer.tokens)
    assert (part.prompt_length, part.draft_prompt_length) == (answer.prompt_length, len(alone.positions))
    assert part.num_visual_tokens == (NUM_VISUAL_TOKENS if prompt.pixels else 0)
    for node, (root, path) in paths.items():
        tokens, logprobs = alone.children([*answer.tokens[: root + 1], *path], SMALL.num_proposals)
        np.testing.assert_allclose(part.forest.child_logprob[node], logprobs, atol=TOLERANCE)
        assert part.forest.child_token[node].tolist() == tokens.tolist()


def test_long_answers_and_wide_levels_take_several_forwards(
    fresh: Recorder, draft: IndependentDraft, processor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More tokens than a forward pass takes, and more nodes on a level of ``ROOTS_AT_ONCE`` forests."""
    monkeypatch.setattr(fresh.target.model.generation_config, "eos_token_id", None)
    path = write_workload(tmp_path, [{"prompt": "Go on.", "max_new_tokens": MAX_STEP + 20, "split": "tune"}])
    workload = load_workload(str(path), "tune")
    answer = fresh.answers(workload)[0]
    assert len(answer.tokens) > MAX_STEP + 1
    bounds = ForestBounds(depth=2, num_proposals=20, width=20, floor=1e-6)
    assert ROOTS_AT_ONCE * bounds.width > MAX_STEP
    draft.visual_keep = 1.0
    inputs = workload.prompts[0].inputs(processor)
    forest = record_forest(fresh.target, draft, inputs, answer, bounds).forest
    alone = Alone(draft, inputs, answer, 1.0)
    paths = paths_of(forest)
    assert len(paths) == 21 * (len(answer.tokens) - 1)
    for node in [0, MAX_STEP - 1, MAX_STEP, len(answer.tokens) - 2, *range(len(answer.tokens), len(paths), 97)]:
        root, tokens = paths[node]
        expected = alone.children([*answer.tokens[: root + 1], *tokens], 20)[1]
        np.testing.assert_allclose(forest.child_logprob[node], expected, atol=TOLERANCE)


def test_a_draft_without_features_evaluates_a_token_of_several_forests_once(
    recorder: Recorder, draft: IndependentDraft, workload: Workload, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forests of one answer overlap: what follows the answer's tokens is in the forests of all roots before it."""
    draft.visual_keep = 1.0
    inputs, answer = workload.prompts[0].inputs(processor), recorder.answers(workload)[0]
    evaluated: list[int] = []
    forward = draft.forward
    monkeypatch.setattr(
        draft, "forward", lambda step, source: evaluated.append(len(step.tokens)) or forward(step, source)
    )
    forest = record_forest(recorder.target, draft, inputs, answer, SMALL).forest
    prefixes = {(*answer.tokens[: root + 1], *path) for root, path in paths_of(forest).values()}
    assert sum(evaluated) == len(prefixes) < len(forest.child_token)
    every = record_forest(recorder.target, draft, inputs, answer, SMALL, shares_tokens=False).forest
    assert sum(evaluated) == len(prefixes) + len(every.child_token), "every node of every forest"
    np.testing.assert_array_equal(forest.child_node, every.child_node)
    np.testing.assert_array_equal(forest.child_token, every.child_token)
    np.testing.assert_allclose(forest.child_logprob, every.child_logprob, atol=TOLERANCE)


def test_the_expanded_nodes_are_those_of_the_bounds() -> None:
    """The compiled choice against the rules of ``ForestBounds``, on random levels of three forests."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        root = np.sort(rng.integers(0, 3, 6))
        logprob = np.log(np.sort(rng.dirichlet(np.ones(4), len(root)))[:, ::-1] * rng.uniform(0.01, 1, (len(root), 1)))
        is_pinned, in_nucleus = rng.random(logprob.shape) < 0.1, rng.random(logprob.shape) < 0.4
        floor = float(rng.uniform(0.01, 0.3))
        width, beam, nucleus_width = (int(rng.integers(0, 8)) for _ in range(3))
        rows, ranks = choose_expanded(root, logprob, is_pinned, in_nucleus, np.log(floor), width, beam, nucleus_width)
        expected: set[tuple[int, int]] = set()
        for forest in np.unique(root):
            candidates = [(int(row), rank) for row in np.flatnonzero(root == forest) for rank in range(4)]
            best = sorted(candidates, key=lambda c: -logprob[c])
            expected |= {c for c in candidates if is_pinned[c]}
            expected |= {c for c in best[:width] if np.exp(logprob[c]) > floor}
            expected |= {*best[:beam], *[c for c in best if in_nucleus[c]][:nucleus_width]}
        assert set(zip(rows.tolist(), ranks.tolist(), strict=True)) == expected
        assert len(rows) == len(expected) and (np.diff(root[rows]) >= 0).all(), "rows of a root are contiguous"


def test_bounds_cover_all_policies() -> None:
    policies = [{"policy": "eagle2", "k": 3, "depth": 14}, {"policy": "wetap", "w_min": 2, "w_max": 9, "top_p": 0.7}]
    bounds = bounds_for(parse_policy(tree) for tree in policies)
    assert (bounds.depth, bounds.beam, bounds.beam_depth) == (14, 3, 14)
    assert (bounds.nucleus, bounds.nucleus_width, bounds.nucleus_depth) == (0.7, 9, 8)
    assert bounds.is_renormalised
    old = bounds_for(parse_policy(tree) for tree in [*policies, {"policy": "wetap", "nucleus": "all"}])
    assert not old.is_renormalised, "nodes for a share of all tokens are more"
    # A chain needs only the most probable path, which every trace holds.
    chain = bounds_for([parse_policy({"policy": "chain", "depth": 5})])
    assert (chain.depth, chain.num_proposals, chain.width, chain.beam, chain.nucleus_width) == (5, 1, 1, 0, 0)
    sage = bounds_for([parse_policy({"policy": "sage", "k": 7, "d_max": 5, "depth_cap": 9})])
    assert (sage.depth, sage.num_proposals, sage.width) == (9, 7, ForestBounds().width)
    assert sage.floor == pytest.approx(0.1 / 9) and chain.floor > 0.5


# -------- records


def test_a_limit_on_answer_tokens_records_the_first_ones(
    fresh: Recorder, draft: IndependentDraft, draft_reference: ModelReference, workload: Workload
) -> None:
    """Equal to the same positions of whole answers."""
    few, whole = (
        record(fresh, draft, draft_reference, workload, bounds=SMALL.model_copy(update={"answer_tokens": limit}))
        for limit in (6, None)
    )
    lengths, all_lengths = np.diff(few.answer_start), np.diff(whole.answer_start)
    assert lengths.tolist() == np.minimum(all_lengths, 6).tolist() and all_lengths.max() > 6
    for p, length in enumerate(lengths):
        begin, all_begin = few.answer_start[p], whole.answer_start[p]
        assert (few.forest.answer[begin : begin + length] == whole.forest.answer[all_begin : all_begin + length]).all()
        roots, all_roots = (trace.first_node[p] + np.arange(length - 1) for trace in (few, whole))
        assert (few.forest.child_token[roots] == whole.forest.child_token[all_roots]).all()


def assert_same_trace(actual: Trace, expected: Trace) -> None:
    for name in ("answer_start", "first_node", "prompt_length", "draft_prompt_length", "num_visual_tokens"):
        assert getattr(actual, name).tolist() == getattr(expected, name).tolist()
    for name in ("answer", "child_token", "child_logprob", "child_node"):
        np.testing.assert_array_equal(getattr(actual.forest, name), getattr(expected.forest, name))


@pytest.mark.parametrize("kind", ["answers", "forests"])
def test_a_damaged_record_is_made_again(
    kind: str,
    fresh: Recorder,
    draft: IndependentDraft,
    draft_reference: ModelReference,
    workload: Workload,
    num_forwards: dict[str, int],
) -> None:
    """Truncated, empty, of another type, or zeros, as a full disk leaves it. Other records are not made again."""
    few = Workload(workload.name, "tune", workload.prompts[:2])
    first = record(fresh, draft, draft_reference, few)
    path = next(path for path in sorted((fresh.folder / kind).rglob("*")) if path.is_file())
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"[]", bytes(len(content))):
        path.write_bytes(damaged)
        num_forwards.update(target=0, draft=0)
        assert_same_trace(record(fresh, draft, draft_reference, few), first)
        made_again, untouched = ("target", "draft") if kind == "answers" else ("draft", "target")
        assert num_forwards[made_again] > 0 == num_forwards[untouched]
        assert path.read_bytes() == content


class Killed(BaseException):
    """Not caught by the recorder, as SIGKILL is not."""


def test_a_kill_loses_only_the_record_being_made(
    fresh: Recorder,
    draft: IndependentDraft,
    draft_reference: ModelReference,
    workload: Workload,
    num_forwards: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kill_after(number: int, name: str) -> None:
        write, written = getattr(recorder_module, name), list[int]()

        def killed(*record: Any) -> None:
            write(*record)
            written.append(1)
            if len(written) == number:
                raise Killed

        monkeypatch.setattr(recorder_module, name, killed)

    kill_after(2, "write_answer")
    with pytest.raises(Killed):
        fresh.answers(workload)
    with pytest.raises(Killed):  # in the middle of a batch's first step
        monkeypatch.setattr(GreedyBatch, "_step", lambda *_: (_ for _ in ()).throw(Killed))
        fresh.answers(workload)
    monkeypatch.undo()
    assert len(list((fresh.folder / "answers").iterdir())) == 2, "half an answer is not recorded"
    made_before = [prompt for prompt in workload.prompts if fresh._answer_path(prompt).exists()]
    before = num_forwards["target"]
    fresh.answers(Workload(workload.name, "tune", tuple(made_before)))
    assert len(made_before) == 2 and num_forwards["target"] == before
    kill_after(3, "_write_part")
    with pytest.raises(Killed):
        record(fresh, draft, draft_reference, workload)
    monkeypatch.undo()
    made = {path: path.stat().st_mtime_ns for path in fresh.folder.rglob("*") if path.is_file()}
    assert len(made) == len(workload.prompts) + 3
    trace = record(fresh, draft, draft_reference, workload)
    assert {path: path.stat().st_mtime_ns for path in made} == made, "complete records are not written again"
    assert trace.num_prompts == len(workload.prompts)
