"""The training loop: the stages of a recipe, crash-safe checkpoints, and the final weights."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, is_tensorboard_available
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from autotune.console import Console
from autotune.errors import UserError
from autotune.files import append_line, content_key, sha256_of
from autotune.machine.contention_monitor import ContentionMonitor
from autotune.modeling.loading import Dtype
from autotune.modeling.weight_files import check_finite, save_tensors
from autotune.training.draft_task import CHAIN_DEPTH, DraftTask, autocast_dtype
from autotune.training.recipe import Recipe, Stage

CHECKPOINT_EVERY = 100  # steps
LOG_EVERY = 25  # steps
STATE = "state.safetensors"
MOMENTS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.Muon: ("momentum_buffer",),
}
"""State of a parameter in each optimizer."""
AGREEMENT_METRIC = "held_out_agreement"  # by which weights are kept
SHOWN_METRICS = ("loss", "agreement", AGREEMENT_METRIC)  # in the progress bar
Progress = Callable[[str, int, int, dict[str, float]], None]
"""Called as progress(stage name, step, steps, metrics)."""


@dataclass(frozen=True)
class Checkpoint:
    """Model, optimizer moments and position, in one safetensors file that is replaced atomically."""

    path: Path
    recipe_key: str

    def save(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], stage: int, step: int, **further: float
    ) -> None:
        own = own_names(module)
        tensors = {f"model.{name}": tensor for name, tensor in module.state_dict().items() if name in own}
        for name, parameter in module.named_parameters():
            for optimizer in optimizers:
                for moment, value in optimizer.state.get(parameter, {}).items():
                    tensors[f"{moment}.{name}"] = value
        numbers = {"stage": stage, "step": step, **further}
        save_tensors(self.path, tensors, {"recipe": self.recipe_key} | {name: str(n) for name, n in numbers.items()})

    def numbers(self) -> dict[str, float]:
        """The ``stage`` and ``step`` to continue from, and what else was saved; empty without a checkpoint, a
        ``UserError`` for a damaged or another recipe's one.
        """
        if not self.path.exists():
            return {}
        with self._reading(), safe_open(self.path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("recipe") != self.recipe_key:
                raise UserError(
                    f"{self.path}: the recipe or its file of examples has changed since this checkpoint; delete the checkpoint to "
                    "start over, or restore the files"
                )
            return {name: float(metadata[name]) for name in {"stage", "step", *metadata} - {"recipe"}}

    def position(self) -> tuple[int, int]:
        """The (stage, step) to continue from; (0, 0) without a checkpoint."""
        numbers = self.numbers() or {"stage": 0, "step": 0}
        return int(numbers["stage"]), int(numbers["step"])

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Inside the context the file is read, which may be damaged."""
        try:
            yield
        except (SafetensorError, OSError, LookupError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{self.path}: the checkpoint is damaged ({reason}); delete it to start over") from None

    def load_model(self, module: nn.Module) -> None:
        with self._reading():
            check_finite(tensors := load_file(self.path), source=self.path)
            state = {name[6:]: tensor for name, tensor in tensors.items() if name.startswith("model.")}
            missing, unexpected = module.load_state_dict(state, strict=False)
            if wrong := [*unexpected, *sorted(own_names(module) & set(missing))]:
                raise ValueError(f"{wrong[0]} is missing, or none of the draft's")

    def load_optimizers(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        names = {parameter: name for name, parameter in module.named_parameters()}
        with self._reading():
            tensors = load_file(self.path)
            for optimizer in optimizers:
                for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                    keys = {moment: f"{moment}.{names[parameter]}" for moment in MOMENTS[type(optimizer)]}
                    if all(key in tensors for key in keys.values()):
                        state = {moment: tensors[key].to(parameter.device) for moment, key in keys.items()}
                        if any(value.ndim and value.shape != parameter.shape for value in state.values()):
                            raise ValueError(f"moments of {names[parameter]} have another shape")
                        optimizer.state[parameter] = state


def own_names(module: nn.Module) -> set[str]:
    """Names of parameters and buffers, without further names of tied ones."""
    return {name for name, _ in (*module.named_parameters(), *module.named_buffers())}


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
    log: Path
    progress: Progress | None
    autocast_dtype: torch.dtype | None
    """None: no autocast, float32."""
    best: Checkpoint
    """The weights of the evaluation of the last stage with the highest held-out agreement, ``agreement``."""

    def run(self) -> None:
        first_stage, first_step = self.checkpoint.position()
        if (first_stage, first_step) != (0, 0):
            self.checkpoint.load_model(self.task.module)
        else:
            self.task.prepare()
        for number in range(first_stage, len(self.recipe.stages)):
            self._run_stage(number, first_step if number == first_stage else 0)
        self.task.module.eval()

    def _run_stage(self, number: int, first_step: int) -> None:
        stage, module = self.recipe.stages[number], self.task.module
        self.task.begin(number)
        parameters = list(module.parameters())
        optimizers = make_optimizers(module, parameters, stage)
        if first_step > 0:
            self.checkpoint.load_optimizers(module, optimizers)
        module.train()
        held_out: dict[str, float] = {}
        best = self.best.numbers() if first_step > 0 else {}
        most = best["agreement"] if best and best["step"] <= first_step else -1.0  # later steps are repeated
        layers: Counter[int] = Counter()  # distilled in the steps since the last line of the log
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
                if number == len(self.recipe.stages) - 1 and held_out[AGREEMENT_METRIC] > most:
                    most = held_out[AGREEMENT_METRIC]
                    self.best.save(module, (), number, num_done, agreement=most)
            if self.progress is not None:
                name = f"{self.recipe.name} stage {number + 1}/{len(self.recipe.stages)}"
                self.progress(name, num_done, stage.steps, held_out | metrics)
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
        dtype = self.autocast_dtype
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
    recipe_path: Path,
    *,
    output: Path | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
    dtype: Dtype | None = None,
    console: Console | None = None,
) -> Path:
    """Train the draft of a recipe, continuing from the last checkpoint; ``dtype`` of the target, instead of the
    recipe's.

    Returns the folder with the weights and the training log. Only the main process calls ``progress`` and
    ``notify``.

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
    if not accelerator.is_main_process:
        progress = notify = console = None
    report = None if progress is None else lambda done, of: progress(f"{recipe.name} examples", done, of, {})

    def checkpoint(name: str) -> Checkpoint:
        """The recipe and its file of examples, which magpie writes first, must not change while a run is resumed."""
        content = recipe.model_dump(mode="json", exclude_defaults=True)
        key = content_key([content, sha256_of(recipe_path.parent / recipe.data.file)])
        return Checkpoint(output / ".checkpoint" / name, key)

    monitor = ContentionMonitor(str(accelerator.device))
    task = DraftTask(recipe, recipe_path, accelerator, report=report, console=console)
    autocast = autocast_dtype(accelerator.device, task.target.dtype)
    log, best = output / "training.jsonl", checkpoint("best.safetensors")
    trainer = Trainer(recipe, task, accelerator, checkpoint(STATE), log, progress, autocast, best)
    memory = task.try_largest_batches()
    if notify is not None:
        notify(memory)
    trainer.run()
    if not accelerator.is_main_process:
        return output
    if kept := best.numbers():
        best.load_model(task.module)
    task.save(output)
    if notify is not None:
        if kept:
            notify(
                f"the weights are those of step {kept['step']:.0f} of the last stage, whose held-out agreement is the highest: "
                f"{kept['agreement']:.1%}"
            )
        tokens = task.tokens_per_round(output)
        accelerator.log({"held_out_tokens_per_round": tokens}, sum(stage.steps for stage in recipe.stages))
        notify(f"on held-out prompts a chain of {CHAIN_DEPTH} emits {tokens:.2f} tokens per round")
        notify(monitor.contention().describe("during the training"))
        notify(f"weights and training log written to {output}")
    return output


def average_gradients(parameters: Iterable[nn.Parameter], accelerator: Accelerator) -> None:
    """Average gradients over processes, each of which has read its share of the batch."""
    if accelerator.num_processes > 1:
        for parameter in parameters:
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            parameter.grad = accelerator.reduce(gradient, reduction="mean")


def train_with_progress(recipe_path: Path, output: Path | None, console: Console, dtype: Dtype | None = None) -> None:
    shown: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:

        def progress(stage: str, step: int, steps: int, metrics: dict[str, float]) -> None:
            if shown.get("stage") != stage:
                stack.close()
                shown.update(stage=stage, update=stack.enter_context(console.stage(stage, steps)))
            note = (f"{name.replace('_', ' ')} {metrics[name]:.3f}" for name in SHOWN_METRICS if name in metrics)
            shown["update"](step, steps, ", ".join(note))

        def notify(text: str) -> None:
            stack.close()  # end the progress bar of the stage before
            console.say(text)

        train(recipe_path, output=output, progress=progress, notify=notify, dtype=dtype, console=console)
