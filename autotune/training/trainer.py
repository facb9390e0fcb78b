"""The training loop: the stages of a recipe, crash-safe checkpoints, and the final weights."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, is_tensorboard_available
from torch import nn

from autotune.console import Console, Update
from autotune.errors import UserError, first_line
from autotune.files import append_line, content_key, sha256_of
from autotune.machine.contention_monitor import ContentionMonitor
from autotune.modeling.loading import Dtype
from autotune.modeling.weight_files import check_finite, save_content
from autotune.training.draft_task import CHAIN_DEPTH, DraftTask, autocast_dtype
from autotune.training.recipe import Recipe, Stage

CHECKPOINT_EVERY = 100  # steps
LOG_EVERY = 25  # steps
STATE, BEST = "state.pt", "best.pt"
AGREEMENT_METRIC = "held_out_agreement"  # by which weights are kept
SHOWN_METRICS = ("loss", "agreement", AGREEMENT_METRIC)  # in the progress bar


class Silent(Console):
    """The console of processes that print nothing."""

    def say(self, text: str) -> None:
        pass

    @contextlib.contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Update]:
        yield lambda done, total, note="": None


@dataclass(frozen=True)
class Checkpoint:
    """Model, optimizers and position, in one file of torch that is replaced atomically."""

    path: Path
    recipe_key: str

    def save(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], stage: int, step: int, **further: float
    ) -> None:
        content = {"recipe": self.recipe_key, "stage": stage, "step": step, **further, "model": module.state_dict()}
        content["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
        save_content(self.path, content)

    def load(self, module: nn.Module | None = None) -> dict[str, Any]:
        """Load what was saved, and its weights into ``module``; empty without a checkpoint.

        Raises:
            UserError: a damaged checkpoint, or that of another recipe.
        """
        if not self.path.exists():
            return {}
        try:
            content: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
            is_same = content["recipe"] == self.recipe_key
            if is_same and module is not None:
                check_finite(content["model"], source=self.path)
                module.load_state_dict(content["model"])
        except UserError:
            raise
        except Exception as error:  # torch raises many kinds for damaged files
            raise UserError(
                f"{self.path}: the checkpoint is damaged ({first_line(error)}); delete it to start over"
            ) from None
        if not is_same:
            raise UserError(
                f"{self.path}: the recipe or its file of examples has changed since this checkpoint; delete the checkpoint to "
                "start over, or restore the files"
            )
        return content


def learning_rate(stage: Stage, step: int) -> float:
    """Linear warm-up, then cosine decay to the stage's share of the peak."""
    if step < stage.warmup_steps:
        return stage.learning_rate * (step + 1) / stage.warmup_steps
    share = (step - stage.warmup_steps) / max(1, stage.steps - stage.warmup_steps)
    return stage.learning_rate * (stage.final_rate + (1 - stage.final_rate) * 0.5 * (1 + math.cos(math.pi * share)))


def make_optimizers(module: nn.Module, parameters: Sequence[nn.Parameter], stage: Stage) -> list[torch.optim.Optimizer]:
    """AdamW of all parameters; or Muon of the layers' matrices, and AdamW of embeddings, heads, norms and vectors."""
    linear = {
        one.weight for name, one in module.named_modules() if isinstance(one, nn.Linear) and "lm_head" not in name
    }
    linear -= {one.weight for one in module.modules() if isinstance(one, nn.Embedding)}
    matrices = [one for one in parameters if one in linear and stage.optimizer == "muon"]
    others = [one for one in parameters if one not in linear or stage.optimizer != "muon"]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, weight_decay=stage.weight_decay, betas=stage.betas, fused=True)
    ]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, weight_decay=stage.weight_decay, adjust_lr_fn="match_rms_adamw"))
    return optimizers


