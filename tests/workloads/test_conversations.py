"""Later turns follow the target's own answers: prompts and answers are those of a chat by hand with ``generate``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.documents.configuration import Configuration
from autotune.documents.decoding_profile import AR
from autotune.drafters.independent import IndependentDraft
from autotune.errors import UserError
from autotune.evaluation.answers import answer_prompts
from autotune.evaluation.race import Everyone, race
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.runtime_arms import RuntimeArms
from autotune.machine.device import fingerprint
from autotune.modeling.loading import reference
from autotune.modeling.target import Target
from autotune.recording.recorder import Recorder
from autotune.replay.reference_replay import rounds
from autotune.replay.trace import bounds_for
from autotune.runtime.decoder import Decoder
from autotune.trees.policy import parse_policy
from autotune.workloads.conversations import Conversations
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from autotune.workloads.workload import Workload, load_workload
from tests.sample_documents import decoding_profile, write_image, write_workload
from tests.tiny_models import Pair

ROWS: list[dict[str, Any]] = [
    {"id": "1", "image": "a.png", "turns": ["Read row 1.", "And row 2?", "Why?"], "topic": "chat"},
    {"id": "2", "image": "b.png", "turns": ["Count the digits.", "Sure?"], "topic": "chat"},
    {"id": "3", "image": "a.png", "turns": ["One turn only."], "topic": "chat"},
]
NUM_TOKENS = 14
CHAIN = Configuration(tree={"policy": "chain", "depth": 3})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    (folder / "images").mkdir()
    for seed, name in enumerate(("a.png", "b.png")):
        write_image(folder / "images" / name, seed)
    return write_workload(folder, ROWS, name="mmspec.jsonl")


@pytest.fixture(scope="module")
def chats(path: Path) -> Workload:
    return load_workload(str(path), "evaluate", is_whole=True).cut(9, NUM_TOKENS)


@pytest.fixture(scope="module")
def by_hand(pair: Pair, processor: Any, chats: Workload) -> list[tuple[list[int], list[int]]]:
    """Prompt tokens and answer of every turn, by Hugging Face alone."""
    found, images = [], iter([chats.prompts[0].pixels, chats.prompts[3].pixels, chats.prompts[5].pixels])
    for row in ROWS:
        chat: list[dict[str, Any]] = []
        pixels = list(next(images))
        for turn in row["turns"]:
            parts: list[dict[str, str]] = [{"type": "image"}] if not chat else []
            chat.append({"role": "user", "content": [*parts, {"type": "text", "text": turn}]})
            text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            inputs = processor(text=text, images=pixels, return_tensors="pt")
            with torch.inference_mode():
                output = pair.target.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
            prompt, answer = inputs["input_ids"][0].tolist(), output[0, inputs["input_ids"].shape[1] :].tolist()
            found.append((prompt, answer))
            said = processor.decode(answer, skip_special_tokens=True).strip()
            chat.append({"role": "assistant", "content": [{"type": "text", "text": said}]})
    return found


def test_recorded_turns_are_those_of_a_chat_by_hand(
    pair: Pair, processor: Any, chats: Workload, by_hand: list[tuple[list[int], list[int]]], tmp_path: Path
) -> None:
    """Replay of their trace predicts the rounds of the runtime."""
    target, draft = Target(pair.target), IndependentDraft(pair.draft)
    recorder = Recorder(target, reference(str(pair.target_folder)), processor, tmp_path)
    assert [prompt.is_answered for prompt in chats.prompts] == [True, False, False, True, False, True]
    followed = recorder.follow(chats)
    assert followed.sha256 == chats.sha256 and all(prompt.is_answered for prompt in followed.prompts)
    inputs = [prompt.inputs(processor) for prompt in followed.prompts]
    answers = recorder.answers(followed)
    found = [(one["input_ids"][0].tolist(), answer.tokens) for one, answer in zip(inputs, answers, strict=True)]
    assert found == by_hand
    assert recorder.follow(followed) == followed, "known answers are kept"
    tree = parse_policy({"policy": "eagle2", "depth": 3, "k": 3, "budget": 7})
    trace = recorder.trace(
        draft, reference(str(pair.draft_folder)), followed, visual_keep=1.0, bounds=bounds_for([tree])
    )
    decoder = Decoder(target, draft, tree=tree)
    for number, (one, prompt) in enumerate(zip(inputs, followed.prompts, strict=True)):
        output = decoder.generate(**one, **prompt.settings.generation)
        assert output.stats.accepted_lengths == [len(one.path) for one in rounds(trace, number, tree)]


def test_turns_are_followed_until_a_deadline(
    pair: Pair, processor: Any, chats: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompts in any case; a later call with more time continues from the recorded answers."""
    monkeypatch.setattr("autotune.recording.recorder.ANSWERS_AT_ONCE", 2)
    recorder = Recorder(Target(pair.target), reference(str(pair.target_folder)), processor, tmp_path)
    followed = recorder.follow(chats, deadline=time.monotonic())
    assert len(followed.prompts) == 2 and all(prompt.is_answered for prompt in followed.prompts)
    whole = recorder.follow(chats)
    assert len(whole.prompts) == len(chats.prompts) and whole.prompts[:2] == followed.prompts


