"""Training rows of the workload ``code``: files and tasks in the form in which they are judged, a pure function of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.random import Generator

from autotune.training.batches import IGNORED, Batch
from autotune.training.recipe import FILES
from autotune.workloads.code.corpus import CodeSplit
from autotune.workloads.code.examples import CODE_TASKS, CodeExample, make_example, random_window
from autotune.workloads.prompt import chat_text

CHARS_PER_TOKEN = 6  # more than any text has on average, so that a window always fills its row
MAX_INDEX = 2**31
Answered = tuple[list[int], list[int]]
"""Token ids of a prompt and of its answer."""
Row = tuple[list[int], list[int], list[float]]
"""Token ids, labels and weights of the labels' losses, at the same positions."""


@dataclass(frozen=True)
class CodeBatches:
    """Rows of one length, each a window of a file, or tasks one behind the other with a window behind them.

    All tokens are trained on, apart from made-up prompts and the prompts of the model's own answers.
    """

    tokenizer: Any
    tasks: dict[str, float]
    """Relative frequency of each task, and of rows that are windows of files alone."""
    split: CodeSplit
    batch_size: int
    sequence_length: int
    seed: int
    own_answers: Mapping[str, Sequence[Answered]] = field(default_factory=dict)
    """By task: answers of the model itself that take the place of the reference answers (``training/own_answers.py``)."""
    answer_weight: float = 1.0
    """Weight of the loss of an answer's tokens; that of prompts and files is 1."""

    def __getitem__(self, step: int) -> Batch:
        rng = np.random.default_rng([self.seed, step])
        rows = [self._row(rng) for _ in range(self.batch_size)]
        ids, labels, weights = (torch.tensor(part) for part in zip(*rows, strict=True))
        return Batch(ids[:, :-1].contiguous(), labels[:, 1:].contiguous(), None, None, weights[:, 1:].contiguous())

    def num_bytes(self, step: int) -> int:
        """UTF-8 bytes of the labelled tokens of a batch."""
        labels = self[step].labels
        return sum(len(self.tokenizer.decode(row[row != IGNORED]).encode()) for row in labels)

    def example(self, rng: Generator, tasks: Sequence[str] = CODE_TASKS) -> CodeExample:
        """An example of one of the tasks, drawn by their frequencies."""
        frequencies = {name: self.tasks[name] for name in tasks if name in self.tasks}
        shares = np.array([*frequencies.values()]) / sum(frequencies.values())
        return make_example(self.split, str(rng.choice([*frequencies], p=shares)), int(rng.integers(MAX_INDEX)))

    def encode_prompt(self, example: CodeExample) -> list[int]:
        """Token ids of a prompt as a chat, up to where the answer begins."""
        return self._encode(chat_text(self.tokenizer, example.prompt, num_images=0))

    def _row(self, rng: Generator) -> Row:
        """A row with one position more than it trains on: every token is the label of the one before."""
        num_tokens = self.sequence_length + 1
        ids: list[int] = []
        labels: list[int] = []
        weights: list[float] = []
        frequencies = np.array([*self.tasks.values()]) / sum(self.tasks.values())
        while (task := str(rng.choice([*self.tasks], p=frequencies))) != FILES or not ids:
            if task == FILES:
                break
            item_ids, item_labels, item_weights = self._item(task, int(rng.integers(MAX_INDEX)))
            if len(ids) + len(item_ids) > num_tokens:
                break
            ids += item_ids
            labels += item_labels
            weights += item_weights
        while len(ids) < num_tokens:
            room = num_tokens - len(ids)
            window = [
                self.tokenizer.bos_token_id,
                *self._encode(random_window(self.split, CHARS_PER_TOKEN * room, rng)),
            ]
            ids += window
            labels += [IGNORED, *window[1:]]
            weights += [1.0] * len(window)
        return ids[:num_tokens], labels[:num_tokens], weights[:num_tokens]

    def _item(self, task: str, index: int) -> Row:
        """An example of a task: its prompt as a chat, its answer, and the end of text unless the answer has none."""
        if own := self.own_answers.get(task):
            prompt, answer = own[index % len(own)]
            return self._join(prompt, [IGNORED] * len(prompt), answer)
        example = make_example(self.split, task, index)
        prompt = self.encode_prompt(example)
        answer = self._encode(example.answer) + [self.tokenizer.eos_token_id] * (not example.is_open)
        labels = prompt[1:] if example.is_prompt_text else [IGNORED] * (len(prompt) - 1)
        return self._join(prompt, [IGNORED, *labels], answer)

    def _join(self, prompt: list[int], labels: list[int], answer: list[int]) -> Row:
        weights = [1.0] * len(prompt) + [self.answer_weight] * len(answer)
        return [*prompt, *answer], [*labels, *answer], weights

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.backend_tokenizer.encode(text).ids)
