"""The frozen target as a teacher: what it thinks along examples."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from autotune.modeling.prompt import Prompt
from autotune.modeling.target import Target
from autotune.modeling.visual_attention import LayerAttention, attention_entropy, visual_scores, watched_attention

ENTROPY_QUERIES = 64  # tokens of one example of a batch whose attention is looked at


@dataclass(frozen=True)
class Example:
    """A prompt with its answer, encoded as one text. The tokens from ``first_taught`` on are followed by the answer's."""

    prompt: Prompt
    first_taught: int


DistillationRule = Literal["none", "entropy", "entropy-and-change"]


@dataclass(frozen=True)
class TeacherBatch:
    """A batch of examples, padded on the right, and what the target makes of them."""

    embeddings: Tensor
    """What the target's layers read, [batch, n, hidden]."""
    is_visual: Tensor
    """[batch, n]"""
    lengths: Tensor
    """Tokens of each example, [batch]."""
    first_taught: Tensor
    """The first token of each that is followed by its answer, [batch]."""
    hidden: dict[int, Tensor]
    """Outputs of layers that were asked for, [batch, n, hidden] each; of the last layer behind the final norm."""
    visual_scores: dict[int, Tensor]
    """By row with visual tokens: their ranking for pruning (STAR, eq. 2)."""
    entropies: Tensor | None
    """Mean attention entropy of each layer (AE), where it was asked for, [layers]."""
    head: Callable[[Tensor], Tensor]
    """The target's: logits of states in place of its last features."""

    @property
    def is_token(self) -> Tensor:
        """False in the padding, [batch, n]."""
        return torch.arange(self.embeddings.shape[1], device=self.lengths.device) < self.lengths[:, None]

    @property
    def loss_mask(self) -> Tensor:
        """Tokens that are followed by the answer's, [batch, n]."""
        columns = torch.arange(self.embeddings.shape[1], device=self.lengths.device)
        return self.is_token & (columns >= self.first_taught[:, None])

    def distilled_layer(self, rule: DistillationRule) -> int:
        """The layer (1 to the number of layers) whose output the first block should resemble: least AE (DREAM, section
        3.2), or least AE + |AE(l) - AE(l - 1)| (STAR, section 3.2), of all but the last, whose output is another loss's.
        """
        assert self.entropies is not None
        entropies = self.entropies[:-1]
        if rule == "entropy-and-change" and len(entropies) > 1:
            change = (entropies[1:] - entropies[:-1]).abs()
            return 2 + int((entropies[1:] + change).argmin())
        return 1 + int(entropies.argmin())

    def serves(self, layers: Collection[int], rule: DistillationRule) -> bool:
        """Whether it holds these layers, and the one that the rule chooses."""
        if rule == "none":
            return self.hidden.keys() >= set(layers)
        return self.entropies is not None and self.hidden.keys() >= {*layers, self.distilled_layer(rule)}

    def save(self, path: Path) -> None:
        """Write it, in half precision where that has room for its numbers."""
        tensors = {"embeddings": self.embeddings, **{f"hidden.{layer}": h for layer, h in self.hidden.items()}}
        tensors = {name: _halved(tensor) for name, tensor in tensors.items()}
        tensors |= {"is_visual": self.is_visual, "lengths": self.lengths, "first_taught": self.first_taught}
        tensors |= {f"visual_scores.{row}": scores for row, scores in self.visual_scores.items()}
        if self.entropies is not None:
            tensors["entropies"] = self.entropies
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.new")  # another run may be at the same lesson
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
        temporary.replace(path)