def test_arms_follow_the_answers_of_plain_decoding(
    pair: Pair, processor: Any, chats: Workload, by_hand: list[tuple[list[int], list[int]]]
) -> None:
    """Each is decoded once, as the arm ``ar``, or apart where the race has no such arm."""
    arms, alone = (RuntimeArms(Decoder(Target(pair.target), IndependentDraft(pair.draft)), processor) for _ in range(2))
    decode = arms._plain_answers
    asked: list[WorkloadPrompt] = []
    arms.conversations = Conversations(processor, lambda prompts: asked.extend(prompts) or decode(prompts))
    runs = race(ArmRunner(), [arms.arm("chain", CHAIN), arms.plain], chats.prompts, Everyone()).runs
    assert [run.tokens for run in runs["chain"]] == [run.tokens for run in runs[AR]]
    assert [run.new_tokens for run in runs[AR]] == [len(answer) for _, answer in by_hand]
    assert not asked
    only = race(ArmRunner(), [alone.arm("chain", CHAIN)], chats.prompts, Everyone()).runs
    assert [run.tokens for run in only["chain"]] == [run.tokens for run in runs[AR]]


def test_run_decodes_turn_after_turn(
    pair: Pair, processor: Any, path: Path, by_hand: list[Any], tmp_path: Path
) -> None:
    target, draft = (reference(str(folder)) for folder in (pair.target_folder, pair.draft_folder))
    decoding_profile(target, draft, hardware=fingerprint("cpu")).save(tmp_path / "p.json")
    evaluated = load_workload(str(path), "evaluate").cut(9, NUM_TOKENS)
    answers = list(answer_prompts(tmp_path / "p.json", evaluated.prompts, device="cpu"))
    expected = [processor.decode(answer, skip_special_tokens=True).strip() for _, answer in by_hand[3:5]]
    assert [answer["text"] for answer in answers] == expected


def test_sampled_turns_share_the_seed_of_their_conversation(pair: Pair, processor: Any, chats: Workload) -> None:
    sampled = chats.sampled(1.0)
    assert [prompt.settings.seed for prompt in sampled.prompts] == [0, 0, 0, 1, 1, 2]
    plain = Decoder(Target(pair.target))

    def answer(prompt: WorkloadPrompt) -> list[int]:
        inputs = prompt.inputs(processor)
        tokens = plain.generate(**inputs, **prompt.settings.generation).sequences[0, inputs["input_ids"].shape[1] :]
        return [int(token) for token in tokens]

    followed = Conversations(processor, lambda prompts: list(map(answer, prompts))).follow_workload(sampled)
    first, second, third = sampled.prompts[:3]
    said = [processor.decode(answer(first), skip_special_tokens=True).strip()]
    by_hand = WorkloadPrompt("by hand", second.settings, second.pixels, tuple(said))
    said.append(processor.decode(answer(by_hand), skip_special_tokens=True).strip())
    assert followed.prompts[2].answers == tuple(said) and followed.prompts[2].settings == third.settings


def test_conversations_without_a_chat_template_are_refused(processor: Any) -> None:
    prompt = WorkloadPrompt("p", Prompt(turns=["a", "b"]), (), answers=("x",))
    with pytest.raises(UserError, match="no chat template; give prompt instead of messages or turns"):
        prompt.inputs(processor.image_processor)
    with pytest.raises(AssertionError, match="not known yet"):
        WorkloadPrompt("p", Prompt(turns=["a", "b"]), ()).inputs(processor)
    assert not prompt.cut(5).answers, "the answer before may be shorter too"
