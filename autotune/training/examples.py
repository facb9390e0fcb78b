"""Training examples of drafts, from a JSONL file. The target generates missing answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from autotune.errors import UserError, errors_about
from autotune.files import content_key
from autotune.modeling.prompt import EncodedPrompt, visual_tokens
from autotune.modeling.target import Target
from autotune.recording.recorder import Recorder, Report
from autotune.training.memory import BatchShape
from autotune.workloads.formats import read_jsonl
from autotune.workloads.prompt import AnsweredPrompt, Prompt, load_prompt
from autotune.workloads.workload import Workload

HELD_OUT_SHARE = 20  # one example in 20 is held out
# Per-token inputs that processors make, with their values for the answer's tokens.
PER_TOKEN = {"attention_mask": 1, "token_type_ids": 0, "mm_token_type_ids": 0}
Share = tuple[int, int]
"""(process, number of processes): a process reads its part of every batch."""


@dataclass(frozen=True)
class Example:
    """A prompt with its answer, encoded as one text. Tokens from ``loss_start`` on are followed by a token of the answer."""

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
    key: str
    """Hash of everything that determines the target's outputs."""


def split_file(
    path: Path, *, batch_size: int, num_examples: int | None = None, num_held_out: int | None = None
) -> tuple[list[NumberedPrompt], list[NumberedPrompt]]:
    """The training and the held-out prompts of a file.

    Lines of the split ``evaluate`` are held out, or the last lines if there are none. If any line has the split ``train``, only
    these are trained on.

    Args:
        batch_size: largest batch size of any stage; as many lines are held out if the file is large enough.
        num_examples: number of lines to train on; None: all.
        num_held_out: largest number of held-out lines to use.

    Raises:
        UserError: missing file, invalid line, or too few lines.
    """
    lines = read_jsonl(path, AnsweredPrompt)
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
    if num_examples is not None and num_examples < batch_size:
        raise UserError(
            f"{path}: num_examples must be at least the batch size {batch_size}; got {num_examples}; raise it, or lower batch_size"
        )
    return training[:num_examples], held_out[:num_held_out]


def read_examples(
    path: Path,
    prompts: Sequence[NumberedPrompt],
    recorder: Recorder,
    accelerator: Accelerator,
    report: Report | None = None,
) -> list[Line]:
    """The lines with answers. The target generates missing answers, each process a share of them; the recorder caches them.

    Raises:
        UserError: an unreadable image, or a prompt that the target cannot read.
    """
    process, num_processes = accelerator.process_index, accelerator.num_processes
    lines: list[Line] = []
    for share in [prompts] if num_processes == 1 else [prompts[process::num_processes], prompts]:
        lines = []
        for number, prompt in share:
            lines.append(read_line(path, number, prompt, recorder))
            if report is not None:
                report(len(lines), len(share))
        accelerator.wait_for_everyone()
    return lines


def read_line(path: Path, number: int, answered: AnsweredPrompt, recorder: Recorder) -> Line:
    """A line with its answer, which the target generates if it is missing."""
    target, source = recorder.target, f"{path}:{number}"
    settings = answered.unanswered
    prompt = load_prompt(path, number, settings)
    prompt_ids = prompt.inputs(recorder.processor)["input_ids"][0].tolist()
    room = target.max_context - len(prompt_ids)
    if room < 1:
        raise UserError(
            f"{source}: the target's context of {target.max_context} tokens must hold the prompt and an answer; "
            f"the prompt has {len(prompt_ids)} tokens; shorten it or remove the line"
        )
    if answered.answer is None:
        limited = settings.model_copy(update={"max_new_tokens": min(settings.max_new_tokens, room)})
        with errors_about(source):
            (generated,) = recorder.answers(Workload(path.name, "tune", (replace(prompt, settings=limited),)))
        answer = generated.tokens[:-1]
    else:
        # The end-of-sequence token would follow; as the last token it is not read.
        tokenizer = getattr(recorder.processor, "tokenizer", recorder.processor)
        answer = tokenizer(answered.answer, add_special_tokens=False)["input_ids"][:room]
    text = torch.tensor(answer if prompt.pixels else [*prompt_ids, *answer], dtype=torch.long)
    if bool(visual_tokens(target.model.config, text).any()):
        raise UserError(
            f"{source}: the text has tokens of images or videos beside those of the line's own; remove them from the text"
        )
    key = content_key([prompt.sha256, answer])
    return Line(path, number, settings, tuple(answer), len(prompt_ids) + len(answer), key)


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

    @property
    def shapes(self) -> list[BatchShape]:
        """Sizes of all batches."""
        return [
            BatchShape(len(batch), max(line.length for line in batch), sum(len(line.answer) + 1 for line in batch))
            for batch in self.batches
        ]

    @torch.no_grad()
    def __getitem__(self, number: int) -> list[Example]:
        """The batch of a number. Examples are encoded one by one: model families arrange the images of several rows differently."""
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
