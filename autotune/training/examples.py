"""Examples from a file of one's own: prompts with answers, which the target writes where there are none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from autotune.acceptance.recorder import Recorder
from autotune.errors import UserError
from autotune.files import content_key
from autotune.modeling.prompt import visual_tokens
from autotune.modeling.target import Target
from autotune.training.memory import BatchShape
from autotune.training.teacher import Example
from autotune.workloads.workload import Prompt, Workload, WorkloadPrompt, load_prompt, read_jsonl

HELD_OUT_SHARE = 20  # one example in so many
# What processors make for every token. Of the answer's tokens: attended to, and text.
PER_TOKEN = {"attention_mask": 1, "token_type_ids": 0, "mm_token_type_ids": 0}
Report = Callable[[int, int], None]
"""Called as report(done, of)."""


class AnsweredPrompt(Prompt):
    """A line to learn from: a workload's, with the answer that follows the prompt's text. Without one the target writes it."""

    answer: str | None = None


@dataclass(frozen=True)
class Line:
    """An example of a file, its images left there until they are needed."""

    path: Path
    number: int
    settings: Prompt
    answer: tuple[int, ...]
    """Tokens that are read behind the prompt: all but the last, which is foretold only."""
    length: int
    """Of prompt and answer, in tokens read."""
    key: str
    """Of all that decides what the target makes of it."""

    def load(self) -> WorkloadPrompt:
        """The prompt with its images."""
        return load_prompt(self.path, self.number, self.settings)


class JsonlFile:
    """The lines of a file, those that training must not see apart: those marked for evaluation, or else the last ones.
    Where lines are marked for training, only they are trained on.

    Args:
        batch_size: the largest of any stage: so much is held out where there is enough.
        num_examples: how many to train on; None: all.
        num_held_out: how many of the others are looked at, at most.

    Raises:
        UserError: no such file, a line that cannot be read, or too few.
    """

    def __init__(
        self, path: Path, *, batch_size: int, num_examples: int | None = None, num_held_out: int | None = None
    ) -> None:
        self.path = path
        written = read_jsonl(path, AnsweredPrompt)
        if len(written) <= batch_size:
            raise UserError(
                f"{path}: training needs more examples than a batch has, as some are held out; got {len(written)} for a "
                f"batch_size of {batch_size}; add lines, or lower batch_size"
            )
        held_out = [line for line in written if line[1].split == "evaluate"]
        training = [line for line in written if line[1].split != "evaluate"]
        if any(line[1].split == "train" for line in training):
            training = [line for line in training if line[1].split == "train"]
        if not held_out:
            number = max(1, min(max(len(training) // HELD_OUT_SHARE, batch_size), len(training) - batch_size))
            training, held_out = training[:-number], training[-number:]
        if len(training) < max(num_examples or 0, batch_size):
            raise UserError(
                f"{path}: there must be as many examples as num_examples says and a batch has; got {len(training)} for "
                f"{max(num_examples or 0, batch_size)}, beside {len(held_out)} held out; add lines, or lower num_examples or batch_size"
            )
        if num_examples is not None and num_examples < batch_size:
            raise UserError(
                f"{path}: num_examples must fill a batch of {batch_size}; got {num_examples}; raise it, or lower batch_size"
            )
        training = training[:num_examples]
        self._training, self._held_out = training, held_out[:num_held_out]

    def read(
        self, recorder: Recorder, accelerator: Accelerator, report: Report | None = None
    ) -> tuple[list[Line], list[Line]]:
        """The lines to train on and those held out, with answers. What the target has to write it writes once, every
        process a share; it is kept where the recorder keeps answers.

        Raises:
            UserError: an image that is none, or a prompt that the target cannot read.
        """
        written = [*self._training, *self._held_out]
        process, num_processes = accelerator.process_index, accelerator.num_processes
        if num_processes > 1:
            self._lines(written[process::num_processes], recorder, report)
            accelerator.wait_for_everyone()
        lines = self._lines(written, recorder, report)
        return lines[: len(self._training)], lines[len(self._training) :]

    def _lines(
        self, written: Sequence[tuple[int, AnsweredPrompt]], recorder: Recorder, report: Report | None
    ) -> list[Line]:
        lines = []
        for number, settings in written:
            lines.append(read_line(self.path, number, settings, recorder))
            if report is not None:
                report(len(lines), len(written))
        return lines


def read_line(path: Path, number: int, written: AnsweredPrompt, recorder: Recorder) -> Line:
    """A line with its answer, which the target writes if need be.

    Raises:
        UserError: see ``JsonlFile.read``.
    """
    target, where = recorder.target, f"{path}:{number}"
    settings = Prompt(**written.model_dump(exclude={"answer"}, exclude_unset=True))
    prompt = load_prompt(path, number, settings)
    asked = prompt.inputs(recorder.processor)["input_ids"][0]
    room = target.max_context - len(asked)
    if room < 1:
        raise UserError(
            f"{where}: the target's context of {target.max_context} tokens must hold the prompt and an answer; "
            f"the prompt has {len(asked)}; shorten it or drop the line"
        )
    if written.answer is None:
        limited = settings.model_copy(update={"max_new_tokens": min(settings.max_new_tokens, room)})
        with _named(where):
            (found,) = recorder.answers(Workload(path.name, "tune", (replace(prompt, settings=limited),)))
        answer = found.tokens[:-1]
    else:
        # The end of sequence stands behind it and, as the last token, is not read.
        tokenizer = getattr(recorder.processor, "tokenizer", recorder.processor)
        answer = tokenizer(written.answer, add_special_tokens=False)["input_ids"][:room]
    unseen = torch.tensor(answer if settings.images else [*asked.tolist(), *answer], dtype=torch.long)
    if bool(visual_tokens(target.model.config, unseen).any()):
        raise UserError(
            f"{where}: image tokens stand for the images of a line; the text has more; drop them from the text"
        )
    return Line(path, number, settings, tuple(answer), len(asked) + len(answer), content_key([prompt.sha256, answer]))


@contextmanager
def _named(where: str) -> Iterator[None]:
    """What is wrong with a prompt is said of the line."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


