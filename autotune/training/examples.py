"""Training examples from a JSONL file: prompts with answers. The target generates missing answers."""

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

HELD_OUT_SHARE = 20  # one example in 20 is held out
# Per-token inputs that processors make, with their values for the answer's tokens.
PER_TOKEN = {"attention_mask": 1, "token_type_ids": 0, "mm_token_type_ids": 0}
Report = Callable[[int, int], None]
"""Called as report(done, of)."""


class AnsweredPrompt(Prompt):
    """A workload line with an answer; if it is missing, the target generates it."""

    answer: str | None = None


@dataclass(frozen=True)
class Line:
    """An example of a file. Its images are loaded when they are needed."""

    path: Path
    number: int
    settings: Prompt
    answer: tuple[int, ...]
    """Tokens of the answer that are read: all except the last one, which is only predicted."""
    length: int
    """Number of tokens read, prompt and answer together."""
    key: str
    """Hash of everything that determines the target's outputs."""

    def load(self) -> WorkloadPrompt:
        """The prompt with its images."""
        return load_prompt(self.path, self.number, self.settings)


class ExampleFile:
    """The lines of a file, split into training and held-out lines.

    Lines of the split ``evaluate`` are held out, or the last lines if there are none. If any line has the split ``train``, only
    these are trained on.

    Args:
        batch_size: largest batch size of any stage; as many lines are held out if the file is large enough.
        num_examples: number of lines to train on; None: all.
        num_held_out: largest number of held-out lines to use.

    Raises:
        UserError: missing file, invalid line, or too few lines.
    """

    def __init__(
        self, path: Path, *, batch_size: int, num_examples: int | None = None, num_held_out: int | None = None
    ) -> None:
        self.path = path
        lines = read_jsonl(path, AnsweredPrompt)
        if len(lines) <= batch_size:
            raise UserError(
                f"{path}: training needs more lines than a batch, because some are held out; got {len(lines)} for a "
                f"batch_size of {batch_size}; add lines, or lower batch_size"
            )
        held_out = [line for line in lines if line[1].split == "evaluate"]
        training = [line for line in lines if line[1].split != "evaluate"]
        if any(line[1].split == "train" for line in training):
            training = [line for line in training if line[1].split == "train"]
        if not held_out:
            number = max(1, min(max(len(training) // HELD_OUT_SHARE, batch_size), len(training) - batch_size))
            training, held_out = training[:-number], training[-number:]
        if len(training) < max(num_examples or 0, batch_size):
            raise UserError(
                f"{path}: training needs at least num_examples lines, and at least one batch; got {len(training)} for "
                f"{max(num_examples or 0, batch_size)}, with {len(held_out)} held out; add lines, or lower num_examples or batch_size"
            )
        if num_examples is not None and num_examples < batch_size:
            raise UserError(
                f"{path}: num_examples must be at least the batch size {batch_size}; got {num_examples}; raise it, or lower batch_size"
            )
        training = training[:num_examples]
        self._training, self._held_out = training, held_out[:num_held_out]

    def read(
        self, recorder: Recorder, accelerator: Accelerator, report: Report | None = None
    ) -> tuple[list[Line], list[Line]]:
        """Training lines and held-out lines, with answers.

        The target generates missing answers once, each process a share of them; the recorder caches them.

        Raises:
            UserError: an unreadable image, or a prompt that the target cannot read.
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
    """A line with its answer, which the target generates if it is missing.

    Raises:
        UserError: see ``ExampleFile.read``.
    """
    target, where = recorder.target, f"{path}:{number}"
    settings = Prompt(**written.model_dump(exclude={"answer"}, exclude_unset=True))
    prompt = load_prompt(path, number, settings)
    prompt_ids = prompt.inputs(recorder.processor)["input_ids"][0]
    room = target.max_context - len(prompt_ids)
    if room < 1:
        raise UserError(
            f"{where}: the target's context of {target.max_context} tokens must hold the prompt and an answer; "
            f"the prompt has {len(prompt_ids)} tokens; shorten it or remove the line"
        )
    if written.answer is None:
        limited = settings.model_copy(update={"max_new_tokens": min(settings.max_new_tokens, room)})
        with _naming(where):
            (generated,) = recorder.answers(Workload(path.name, "tune", (replace(prompt, settings=limited),)))
        answer = generated.tokens[:-1]
    else:
        # The end-of-sequence token would follow; as the last token it is not read.
        tokenizer = getattr(recorder.processor, "tokenizer", recorder.processor)
        answer = tokenizer(written.answer, add_special_tokens=False)["input_ids"][:room]
    remaining = torch.tensor(answer if settings.images else [*prompt_ids.tolist(), *answer], dtype=torch.long)
    if bool(visual_tokens(target.model.config, remaining).any()):
        raise UserError(
            f"{where}: the text has image tokens beside those of the line's images; remove them from the text"
        )
    return Line(
        path, number, settings, tuple(answer), len(prompt_ids) + len(answer), content_key([prompt.sha256, answer])
    )


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Put the file and line number in front of errors."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


class JsonlExamples:
    """Lines of a file in batches of similar length (``Examples``).

    Args:
        seed: determines the order of the batches.
        share: (process, number of processes): the part of every batch that this process reads.
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
        # Every process needs a line of each batch.
        num_batches = min(-(-len(lines) // batch_size), max(1, len(lines) // share[1]))
        order = np.random.default_rng(seed).permutation(num_batches)
        cuts = np.array_split(np.arange(len(lines)), len(order))  # sizes differ by at most one line
        self.batches = [[ranked[number] for number in cuts[index]][share[0] :: share[1]] for index in order]
        self.num_batches = len(self.batches)
        self.key = content_key([[line.key for line in batch] for batch in self.batches])

    @functools.cached_property
    def shapes(self) -> list[BatchShape]:
        """Sizes of all batches."""
        return [
            BatchShape(len(batch), max(line.length for line in batch), sum(len(line.answer) + 1 for line in batch))
            for batch in self.batches
        ]

    def __getitem__(self, number: int) -> list[Example]:
        return [self._encode(line) for line in self.batches[number]]

    @torch.no_grad()
    def _encode(self, line: Line) -> Example:
        """Encode examples one by one: model families arrange the images of several rows differently."""
        inputs = line.load().inputs(self.processor)
        answer = torch.tensor([line.answer], dtype=torch.long)
        num_prompt_tokens = inputs["input_ids"].shape[1]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], 1)
        for name, value in PER_TOKEN.items():
            if isinstance(inputs.get(name), Tensor):
                inputs[name] = torch.cat([inputs[name], torch.full_like(answer, value)], 1)
        with _naming(f"{line.path}:{line.number}"):
            (prompt,) = self.target.encode(inputs).prompts
        return Example(prompt, num_prompt_tokens - 1)
