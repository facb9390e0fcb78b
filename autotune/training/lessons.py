"""Examples for the teacher, encoded by the target: of the bundled workload, without end."""

from __future__ import annotations

import torch

from autotune.runtime.target import Target
from autotune.training.batches import IGNORED, Batches
from autotune.training.teacher import Example


class DigitsExamples:
    """The bundled workload's batches, each example drawn once."""

    def __init__(self, batches: Batches, target: Target) -> None:
        self.batches = batches
        self.target = target

    def __getitem__(self, step: int) -> list[Example]:
        batch = self.batches[step]
        is_labelled = batch.labels != IGNORED
        columns = torch.arange(batch.labels.shape[1])
        ends = torch.where(is_labelled, columns + 1, 0).amax(1)  # the last token read is followed by the last label
        inputs = {"input_ids": batch.input_ids, "attention_mask": (columns < ends[:, None]).long()}
        if batch.pixel_values is not None:
            inputs["pixel_values"] = batch.pixel_values
        with torch.no_grad():
            prompts = self.target.encode(inputs).prompts
        firsts = is_labelled.int().argmax(1).tolist()
        return [Example(prompt, first) for prompt, first in zip(prompts, firsts, strict=True)]
