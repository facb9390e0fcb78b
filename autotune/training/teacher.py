"""The frozen target as a teacher: its features, embeddings and attention statistics on batches of training examples."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from autotune.documents.loss_settings import DistillationRule
from autotune.drafters.teacher_batch import TeacherBatch
from autotune.errors import UserError
from autotune.modeling.prompt import EncodedPrompt
from autotune.modeling.target import LayerAttention, Target, attention_entropy, observed_attention, visual_scores
from autotune.modeling.weight_files import save_content
from autotune.training.examples import Example, JsonlExamples

ENTROPY_QUERIES = 64  # tokens of one example of a batch whose attention entropy is measured


class Teacher:
    def __init__(self, target: Target) -> None:
        self.target = target
        self.num_layers = len(target.text.layers)

    def load(self, path: Path) -> TeacherBatch:
        """A batch that ``save`` wrote, in the target's data type."""
        dtype = self.target.dtype
        content = torch.load(path, map_location=self.target.device, weights_only=True)
        content["embeddings"] = content["embeddings"].to(dtype)
        content["hidden"] = {layer: states.to(dtype) for layer, states in content["hidden"].items()}
        return TeacherBatch(**content, head=self.target.text.logits)

    @torch.no_grad()
    def read(
        self, examples: Sequence[Example], *, layers: Collection[int], rule: DistillationRule = "none", seed: int = 0
    ) -> TeacherBatch:
        """Run the target over the examples.

        Args:
            layers: layers whose outputs are kept, in addition to the last one and the one that ``rule`` chooses.
            seed: chooses the tokens whose attention entropy is measured.
        """
        prompts = [example.prompt for example in examples]
        lengths = [len(prompt) for prompt in prompts]
        device = self.target.device
        rng = torch.Generator().manual_seed(seed)
        query_row = int(torch.randint(len(prompts), (), generator=rng))
        queries = torch.randint(lengths[query_row], (ENTROPY_QUERIES,), generator=rng).to(device)
        scores: dict[int, Tensor] = {}
        entropies: dict[int, Tensor] = {}
        rows: Sequence[int] = ()  # rows of the batch that the current forward pass reads

        def watch(attention: LayerAttention) -> None:
            for index, row in enumerate(rows):
                if rule != "none" and row == query_row:
                    entropies[attention.layer] = attention_entropy(attention, index, queries)
                if attention.layer == self.num_layers - 1 and prompts[row].num_visual_tokens:
                    asked = slice(examples[row].loss_start + 1)  # without the answer
                    tokens, is_visual = prompts[row].tokens[asked], prompts[row].is_visual[asked]
                    scores[row] = visual_scores("text_after_image", tokens, is_visual, attention, index)

        embeddings = [self.target.embeddings(prompt) for prompt in prompts]
        positions = [prompt.own_positions.flatten(0, -2).t() for prompt in prompts]
        num_axes = max(rows.shape[1] for rows in positions)
        # Some families make masks and further inputs for one prompt at a time, or positions only for prompts with
        # images.
        axes = {None if prompt.positions is None else prompt.positions.shape[:-1] for prompt in prompts}
        can_batch = len(axes) == 1 and all(prompt.mask is None and not prompt.extra for prompt in prompts)
        groups = [range(len(prompts))] if can_batch else [range(row, row + 1) for row in range(len(prompts))]
        outputs: list[tuple[Tensor, ...]] = []
        with observed_attention(self.target.text, watch):
            for rows in groups:
                outputs.append(self._hidden([prompts[row] for row in rows], [embeddings[row] for row in rows]))
        batch = TeacherBatch(
            embeddings=pad_sequence(embeddings, batch_first=True),
            is_visual=pad_sequence([prompt.is_visual for prompt in prompts], batch_first=True),
            lengths=torch.tensor(lengths, device=device),
            loss_start=torch.tensor([example.loss_start for example in examples], device=device),
            hidden={},
            visual_scores=scores,
            entropies=torch.stack([entropies[layer] for layer in range(self.num_layers)]) if entropies else None,
            head=self.target.text.logits,
            positions=pad_sequence([rows.expand(-1, num_axes) for rows in positions]).permute(2, 1, 0),
        )
        kept = {*layers, self.num_layers} | ({batch.distilled_layer(rule)} if rule != "none" else set())
        hidden = {
            layer: pad_sequence([row for states in outputs for row in states[layer]], batch_first=True)
            for layer in sorted(kept)
        }
        return replace(batch, hidden=hidden)

    def _hidden(self, prompts: Sequence[EncodedPrompt], embeddings: list[Tensor]) -> tuple[Tensor, ...]:
        """Outputs of the embedding and of every layer, [prompts, n, hidden] each; causal attention needs no padding
        mask.
        """
        longest = max(len(prompt) for prompt in prompts)
        positions = [functional.pad(p.positions, (0, longest - len(p))) for p in prompts if p.positions is not None]
        # Gemma 4 looks up more than one embedding of a token.
        is_text = all(prompt.embeddings is None for prompt in prompts)
        rows = pad_sequence([p.tokens for p in prompts] if is_text else embeddings, batch_first=True)
        out = self.target.text.module(
            **{"input_ids" if is_text else "inputs_embeds": rows},
            position_ids=torch.cat(positions, dim=-2) if positions else None,
            attention_mask=prompts[0].mask,
            use_cache=False,
            output_hidden_states=True,
            **prompts[0].extra,
        )
        return tuple(out.hidden_states)


