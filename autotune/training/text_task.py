"""Training of text models: the target of the pair ``code``, and its ``independent`` draft."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.drafters.mtp import MtpNetwork, copy_last_layer, load_mtp, new_mtp, save_mtp
from autotune.errors import UserError
from autotune.files import WORKSPACE, content_key
from autotune.modeling.loading import load_model, load_processor
from autotune.modeling.target import Target
from autotune.training.batches import IGNORED, Batch
from autotune.training.build import build_text_model, train_code_tokenizer
from autotune.training.causal_attention import causal_blocks
from autotune.training.code_batches import CodeBatches
from autotune.training.divergence import make_divergence
from autotune.training.examples import Report
from autotune.training.model_task import copy_teacher_weights
from autotune.training.own_answers import read_own_answers, write_own_answers
from autotune.training.recipe import Recipe, Stage, teacher_name, trained_folder
from autotune.training.task import Task
from autotune.training.unrolled import unrolled_divergence
from autotune.workloads.code.corpus import installed_versions

HELD_OUT_SEED = 1


class TextTask(Task):
    """Trains a causal text model on rows of files and tasks. Stages may run only some of its layers.

    Args:
        report: called while the model samples answers.
    """

    model: Any

    def __init__(self, recipe: Recipe, recipe_path: Path, report: Report | None = None) -> None:
        self.recipe = recipe
        self.report = report
        self.teacher: Any | None = None
        if recipe.teacher is not None:
            name = teacher_name(recipe, recipe_path)
            self.tokenizer, self.teacher = load_processor(name), load_model(name)
        elif recipe.trained_stages == 0:
            assert recipe.vocabulary_size is not None
            self.tokenizer = train_code_tokenizer(recipe.vocabulary_size)
        if recipe.trained_stages > 0:
            folder = str(trained_folder(recipe_path))
            self.tokenizer, self.model = load_processor(folder), load_model(folder).requires_grad_(True)
        else:
            self.model = build_text_model(recipe, self.tokenizer)
            if recipe.teacher_layers is not None:
                copy_teacher_weights(self.model, self.teacher, recipe.teacher_layers, recipe_path)
        self.module, self.head = self.model, self._new_head(recipe_path)
        if self.head is not None:
            self.module = nn.ModuleDict({"model": self.model, "mtp": self.head})
        for number, stage in enumerate(recipe.stages):
            if self.num_layers % (stage.num_layers or 1):
                raise UserError(
                    f"{recipe_path}: num_layers of a stage must divide the {self.num_layers} layers of the model; got "
                    f"{stage.num_layers} in stage {number + 1}; give a divisor"
                )
        self._token_loss = token_loss
        if recipe.compile:
            self._token_loss = torch.compile(token_loss, dynamic=False)
            for model in (self.model, self.teacher):
                for layer in () if model is None else model.model.layers:
                    layer.compile(dynamic=False)

    def _new_head(self, recipe_path: Path) -> MtpNetwork | None:
        """The recipe's multi-token prediction head: the stored one of a model that continues, otherwise a new one."""
        if self.recipe.mtp is None:
            return None
        target, folder = Target(self.model), recipe_path.parent / self.recipe.mtp
        self._is_new_head = self.recipe.trained_stages == 0 or not (folder / "config.json").exists()
        return new_mtp(target) if self._is_new_head else load_mtp(folder, target).requires_grad_(True)

    @property
    def num_layers(self) -> int:
        return len(self.model.model.layers)

    def running_layers(self, stage: Stage) -> list[int]:
        """Layers that run in a stage, evenly spaced."""
        return [*range(0, self.num_layers, self.num_layers // (stage.num_layers or self.num_layers))]

    @torch.no_grad()
    def grow(self, previous: Stage, stage: Stage) -> None:
        """Copy the layers that ran into those that run from now on, which then share the residual update of their original. A new
        head that is trained from now on begins with the last layer.
        """
        old, new = self.running_layers(previous), self.running_layers(stage)
        copies = max(1, len(new) // len(old))
        for number in new:
            source = max(layer for layer in old if layer <= number)
            layer = self.model.model.layers[number]
            if source != number:
                layer.load_state_dict(self.model.model.layers[source].state_dict())
        for number in new:
            layer = self.model.model.layers[number]
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.div_(copies)
        first_of_head = next((one for one in self.recipe.stages if one.mtp_weight > 0), None)
        if self.head is not None and self._is_new_head and stage is first_of_head:
            copy_last_layer(self.head, Target(self.model))

    def prepare(self, stage: Stage, number: int) -> None:
        """Sample the model's own answers of the stage."""
        if stage.own_answers > 0:
            write_own_answers(
                self._own_answers_path(number),
                copy.deepcopy(self.model),  # the copy's layers are not compiled
                self._training_batches(stage, number),
                num_prompts=stage.own_answers,
                temperature=stage.own_answers_temperature,
                report=self.report,
            )

    def begin(self, stage: Stage, number: int) -> list[nn.Parameter]:
        self._batches = self._training_batches(stage, number)
        if stage.own_answers > 0:
            if not self._own_answers_path(number).exists():  # deleted before the stage was resumed
                self.prepare(stage, number)
            own_answers = read_own_answers(self._own_answers_path(number))
            self._batches = dataclasses.replace(self._batches, own_answers=own_answers)
        held_out = CodeBatches(
            self.tokenizer, self.recipe.tasks, "tune", stage.batch_size, stage.sequence_length, HELD_OUT_SEED
        )
        self._held_out, self._held_out_bytes = held_out[0], held_out.num_bytes(0)
        self._text = with_layers(self.model.model, self.running_layers(stage))
        self._compare = make_divergence(stage.divergence, compiled=self.recipe.compile)
        self._num_drafted = stage.unrolled_steps if stage.mtp_weight > 0 else 0
        head = self.head if self._num_drafted else None
        return [*self._text.parameters(), *(() if head is None else head.parameters())]

    def _training_batches(self, stage: Stage, number: int) -> CodeBatches:
        seed, tasks = 10 * self.recipe.seed + number, stage.tasks or self.recipe.tasks
        return CodeBatches(
            self.tokenizer,
            tasks,
            "train",
            stage.batch_size,
            stage.sequence_length,
            seed,
            answer_weight=stage.answer_weight,
        )

    def _own_answers_path(self, number: int) -> Path:
        recipe = self.recipe.model_dump(mode="json", exclude_defaults=True)
        return WORKSPACE / "sampled-answers" / f"{content_key([recipe, number, installed_versions()])}.json"

    def loss(self, stage: Stage, step: int) -> tuple[Tensor, dict[str, float]]:
        batch = self._batches[step]
        if stage.objective == "distillation":
            return self._distillation(batch)
        hidden = self._states(batch)
        loss = self._text_loss(hidden, batch)
        if not self._num_drafted:
            return loss, {"loss": loss.item()}
        rows = slice(stage.mtp_rows)
        drafting_loss, figures = self._head_loss(batch.input_ids[rows], hidden[rows], batch.labels[rows])
        return loss + stage.mtp_weight * drafting_loss, {**figures, "loss": loss.item()}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and bits per byte on rows of the tuning packages, and how often the head agrees with the model there."""
        ids, labels = self._held_out.input_ids, self._held_out.labels
        hidden = self._states(self._held_out)
        loss = self._text_loss(hidden, self._held_out).item()
        bits = loss / math.log(2) * int((labels != IGNORED).sum())
        figures = self._head_loss(ids, hidden, labels)[1] if self._num_drafted else {}
        of_head = {f"held_out_{name}": figures[name] for name in figures if name != "loss"}
        return {"held_out_loss": loss, "held_out_bits_per_byte": bits / self._held_out_bytes, **of_head}

    def save(self, folder: Path) -> None:
        """Save in Hugging Face format: weights are stored as bfloat16 (half the bytes) and declared float32, in which they run."""
        self.model.to(torch.bfloat16).save_pretrained(folder)
        self.model.float()
        config = json.loads((folder / "config.json").read_text()) | {"dtype": "float32"}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        self.tokenizer.save_pretrained(folder)
        if self.head is not None:
            assert self.recipe.mtp is not None
            save_mtp(self.head, folder / self.recipe.mtp)

    def _distillation(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """KL(teacher || draft) at every labelled position."""
        assert self.teacher is not None
        is_labelled = batch.labels != IGNORED
        with torch.no_grad():
            states = self._read(self.teacher.model, batch)
            teacher_logprobs = self.teacher.lm_head(states[is_labelled]).float().log_softmax(-1)
        states = self._states(batch)
        token_losses, agrees = self._compare(self.model.lm_head(states[is_labelled]), teacher_logprobs)
        loss = token_losses.mean()
        return loss, {"loss": loss.item(), "agreement": agrees.mean().item()}

    def _text_loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        assert batch.weights is not None
        loss: Tensor = self._token_loss(hidden, self.model.lm_head.weight, batch.labels, batch.weights)
        return loss

    def _states(self, batch: Batch) -> Tensor:
        """The model's last hidden states [batch, n, hidden], after its final norm."""
        return self._read(self._text, batch)

    def _read(self, text: Any, batch: Batch) -> Tensor:
        with causal_blocks(text.config) if self.recipe.compile else nullcontext():
            states: Tensor = text(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        return states

    def _head_loss(self, ids: Tensor, hidden: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, float]]:
        """The divergence of the head's drafting from the model's distributions. Its gradient reaches the model through the
        states ``hidden`` that the head reads, the embeddings and the output head, and not through the distributions.
        """
        assert self.head is not None
        is_loss = labels[:, 1:] != IGNORED
        with torch.no_grad():
            logprobs = self.model.lm_head(hidden[:, 1:][is_loss]).float().log_softmax(-1)
        stream = self.model.get_input_embeddings()(ids[:, 1:])
        return unrolled_divergence(
            self.head,
            stream,
            hidden[:, :-1],
            is_loss,
            logprobs,
            self.model.lm_head,
            num_steps=self._num_drafted,
            compare=self._compare,
        )


def with_layers(text: Any, numbers: list[int]) -> Any:
    """A text model that runs some of another one's layers, and shares everything with it."""
    shallow = copy.copy(text)
    shallow._modules = {**text._modules, "layers": nn.ModuleList(text.layers[number] for number in numbers)}
    return shallow


def token_loss(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of the next-token cross-entropy at the labelled positions."""
    logits = functional.linear(hidden, head).float()
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return (losses * weights.flatten()).sum() / weights[labels != IGNORED].sum()