@dataclass
class Trainer:
    """Runs the stages of a recipe. With several processes, only the main process writes files and reports progress."""

    recipe: Recipe
    task: DraftTask
    accelerator: Accelerator
    checkpoint: Checkpoint
    best: Checkpoint
    """The weights of the evaluation of the last stage with the highest held-out agreement, ``agreement``."""
    log: Path
    console: Console

    def run(self) -> None:
        saved = self.checkpoint.load(self.task.module)
        if not saved:
            self.task.prepare()
        for number in range(saved.get("stage", 0), len(self.recipe.stages)):
            self._run_stage(number, saved if number == saved.get("stage") and saved["step"] else {})
        self.task.module.eval()

    def _run_stage(self, number: int, saved: Mapping[str, Any]) -> None:
        """Run a stage from its first step, or from the one that was saved."""
        stage, module, num_stages = self.recipe.stages[number], self.task.module, len(self.recipe.stages)
        self.task.begin(number)
        parameters, first_step = list(module.parameters()), saved.get("step", 0)
        optimizers = make_optimizers(module, parameters, stage)
        for optimizer, state in zip(optimizers, saved.get("optimizers", ()), strict=False):
            optimizer.load_state_dict(state)
        module.train()
        held_out: dict[str, float] = {}
        best = self.best.load() if first_step > 0 else {}
        most = best["agreement"] if best and best["step"] <= first_step else -1.0  # later steps are repeated
        layers: Counter[int] = Counter()  # distilled in the steps since the last line of the log
        with self.console.stage(f"{self.recipe.name} stage {number + 1}/{num_stages}", stage.steps) as update:
            for step in range(first_step, stage.steps):
                started = time.perf_counter()
                metrics = self._step(stage, step, parameters, optimizers)
                if (layer := metrics.pop("distilled_layer", None)) is not None:
                    layers[int(layer)] += 1
                if not self.accelerator.is_main_process:
                    continue
                num_done, is_last = step + 1, step + 1 == stage.steps
                if num_done % CHECKPOINT_EVERY == 0 or is_last:
                    held_out = self.task.evaluate()
                    metrics |= held_out
                    if number == num_stages - 1 and held_out[AGREEMENT_METRIC] > most:
                        most = held_out[AGREEMENT_METRIC]
                        self.best.save(module, (), number, num_done, agreement=most)
                shown = held_out | metrics
                note = (f"{name.replace('_', ' ')} {shown[name]:.3f}" for name in SHOWN_METRICS if name in shown)
                update(num_done, stage.steps, ", ".join(note))
                if num_done % LOG_EVERY == 0 or is_last:
                    record: dict[str, Any] = {"stage": number, "step": num_done}
                    if layers:
                        record["distilled_layers"] = {str(layer): layers[layer] for layer in sorted(layers)}
                        layers.clear()
                    append_line(self.log, {**record, **metrics, "seconds": time.perf_counter() - started})
                    self.accelerator.log(metrics, sum(one.steps for one in self.recipe.stages[:number]) + num_done)
                if num_done % CHECKPOINT_EVERY == 0 and not is_last:
                    self.checkpoint.save(module, optimizers, number, num_done)
        if self.accelerator.is_main_process:
            self.checkpoint.save(module, optimizers, number + 1, 0)

    def _step(
        self, stage: Stage, step: int, parameters: list[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> dict[str, float]:
        """Update the parameters once, and return metrics to display."""
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = learning_rate(stage, step)
        dtype = autocast_dtype(self.accelerator.device, self.task.target.dtype)
        with torch.autocast(self.accelerator.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            loss, metrics = self.task.loss(step)
        loss.backward()
        average_gradients(parameters, self.accelerator)
        self.task.module.after_backward()
        nn.utils.clip_grad_norm_(parameters, stage.gradient_clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return metrics


def train(
    recipe_path: Path, *, output: Path | None = None, dtype: Dtype | None = None, console: Console | None = None
) -> Path:
    """Train the draft of a recipe, continuing from the last checkpoint; ``dtype`` of the target, instead of the
    recipe's.

    Returns the folder with the weights and the training log. Only the main process prints to ``console``.

    Raises:
        UserError: an invalid recipe, teacher or example, too little memory, or a checkpoint of another recipe.
    """
    recipe = Recipe.load(recipe_path)
    recipe = recipe if dtype is None else recipe.model_copy(update={"dtype": dtype})
    output = output or recipe_path.parent
    # Processes wait for each other while the target generates answers and while the main process evaluates.
    accelerator = Accelerator(
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=1))],
        log_with="tensorboard" if is_tensorboard_available() else None,
        project_dir=output,
    )
    accelerator.init_trackers("tensorboard")
    console = console if console is not None and accelerator.is_main_process else Silent()
    monitor = ContentionMonitor(str(accelerator.device))
    task = DraftTask(recipe, recipe_path, accelerator, console)
    # The recipe and its file of examples, which magpie writes first, must not change while a run is resumed.
    content = recipe.model_dump(mode="json", exclude_defaults=True)
    key = content_key([content, sha256_of(recipe_path.parent / recipe.data.file)])
    state, best = (Checkpoint(output / ".checkpoint" / name, key) for name in (STATE, BEST))
    console.say(task.try_largest_batches())
    Trainer(recipe, task, accelerator, state, best, output / "training.jsonl", console).run()
    if not accelerator.is_main_process:
        return output
    if kept := best.load(task.module):
        console.say(
            f"the weights are those of step {kept['step']} of the last stage, whose held-out agreement is the highest: "
            f"{kept['agreement']:.1%}"
        )
    task.save(output)
    tokens = task.tokens_per_round(output)
    accelerator.log({"held_out_tokens_per_round": tokens}, sum(stage.steps for stage in recipe.stages))
    console.say(f"on held-out prompts a chain of {CHAIN_DEPTH} emits {tokens:.2f} tokens per round")
    console.say(monitor.contention().describe("during the training"))
    console.say(f"weights and training log written to {output}")
    return output


def average_gradients(parameters: Iterable[nn.Parameter], accelerator: Accelerator) -> None:
    """Average gradients over processes, each of which has read its share of the batch."""
    if accelerator.num_processes > 1:
        for parameter in parameters:
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            parameter.grad = accelerator.reduce(gradient, reduction="mean")