class JsonlExamples:
    """Lines of a file in batches of similar length.

    Args:
        seed: of the order of the batches.
        share: (process, number of processes): which part of every batch is read here.
    """

    def __init__(
        self,
        lines: Sequence[Line],
        target: Target,
        processor: Any,
        *,
        batch_size: int,
        seed: int = 0,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self.target = target
        self.processor = processor
        ranked = sorted(lines, key=lambda line: line.length)
        # So many that every process finds a line in each.
        num_batches = min(-(-len(lines) // batch_size), max(1, len(lines) // share[1]))
        order = np.random.default_rng(seed).permutation(num_batches)
        cuts = np.array_split(np.arange(len(lines)), len(order))  # of equal size but for one line
        self.batches = [[ranked[number] for number in cuts[place]][share[0] :: share[1]] for place in order]
        self.num_batches = len(self.batches)
        self.key = content_key([[line.key for line in batch] for batch in self.batches])

    @functools.cached_property
    def shapes(self) -> list[BatchShape]:
        """Of all batches."""
        return [
            BatchShape(len(batch), max(line.length for line in batch), sum(len(line.answer) + 1 for line in batch))
            for batch in self.batches
        ]

    def __getitem__(self, number: int) -> list[Example]:
        return [self._encode(line) for line in self.batches[number]]

    @torch.no_grad()
    def _encode(self, line: Line) -> Example:
        """One example alone: families lay out images of several rows each in their own way."""
        inputs = line.load().inputs(self.processor)
        answer = torch.tensor([line.answer], dtype=torch.long)
        asked = inputs["input_ids"].shape[1]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], 1)
        for name, value in PER_TOKEN.items():
            if isinstance(inputs.get(name), Tensor):
                inputs[name] = torch.cat([inputs[name], torch.full_like(answer, value)], 1)
        with _named(f"{line.path}:{line.number}"):
            (prompt,) = self.target.encode(inputs).prompts
        return Example(prompt, asked - 1)
