"""Training of the pair's complete Hugging Face models: the target and its ``independent`` draft."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.files import append_line
from autotune.modeling.loading import load_model, load_processor
from autotune.training.draft_task import autocast_dtype
from autotune.training.recipe import Stage
from autotune.training.trainer import LOG_EVERY, learning_rate, make_optimizers
from drafts.digits.make.batches import IGNORED, TASK_SHARES, Batch, Batches
from drafts.digits.make.build import build_model, build_processor, train_tokenizer

VOCABULARY_SIZE = 2048
VISION = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 192,
    "patch_size": 16,
}


@dataclass(frozen=True)
class Phase:
    """A stage of training with one objective.

    * ``grounding`` classifies the digit under every visual token and trains only the vision tower and the projector.
    * ``answers`` is next-token cross-entropy on the reference answers plus ``grounding_weight`` times the grounding
      loss.
    * ``distillation`` is the KL divergence from the teacher's distribution at every answer position. Half of the steps
      drop visual tokens at random, down to the share ``min_visual_keep``, so that the draft tolerates pruning.
    """

    objective: Literal["grounding", "answers", "distillation"]
    stage: Stage
    grounding_weight: float = 0.0
    min_visual_keep: float = 1.0


@dataclass(frozen=True)
class Model:
    """A model to make. ``teacher_layers`` are the teacher's text layers from which its own are initialized."""

    num_layers: int
    phases: tuple[Phase, ...]
    teacher_layers: tuple[int, ...] = ()
    seed: int = 0

    @property
    def text(self) -> dict[str, Any]:
        heads = {"num_attention_heads": 6, "num_key_value_heads": 6}
        return {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": self.num_layers, **heads}


TARGET = Model(
    num_layers=12,
    phases=(
        Phase("grounding", Stage(steps=1400, batch_size=24, learning_rate=1.0e-3, warmup_steps=100)),
        Phase(
            "answers", Stage(steps=3000, batch_size=16, learning_rate=1.5e-3, warmup_steps=100), grounding_weight=0.1
        ),
    ),
)
INDEPENDENT = Model(
    num_layers=2,
    phases=(
        Phase("distillation", Stage(steps=1600, batch_size=16, learning_rate=1.5e-3), min_visual_keep=0.1),
        Phase("distillation", Stage(steps=1300, batch_size=16, learning_rate=1.5e-3)),
    ),
    teacher_layers=(0, 11),
    seed=1,
)
NUM_DIGIT_CLASSES = 11  # ten digits, and blank


class Trainee(nn.Module):
    """The trained model with a classifier of the digit under each visual token, which is discarded at the end."""

    model: Any

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.grounding_head = nn.Linear(model.config.text_config.hidden_size, NUM_DIGIT_CLASSES)


def visual_features(model: Any, pixel_values: Tensor) -> Tensor:
    """Projected visual tokens, [images, visual tokens, hidden]."""
    return torch.stack(list(model.get_image_features(pixel_values=pixel_values).pooler_output))


def answer_states(
    model: Any, batch: Batch, *, min_visual_keep: float = 1.0, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor | None]:
    """Final hidden states at the labelled positions [labels, hidden], and the visual features.

    If ``min_visual_keep`` is below 1, half of the calls hide a random share of the visual tokens from all later tokens.
    """
    embeddings = model.get_input_embeddings()(batch.input_ids)
    features, mask = None, None
    if batch.pixel_values is not None:
        features = visual_features(model, batch.pixel_values)
        is_visual = batch.input_ids == model.config.image_token_id
        embeddings = embeddings.masked_scatter(is_visual.unsqueeze(-1), features.to(embeddings.dtype))
        if min_visual_keep < 1.0 and torch.rand((), generator=generator) < 0.5:
            keep = min_visual_keep + (1.0 - min_visual_keep) * torch.rand((), generator=generator)
            is_hidden = is_visual & (torch.rand(is_visual.shape, generator=generator) > keep)
            identity = torch.eye(batch.input_ids.shape[1], dtype=torch.bool)
            is_visible = torch.ones_like(identity).tril() & (~is_hidden[:, None, :] | identity)
            mask = torch.zeros(is_visible.shape, dtype=embeddings.dtype)
            mask = mask.masked_fill(~is_visible, torch.finfo(embeddings.dtype).min)[:, None]
    out = model.model.language_model(inputs_embeds=embeddings, attention_mask=mask, use_cache=False)
    return out.last_hidden_state[batch.labels != IGNORED], features


class Training:
    """The losses of a model's phases."""

    def __init__(self, model: Model, teacher: Path | None = None) -> None:
        torch.manual_seed(model.seed)
        self.teacher: Any | None = None
        if teacher is None:
            self.processor = build_processor(train_tokenizer(VOCABULARY_SIZE), VISION["patch_size"])
        else:
            self.processor, self.teacher = load_processor(str(teacher)), load_model(str(teacher))
        trained = build_model(model.text, VISION, self.processor.tokenizer)
        if model.teacher_layers:
            copy_teacher_weights(trained, self.teacher, model.teacher_layers)
        self.module = Trainee(trained)

    def parameters(self, phase: Phase) -> list[nn.Parameter]:
        """The parameters that a phase trains."""
        is_grounding = phase.objective == "grounding"
        parameters = self.module.named_parameters()
        return [parameter for name, parameter in parameters if not (is_grounding and "language_model" in name)]

    def batches(self, phase: Phase, seed: int) -> Batches:
        """The batches of a phase."""
        without = "continue" if phase.objective == "grounding" else None
        tasks = {task: share for task, share in TASK_SHARES.items() if task != without}
        return Batches(self.processor, tasks, phase.stage.batch_size, seed)

    def loss(self, phase: Phase, batch: Batch, step: int) -> tuple[Tensor, dict[str, float]]:
        """The loss of one step, and metrics for the log."""
        if phase.objective == "grounding":
            return self._grounding(batch)
        return self._answers(batch, phase) if phase.objective == "answers" else self._distillation(batch, phase, step)

    def _grounding(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        assert batch.pixel_values is not None and batch.digits is not None
        logits = self.module.grounding_head(visual_features(self.module.model, batch.pixel_values))
        is_correct = logits.argmax(-1) == batch.digits
        metrics = {"digit_accuracy": is_correct[batch.digits < 10].float().mean().item()}
        return functional.cross_entropy(logits.float().flatten(0, 1), batch.digits.flatten()), metrics

    def _answers(self, batch: Batch, phase: Phase) -> tuple[Tensor, dict[str, float]]:
        hidden, features = answer_states(self.module.model, batch)
        logits = self.module.model.lm_head(hidden).float()
        labels = batch.labels[batch.labels != IGNORED]
        loss = functional.cross_entropy(logits, labels)
        metrics = {"loss": loss.item(), "token_accuracy": (logits.argmax(-1) == labels).float().mean().item()}
        if features is not None and batch.digits is not None and phase.grounding_weight > 0:
            digit_logits = self.module.grounding_head(features).float().flatten(0, 1)
            loss = loss + phase.grounding_weight * functional.cross_entropy(digit_logits, batch.digits.flatten())
        return loss, metrics

    def _distillation(self, batch: Batch, phase: Phase, step: int) -> tuple[Tensor, dict[str, float]]:
        """Online-logit distillation: KL(teacher || draft) at every answer position."""
        assert self.teacher is not None
        with torch.no_grad():
            teacher_logprobs = self.teacher.lm_head(answer_states(self.teacher, batch)[0]).float().log_softmax(-1)
        model, generator = self.module.model, torch.Generator().manual_seed(step)
        hidden, _ = answer_states(model, batch, min_visual_keep=phase.min_visual_keep, generator=generator)
        logprobs = model.lm_head(hidden).float().log_softmax(-1)
        loss = functional.kl_div(logprobs, teacher_logprobs, reduction="batchmean", log_target=True)
        agreement = (logprobs.argmax(-1) == teacher_logprobs.argmax(-1)).float().mean().item()
        return loss, {"loss": loss.item(), "agreement": agreement}


def make(model: Model, output: Path, *, teacher: Path | None = None) -> None:
    """Train a model and write it in Hugging Face format, with ``training.jsonl``. An interrupted training
    starts over.
    """
    training = Training(model, teacher)
    dtype = autocast_dtype(torch.device("cpu"), torch.float32)
    output.mkdir(parents=True, exist_ok=True)
    (output / "training.jsonl").unlink(missing_ok=True)
    for number, phase in enumerate(model.phases):
        stage, parameters = phase.stage, training.parameters(phase)
        batches = training.batches(phase, 10 * model.seed + number)
        optimizers = make_optimizers(training.module, parameters, stage)
        for step in range(stage.steps):
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = learning_rate(stage, step)
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss, metrics = training.loss(phase, batches[step], step)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, stage.gradient_clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if (step + 1) % LOG_EVERY == 0 or step + 1 == stage.steps:
                append_line(output / "training.jsonl", {"stage": number, "step": step + 1, **metrics})
                print(f"{phase.objective} {step + 1}/{stage.steps} {metrics}", flush=True)
    save(training, output)


def save(training: Training, folder: Path) -> None:
    """Save in Hugging Face format: weights are stored as bfloat16 (half the bytes) and declared float32, in which they
    run.
    """
    model = training.module.model
    model.to(torch.bfloat16).save_pretrained(folder)
    model.float()
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config["text_config"], config["vision_config"]):
        part["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    training.processor.save_pretrained(folder)


def copy_teacher_weights(draft: Any, teacher: Any, layers: Sequence[int]) -> None:
    """Copy the teacher's weights into the draft: text layer i from the teacher's ``layers[i]``, the rest by name."""
    available = teacher.state_dict()
    renamed = {
        name: re.sub(r"(?<=model\.layers\.)\d+", lambda match: str(layers[int(match[0])]), name)
        for name in draft.state_dict()
    }
    draft.load_state_dict({name: available[source] for name, source in renamed.items()})