class Teacher:
    """Reads lessons with one target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.num_layers = len(target.text.layers)

    def load(self, path: Path) -> TeacherBatch:
        """A lesson that was saved."""
        target = self.target
        tensors = load_file(path, device=str(target.device))

        def numbered(kind: str) -> dict[int, Tensor]:
            return {int(n.split(".")[1]): t for n, t in sorted(tensors.items()) if n.startswith(kind + ".")}

        return TeacherBatch(
            embeddings=tensors["embeddings"].to(target.dtype),
            is_visual=tensors["is_visual"],
            lengths=tensors["lengths"],
            first_taught=tensors["first_taught"],
            hidden={layer: states.to(target.dtype) for layer, states in numbered("hidden").items()},
            visual_scores=numbered("visual_scores"),
            entropies=tensors.get("entropies"),
            head=target.text.logits,
        )

    @torch.no_grad()
    def lesson(
        self, examples: Sequence[Example], *, layers: Collection[int], rule: DistillationRule = "none", seed: int = 0
    ) -> TeacherBatch:
        """Run the target over the examples.

        Args:
            layers: whose outputs are kept, beside the last one's and the one that ``rule`` chooses.
            seed: chooses the tokens whose attention entropy is looked at.
        """
        prompts = [example.prompt for example in examples]
        lengths = [len(prompt) for prompt in prompts]
        longest, device = max(lengths), self.target.device
        rng = torch.Generator().manual_seed(seed)
        asked_row = int(torch.randint(len(prompts), (), generator=rng))
        asked = torch.randint(lengths[asked_row], (ENTROPY_QUERIES,), generator=rng).to(device)
        scores: dict[int, Tensor] = {}
        entropies: dict[int, Tensor] = {}
        rows: Sequence[int] = ()  # of the lesson, that the forward under way reads

        def watch(attention: LayerAttention) -> None:
            for place, row in enumerate(rows):
                if rule != "none" and row == asked_row:
                    entropies[attention.layer] = attention_entropy(attention, place, asked)
                if attention.layer == self.num_layers - 1 and prompts[row].num_visual_tokens:
                    text_end = examples[row].first_taught + 1
                    scores[row] = visual_scores(attention, place, prompts[row].is_visual, text_end)

        embeddings = [self._embeddings(prompt) for prompt in prompts]
        # Masks and further inputs of some families are made for one prompt, positions perhaps only where there is an image.
        axes = {None if prompt.positions is None else prompt.positions.shape[:-1] for prompt in prompts}
        is_plain = len(axes) == 1 and all(prompt.mask is None and not prompt.extra for prompt in prompts)
        groups = [range(len(prompts))] if is_plain else [range(row, row + 1) for row in range(len(prompts))]
        found: list[tuple[Tensor, ...]] = []
        with watched_attention(self.target.text, watch):
            for rows in groups:
                found.append(self._hidden([prompts[row] for row in rows], [embeddings[row] for row in rows]))
        lesson = TeacherBatch(
            embeddings=torch.stack([_padded(one, longest) for one in embeddings]),
            is_visual=torch.stack([_padded(prompt.is_visual, longest) for prompt in prompts]),
            lengths=torch.tensor(lengths, device=device),
            first_taught=torch.tensor([example.first_taught for example in examples], device=device),
            hidden={},
            visual_scores=scores,
            entropies=torch.stack([entropies[layer] for layer in range(self.num_layers)]) if entropies else None,
            head=self.target.text.logits,
        )
        kept = {*layers, self.num_layers} | ({lesson.distilled_layer(rule)} if rule != "none" else set())
        return replace(
            lesson,
            hidden={
                layer: torch.cat([_padded(states[layer], longest, 1) for states in found]) for layer in sorted(kept)
            },
        )

    def _embeddings(self, prompt: Prompt) -> Tensor:
        """[n, hidden]"""
        if prompt.embeddings is not None:
            return prompt.embeddings[0]
        return self.target.text.module.get_input_embeddings()(prompt.tokens)  # type: ignore[no-any-return]

    def _hidden(self, prompts: Sequence[Prompt], embeddings: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Outputs of the embedding and of every layer, [prompts, n, hidden] each. Causal attention needs no mask for
        padding on the right.
        """
        longest = max(len(prompt) for prompt in prompts)
        first = prompts[0]
        positions = None
        if first.positions is not None:
            placed = [p.positions for p in prompts if p.positions is not None]
            positions = torch.cat([_padded(one, longest, one.dim() - 1) for one in placed], dim=-2)
        out = self.target.text.module(
            inputs_embeds=torch.stack([_padded(one, longest) for one in embeddings]),
            position_ids=positions,
            attention_mask=first.mask,
            use_cache=False,
            output_hidden_states=True,
            **first.extra,
        )
        return tuple(out.hidden_states)


def _padded(states: Tensor, length: int, dimension: int = 0) -> Tensor:
    """Zeros behind, up to ``length`` along a dimension."""
    behind = [0, 0] * (states.dim() - 1 - dimension) + [0, length - states.shape[dimension]]
    return functional.pad(states, behind)


def _halved(states: Tensor) -> Tensor:
    """In float16, or bfloat16 where numbers are too large for it."""
    half = states.half()
    return half if bool(half.isfinite().all()) else states.bfloat16()
