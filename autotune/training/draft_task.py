"""Training of drafts that read the target's features, with a teacher batch and a subnet for every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from autotune.acceptance.recorder import Recorder
from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import new_network, save_draft
from autotune.drafters.network import BlocksNetwork
from autotune.drafters.star import StarNetwork
from autotune.errors import UserError
from autotune.files import WORKSPACE, content_key
from autotune.modeling.loading import load_model, load_processor, reference
from autotune.modeling.target import Target
from autotune.training.batches import Batches
from autotune.training.examples import ExampleFile, JsonlExamples, Report
from autotune.training.losses import drafting_loss, sample_subnet
from autotune.training.memory import BatchShape, check_memory, estimate_memory, teacher_batch_bytes
from autotune.training.recipe import Recipe, Stage, teacher_name
from autotune.training.teacher import Teacher
from autotune.training.teacher_batches import DigitsExamples, Examples, ProcessShare, TeacherBatches

FIRST_SEED = 1000  # examples for drafts use other seeds than those for the bundled models
NUM_HELD_OUT = 3  # batches
EVALUATION = Stage(objective="drafting", steps=1, batch_size=1, learning_rate=1.0)


class DraftTask:
    """Trains a draft for the recipe's teacher (a ``Task``)."""

    module: BlocksNetwork

    def __init__(
        self, recipe: Recipe, recipe_path: Path, accelerator: Accelerator, *, report: Report | None = None
    ) -> None:
        self.recipe = recipe
        self.recipe_path = recipe_path
        self.accelerator = accelerator
        self.share = (accelerator.process_index, accelerator.num_processes)
        smallest, largest = (find(stage.batch_size for stage in recipe.stages) for find in (min, max))
        if smallest < self.share[1]:
            raise UserError(
                f"{recipe_path}: every process needs an example of each batch; got batch_size {smallest} for {self.share[1]} "
                "processes; raise batch_size, or start fewer processes"
            )
        data = recipe.data
        file = None
        if data.file is not None:
            file = ExampleFile(
                recipe_path.parent / data.file,
                batch_size=largest,
                num_examples=data.num_examples,
                num_held_out=NUM_HELD_OUT * largest,
            )
        self.teacher_name = teacher_name(recipe, recipe_path)
        self.processor = load_processor(self.teacher_name)
        self.target = Target(load_model(self.teacher_name, device=str(accelerator.device)))
        self.target_reference = reference(self.teacher_name)
        self.teacher = Teacher(self.target)
        torch.manual_seed(recipe.seed)
        self.module = new_network(recipe.model, recipe.draft, self.target, source=str(recipe_path)).to(
            accelerator.device
        )
        self._head_masks: list[Tensor] | None = None
        self._lines = None
        if file is not None:
            recorder = Recorder(self.target, self.target_reference, self.processor, WORKSPACE)
            self._lines = file.read(recorder, accelerator, report)

    def _examples(self, stage: Stage) -> tuple[Examples, Path]:
        """The examples of this process in a stage, and the folder in which their teacher batches are cached."""
        data = self.recipe.data
        described: dict[str, Any] = {
            "target": self.target_reference.sha256 or self.target_reference.id,
            "data": data.model_dump(exclude={"file"}),
            "batch_size": stage.batch_size,
            "share": list(self.share),
        }
        examples: Examples
        if self._lines is not None:
            examples = JsonlExamples(
                self._lines[0],
                self.target,
                self.processor,
                batch_size=stage.batch_size,
                seed=data.seed,
                share=self.share,
            )
            described["lines"] = examples.key
        else:
            batches = Batches(
                self.processor,
                self.recipe.tasks,
                split="train",
                batch_size=stage.batch_size,
                seed=FIRST_SEED + data.seed,
            )
            num_batches = None if data.num_examples is None else max(1, data.num_examples // stage.batch_size)
            examples = ProcessShare(DigitsExamples(batches, self.target, num_batches), *self.share)
            described["tasks"] = self.recipe.tasks
        return examples, WORKSPACE / "teacher-batches" / content_key(described)

    def _held_out_examples(self, stage: Stage) -> Examples:
        """Held-out examples, in batches of the size that one process trains on."""
        batch_size = -(-stage.batch_size // self.share[1])
        if self._lines is not None:
            return JsonlExamples(self._lines[1], self.target, self.processor, batch_size=batch_size)
        batches = Batches(self.processor, self.recipe.tasks, split="held-out", batch_size=batch_size, seed=FIRST_SEED)
        return DigitsExamples(batches, self.target)

    def begin(self, stage: Stage, number: int) -> list[nn.Parameter]:
        """Prepare the examples of a stage and return the parameters that it trains."""
        examples, cache = self._examples(stage)
        layers = self.module.config.injection_layers
        self._teacher_batches = TeacherBatches(
            examples,
            self.teacher,
            layers=layers,
            rule=stage.distillation,
            cache=cache,
            seed=10 * self.recipe.seed + number,
        )
        self._number = number
        self._held_out = []
        if self.accelerator.is_main_process:  # only it evaluates
            held_out = self._held_out_examples(stage)
            num_batches = min(NUM_HELD_OUT, held_out.num_batches or NUM_HELD_OUT)
            self._held_out = [self.teacher.read(held_out[number], layers=layers) for number in range(num_batches)]
        return list(self.module.parameters())

    def check_memory(self, *, half_precision: bool) -> str:
        """Estimated memory and disk use of all stages as one line.

        Raises:
            UserError: more than is available.
        """
        read = {*self.module.config.injection_layers, self.teacher.num_layers}
        max_kept = 0
        shapes: list[BatchShape] = []
        caches: dict[Path, int] = {}  # bytes
        for stage in self.recipe.stages:
            num_layers_kept = min(len(read) + (stage.distillation != "none"), self.teacher.num_layers)
            examples, cache = self._examples(stage)
            max_kept = max(max_kept, num_layers_kept)
            shapes += examples.shapes
            if examples.num_batches is not None:
                of_batch = [
                    teacher_batch_bytes(s, self.target.text.config.hidden_size, num_layers_kept)
                    for s in examples.shapes
                ]
                needed = sum(of_batch) * examples.num_batches // len(of_batch)
                caches[cache] = max(needed, caches.get(cache, 0))
        cached = {cache: sum(file.stat().st_size for file in cache.glob("*.safetensors")) for cache in caches}
        needs = estimate_memory(
            self.target,
            self.module,
            shapes,
            num_layers_kept=max_kept,
            num_held_out=NUM_HELD_OUT,
            disk_bytes=sum(max(0, needed - cached[cache]) for cache, needed in caches.items()),
            half_precision=half_precision,
        )
        return check_memory(
            needs,
            self.accelerator.device,
            WORKSPACE / "teacher-batches",
            num_processes=self.share[1],
            source=self.recipe_path,
        )

    def loss(self, stage: Stage, step: int) -> tuple[Tensor, dict[str, float]]:
        """The loss of one step, and figures to display."""
        seed = (self.recipe.seed * 1000 + self._number) * 1_000_000 + step
        generator = torch.Generator().manual_seed(seed)
        subnet, self._head_masks = self._subnet(stage, generator)
        return drafting_loss(self.module, self._teacher_batches[step], stage, subnet, self._head_masks, generator)

    def _subnet(self, stage: Stage, generator: torch.Generator) -> tuple[Subnet, list[Tensor] | None]:
        """The subnet of a step, and its head masks if the draft is a supernet."""
        if not isinstance(self.module, StarNetwork):
            return Subnet(visual_keep=self.module.config.visual_keep), None
        subnet = stage.subnet or Subnet()
        train_full = stage.whole_share > 0 and float(torch.rand((), generator=generator)) < stage.whole_share
        if stage.subnets == "random" and not train_full:
            subnet = sample_subnet(self.module, generator)
        return subnet, self.module.head_masks(subnet.head_shares)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean figures of the full draft over the held-out teacher batches."""
        keep = self.module.config.visual_keep
        figures = []
        self.module.eval()
        for batch in self._held_out:
            generator = torch.Generator().manual_seed(0)
            figures.append(drafting_loss(self.module, batch, EVALUATION, Subnet(visual_keep=keep), None, generator)[1])
        self.module.train()
        return {f"held_out_{name}": sum(batch[name] for batch in figures) / len(figures) for name in figures[0]}

    def after_backward(self) -> None:
        """Accumulate the importance of heads."""
        if isinstance(self.module, StarNetwork) and self._head_masks is not None:
            self.module.observe_importance(self._head_masks)

    def save(self, folder: Path) -> None:
        """Write the draft's config and weights."""
        save_draft(self.module, folder)