def save(batch: TeacherBatch, path: Path) -> None:
    """Write a batch, in half precision where its values fit; see ``Teacher.load``."""
    content = {name: value for name, value in vars(batch).items() if name != "head"}
    content["embeddings"] = _to_half(batch.embeddings)
    content["hidden"] = {layer: _to_half(states) for layer, states in batch.hidden.items()}
    save_content(path, content)


def _to_half(states: Tensor) -> Tensor:
    """Convert to float16, or to bfloat16 if a value exceeds float16.

    Raises:
        UserError: the states are not finite.
    """
    if bool((half := states.half()).isfinite().all()):
        return half
    if not bool(states.isfinite().all()):
        dtype = str(states.dtype).removeprefix("torch.")
        raise UserError(
            f"the target's states of an example are not finite in {dtype}; give --dtype bfloat16 or float32"
        )
    return states.bfloat16()


@dataclass(frozen=True)
class TeacherBatches:
    """The teacher batch of every step. Batches are repeated, in another order each epoch, and cached on disk."""

    examples: JsonlExamples
    teacher: Teacher
    layers: Collection[int]
    """Target layers whose outputs are needed; the last layer is always included."""
    cache: Path
    """Folder for this target and these examples."""
    rule: DistillationRule = "none"
    """Chooses one more layer, for intermediate distillation."""
    seed: int = 0

    def batch_of(self, step: int) -> int:
        epoch, within = divmod(step, self.examples.num_batches)
        if epoch == 0:  # in order, because neighbouring batches are made together
            return within
        order = np.random.default_rng([self.seed, epoch]).permutation(self.examples.num_batches)
        return int(order[within])

    def __getitem__(self, step: int) -> TeacherBatch:
        number = self.batch_of(step)
        path, layers, rule = self.cache / f"{number}.pt", {*self.layers}, self.rule
        with contextlib.suppress(Exception):  # a missing or damaged file, of which torch raises many kinds
            cached = self.teacher.load(path)
            if cached.serves(layers, rule):
                return cached
            layers |= cached.hidden.keys()  # another draft needs these
            if cached.entropies is not None and rule == "none":
                rule = "entropy"
        save(self.teacher.read(self.examples[number], layers=layers, rule=rule, seed=number), path)
        return self.teacher.load(path)  # rounded to half precision like every later read
