"""Training of complete Hugging Face models: the bundled target and its ``independent`` draft."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.errors import UserError
from autotune.modeling.loading import load_model, load_processor
from autotune.training.batches import IGNORED, Batch, Batches
from autotune.training.build import build_model, build_processor, train_tokenizer
from autotune.training.recipe import Recipe, Stage, teacher_name
from autotune.training.task import Task

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


class ModelTask(Task):
    """Trains a model with a vision tower and a text model on the bundled workload."""

    module: Trainee

    def __init__(self, recipe: Recipe, recipe_path: Path) -> None:
        self.recipe = recipe
        self.teacher: Any | None = None
        if recipe.teacher is None:
            assert recipe.vocabulary_size is not None
            self.processor = build_processor(train_tokenizer(recipe.vocabulary_size), recipe.vision["patch_size"])
        else:
            name = teacher_name(recipe, recipe_path)
            self.processor, self.teacher = load_processor(name), load_model(name)
        model = build_model(recipe, self.processor.tokenizer)
        if recipe.teacher_layers is not None:
            copy_teacher_weights(model, self.teacher, recipe.teacher_layers, recipe_path)
        self.module = Trainee(model)

    def begin(self, stage: Stage, number: int) -> list[nn.Parameter]:
        is_grounding = stage.objective == "grounding"
        tasks = {
            name: share
            for name, share in (stage.tasks or self.recipe.tasks).items()
            if not (is_grounding and name == "continue")
        }
        seed = 10 * self.recipe.seed + number
        self._batches = Batches(self.processor, tasks, split="train", batch_size=stage.batch_size, seed=seed)
        parameters = self.module.named_parameters()
        return [parameter for name, parameter in parameters if not (is_grounding and "language_model" in name)]

    def loss(self, stage: Stage, step: int) -> tuple[Tensor, dict[str, float]]:
        objective = {"grounding": self._grounding, "answers": self._answers, "distillation": self._distillation}
        return objective[stage.objective](self._batches[step], stage, step)

    def save(self, folder: Path) -> None:
        """Save in Hugging Face format: weights are stored as bfloat16 (half the bytes) and declared float32, in which they run."""
        self.module.model.to(torch.bfloat16).save_pretrained(folder)
        self.module.model.float()
        config = json.loads((folder / "config.json").read_text())
        for part in (config, config["text_config"], config["vision_config"]):
            part["dtype"] = "float32"
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        self.processor.save_pretrained(folder)

    def _grounding(self, batch: Batch, stage: Stage, step: int) -> tuple[Tensor, dict[str, float]]:
        assert batch.pixel_values is not None and batch.digits is not None
        logits = self.module.grounding_head(visual_features(self.module.model, batch.pixel_values))
        is_correct = logits.argmax(-1) == batch.digits
        metrics = {"digit_accuracy": is_correct[batch.digits < 10].float().mean().item()}
        return functional.cross_entropy(logits.float().flatten(0, 1), batch.digits.flatten()), metrics

    def _answers(self, batch: Batch, stage: Stage, step: int) -> tuple[Tensor, dict[str, float]]:
        hidden, features = answer_states(self.module.model, batch)
        logits = self.module.model.lm_head(hidden).float()
        labels = batch.labels[batch.labels != IGNORED]
        loss = functional.cross_entropy(logits, labels)
        metrics = {"loss": loss.item(), "token_accuracy": (logits.argmax(-1) == labels).float().mean().item()}
        if features is not None and batch.digits is not None and stage.grounding_weight > 0:
            digit_logits = self.module.grounding_head(features).float().flatten(0, 1)
            loss = loss + stage.grounding_weight * functional.cross_entropy(digit_logits, batch.digits.flatten())
        return loss, metrics

    def _distillation(self, batch: Batch, stage: Stage, step: int) -> tuple[Tensor, dict[str, float]]:
        """Online-logit distillation: KL(teacher || draft) at every answer position."""
        assert self.teacher is not None
        with torch.no_grad():
            teacher_logprobs = self.teacher.lm_head(answer_states(self.teacher, batch)[0]).float().log_softmax(-1)
        model, generator = self.module.model, torch.Generator().manual_seed(step)
        hidden, _ = answer_states(model, batch, min_visual_keep=stage.min_visual_keep, generator=generator)
        logprobs = model.lm_head(hidden).float().log_softmax(-1)
        loss = functional.kl_div(logprobs, teacher_logprobs, reduction="batchmean", log_target=True)
        agreement = (logprobs.argmax(-1) == teacher_logprobs.argmax(-1)).float().mean().item()
        return loss, {"loss": loss.item(), "agreement": agreement}


def copy_teacher_weights(draft: Any, teacher: Any, layers: list[int], recipe_path: Path) -> None:
    """Copy the teacher's weights into the draft: text layer i from the teacher's ``layers[i]``, the rest by name.

    Raises:
        UserError: a layer that the teacher does not have, or sizes that differ from the teacher's.
    """
    available, own = teacher.state_dict(), draft.state_dict()
    state = {}
    for name in own:
        source = re.sub(r"(?<=model\.layers\.)\d+", lambda match: str(layers[int(match[0])]), name)
        if source not in available or available[source].shape != own[name].shape:
            raise UserError(
                f"{recipe_path}: the draft cannot start from its teacher's {source}, which is missing or has another size; "
                "give the draft the teacher's sizes, or remove teacher_layers"
            )
        state[name] = available[source]
    draft.load_state_dict(state)
