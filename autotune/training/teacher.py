"""The frozen target as a teacher: its features, embeddings and attention statistics on training examples."""

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
from autotune.modeling.visual_attention import LayerAttention, attention_entropy, observed_attention, visual_scores

ENTROPY_QUERIES = 64  # tokens of one example of a batch whose attention entropy is measured


@dataclass(frozen=True)
class Example:
    """A prompt with its answer, encoded as one text. Tokens from ``loss_start`` on are followed by a token of the answer."""

    prompt: Prompt
    loss_start: int


DistillationRule = Literal["none", "entropy", "entropy-and-change"]


@dataclass(frozen=True)
class TeacherBatch:
    """A batch of right-padded examples with the target's outputs on them."""

    embeddings: Tensor
    """Input of the target's first layer, [batch, n, hidden]."""
    is_visual: Tensor
    """[batch, n]"""
    lengths: Tensor
    """Number of tokens of each example, [batch]."""
    loss_start: Tensor
    """Index of the first token that is followed by a token of the answer, [batch]."""
    hidden: dict[int, Tensor]
    """Outputs of the requested layers, [batch, n, hidden] each; the last layer's after the final norm."""
    visual_scores: dict[int, Tensor]
    """Scores of the visual tokens by row, for pruning (STAR, eq. 2)."""
    entropies: Tensor | None
    """Mean attention entropy of each layer (AE) [layers], if requested."""
    head: Callable[[Tensor], Tensor]
    """The target's output head: logits of hidden states."""

    @property
    def is_token(self) -> Tensor:
        """False in the padding, [batch, n]."""
        return torch.arange(self.embeddings.shape[1], device=self.lengths.device) < self.lengths[:, None]

    @property
    def loss_mask(self) -> Tensor:
        """Tokens that are followed by a token of the answer, [batch, n]."""
        columns = torch.arange(self.embeddings.shape[1], device=self.lengths.device)
        return self.is_token & (columns >= self.loss_start[:, None])

    def distilled_layer(self, rule: DistillationRule) -> int:
        """The layer (from 1) whose output the first block imitates.

        The layer of least AE (DREAM, section 3.2), or of least AE + |AE(l) - AE(l - 1)| (STAR, section 3.2). The last layer is
        excluded: its output is the target of the feature loss.
        """
        assert self.entropies is not None
        entropies = self.entropies[:-1]
        if rule == "entropy-and-change" and len(entropies) > 1:
            change = (entropies[1:] - entropies[:-1]).abs()
            return 2 + int((entropies[1:] + change).argmin())
        return 1 + int(entropies.argmin())

    def serves(self, layers: Collection[int], rule: DistillationRule) -> bool:
        """Whether the batch holds these layers and the layer that the rule chooses."""
        if rule == "none":
            return self.hidden.keys() >= set(layers)
        return self.entropies is not None and self.hidden.keys() >= {*layers, self.distilled_layer(rule)}

    def save(self, path: Path) -> None:
        """Write the batch, in half precision where its values fit."""
        tensors = {"embeddings": self.embeddings, **{f"hidden.{layer}": h for layer, h in self.hidden.items()}}
        tensors = {name: _to_half(tensor) for name, tensor in tensors.items()}
        tensors |= {"is_visual": self.is_visual, "lengths": self.lengths, "loss_start": self.loss_start}
        tensors |= {f"visual_scores.{row}": scores for row, scores in self.visual_scores.items()}
        if self.entropies is not None:
            tensors["entropies"] = self.entropies
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.new")  # another run may write the same batch
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
        temporary.replace(path)


class Teacher:
    """Runs the target over examples."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.num_layers = len(target.text.layers)

    def load(self, path: Path) -> TeacherBatch:
        """Load a saved batch."""
        target = self.target
        tensors = load_file(path, device=str(target.device))

        def numbered(kind: str) -> dict[int, Tensor]:
            return {int(n.split(".")[1]): t for n, t in sorted(tensors.items()) if n.startswith(kind + ".")}

        return TeacherBatch(
            embeddings=tensors["embeddings"].to(target.dtype),
            is_visual=tensors["is_visual"],
            lengths=tensors["lengths"],
            loss_start=tensors["loss_start"],
            hidden={layer: states.to(target.dtype) for layer, states in numbered("hidden").items()},
            visual_scores=numbered("visual_scores"),
            entropies=tensors.get("entropies"),
            head=target.text.logits,
        )

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
        longest, device = max(lengths), self.target.device
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
                    text_end = examples[row].loss_start + 1
                    scores[row] = visual_scores(attention, index, prompts[row].is_visual, text_end)

        embeddings = [self._embeddings(prompt) for prompt in prompts]
        # Some families make masks and further inputs for one prompt at a time, or positions only for prompts with images.
        axes = {None if prompt.positions is None else prompt.positions.shape[:-1] for prompt in prompts}
        can_batch = len(axes) == 1 and all(prompt.mask is None and not prompt.extra for prompt in prompts)
        groups = [range(len(prompts))] if can_batch else [range(row, row + 1) for row in range(len(prompts))]
        outputs: list[tuple[Tensor, ...]] = []
        with observed_attention(self.target.text, watch):
            for rows in groups:
                outputs.append(self._hidden([prompts[row] for row in rows], [embeddings[row] for row in rows]))
        batch = TeacherBatch(
            embeddings=torch.stack([_padded(row, longest) for row in embeddings]),
            is_visual=torch.stack([_padded(prompt.is_visual, longest) for prompt in prompts]),
            lengths=torch.tensor(lengths, device=device),
            loss_start=torch.tensor([example.loss_start for example in examples], device=device),
            hidden={},
            visual_scores=scores,
            entropies=torch.stack([entropies[layer] for layer in range(self.num_layers)]) if entropies else None,
            head=self.target.text.logits,
        )
        kept = {*layers, self.num_layers} | ({batch.distilled_layer(rule)} if rule != "none" else set())
        return replace(
            batch,
            hidden={
                layer: torch.cat([_padded(states[layer], longest, 1) for states in outputs]) for layer in sorted(kept)
            },
        )

    def _embeddings(self, prompt: Prompt) -> Tensor:
        """[n, hidden]"""
        if prompt.embeddings is not None:
            return prompt.embeddings[0]
        return self.target.text.module.get_input_embeddings()(prompt.tokens)  # type: ignore[no-any-return]

    def _hidden(self, prompts: Sequence[Prompt], embeddings: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Outputs of the embedding and of every layer, [prompts, n, hidden] each; causal attention needs no padding mask."""
        longest = max(len(prompt) for prompt in prompts)
        first = prompts[0]
        positions = None
        if first.positions is not None:
            given = [p.positions for p in prompts if p.positions is not None]
            positions = torch.cat([_padded(row, longest, row.dim() - 1) for row in given], dim=-2)
        out = self.target.text.module(
            inputs_embeds=torch.stack([_padded(row, longest) for row in embeddings]),
            position_ids=positions,
            attention_mask=first.mask,
            use_cache=False,
            output_hidden_states=True,
            **first.extra,
        )
        return tuple(out.hidden_states)


def _padded(states: Tensor, length: int, dimension: int = 0) -> Tensor:
    """Pad a dimension with zeros at its end, to ``length``."""
    padding = [0, 0] * (states.dim() - 1 - dimension) + [0, length - states.shape[dimension]]
    return functional.pad(states, padding)


def _to_half(states: Tensor) -> Tensor:
    """Convert to float16, or to bfloat16 if a value exceeds float16."""
    half = states.half()
    return half if bool(half.isfinite().all()) else states.bfloat16()
