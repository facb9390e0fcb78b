"""The training loop: stages of a recipe, checkpoints that survive any kill, and weights in Hugging Face format at the
end.
"""

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
SHOWN = ("loss", "token_accuracy", "digit_accuracy", "agreement", "held_out_agreement")  # beside the progress bar
Progress = Callable[[str, int, int, dict[str, float]], None]
"""Called as progress(stage name, step, steps, figures)."""


class Task(Protocol):
    """What the loop trains: a module, and its loss at every step, which depends on the step alone."""

    @property
    def module(self) -> nn.Module:
        """With all that is trained, and no more."""

    def begin(self, stage: Stage, number: int) -> list[nn.Parameter]:
        """Prepare a stage; returns what it trains."""

    def loss(self, stage: Stage, step: int) -> tuple[Tensor, dict[str, float]]:
        """Of one step, and figures to show."""

    def check_needs(self, *, in_half: bool) -> str | None:
        """What the stages need of memory and disk, as one line, where that can be said.

        Raises:
            UserError: more than is there.
        """

    def evaluate(self) -> dict[str, float]:
        """Figures on held-out examples."""

    def after_backward(self) -> None:
        """The gradients of the step are there."""

    def save(self, folder: Path) -> None:
        """Write what was trained."""


# --------------------------------------------------------------------------------------------------------- checkpoints


class Checkpoint:
    """Model, optimizer moments and position in one safetensors file, replaced atomically."""

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
                f"{self.path}: the recipe or its file of examples has changed since this checkpoint; delete the checkpoint to "
                "start over, or restore them"
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
    """Linear warm-up, then a cosine down to a twentieth."""
    if step < stage.warmup_steps:
        return stage.learning_rate * (step + 1) / stage.warmup_steps
    share = (step - stage.warmup_steps) / max(1, stage.steps - stage.warmup_steps)
    return stage.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """bfloat16 where the device multiplies it natively, else None (float32)."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else None
    capable = torch.cpu.get_capabilities()
    return torch.bfloat16 if capable.get("avx512_bf16") or capable.get("amx_bf16") else None


def train(
    recipe_path: Path,
    *,
    output: Path | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Train what the recipe says, going on from the last checkpoint; returns the folder with weights, training log and
    its curve. Of several processes one writes, and calls ``progress`` and ``say``.

    Raises:
        UserError: the recipe, its teacher or its examples, too little memory, or a checkpoint of another recipe.
    """
    recipe = load_recipe(recipe_path)
    output = output or recipe_path.parent
    # Processes wait for each other while the target writes answers, and while one of them evaluates.
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=1))])
    if not accelerator.is_main_process:
        progress = say = None
    torch.manual_seed(recipe.seed)
    task = make_task(recipe, recipe_path, accelerator, progress)
    checkpoint = Checkpoint(output / ".checkpoint" / "state.safetensors", checkpoint_key(recipe, recipe_path))
    first_stage, first_step = checkpoint.position()
    if (first_stage, first_step) != (0, 0):
        checkpoint.load_model(task.module)
    log = output / "training.jsonl"
    dtype = autocast_dtype(accelerator.device)
    if (needs := task.check_needs(in_half=dtype is not None)) is not None and say is not None:
        say(needs)
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
        if say is not None:
            say(f"weights, training log and its curve written to {output}")
    return output


def make_task(recipe: Recipe, recipe_path: Path, accelerator: Accelerator, progress: Progress | None) -> Task:
    """What the recipe's model asks for."""
    if recipe.model not in FEATURE_DRAFTS:
        return ModelTask(recipe, recipe_path)
    report = None if progress is None else lambda done, of: progress(f"{recipe.name} examples", done, of, {})
    return DraftTask(recipe, recipe_path, accelerator, report=report)


def checkpoint_key(recipe: Recipe, recipe_path: Path) -> str:
    """Of what a run must not change when it goes on: the recipe, and the file that it learns from."""
    content = recipe.model_dump(mode="json", exclude_defaults=True)
    if recipe.data.file is None:
        return content_key(content)
    return content_key([content, sha256_of(recipe_path.parent / recipe.data.file)])


def average_gradients(parameters: Iterable[nn.Parameter], accelerator: Accelerator) -> None:
    """Every process has read its own share of the batch: the gradients of all are averaged."""
    if accelerator.num_processes > 1:
        for parameter in parameters:
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            parameter.grad = accelerator.reduce(gradient, reduction="mean")


def train_with_progress(recipe_path: Path, output: Path | None, console: Console) -> None:
    """``autotune train``: the loop with a progress bar for people: what it needs, how it does, where the weights are."""
    shown: dict[str, Any] = {}

    with contextlib.ExitStack() as stack:

        def progress(stage: str, step: int, steps: int, figures: dict[str, float]) -> None:
            if shown.get("stage") != stage:
                stack.close()
                shown.update(stage=stage, update=stack.enter_context(console.stage(stage)))
            note = (f"{name.replace('_', ' ')} {figures[name]:.3f}" for name in SHOWN if name in figures)
            shown["update"](step, steps, ", ".join(note))

        def say(text: str) -> None:
            stack.close()  # what was under way is done
            console.say(text)

        train(recipe_path, output=output, progress=progress, say=say)
