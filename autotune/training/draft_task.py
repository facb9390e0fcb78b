"""The draft that a recipe trains, with a teacher batch and a subnet for every step."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor

from autotune.console import Console
from autotune.documents.loss_settings import DistillationRule, LossSettings
from autotune.drafters.checkpoint import NETWORKS, load_draft
from autotune.drafters.network import NOT_TRAINED, DraftNetwork
from autotune.drafters.teacher_batch import Metrics, TeacherBatch, divergence
from autotune.errors import UserError
from autotune.files import WORKSPACE, content_key
from autotune.machine.device import free_memory, gib, multiplies_bfloat16
from autotune.modeling.loading import load_model, load_processor, reference
from autotune.modeling.target import Target
from autotune.recording.answers import AnswerRecorder
from autotune.recording.recorder import Recorder
from autotune.runtime.decoder import Decoder
from autotune.training.examples import (
    JsonlExamples,
    Line,
    at_temperatures,
    judged_questions,
    read_examples,
    split_file,
    write_questions,
)
from autotune.training.recipe import Recipe, Stage, teacher_name
from autotune.training.teacher import Teacher, TeacherBatches
from autotune.workloads.prompt import load_prompt

CHAIN_DEPTH = 5  # of the draft that is tried on held-out prompts
NUM_TRIED_PROMPTS, NUM_TRIED_TOKENS = 8, 64
NUM_HELD_OUT = 3  # batches
NUM_PREPARED = 16  # batches that a network reads before its first step
NUM_FINISHED = 64  # batches that a network reads after its last step


def autocast_dtype(device: torch.device, target: torch.dtype) -> torch.dtype | None:
    """bfloat16 if the device multiplies it natively, or the target's data type is not float32; otherwise None
    (float32).
    """
    return torch.bfloat16 if multiplies_bfloat16(device) or target != torch.float32 else None


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; on the CPU torch raises a plain ``RuntimeError``."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


class DraftTask:
    """A draft to train for the recipe's teacher. The loss of a step is a function of the recipe and the step alone."""

    module: DraftNetwork
    """Holds exactly the trained parameters."""

    def __init__(self, recipe: Recipe, recipe_path: Path, accelerator: Accelerator, console: Console) -> None:
        self.recipe = recipe
        self.recipe_path = recipe_path
        self.accelerator = accelerator
        self.share = accelerator.process_index, accelerator.num_processes
        smallest, largest = (select(stage.batch_size for stage in recipe.stages) for select in (min, max))
        if smallest < self.share[1]:
            raise UserError(
                f"{recipe_path}: every process needs an example of each batch; got batch_size {smallest} for {self.share[1]} "
                "processes; raise batch_size, or start fewer processes"
            )
        data, path = recipe.data, recipe_path.parent / recipe.data.file
        judged = judged_questions(recipe_path.parent, data.judged)
        name = teacher_name(recipe, recipe_path)
        self.processor = load_processor(name)
        self.target = Target(load_model(name, device=str(accelerator.device), dtype=recipe.dtype, console=console))
        self.target_reference = reference(name)
        self.teacher = Teacher(self.target)
        for stage in recipe.stages:
            if isinstance(stage.distillation, int) and stage.distillation > self.teacher.num_layers:
                raise UserError(
                    f"{recipe_path}: distillation names a layer of the target, 1 to {self.teacher.num_layers}; got "
                    f"{stage.distillation}; name one of them"
                )
        torch.manual_seed(recipe.seed)
        module = NETWORKS[recipe.model].new(recipe.draft, self.target, source=str(recipe_path))
        self.module = module.to(accelerator.device)
        # The compiled one keeps no tensor as large as the logits but their gradient.
        self._compare = torch.compile(divergence, dynamic=True) if recipe.compile else divergence
        # Recipes of one file of examples share answers and teacher batches, wherever they are trained from.
        self.cache = (path.parent if os.access(path.parent, os.W_OK) else Path()) / WORKSPACE
        with console.stage(f"{recipe.name} examples") as report:
            if data.magpie is not None and accelerator.is_main_process:
                answers = AnswerRecorder(self.target, self.processor)
                write_questions(path, data.magpie, answers, report, data.chat_template_kwargs)
            accelerator.wait_for_everyone()
            choices = data.temperatures, data.chat_template_kwargs
            parts = split_file(
                path,
                batch_size=largest,
                num_examples=data.num_examples,
                num_held_out=NUM_HELD_OUT * largest,
                judged=judged,
            )
            training, held_out = (at_temperatures(part, *choices) for part in parts)
            recorder = Recorder(self.target, self.target_reference, self.processor, self.cache)
            lines = read_examples(path, [*training, *held_out], recorder, accelerator, report)
        self._training_lines, self._held_out_lines = lines[: len(training)], lines[len(training) :]
        self._choose_vocabulary(self._training_lines)

    def _choose_vocabulary(self, lines: Sequence[Line]) -> None:
        """Compare draft and target over the tokens that are most frequent in the answers, and of equally frequent ones
        over those of low ids.
        """
        size, text = self.target.vocab_size, self.target.text
        kept = None
        if (number := self.recipe.vocabulary or size) < size:
            counts = np.bincount([token for line in lines for token in line.answer], minlength=size)[:size]
            kept = torch.from_numpy(np.sort((-counts).argsort(kind="stable")[:number])).to(text.head.weight.device)
            text = text.with_vocabulary(kept)
            self.module.keep_tokens(kept, text.head.weight)
        self._kept, self._head = kept, text.logits

    def try_largest_batches(self) -> str:
        """Try a step on the largest batch of every stage; returns the memory that is left, as one line.

        Raises:
            UserError: a batch needs more memory than there is.
        """
        for number, stage in enumerate(self.recipe.stages):
            batches = self._batches_of(number).examples.batches
            self._try_step(stage, max(batches, key=lambda batch: len(batch) * max(line.length for line in batch)))
        device = self.accelerator.device
        return (
            f"memory on {device}: steps on the largest batches fit; {gib(free_memory(device))} are free between steps"
        )

    def _try_step(self, stage: Stage, lines: Sequence[Line]) -> None:
        """Try a step on a batch of these lines, which are repeated if they are fewer. The draft stays as it is.

        Raises:
            UserError: the batch needs more memory than there is.
        """
        size, device = math.ceil(stage.batch_size / self.share[1]), self.accelerator.device
        chosen = (list(lines) * math.ceil(size / len(lines)))[:size]
        examples = JsonlExamples(chosen, self.target, self.processor, batch_size=size)
        layers, rule = self._layers_and_rule(stage)
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.0, fused=True)
        dtype = autocast_dtype(device, self.target.dtype)
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        self.module.train()
        try:
            batch = self._compared(self.teacher.read(examples[0], layers=layers, rule=rule))
            with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
                loss, _ = self.module.loss(batch, stage, torch.Generator().manual_seed(0), self._compare)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"{self.recipe_path}: the memory of {device} must hold a step on {size} examples of up to "
                f"{max(line.length for line in chosen):,} tokens; it is full ({' '.join(str(error).split())[:200]}); lower "
                f"batch_size (a process reads {size} at a time), or shorten the longest examples"
            ) from None
        optimizer.zero_grad()
        for name, buffer in self.module.named_buffers():
            buffer.copy_(buffers[name])

    def prepare(self) -> None:
        """Compute what weights begin with."""
        if layers := self.module.layers_in_preparation:
            batches = self._batches_of(0)
            batches = replace(batches, layers={*batches.layers, *layers})
            self.module.prepare(batches[step] for step in range(min(NUM_PREPARED, batches.examples.num_batches)))
            for parameter in self.module.parameters():
                parameter.data = broadcast(parameter.data)

    def begin(self, number: int) -> None:
        self._number, self._stage = number, self.recipe.stages[number]
        self._teacher_batches = self._batches_of(number)
        self._held_out = []
        if self.accelerator.is_main_process:  # only it evaluates, in batches of the size that one process trains on
            batch_size = math.ceil(self._stage.batch_size / self.share[1])
            held_out = JsonlExamples(self._held_out_lines, self.target, self.processor, batch_size=batch_size)
            self._held_out = [
                self._compared(self.teacher.read(held_out[index], layers=self.module.layers_in_training))
                for index in range(min(NUM_HELD_OUT, held_out.num_batches))
            ]

    def _layers_and_rule(self, stage: Stage) -> tuple[set[int], DistillationRule]:
        """Layers of the target that a stage needs, and the rule that chooses one more."""
        layers = {*self.module.layers_in_training, self.teacher.num_layers}
        if isinstance(stage.distillation, int):
            return layers | {stage.distillation}, "none"
        return layers, stage.distillation

    def _batches_of(self, number: int) -> TeacherBatches:
        data, stage, share = self.recipe.data, self.recipe.stages[number], self.share
        layers, rule = self._layers_and_rule(stage)
        options: dict[str, Any] = {"batch_size": stage.batch_size, "seed": data.seed, "share": share}
        examples = JsonlExamples(self._training_lines, self.target, self.processor, **options)
        content: dict[str, Any] = {
            "target": [self.target_reference.sha256 or self.target_reference.id, self.target.text.precision],
            "data": data.model_dump(include={"num_examples", "seed"}),
            "batch_size": stage.batch_size,
            "share": list(share),
            "lines": examples.key,
        }
        cache, seed = self.cache / "teacher-batches" / content_key(content), 10 * self.recipe.seed + number
        return TeacherBatches(examples, self.teacher, layers=layers, rule=rule, cache=cache, seed=seed)

    def loss(self, step: int) -> tuple[Tensor, Metrics]:
        """The loss of one step of the stage that has begun, and metrics to display."""
        seed = (self.recipe.seed * 1000 + self._number) * 1_000_000 + step
        generator = torch.Generator().manual_seed(seed)
        settings = self._stage.at(step / self._stage.steps)
        return self.module.loss(self._compared(self._teacher_batches[step]), settings, generator, self._compare)

    def _compared(self, batch: TeacherBatch) -> TeacherBatch:
        """The batch with the target's logits of the tokens over which the draft is compared. Autocast to bfloat16 takes
        no float16.
        """
        if batch.embeddings.dtype == torch.float16:
            hidden = {layer: states.float() for layer, states in batch.hidden.items()}
            batch = replace(batch, embeddings=batch.embeddings.float(), hidden=hidden)
        return replace(batch, head=self._head)

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        """Mean metrics of the full draft over the held-out teacher batches."""
        self.module.eval()
        settings = LossSettings()
        is_half = self.target.dtype != torch.float32  # its outputs do not fit the float32 weights of the draft
        with torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=is_half):
            metrics = [
                self.module.loss(batch, settings, torch.Generator().manual_seed(0))[1] for batch in self._held_out
            ]
        self.module.train()
        return {f"held_out_{name}": sum(batch[name] for batch in metrics) / len(metrics) for name in metrics[0]}

    def save(self, folder: Path) -> None:
        batches = self._batches_of(len(self.recipe.stages) - 1)
        num_batches = min(NUM_FINISHED, self.recipe.stages[-1].steps, batches.examples.num_batches)
        self.module.finish(batches[step] for step in range(num_batches))
        if (frequencies := self.module.token_frequencies) is not None and self._kept is not None:
            unknown = torch.full_like(frequencies, NOT_TRAINED)
            self.module.token_frequencies = unknown.index_copy(0, self._kept, frequencies[self._kept])
        self.module.save(folder)

    def tokens_per_round(self, folder: Path) -> float:
        """The mean number of tokens that a round emits, on held-out prompts, of a chain of the draft in a folder."""
        draft = load_draft(str(folder), self.target)
        decoder = Decoder(self.target, draft, tree={"policy": "chain", "depth": CHAIN_DEPTH})
        tried = []
        for line in self._held_out_lines[:NUM_TRIED_PROMPTS]:
            inputs = load_prompt(line.path, line.number, line.settings).inputs(self.processor, self.target.device)
            options = {
                **line.settings.generation,
                "max_new_tokens": min(NUM_TRIED_TOKENS, line.settings.max_new_tokens),
            }
            tried.append(decoder.generate(**inputs, **options).stats)
        return sum(stats.new_tokens - 1 for stats in tried) / max(1, sum(stats.rounds for stats in tried))
