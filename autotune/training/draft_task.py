"""The draft that a recipe trains, with a teacher batch and a subnet for every step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from autotune.documents.subnet import Subnet
from autotune.drafters.checkpoint import load_feature_network, new_network, save_draft
from autotune.drafters.eagle3 import Eagle3Network, new_eagle3, save_eagle3
from autotune.drafters.mtp import MtpNetwork, new_mtp, save_mtp
from autotune.drafters.network import BlocksNetwork
from autotune.drafters.star import StarNetwork
from autotune.errors import UserError
from autotune.files import WORKSPACE, content_key
from autotune.modeling.loading import load_model, load_processor, reference
from autotune.modeling.target import Target
from autotune.recording.recorder import Recorder
from autotune.training.divergence import make_divergence
from autotune.training.examples import JsonlExamples, Report, read_examples, split_file
from autotune.training.losses import drafting_loss, sample_subnet
from autotune.training.memory import BatchShape, check_memory, estimate_memory, teacher_batch_bytes
from autotune.training.recipe import Recipe, Stage, teacher_name
from autotune.training.teacher import DistillationRule, Teacher, TeacherBatches
from autotune.training.unrolled import UnrolledNetwork, unrolled_loss

NUM_HELD_OUT = 3  # batches
NUM_COUNTED = 64  # batches whose tokens are counted
ROWS_COUNTED = 1024  # tokens at a time
EVALUATION = Stage(steps=1, batch_size=1, learning_rate=1.0)


class DraftTask:
    """A draft to train for the recipe's teacher. The loss of a step is a function of the recipe and the step alone."""

    module: BlocksNetwork | UnrolledNetwork
    """Holds exactly the trained parameters."""

    def __init__(
        self, recipe: Recipe, recipe_path: Path, accelerator: Accelerator, *, report: Report | None = None
    ) -> None:
        self.recipe = recipe
        self.recipe_path = recipe_path
        self.accelerator = accelerator
        self.share = accelerator.process_index, accelerator.num_processes
        smallest, largest = (select(stage.batch_size for stage in recipe.stages) for select in (min, max))
        if smallest < self.share[1]:
            raise UserError(
                f"{recipe_path}: every process needs an example of each batch; got batch_size {smallest} for {self.share[1]} "
                "processes; raise batch_size, or start fewer processes"
            )
        path = recipe_path.parent / recipe.data.file  # an invalid file is refused before the target is loaded
        training, held_out = split_file(
            path, batch_size=largest, num_examples=recipe.data.num_examples, num_held_out=NUM_HELD_OUT * largest
        )
        name = teacher_name(recipe, recipe_path)
        self.processor = load_processor(name)
        self.target = Target(load_model(name, device=str(accelerator.device)))
        self.target_reference = reference(name)
        self.teacher = Teacher(self.target)
        for stage in recipe.stages:
            if isinstance(stage.distillation, int) and stage.distillation > self.teacher.num_layers:
                raise UserError(
                    f"{recipe_path}: distillation names a layer of the target, 1 to {self.teacher.num_layers}; got "
                    f"{stage.distillation}; name one of them"
                )
        torch.manual_seed(recipe.seed)
        self.module = self._new_module().to(accelerator.device)
        self._head_masks: list[Tensor] | None = None
        recorder = Recorder(self.target, self.target_reference, self.processor, WORKSPACE)
        lines = read_examples(path, [*training, *held_out], recorder, accelerator, report)
        self._training_lines, self._held_out_lines = lines[: len(training)], lines[len(training) :]

    def _new_module(self) -> BlocksNetwork | UnrolledNetwork:
        recipe, source = self.recipe, str(self.recipe_path)
        if recipe.trained_stages > 0:
            return self._stored_module("trained_stages needs the draft of these stages", "0")
        if recipe.initial_weights == "stored":
            return self._stored_module("initial_weights: stored needs a draft", "new")
        if recipe.model == "mtp":
            return new_mtp(self.target)
        if recipe.model == "eagle3":
            return new_eagle3(recipe.draft, self.target, source=source)
        return new_network(recipe.model, recipe.draft, self.target, source=source)

    def _stored_module(self, needs: str, default: str) -> BlocksNetwork | UnrolledNetwork:
        """The draft beside the recipe, from which training continues.

        Raises:
            UserError: there is none, or it is of another kind.
        """
        folder = self.recipe_path.parent
        if not (folder / "config.json").exists():
            raise UserError(f"{self.recipe_path}: {needs} in {folder}; set it to {default}")
        network = load_feature_network(str(folder), folder, self.target)
        if network.config.kind != self.recipe.model:
            raise UserError(
                f"{self.recipe_path}: training continues from the draft in {folder}, which is of kind {network.config.kind}; "
                f"got model {self.recipe.model}; set trained_stages to 0 and initial_weights to new"
            )
        assert isinstance(network, BlocksNetwork | UnrolledNetwork)
        return network.requires_grad_(True)

    def _examples(self, stage: Stage) -> tuple[JsonlExamples, Path]:
        """The examples of this process in a stage, and the folder in which their teacher batches are cached."""
        data = self.recipe.data
        examples = JsonlExamples(
            self._training_lines,
            self.target,
            self.processor,
            batch_size=stage.batch_size,
            seed=data.seed,
            share=self.share,
        )
        content: dict[str, Any] = {
            "target": self.target_reference.sha256 or self.target_reference.id,
            "data": data.model_dump(exclude={"file"}),
            "batch_size": stage.batch_size,
            "share": list(self.share),
            "lines": examples.key,
        }
        return examples, WORKSPACE / "teacher-batches" / content_key(content)

    def begin(self, stage: Stage, number: int) -> None:
        """Prepare a stage."""
        self._compare = make_divergence(stage.divergence, compiled=self.recipe.compile)
        self._teacher_batches = self._batches_of(stage, number)
        self._stage_number = number
        self._held_out = []
        if self.accelerator.is_main_process:  # only it evaluates, in batches of the size that one process trains on
            batch_size = math.ceil(stage.batch_size / self.share[1])
            held_out = JsonlExamples(self._held_out_lines, self.target, self.processor, batch_size=batch_size)
            self._held_out = [
                self.teacher.read(held_out[index], layers=self._layers_read)
                for index in range(min(NUM_HELD_OUT, held_out.num_batches))
            ]

    def _batches_of(self, stage: Stage, number: int) -> TeacherBatches:
        """The teacher batches of the stage ``number``."""
        examples, cache = self._examples(stage)
        layers, rule = self._layers_kept(stage)
        seed = 10 * self.recipe.seed + number
        return TeacherBatches(examples, self.teacher, layers=layers, rule=rule, cache=cache, seed=seed)

    @property
    def _layers_read(self) -> tuple[int, ...]:
        """Target layers whose outputs the draft can read."""
        network = self.module
        return network.config.layers if isinstance(network, Eagle3Network) else network.config.injection_layers

    def _layers_kept(self, stage: Stage) -> tuple[set[int], DistillationRule]:
        """Target layers that the teacher batches of a stage keep, and the rule that chooses one more in each batch."""
        layers, rule = {*self._layers_read, self.teacher.num_layers}, stage.distillation
        return (layers | {rule}, "none") if isinstance(rule, int) else (layers, rule)

    def check_memory(self, *, half_precision: bool) -> str:
        """Estimated memory and disk use of all stages as one line.

        Raises:
            UserError: more than is available.
        """
        hidden_size = self.target.text.config.hidden_size
        max_layers = 0
        shapes: list[BatchShape] = []
        cached: dict[Path, int] = {}  # bytes of the teacher batches in each folder
        for stage in self.recipe.stages:
            layers, rule = self._layers_kept(stage)
            num_layers = min(len(layers) + (rule != "none"), self.teacher.num_layers)
            max_layers = max(max_layers, num_layers)
            examples, cache = self._examples(stage)
            shapes += examples.shapes
            size = sum(teacher_batch_bytes(shape, hidden_size, num_layers) for shape in examples.shapes)
            cached[cache] = max(size, cached.get(cache, 0))
        written = {cache: sum(file.stat().st_size for file in cache.glob("*.safetensors")) for cache in cached}
        needs = estimate_memory(
            self.target,
            self.module,
            shapes,
            num_layers_kept=max_layers,
            num_held_out=NUM_HELD_OUT,
            disk_bytes=sum(max(0, cached[cache] - written[cache]) for cache in cached),
            half_precision=half_precision,
        )
        folder, device = WORKSPACE / "teacher-batches", self.accelerator.device
        return check_memory(needs, device, folder, num_processes=self.share[1], source=self.recipe_path)

    def loss(self, stage: Stage, step: int) -> tuple[Tensor, dict[str, float]]:
        """The loss of one step, and metrics to display."""
        batch = self._teacher_batches[step]
        if isinstance(self.module, UnrolledNetwork):
            return unrolled_loss(self.module, batch, num_steps=stage.unrolled_steps, compare=self._compare)
        seed = (self.recipe.seed * 1000 + self._stage_number) * 1_000_000 + step
        generator = torch.Generator().manual_seed(seed)
        subnet, self._head_masks = self._subnet(stage, generator)
        return drafting_loss(self.module, batch, stage, subnet, self._head_masks, generator, self._compare)

    def _subnet(self, stage: Stage, generator: torch.Generator) -> tuple[Subnet, list[Tensor] | None]:
        """The subnet of a step, and its head masks if the draft is a supernet."""
        if not isinstance(self.module, StarNetwork):
            return Subnet(visual_keep=self.module.config.visual_keep), None
        subnet = stage.subnet or Subnet()
        is_full = stage.whole_share > 0 and float(torch.rand((), generator=generator)) < stage.whole_share
        if stage.subnets == "random" and not is_full:
            subnet = sample_subnet(self.module, generator)
        return subnet, self.module.head_masks(subnet.head_shares)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean metrics of the full draft over the held-out teacher batches."""
        self.module.eval()
        metrics = []
        for batch in self._held_out:
            if isinstance(self.module, UnrolledNetwork):
                metrics.append(unrolled_loss(self.module, batch)[1])
            else:
                subnet, noise = Subnet(visual_keep=self.module.config.visual_keep), torch.Generator().manual_seed(0)
                metrics.append(drafting_loss(self.module, batch, EVALUATION, subnet, None, noise)[1])
        self.module.train()
        return {f"held_out_{name}": sum(batch[name] for batch in metrics) / len(metrics) for name in metrics[0]}

    def after_backward(self) -> None:
        """Accumulate the importance of heads, when the gradients of a step have been computed."""
        if isinstance(self.module, StarNetwork) and self._head_masks is not None:
            self.module.observe_importance(self._head_masks)

    def save(self, folder: Path) -> None:
        """Write the trained draft."""
        if isinstance(self.module, Eagle3Network):
            save_eagle3(self.module, folder)
        elif isinstance(self.module, MtpNetwork):
            save_mtp(self.module, folder)
        else:
            self.module.token_frequencies = self._token_frequencies()
            save_draft(self.module, folder)

    @torch.no_grad()
    def _token_frequencies(self) -> Tensor:
        """How often the target is expected to emit each token along the first batches of the last stage, [vocabulary]."""
        stage, number = self.recipe.stages[-1], len(self.recipe.stages) - 1
        batches = self._batches_of(stage, number)
        num_batches = min(NUM_COUNTED, stage.steps, batches.examples.num_batches)
        total = torch.zeros(self.target.vocab_size, dtype=torch.float64, device=self.target.device)
        for number in range(num_batches):
            batch = batches[number]
            states = batch.hidden[self.teacher.num_layers][batch.loss_mask]
            for rows in states.split(ROWS_COUNTED):
                total += batch.head(rows).double().softmax(-1).sum(0)
        return total.float()
