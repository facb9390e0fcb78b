"""The training loop: stages of a recipe, checkpoints that survive any kill, and weights in Hugging Face format at the
end.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from autotune.console import Console
from autotune.errors import UserError
from autotune.files import append_line, content_key, sha256_of
from autotune.training.batches import IGNORED, Batch, Batches
from autotune.training.build import build_model, build_processor, train_tokenizer
from autotune.training.recipe import Recipe, Stage, load_recipe

NUM_DIGIT_CLASSES = 11  # ten digits, and blank
CHECKPOINT_EVERY = 100  # steps
Progress = Callable[[str, int, int, dict[str, float]], None]
"""Called as progress(stage name, step, steps, figures)."""


class Trainee(nn.Module):
    """The model being trained, and the head that names the digit under each visual token (dropped at the end)."""

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

    Below 1, ``min_visual_keep`` hides a random share of the visual tokens from every later token in half of the calls.
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
            is_open = causal & (~is_hidden[:, None, :] | torch.eye(length, dtype=torch.bool))
            mask = torch.zeros(is_open.shape, dtype=embeddings.dtype).masked_fill(
                ~is_open, torch.finfo(embeddings.dtype).min
            )[:, None]
    hidden = model.model.language_model(
        inputs_embeds=embeddings, attention_mask=mask, use_cache=False
    ).last_hidden_state
    return hidden[batch.labels != IGNORED], features


def grounding_loss(trainee: Trainee, features: Tensor, digits: Tensor) -> Tensor:
    return nn.functional.cross_entropy(trainee.grounding_head(features).float().flatten(0, 1), digits.flatten())


class Objectives:
    """The loss of each stage; every method returns the loss and figures to show."""

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
            taught = self.teacher.lm_head(answer_states(self.teacher, batch)[0]).float().log_softmax(-1)
        generator = torch.Generator().manual_seed(step)
        hidden, _ = answer_states(self.trainee.model, batch, min_visual_keep=stage.min_visual_keep, generator=generator)
        logits = self.trainee.model.lm_head(hidden).float()
        loss = nn.functional.kl_div(logits.log_softmax(-1), taught, reduction="batchmean", log_target=True)
        return loss, {"loss": loss.item(), "agreement": (logits.argmax(-1) == taught.argmax(-1)).float().mean().item()}


# --------------------------------------------------------------------------------------------------------- checkpoints


class Checkpoint:
    """Model, optimizer moments and position in one safetensors file, replaced atomically."""

    def __init__(self, path: Path, recipe_key: str) -> None:
        self.path = path
        self.recipe_key = recipe_key

    def save(self, trainee: Trainee, optimizer: torch.optim.Optimizer, stage: int, step: int) -> None:
        tensors = {f"model.{name}": tensor for name, tensor in trainee.state_dict().items() if "lm_head" not in name}
        for name, parameter in trainee.named_parameters():
            for moment, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{moment}.{name}"] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".new")
        save_file(
            {k: v.contiguous().clone() for k, v in tensors.items()},
            temporary,
            {"stage": str(stage), "step": str(step), "recipe": self.recipe_key},
        )
        temporary.replace(self.path)

    def position(self) -> tuple[int, int]:
        """(stage, step) to go on from; (0, 0) without a checkpoint.

        Raises:
            UserError: the checkpoint was made by another recipe.
        """
        if not self.path.exists():
            return 0, 0
        with safe_open(self.path, "pt") as file:
            metadata = file.metadata()
        if metadata["recipe"] != self.recipe_key:
            raise UserError(
                f"{self.path}: the recipe has changed since this checkpoint; delete the checkpoint to start over, or restore the recipe"
            )
        return int(metadata["stage"]), int(metadata["step"])

    def load_model(self, trainee: Trainee) -> None:
        with safe_open(self.path, "pt") as file:
            state = {name[len("model.") :]: file.get_tensor(name) for name in file.keys() if name.startswith("model.")}  # noqa: SIM118
        missing, unexpected = trainee.load_state_dict(state, strict=False)
        assert not unexpected and all("lm_head" in name for name in missing), (missing, unexpected)

    def load_optimizer(self, trainee: Trainee, optimizer: torch.optim.Optimizer) -> None:
        with safe_open(self.path, "pt") as file:
            names = set(file.keys())
            for name, parameter in trainee.named_parameters():
                if f"exp_avg.{name}" in names:
                    optimizer.state[parameter] = {
                        moment: file.get_tensor(f"{moment}.{name}") for moment in ("step", "exp_avg", "exp_avg_sq")
                    }


# ---------------------------------------------------------------------------------------------------------------- loop


def learning_rate(stage: Stage, step: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    if step < stage.warmup_steps:
        return stage.learning_rate * (step + 1) / stage.warmup_steps
    share = (step - stage.warmup_steps) / max(1, stage.steps - stage.warmup_steps)
    return stage.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))


def trained_parameters(trainee: Trainee, stage: Stage) -> Iterator[nn.Parameter]:
    for name, parameter in trainee.named_parameters():
        if stage.objective != "grounding" or "language_model" not in name:
            yield parameter


def autocast_dtype() -> torch.dtype | None:
    """bfloat16 where the processor multiplies it natively, else None (float32)."""
    capable = torch.cpu.get_capabilities()
    return torch.bfloat16 if capable.get("avx512_bf16") or capable.get("amx_bf16") else None


def train(recipe_path: Path, *, output: Path | None = None, progress: Progress | None = None) -> Path:
    """Train what the recipe says, going on from the last checkpoint; returns the folder with weights, processor and
    training log.

    Raises:
        UserError: the recipe, its teacher, or a checkpoint of another recipe.
    """
    recipe = load_recipe(recipe_path)
    output = output or recipe_path.parent
    torch.manual_seed(recipe.seed)
    teacher, processor, trainee = _models(recipe, recipe_path)
    checkpoint = Checkpoint(output / ".checkpoint" / "state.safetensors", content_key(recipe.model_dump(mode="json")))
    first_stage, first_step = checkpoint.position()
    if (first_stage, first_step) != (0, 0):
        checkpoint.load_model(trainee)
    objectives = Objectives(trainee, teacher)
    log = output / "training.jsonl"
    dtype = autocast_dtype()
    for number, stage in enumerate(recipe.stages):
        if number < first_stage:
            continue
        begin = first_step if number == first_stage else 0
        tasks = {
            name: weight
            for name, weight in recipe.tasks.items()
            if stage.objective != "grounding" or name != "continue"
        }
        batches = Batches(processor, tasks, split="train", batch_size=stage.batch_size, seed=10 * recipe.seed + number)
        parameters = list(trained_parameters(trainee, stage))
        optimizer = torch.optim.AdamW(parameters, weight_decay=stage.weight_decay, betas=(0.9, 0.98), fused=True)
        if begin > 0:
            checkpoint.load_optimizer(trainee, optimizer)
        objective = getattr(objectives, stage.objective)
        trainee.train()
        for step in range(begin, stage.steps):
            started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(stage, step)
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss, figures = objective(batches[step], stage, step)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if progress is not None:
                progress(f"{recipe.name} {stage.objective}", step + 1, stage.steps, figures)
            if (step + 1) % 25 == 0:
                append_line(
                    log,
                    {"stage": stage.objective, "step": step + 1, **figures, "seconds": time.perf_counter() - started},
                )
            if (step + 1) % CHECKPOINT_EVERY == 0 and step + 1 < stage.steps:
                checkpoint.save(trainee, optimizer, number, step + 1)
        checkpoint.save(trainee, optimizer, number + 1, 0)
    trainee.eval()
    save_pretrained(trainee.model, processor, output)
    return output


def _models(recipe: Recipe, recipe_path: Path) -> tuple[Any | None, Any, Trainee]:
    if recipe.teacher is None:
        assert recipe.vocabulary_size is not None
        processor = build_processor(train_tokenizer(recipe.vocabulary_size), recipe.vision["patch_size"])
        return None, processor, Trainee(build_model(recipe, processor.tokenizer))
    folder = (recipe_path.parent / recipe.teacher).resolve()
    if not (folder / "model.safetensors").exists():
        raise UserError(
            f"{recipe_path}: its teacher {folder} has no weights; train it first: autotune train {folder / 'recipe.yaml'}"
        )
    processor = AutoProcessor.from_pretrained(folder)
    teacher = AutoModelForImageTextToText.from_pretrained(folder).eval().requires_grad_(False)
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
                f"{recipe_path}: the draft cannot start from its teacher's {source}, which is missing or of another size; "
                "give the draft the teacher's sizes, or drop teacher_layers"
            )
        state[name] = available[source]
    draft.load_state_dict(state)


def save_pretrained(model: Any, processor: Any, folder: Path) -> None:
    """Hugging Face format, weights stored as bfloat16 (half the bytes) and declared float32, in which they load and
    run.
    """
    model.to(torch.bfloat16).save_pretrained(folder)
    model.float()
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config["text_config"], config["vision_config"]):
        part["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    processor.save_pretrained(folder)


def weights_sha256(folder: Path) -> str:
    """The hash that names a model in profiles, traces and cost tables: of its weights and its config."""
    return sha256_of(*sorted(folder.glob("*.safetensors")), folder / "config.json")


def train_with_progress(recipe_path: Path, output: Path | None, console: Console) -> None:
    """``autotune train``: the loop with a progress bar for people, ending with where the weights are."""
    shown: dict[str, Any] = {}

    with contextlib.ExitStack() as stack:

        def progress(stage: str, step: int, steps: int, figures: dict[str, float]) -> None:
            if shown.get("stage") != stage:
                stack.close()
                shown.update(stage=stage, update=stack.enter_context(console.stage(stage)))
            shown["update"](step, steps, " ".join(f"{name} {value:.3f}" for name, value in figures.items()))

        folder = train(recipe_path, output=output, progress=progress)
    console.say(f"weights, processor and training log written to {folder}")
