"""Training batches of the bundled workload, a pure function of recipe and step: resumed training sees the same batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotune.workloads.digits import DIGIT_SIZE, PASSAGE_TOKENS, DigitsExample, Split, make_example
from autotune.workloads.workload import chat_text

IGNORED = -100  # label of positions without a loss
POOL_BATCHES = 4  # batches are cut from a pool sorted by length, which reduces padding


@dataclass(frozen=True)
class Batch:
    """Right-padded examples; causal attention needs no mask for the padding.

    ``input_ids`` and ``labels`` are [batch, length], and ``labels[t]`` is the token after ``input_ids[t]``;
    ``pixel_values`` is [images, 3, 192, 192]; ``digits`` [images, visual tokens] is the class under every visual token.
    """

    tasks: list[str]
    input_ids: Tensor
    labels: Tensor
    pixel_values: Tensor | None
    digits: Tensor | None


class Batches:
    """Batches of a split with given task frequencies, by step."""

    def __init__(self, processor: Any, tasks: dict[str, float], *, split: Split, batch_size: int, seed: int) -> None:
        self.processor = processor
        self.split = split
        self.batch_size = batch_size
        self.seed = seed
        self.names = list(tasks)
        self.frequencies = np.array([tasks[name] for name in self.names]) / sum(tasks.values())
        self._pool: tuple[int, list[Batch]] | None = None

    def __getitem__(self, step: int) -> Batch:
        number, within = divmod(step, POOL_BATCHES)
        if self._pool is None or self._pool[0] != number:
            self._pool = (number, self._make_pool(number))
        return self._pool[1][within]

    def _make_pool(self, number: int) -> list[Batch]:
        rng = np.random.default_rng([self.seed, number])
        count = POOL_BATCHES * self.batch_size
        tasks = rng.choice(self.names, size=count, p=self.frequencies)
        # Every seed has its own range of example indices, so that two recipes do not train on the same examples.
        first = self.seed * 10_000_000 + number * count
        examples = [self._tokenize(make_example(self.split, str(task), first + i)) for i, task in enumerate(tasks)]
        examples.sort(key=lambda example: len(example[1]) + len(example[2]))
        pool = [self._collate(examples[i : i + self.batch_size]) for i in range(0, count, self.batch_size)]
        return [pool[i] for i in rng.permutation(POOL_BATCHES)]

    def _tokenize(self, example: DigitsExample) -> tuple[DigitsExample, list[int], list[int]]:
        tokenizer = self.processor.tokenizer
        prompt = chat_text(self.processor, example.prompt, num_images=0 if example.image is None else 1)
        num_visual_tokens = (
            (example.image.shape[0] // self.processor.patch_size) ** 2 if example.image is not None else 0
        )
        prompt_ids = tokenizer(prompt.replace("<image>", "<image>" * num_visual_tokens)).input_ids
        answer_ids = tokenizer(" " + example.answer).input_ids
        answer_ids = (
            answer_ids[:PASSAGE_TOKENS] if example.task == "continue" else [*answer_ids, tokenizer.eos_token_id]
        )
        return example, prompt_ids, answer_ids

    def _collate(self, examples: list[tuple[DigitsExample, list[int], list[int]]]) -> Batch:
        length = max(len(prompt) + len(answer) for _, prompt, answer in examples) - 1
        input_ids = torch.full((len(examples), length), self.processor.tokenizer.pad_token_id)
        labels = torch.full((len(examples), length), IGNORED)
        for row, (_, prompt, answer) in enumerate(examples):
            ids = torch.tensor([*prompt, *answer])
            input_ids[row, : len(ids) - 1] = ids[:-1]
            # A passage has no question, so its prompt is trained on as well.
            begin = 1 if examples[row][0].task == "continue" else len(prompt)
            labels[row, begin - 1 : len(ids) - 1] = ids[begin:]
        images = [example.image for example, _, _ in examples if example.image is not None]
        cells = [example.cells for example, _, _ in examples if example.cells is not None]
        pixel_values = self.processor.image_processor(images, return_tensors="pt").pixel_values if images else None
        per_square = DIGIT_SIZE // self.processor.patch_size
        digits = torch.tensor(np.stack(cells).repeat(per_square, 1).repeat(per_square, 2)).flatten(1) if cells else None
        return Batch([example.task for example, _, _ in examples], input_ids, labels, pixel_values, digits)
