"""Where lessons come from: batches of examples, read by the teacher once and kept on disk where they come again."""

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
        """How many different ones there are; None: as many as are asked for."""

    @property
    def shapes(self) -> Sequence[BatchShape]:
        """Of all batches, or of the first few where they do not end."""

    def __getitem__(self, number: int) -> Sequence[Example]:
        """The same batch for the same number."""


class DigitsExamples:
    """The bundled workload's batches, encoded by the target."""

    def __init__(self, batches: Batches, target: Target, num_batches: int | None = None) -> None:
        self.batches = batches
        self.target = target
        self.num_batches = num_batches

    @property
    def shapes(self) -> list[BatchShape]:
        """Of one pool: every length is in it."""
        made = [self.batches[number] for number in range(POOL_BATCHES)]
        shapes = []
        for batch in made:
            num_rows, length = batch.labels.shape
            shapes.append(BatchShape(num_rows, length, int((batch.labels != IGNORED).sum())))
        return shapes

    def __getitem__(self, number: int) -> list[Example]:
        batch = self.batches[number]
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


class Share:
    """What one of several processes reads of every batch."""

    def __init__(self, examples: Examples, process: int, num_processes: int) -> None:
        self.examples = examples
        self.process = process
        self.num_processes = num_processes
        self.num_batches = examples.num_batches

    @property
    def shapes(self) -> list[BatchShape]:
        """Of its own part."""
        number = self.num_processes
        return [
            replace(s, num_rows=-(-s.num_rows // number), num_taught=-(-s.num_taught // number))
            for s in self.examples.shapes
        ]

    def __getitem__(self, number: int) -> Sequence[Example]:
        return self.examples[number][self.process :: self.num_processes]


class Lessons:
    """A lesson for every step. A finite number of batches comes again in another order each epoch, and what the teacher makes of
    them is kept in ``cache``: of an image nothing is ever computed twice.

    Args:
        layers: of the target, whose outputs are needed; the last one's always are.
        rule: which layer is needed besides, for intermediate distillation.
        cache: folder of these examples and this target; only used where batches come again.
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
        """Which batch is read at a step."""
        if self.examples.num_batches is None:
            return step
        epoch, within = divmod(step, self.examples.num_batches)
        if epoch == 0:  # in the order in which neighbours are made together
            return within
        order = np.random.default_rng([self.seed, epoch]).permutation(self.examples.num_batches)
        return int(order[within])

    def __getitem__(self, step: int) -> TeacherBatch:
        number = self.batch_of(step)
        path = None if self.cache is None else self.cache / f"{number}.safetensors"
        kept, rule = self.layers, self.rule
        if path is not None and (found := self._found(path)) is not None:
            if found.serves(self.layers, self.rule):
                return found
            kept = kept | found.hidden.keys()  # what another draft needs of it
            rule = "entropy" if rule == "none" and found.entropies is not None else rule
        lesson = self.teacher.lesson(self.examples[number], layers=kept, rule=rule, seed=number)
        if path is None:
            return lesson
        lesson.save(path)
        return self.teacher.load(path)  # as it will be read from now on

    def _found(self, path: Path) -> TeacherBatch | None:
        """A lesson that is on disk whole."""
        try:
            return self.teacher.load(path)
        except (OSError, SafetensorError, KeyError):
            return None
