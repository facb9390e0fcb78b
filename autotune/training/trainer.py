"""The training loop: the stages of a recipe, crash-safe checkpoints, and the final weights in Hugging Face format."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from autotune.console import Console
from autotune.errors import UserError
from autotune.files import append_line, content_key, sha256_of
from autotune.training.curve import draw_curve
from autotune.training.draft_task import DraftTask
from autotune.training.model_task import ModelTask
from autotune.training.recipe import FEATURE_DRAFTS, Recipe, Stage, load_recipe

CHECKPOINT_EVERY = 100  # steps
LOG_EVERY = 25  # steps
SHOWN_FIGURES = ("loss", "token_accuracy", "digit_accuracy", "agreement", "held_out_agreement")  # in the progress bar
Progress = Callable[[str, int, int, dict[str, float]], None]
"""Called as progress(stage name, step, steps, figures)."""


class Task(Protocol):
    """A module to train, and its loss at every step. The loss depends on nothing but the step."""

    @property
    def module(self) -> nn.Module:
        """The module that holds exactly the trained parameters."""

    def begin(self, stage: Stage, number: int) -> list[nn.Parameter]:
        """Prepare a stage and return the parameters that it trains."""

    def loss(self, stage: Stage, step: int) -> tuple[Tensor, dict[str, float]]:
        """The loss of one step, and figures to display."""

    def check_memory(self, *, half_precision: bool) -> str | None:
        """Estimated memory and disk use of all stages as one line, or None if unknown.

        Raises:
            UserError: more than is available.
        """

    def evaluate(self) -> dict[str, float]:
        """Figures on held-out examples."""

    def after_backward(self) -> None:
        """Called when the gradients of a step have been computed."""

    def save(self, folder: Path) -> None:
        """Write the trained model."""


# --------------------------------------------------------------------------------------------------------- checkpoints


class Checkpoint:
    """Model, optimizer moments and position, in one safetensors file that is replaced atomically."""

    def __init__(self, path: Path, recipe_key: str) -> None:
        self.path = path
        self.recipe_key = recipe_key

    def save(self, module: nn.Module, optimizer: torch.optim.Optimizer, stage: int, step: int) -> None:
        tensors = {f"model.{name}": tensor for name, tensor in module.state_dict().items() if "lm_head" not in name}
        for name, parameter in module.named_parameters():
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
        """The (stage, step) to continue from; (0, 0) without a checkpoint.

        Raises:
            UserError: the checkpoint was made by another recipe.
        """
        if not self.path.exists():
            return 0, 0
        with safe_open(self.path, "pt") as file:
            metadata = file.metadata()
        if metadata["recipe"] != self.recipe_key:
            raise UserError(
                f"{self.path}: the recipe or its file of examples has changed since this checkpoint; delete the checkpoint to "
                "start over, or restore the files"
            )
        return int(metadata["stage"]), int(metadata["step"])

    def load_model(self, module: nn.Module) -> None:
        with safe_open(self.path, "pt") as file:
            state = {name[len("model.") :]: file.get_tensor(name) for name in file.keys() if name.startswith("model.")}  # noqa: SIM118
        missing, unexpected = module.load_state_dict(state, strict=False)
        assert not unexpected and all("lm_head" in name for name in missing), (missing, unexpected)

    def load_optimizer(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with safe_open(self.path, "pt") as file:
            names = set(file.keys())
            for name, parameter in module.named_parameters():
                if f"exp_avg.{name}" in names:
                    optimizer.state[parameter] = {
                        moment: file.get_tensor(f"{moment}.{name}").to(parameter.device)
                        for moment in ("step", "exp_avg", "exp_avg_sq")
                    }


# ---------------------------------------------------------------------------------------------------------------- loop


def learning_rate(stage: Stage, step: int) -> float:
    """Linear warm-up, then cosine decay to 5 % of the peak."""
    if step < stage.warmup_steps:
        return stage.learning_rate * (step + 1) / stage.warmup_steps
    share = (step - stage.warmup_steps) / max(1, stage.steps - stage.warmup_steps)
    return stage.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """bfloat16 if the device supports it natively, otherwise None (float32)."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else None
    capable = torch.cpu.get_capabilities()
    return torch.bfloat16 if capable.get("avx512_bf16") or capable.get("amx_bf16") else None


