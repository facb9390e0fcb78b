"""Training of complete Hugging Face models: the bundled target and its ``independent`` draft."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autotune.errors import UserError
from autotune.modeling.loading import load_model, load_processor
from autotune.training.batches import IGNORED, Batch, Batches
from autotune.training.build import build_model, build_processor, train_tokenizer
from autotune.training.recipe import Recipe, Stage, teacher_name

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
    pooled = model.get_image_features(pixel_values=pixel_values).pooler_output
    return torch.stack(list(pooled))


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
            length = batch.input_ids.shape[1]
            causal = torch.ones(length, length, dtype=torch.bool).tril()
            is_visible = causal & (~is_hidden[:, None, :] | torch.eye(length, dtype=torch.bool))
            mask = torch.zeros(is_visible.shape, dtype=embeddings.dtype).masked_fill(
                ~is_visible, torch.finfo(embeddings.dtype).min
            )[:, None]
    hidden = model.model.language_model(
        inputs_embeds=embeddings, attention_mask=mask, use_cache=False
    ).last_hidden_state
    return hidden[batch.labels != IGNORED], features


def grounding_loss(trainee: Trainee, features: Tensor, digits: Tensor) -> Tensor:
    return nn.functional.cross_entropy(trainee.grounding_head(features).float().flatten(0, 1), digits.flatten())


class Objectives:
    """The losses of the objectives; every method returns the loss and figures to display."""

    def __init__(self, trainee: Trainee, teacher: Any | None) -> None:
        self.trainee = trainee
        self.teacher = teacher

    def grounding(self, batch: Batch, stage: Stage, step: int) -> tuple[Tensor, dict[str, float]]:
        assert batch.pixel_values is not None and batch.digits is not None
        features = visual_features(self.trainee.model, batch.pixel_values)
        loss = grounding_loss(self.trainee, features, batch.digits)
        found = self.trainee.grounding_head(features).argmax(-1)
        return loss, {"digit_accuracy": (found == batch.digits)[batch.digits < 10].float().mean().item()}

    def answers(self, batch: Batch, stage: Stage, step: int) -> tuple[Tensor, dict[str, float]]:
        model = self.trainee.model
        hidden, features = answer_states(model, batch)
        logits = model.lm_head(hidden).float()
        labels = batch.labels[batch.labels != IGNORED]
        loss = nn.functional.cross_entropy(logits, labels)
        figures = {"loss": loss.item(), "token_accuracy": (logits.argmax(-1) == labels).float().mean().item()}
        if features is not None and batch.digits is not None and stage.grounding_weight > 0:
            loss = loss + stage.grounding_weight * grounding_loss(self.trainee, features, batch.digits)
        return loss, figures

    def distillation(self, batch: Batch, stage: Stage, step: int) -> tuple[Tensor, dict[str, float]]:
        """Online-logit distillation: KL(teacher || draft) at every answer position."""
        assert self.teacher is not None
        with torch.no_grad():
            teacher_logprobs = self.teacher.lm_head(answer_states(self.teacher, batch)[0]).float().log_softmax(-1)
        generator = torch.Generator().manual_seed(step)
        hidden, _ = answer_states(self.trainee.model, batch, min_visual_keep=stage.min_visual_keep, generator=generator)
        logits = self.trainee.model.lm_head(hidden).float()
        loss = nn.functional.kl_div(logits.log_softmax(-1), teacher_logprobs, reduction="batchmean", log_target=True)
        return loss, {
            "loss": loss.item(),
            "agreement": (logits.argmax(-1) == teacher_logprobs.argmax(-1)).float().mean().item(),
        }


class ModelTask:
    """Trains a model with a vision tower and a text model on the bundled workload (see ``Task``)."""

    def __init__(self, recipe: Recipe, recipe_path: Path) -> None:
        self.recipe = recipe
        self.teacher, self.processor, self.module = _models(recipe, recipe_path)
        self._objectives = Objectives(self.module, self.teacher)

    def begin(self, stage: Stage, number: int) -> list[nn.Parameter]:
        """Prepare the batches of a stage and return the parameters that it trains."""
        tasks = {n: w for n, w in self.recipe.tasks.items() if stage.objective != "grounding" or n != "continue"}
        seed = 10 * self.recipe.seed + number
        self._batches = Batches(self.processor, tasks, split="train", batch_size=stage.batch_size, seed=seed)
        return list(trained_parameters(self.module, stage))

    def loss(self, stage: Stage, step: int) -> tuple[Tensor, dict[str, float]]:
        """The loss of one step, and figures to display."""
        objective = getattr(self._objectives, stage.objective)
        return objective(self._batches[step], stage, step)  # type: ignore[no-any-return]

    def check_memory(self, *, half_precision: bool) -> str | None:
        """None: memory is not estimated for complete models."""
        return None

    def evaluate(self) -> dict[str, float]:
        """No figures on held-out examples."""
        return {}

    def after_backward(self) -> None:
        """Nothing to do."""

    def save(self, folder: Path) -> None:
        """Write weights, config and processor."""
        save_pretrained(self.module.model, self.processor, folder)


def trained_parameters(trainee: Trainee, stage: Stage) -> Iterator[nn.Parameter]:
    for name, parameter in trainee.named_parameters():
        if stage.objective != "grounding" or "language_model" not in name:
            yield parameter


def _models(recipe: Recipe, recipe_path: Path) -> tuple[Any | None, Any, Trainee]:
    if recipe.teacher is None:
        assert recipe.vocabulary_size is not None
        processor = build_processor(train_tokenizer(recipe.vocabulary_size), recipe.vision["patch_size"])
        return None, processor, Trainee(build_model(recipe, processor.tokenizer))
    name = teacher_name(recipe, recipe_path)
    processor, teacher = load_processor(name), load_model(name)
    draft = build_model(recipe, processor.tokenizer)
    if recipe.teacher_layers is not None:
        start_from(draft, teacher, recipe.teacher_layers, recipe_path)
    return teacher, processor, Trainee(draft)


def start_from(draft: Any, teacher: Any, layers: list[int], recipe_path: Path) -> None:
    """Copy the teacher's weights into the draft: text layer i from the teacher's ``layers[i]``, the rest by name.

    Raises:
        UserError: a layer that the teacher does not have, or sizes that differ from the teacher's.
    """
    available = teacher.state_dict()
    state = {}
    for name in draft.state_dict():
        found = re.search(r"(?<=language_model\.layers\.)\d+", name)
        source = name if found is None else f"{name[: found.start()]}{layers[int(found[0])]}{name[found.end() :]}"
        if source not in available or available[source].shape != draft.state_dict()[name].shape:
            raise UserError(
                f"{recipe_path}: the draft cannot start from its teacher's {source}, which is missing or has another size; "
                "give the draft the teacher's sizes, or remove teacher_layers"
            )
        state[name] = available[source]
    draft.load_state_dict(state)


def save_pretrained(model: Any, processor: Any, folder: Path) -> None:
    """Save in Hugging Face format: weights are stored as bfloat16 (half the bytes) and declared float32, in which they run."""
    model.to(torch.bfloat16).save_pretrained(folder)
    model.float()
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config["text_config"], config["vision_config"]):
        part["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    processor.save_pretrained(folder)
