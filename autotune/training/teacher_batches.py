"""Teacher batches by step: batches of examples that the teacher reads once and that are cached on disk if repeated."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError

from autotune.modeling.target import Target
from autotune.training.batches import IGNORED, POOL_BATCHES, Batches
from autotune.training.memory import BatchShape
from autotune.training.teacher import DistillationRule, Example, Teacher, TeacherBatch


class Examples(Protocol):
    """Batches of examples by number."""

    @property
    def num_batches(self) -> int | None:
        """Number of different batches; None: unlimited."""

    @property
    def shapes(self) -> Sequence[BatchShape]:
        """Sizes of all batches, or of the first few if they are unlimited."""

    def __getitem__(self, number: int) -> Sequence[Example]:
        """The batch of a number; always the same one."""


class DigitsExamples:
    """The bundled workload's batches, encoded by the target."""

    def __init__(self, batches: Batches, target: Target, num_batches: int | None = None) -> None:
        self.batches = batches
        self.target = target
        self.num_batches = num_batches

    @property
    def shapes(self) -> list[BatchShape]:
        """Sizes of one pool, which contains every length."""
        pool = [self.batches[number] for number in range(POOL_BATCHES)]
        shapes = []
        for batch in pool:
            num_rows, length = batch.labels.shape
            shapes.append(BatchShape(num_rows, length, int((batch.labels != IGNORED).sum())))
        return shapes

    def __getitem__(self, number: int) -> list[Example]:
        batch = self.batches[number]
        is_labelled = batch.labels != IGNORED
        columns = torch.arange(batch.labels.shape[1])
        ends = torch.where(is_labelled, columns + 1, 0).amax(
            1
        )  # the last token that is read is followed by the last label
        inputs = {"input_ids": batch.input_ids, "attention_mask": (columns < ends[:, None]).long()}
        if batch.pixel_values is not None:
            inputs["pixel_values"] = batch.pixel_values
        with torch.no_grad():
            prompts = self.target.encode(inputs).prompts
        starts = is_labelled.int().argmax(1).tolist()
        return [Example(prompt, start) for prompt, start in zip(prompts, starts, strict=True)]


class ProcessShare:
    """The part of every batch that one of several processes reads."""

    def __init__(self, examples: Examples, process: int, num_processes: int) -> None:
        self.examples = examples
        self.process = process
        self.num_processes = num_processes
        self.num_batches = examples.num_batches

    @property
    def shapes(self) -> list[BatchShape]:
        """Sizes of this process's part."""
        number = self.num_processes
        return [
            replace(s, num_rows=-(-s.num_rows // number), num_loss_tokens=-(-s.num_loss_tokens // number))
            for s in self.examples.shapes
        ]

    def __getitem__(self, number: int) -> Sequence[Example]:
        return self.examples[number][self.process :: self.num_processes]


class TeacherBatches:
    """The teacher batch of every step. A finite number of batches is repeated in another order each epoch, and the teacher's
    outputs on them are cached.

    Args:
        layers: target layers whose outputs are needed; the last layer is always included.
        rule: chooses one more layer, for intermediate distillation.
        cache: folder for this target and these examples; used only if batches are repeated.
    """

    def __init__(
        self,
        examples: Examples,
        teacher: Teacher,
        *,
        layers: Collection[int],
        rule: DistillationRule = "none",
        cache: Path | None = None,
        seed: int = 0,
    ) -> None:
        self.examples = examples
        self.teacher = teacher
        self.layers = frozenset(layers)
        self.rule = rule
        self.cache = cache if examples.num_batches is not None else None
        self.seed = seed

    def batch_of(self, step: int) -> int:
        """The number of the batch that a step reads."""
        if self.examples.num_batches is None:
            return step
        epoch, within = divmod(step, self.examples.num_batches)
        if epoch == 0:  # in order, because neighbouring batches are made together
            return within
        order = np.random.default_rng([self.seed, epoch]).permutation(self.examples.num_batches)
        return int(order[within])

    def __getitem__(self, step: int) -> TeacherBatch:
        number = self.batch_of(step)
        path = None if self.cache is None else self.cache / f"{number}.safetensors"
        layers, rule = self.layers, self.rule
        if path is not None and (cached := self._load(path)) is not None:
            if cached.serves(self.layers, self.rule):
                return cached
            layers = layers | cached.hidden.keys()  # another draft needs these
            rule = "entropy" if rule == "none" and cached.entropies is not None else rule
        batch = self.teacher.read(self.examples[number], layers=layers, rule=rule, seed=number)
        if path is None:
            return batch
        batch.save(path)
        return self.teacher.load(path)  # rounded to half precision like every later read

    def _load(self, path: Path) -> TeacherBatch | None:
        """The cached batch; None if it is missing or damaged."""
        try:
            return self.teacher.load(path)
        except (OSError, SafetensorError, KeyError):
            return None