def train(
    recipe_path: Path,
    *,
    output: Path | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> Path:
    """Train the model of a recipe, continuing from the last checkpoint.

    Returns the folder with the weights, the training log and its plot. With several processes, only the main process writes
    files and calls ``progress`` and ``notify``.

    Raises:
        UserError: an invalid recipe, teacher or example, too little memory, or a checkpoint of another recipe.
    """
    recipe = load_recipe(recipe_path)
    output = output or recipe_path.parent
    # Processes wait for each other while the target generates answers and while the main process evaluates.
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=1))])
    if not accelerator.is_main_process:
        progress = notify = None
    torch.manual_seed(recipe.seed)
    task = make_task(recipe, recipe_path, accelerator, progress)
    checkpoint = Checkpoint(output / ".checkpoint" / "state.safetensors", checkpoint_key(recipe, recipe_path))
    first_stage, first_step = checkpoint.position()
    if (first_stage, first_step) != (0, 0):
        checkpoint.load_model(task.module)
    log = output / "training.jsonl"
    dtype = autocast_dtype(accelerator.device)
    if (estimate := task.check_memory(half_precision=dtype is not None)) is not None and notify is not None:
        notify(estimate)
    for number, stage in enumerate(recipe.stages):
        if number < first_stage:
            continue
        begin = first_step if number == first_stage else 0
        parameters = task.begin(stage, number)
        optimizer = torch.optim.AdamW(parameters, weight_decay=stage.weight_decay, betas=(0.9, 0.98), fused=True)
        if begin > 0:
            checkpoint.load_optimizer(task.module, optimizer)
        task.module.train()
        held_out: dict[str, float] = {}
        for step in range(begin, stage.steps):
            started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(stage, step)
            with torch.autocast(accelerator.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
                loss, figures = task.loss(stage, step)
            loss.backward()
            average_gradients(parameters, accelerator)
            task.after_backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if not accelerator.is_main_process:
                continue
            if (step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == stage.steps:
                held_out = task.evaluate()
                figures |= held_out
            if progress is not None:
                name = f"{recipe.name} {stage.objective} {number + 1}/{len(recipe.stages)}"
                progress(name, step + 1, stage.steps, held_out | figures)
            if (step + 1) % LOG_EVERY == 0 or step + 1 == stage.steps:
                seconds = time.perf_counter() - started
                append_line(
                    log,
                    {"stage": number, "objective": stage.objective, "step": step + 1, **figures, "seconds": seconds},
                )
            if (step + 1) % CHECKPOINT_EVERY == 0 and step + 1 < stage.steps:
                checkpoint.save(task.module, optimizer, number, step + 1)
        if accelerator.is_main_process:
            checkpoint.save(task.module, optimizer, number + 1, 0)
    task.module.eval()
    if accelerator.is_main_process:
        task.save(output)
        draw_curve(log, output / "training.png")
        if notify is not None:
            notify(f"weights, training log and plot written to {output}")
    return output


def make_task(recipe: Recipe, recipe_path: Path, accelerator: Accelerator, progress: Progress | None) -> Task:
    if recipe.model not in FEATURE_DRAFTS:
        return ModelTask(recipe, recipe_path)
    report = None if progress is None else lambda done, of: progress(f"{recipe.name} examples", done, of, {})
    return DraftTask(recipe, recipe_path, accelerator, report=report)


def checkpoint_key(recipe: Recipe, recipe_path: Path) -> str:
    """Hash of everything that must not change while a run is resumed: the recipe and its file of examples."""
    content = recipe.model_dump(mode="json", exclude_defaults=True)
    if recipe.data.file is None:
        return content_key(content)
    return content_key([content, sha256_of(recipe_path.parent / recipe.data.file)])


def average_gradients(parameters: Iterable[nn.Parameter], accelerator: Accelerator) -> None:
    """Average gradients over processes, each of which has read its share of the batch."""
    if accelerator.num_processes > 1:
        for parameter in parameters:
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            parameter.grad = accelerator.reduce(gradient, reduction="mean")


def train_with_progress(recipe_path: Path, output: Path | None, console: Console) -> None:
    """Run ``train`` with a progress bar."""
    shown: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:

        def progress(stage: str, step: int, steps: int, figures: dict[str, float]) -> None:
            if shown.get("stage") != stage:
                stack.close()
                shown.update(stage=stage, update=stack.enter_context(console.stage(stage)))
            note = (f"{name.replace('_', ' ')} {figures[name]:.3f}" for name in SHOWN_FIGURES if name in figures)
            shown["update"](step, steps, ", ".join(note))

        def notify(text: str) -> None:
            stack.close()  # end the progress bar of the stage before
            console.say(text)

        train(recipe_path, output=output, progress=progress, notify=notify)
