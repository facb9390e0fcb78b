"""Training batches of the target and its independent draft, a pure function of seed and step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from autotune.workloads.chat import chat_for
from drafts.digits.make.digits import DIGIT_SIZE, PASSAGE_TOKENS, DigitsExample, make_example

TASK_SHARES = {
    "read": 1.0,
    "count": 1.25,
    "sum": 1.0,
    "sort": 1.25,
    "add": 1.5,
    "multiply": 1.5,
    "describe": 1.0,
    "continue": 1.25,
}
"""Relative frequency of each task in training."""
IGNORED = -100  # label of positions without a loss
POOL_BATCHES = 4  # batches are cut from a pool sorted by length, which reduces padding


@dataclass(frozen=True)
class Batch:
    """Right-padded examples; causal attention needs no mask for the padding."""

    input_ids: Tensor
    """[batch, length]"""
    labels: Tensor
    """The next token at every position, or IGNORED, [batch, length]."""
    pixel_values: Tensor | None
    """[images, 3, 192, 192]"""
    digits: Tensor | None
    """The class of the digit under every visual token, [images, visual tokens]."""


@dataclass
class Batches:
    """Batches of the training split, by step."""

    processor: Any
    tasks: dict[str, float]
    """Relative frequency of each task."""
    batch_size: int
    seed: int
    _pool: tuple[int, list[Batch]] | None = field(default=None, init=False)

    def __getitem__(self, step: int) -> Batch:
        number, within = divmod(step, POOL_BATCHES)
        if self._pool is None or self._pool[0] != number:
            self._pool = (number, self._make_pool(number))
        return self._pool[1][within]

    def _make_pool(self, number: int) -> list[Batch]:
        rng = np.random.default_rng([self.seed, number])
        count = POOL_BATCHES * self.batch_size
        frequencies = np.array([*self.tasks.values()]) / sum(self.tasks.values())
        tasks = rng.choice([*self.tasks], size=count, p=frequencies)
        # Every seed has its own range of example indices, so that two models do not train on the same examples.
        first = self.seed * 10_000_000 + number * count
        examples = [self._tokenize(make_example("train", str(task), first + i)) for i, task in enumerate(tasks)]
        examples.sort(key=lambda example: len(example[1]))
        pool = [self._collate(examples[i : i + self.batch_size]) for i in range(0, count, self.batch_size)]
        return [pool[i] for i in rng.permutation(POOL_BATCHES)]

    def _tokenize(self, example: DigitsExample) -> tuple[DigitsExample, list[int], list[int]]:
        """The example with its token ids and their labels, which are one shorter."""
        image, tokenizer = example.image, self.processor.tokenizer
        num_visual_tokens = 0 if image is None else (image.shape[0] // self.processor.patch_size) ** 2
        messages = chat_for(self.processor, example.prompt, num_images=int(image is not None))
        prompt = str(self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        prompt_ids = tokenizer(prompt.replace("<image>", "<image>" * num_visual_tokens)).input_ids
        answer_ids = tokenizer(" " + example.answer).input_ids
        if example.task == "continue":  # a passage has no end, and its prompt is trained on as well
            ids, num_ignored = [*prompt_ids, *answer_ids[:PASSAGE_TOKENS]], 0
        else:
            ids, num_ignored = [*prompt_ids, *answer_ids, tokenizer.eos_token_id], len(prompt_ids) - 1
        return example, ids, [IGNORED] * num_ignored + ids[num_ignored + 1 :]

    def _collate(self, examples: list[tuple[DigitsExample, list[int], list[int]]]) -> Batch:
        def pad(rows: list[list[int]], value: int) -> Tensor:
            return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)

        images = [example.image for example, _, _ in examples if example.image is not None]
        cells = [example.cells for example, _, _ in examples if example.cells is not None]
        per_square = DIGIT_SIZE // self.processor.patch_size  # visual tokens along a side
        return Batch(
            input_ids=pad([ids[:-1] for _, ids, _ in examples], self.processor.tokenizer.pad_token_id),
            labels=pad([labels for _, _, labels in examples], IGNORED),
            pixel_values=self.processor.image_processor(images, return_tensors="pt").pixel_values if images else None,
            digits=torch.tensor(np.stack(cells).repeat(per_square, 1).repeat(per_square, 2)).flatten(1)
            if cells
            else None,
        )
