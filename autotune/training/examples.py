"""Training examples of drafts, from a JSONL file. The target generates missing answers.

It may write the prompts too, as in Magpie (Xu et al., arXiv 2406.08464): a chat model that is given the beginning of an
empty user turn continues it with a question.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from autotune.errors import UserError, errors_about
from autotune.files import content_key, read_lines, write_bytes
from autotune.modeling.prompt import EncodedPrompt, placeholders_of, visual_tokens
from autotune.modeling.target import Target
from autotune.recording.answers import MAX_BATCH_BYTES, AnswerRecorder
from autotune.recording.recorder import Recorder, Report
from autotune.runtime.answer_keys import SOFTWARE
from autotune.training.recipe import Magpie
from autotune.workloads.chat import Variables, chat_for, used_variables
from autotune.workloads.formats import read_answered
from autotune.workloads.prompt import AnsweredPrompt, Prompt, WorkloadPrompt, hash_inputs, load_prompt
from autotune.workloads.workload import WorkloadSplit, is_named, load_workload

ROWS = 64  # questions or answers that are decoded together
HELD_OUT_SHARE = 20  # one example in 20 is held out
# Per-token inputs that processors make, with their values for the answer's tokens.
PER_TOKEN = {"attention_mask": 1, "token_type_ids": 0, "mm_token_type_ids": 0}
Share = tuple[int, int]
"""(process, number of processes): a process reads its part of every batch."""


@dataclass(frozen=True)
class Example:
    """A prompt with its answer, encoded as one text. Tokens from ``loss_start`` on are followed by a token of the
    answer.
    """

    prompt: EncodedPrompt
    loss_start: int


NumberedPrompt = tuple[int, AnsweredPrompt]
"""A line number, from 1, and the prompt of the line."""


@dataclass(frozen=True)
class Line:
    """An example of a file. Its images are loaded when they are needed."""

    path: Path
    number: int
    """Line number in the file, from 1."""
    settings: Prompt
    answer: tuple[int, ...]
    """Tokens of the answer that are read: all except the last one, which is only predicted."""
    length: int
    """Number of tokens read, prompt and answer together."""
    prompt_key: str
    """Hash of the prompt's tokens and pixels."""
    key: str
    """Hash of everything that determines the target's outputs."""


def split_file(
    path: Path,
    *,
    batch_size: int,
    num_examples: int | None = None,
    num_held_out: int | None = None,
    judged: Collection[str] = (),
) -> tuple[list[NumberedPrompt], list[NumberedPrompt]]:
    """The training and the held-out prompts of a file.

    Lines of the split ``evaluate`` are held out, or the last lines if there are none. If any line has the split
    ``train``, only these are trained on.

    Args:
        batch_size: largest batch size of any stage; as many lines are held out if the file is large enough.
        num_examples: number of lines to train on; None: all.
        num_held_out: largest number of held-out lines to use.
        judged: hashes of questions that are neither trained on nor held out, see ``judged_questions``.

    Raises:
        UserError: missing file, invalid line, or too few lines.
    """
    lines = read_answered(path)
    if judged:
        lines = [line for line in lines if _question(load_prompt(path, line[0], line[1].unanswered)) not in judged]
    held_out = [line for line in lines if line[1].split == "evaluate"]
    training = [line for line in lines if line[1].split == "train"]
    training = training or [line for line in lines if line[1].split != "evaluate"]
    if not held_out:
        number = max(1, min(max(len(training) // HELD_OUT_SHARE, batch_size), len(training) - batch_size))
        training, held_out = training[:-number], training[-number:]
    if len(training) < (num_needed := max(num_examples or 0, batch_size)):
        raise UserError(
            f"{path}: training needs at least num_examples lines, and at least one batch; got {len(training)} for {num_needed}, "
            f"with {len(held_out)} held out; add lines, or lower num_examples or batch_size"
        )
    return training[:num_examples], held_out[:num_held_out]


def judged_questions(folder: Path, names: Sequence[str]) -> frozenset[str]:
    """Hashes of the questions, with their images, of workloads that judge a draft: bundled ones, or files relative to a
    folder.

    Raises:
        UserError: a workload cannot be read.
    """
    found: list[WorkloadPrompt] = []
    for name in names:
        if is_named(name):
            found += [prompt for split in get_args(WorkloadSplit) for prompt in load_workload(name, split).prompts]
        else:
            found += load_workload(str(folder / name), "evaluate", is_whole=True).prompts
    return frozenset(map(_question, found))


def _question(prompt: WorkloadPrompt) -> str:
    """Hash of a prompt's last message and images, whatever its settings."""
    return replace(prompt, settings=Prompt(prompt=prompt.settings.text.strip()), answers=()).sha256


def at_temperatures(
    lines: Sequence[NumberedPrompt], temperatures: Sequence[float], variables: Variables | None = None
) -> list[NumberedPrompt]:
    """The prompts with these variables of the chat template, those without an answer once for each temperature; a
    sampled answer's seed is its line's number, unless it has one.
    """
    several = []
    for number, prompt in lines:
        changes = [{"temperature": t, "seed": prompt.seed or number * (t > 0)} for t in temperatures]
        copies = changes if prompt.answer is None and changes else [{}]
        own = {"chat_template_kwargs": {**(variables or {}), **(prompt.chat_template_kwargs or {})} or None}
        several += [(number, prompt.model_copy(update=own | change)) for change in copies]
    return several


def read_examples(
    path: Path,
    prompts: Sequence[NumberedPrompt],
    recorder: Recorder,
    accelerator: Accelerator,
    report: Report | None = None,
) -> list[Line]:
    """The lines with answers. The target writes missing answers in batches of prompts of similar length, each process a
    share of them; the recorder caches them.

    Raises:
        UserError: an unreadable image, or a prompt that the target cannot read.
    """
    asked = [_read_line(path, number, prompt, recorder) for number, prompt in prompts]
    missing = sorted((line for line in asked if line.key == ""), key=lambda line: line.length)
    process, num_processes = accelerator.process_index, accelerator.num_processes
    placeholders = placeholders_of(recorder.target.model.config)
    answered: dict[int, Line] = {}  # by the identity of the line without its answer
    for share in [missing] if num_processes == 1 else [missing[process::num_processes], missing]:
        answered = {}
        for batch in _batches(share, recorder.target):
            with errors_about(str(path)):
                answers = recorder.answers_to_train_on(
                    [load_prompt(path, line.number, line.settings) for line in batch]
                )
            for line, answer in zip(batch, answers, strict=True):  # a sampled one may hold a token of images
                read = itertools.takewhile(lambda token: token not in placeholders, answer[:-1])
                answered[id(line)] = _answered(line, list(read), recorder)
            if report is not None:
                report(len(answered), len(share))
        accelerator.wait_for_everyone()
    return [answered.get(id(line), line) for line in asked]


def _batches(lines: Sequence[Line], target: Target) -> Iterator[list[Line]]:
    """Consecutive lines whose answers are decoded together: ``ROWS`` at most, as many as the memory of their keys and
    values allows.
    """
    batch: list[Line] = []
    longest = 0
    for line in lines:
        longest = max(longest, line.length + line.settings.max_new_tokens)
        size = (len(batch) + 1) * longest * target.kv_bytes_per_token
        if batch and (len(batch) == ROWS or size > MAX_BATCH_BYTES):
            yield batch
            batch, longest = [], line.length + line.settings.max_new_tokens
        batch.append(line)
    if batch:
        yield batch


def _read_line(path: Path, number: int, answered: AnsweredPrompt, recorder: Recorder) -> Line:
    """A line; without a key while its answer is missing."""
    target, source = recorder.target, f"{path}:{number}"
    prompt = load_prompt(path, number, answered.unanswered)
    inputs = prompt.inputs(recorder.processor)
    prompt_ids = inputs["input_ids"][0]
    room = target.max_context - len(prompt_ids)
    if room < 1:
        raise UserError(
            f"{source}: the target's context of {target.max_context} tokens must hold the prompt and an answer; "
            f"the prompt has {len(prompt_ids)} tokens; shorten it or remove the line"
        )
    if not prompt.pixels:
        _refuse_visual_tokens(prompt_ids, target, source)
    limit = min(prompt.settings.max_new_tokens, room)
    settings = prompt.settings.model_copy(update={"max_new_tokens": limit})
    line = Line(path, number, settings, (), len(prompt_ids), hash_inputs(inputs), "")
    if answered.answer is None:
        return line
    # The end-of-sequence token would follow; as the last token it is not read.
    tokenizer = getattr(recorder.processor, "tokenizer", recorder.processor)
    return _answered(line, tokenizer(answered.answer, add_special_tokens=False)["input_ids"][:room], recorder)


def _answered(line: Line, answer: Sequence[int], recorder: Recorder) -> Line:
    _refuse_visual_tokens(torch.tensor(answer, dtype=torch.long), recorder.target, f"{line.path}:{line.number}")
    key = content_key([SOFTWARE, line.prompt_key, list(answer)])
    return replace(line, answer=tuple(answer), length=line.length + len(answer), key=key)


def _refuse_visual_tokens(text: Tensor, target: Target, source: str) -> None:
    if bool(visual_tokens(target.model.config, text).any()):
        raise UserError(
            f"{source}: the text has tokens of images or videos beside those of the line's own; remove them from the text"
        )


class JsonlExamples:
    """Lines of a file in batches of similar length; ``seed`` determines the order of the batches."""

    def __init__(
        self,
        lines: Sequence[Line],
        target: Target,
        processor: Any,
        *,
        batch_size: int,
        seed: int = 0,
        share: Share = (0, 1),
    ) -> None:
        self.target = target
        self.processor = processor
        ranked = sorted(lines, key=lambda line: line.length)
        # Every process needs a line of each batch.
        num_batches = min(math.ceil(len(lines) / batch_size), max(1, len(lines) // share[1]))
        parts = np.array_split(np.arange(len(lines)), num_batches)  # sizes differ by at most one line
        order = np.random.default_rng(seed).permutation(num_batches)
        self.batches = [[ranked[i] for i in parts[number]][share[0] :: share[1]] for number in order]
        self.num_batches = num_batches
        self.key = content_key([[line.key for line in batch] for batch in self.batches])

    @torch.no_grad()
    def __getitem__(self, number: int) -> list[Example]:
        """The batch of a number. Examples are encoded one by one: model families arrange the images of several rows
        differently.
        """
        return [self._encode(line) for line in self.batches[number]]

    def _encode(self, line: Line) -> Example:
        inputs = load_prompt(line.path, line.number, line.settings).inputs(self.processor)
        answer = torch.tensor([line.answer], dtype=torch.long)
        num_prompt_tokens = inputs["input_ids"].shape[1]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], 1)
        for name, value in PER_TOKEN.items():
            if inputs.get(name) is not None:
                inputs[name] = torch.cat([inputs[name], torch.full_like(answer, value)], 1)
        with errors_about(f"{line.path}:{line.number}"):
            (prompt,) = self.target.encode(inputs).prompts
        return Example(prompt, num_prompt_tokens - 1)


MAX_EMPTY_BATCHES = 10  # in a row, without a new question
_MARK = "USER-TURN"


class _UserTurn(WorkloadPrompt):
    """The chat template up to where the user's message begins."""

    def inputs(self, processor: Any, device: Any = "cpu") -> dict[str, Any]:
        before, _ = user_turn(processor, self.settings.chat_template_kwargs)
        tokens = getattr(processor, "tokenizer", processor)(before, add_special_tokens=False, return_tensors="pt")
        return {name: tokens[name].to(device) for name in ("input_ids", "attention_mask")}


def user_turn(processor: Any, variables: Variables | None = None) -> tuple[str, str]:
    """The text of the chat template before the user's message, and after it.

    Raises:
        UserError: there is no chat template.
    """
    if not getattr(processor, "chat_template", None):
        raise UserError(
            "magpie has the target write questions by its chat template; it has none; remove magpie from data"
        )
    options = {**used_variables(processor, variables or {}), "add_generation_prompt": True, "tokenize": False}
    text = str(processor.apply_chat_template(chat_for(processor, _MARK, num_images=0), **options))
    before, _, after = text.partition(_MARK)
    return before, after


def write_questions(
    path: Path,
    settings: Magpie,
    answers: AnswerRecorder,
    report: Callable[[int, int], None] | None = None,
    variables: Variables | None = None,
) -> None:
    """Write the target's questions to a JSONL file, each once, until it holds ``settings.num_prompts``. Every batch is
    on disk before the next one begins, and a later call continues after the last.

    Raises:
        UserError: no chat template, or the target repeats itself.
    """
    lines = read_lines(path)
    found, seed, num_empty = {line.get("prompt") for line in lines}, 0, 0
    if lines:
        seed = (lines[-1].get("seed", 0) // ROWS + 1) * ROWS
    processor = answers.processor
    tokenizer = getattr(processor, "tokenizer", processor)
    after = tokenizer(user_turn(processor, variables)[1], add_special_tokens=False)["input_ids"][:1]
    ends = {tokenizer.eos_token_id, *set(after).intersection(tokenizer.get_added_vocab().values())}
    ends |= set(torch.tensor(answers.target.model.generation_config.eos_token_id or []).flatten().tolist())
    while len(lines) < settings.num_prompts:
        options: dict[str, Any] = {"prompt": "", "temperature": settings.temperature, "top_p": settings.top_p}
        options |= {"max_new_tokens": settings.question_tokens, "chat_template_kwargs": variables}
        turns = [_UserTurn("magpie", Prompt(**options, seed=seed + n), ()) for n in range(ROWS)]
        written = answers.write_together(turns, eos_token_id=sorted(ends - {None}))
        before = len(lines)
        for number, tokens in enumerate(written):
            question = tokenizer.decode(tokens[:-1], skip_special_tokens=True).strip()
            if (
                tokens[-1] not in ends or not question or question in found
            ):  # an unfinished one breaks off in a sentence
                continue
            found.add(question)
            lines.append({"prompt": question, "max_new_tokens": settings.answer_tokens, "seed": seed + number})
        seed += ROWS
        num_empty = 0 if len(lines) > before else num_empty + 1
        if num_empty == MAX_EMPTY_BATCHES:
            raise UserError(
                f"{path}: magpie asks for {settings.num_prompts} questions, and the target writes no new ones after {before}; raise "
                "temperature or question_tokens, or lower num_prompts"
            )
        lines = lines[: settings.num_prompts]
        write_bytes(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        if report is not None:
            report(len(lines), settings.num_prompts)
