"""The frozen target as a teacher: what it thinks along examples, computed when it is needed and never stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from autotune.runtime.attention import LayerAttention, attention_entropy, visual_scores, watched_attention
from autotune.runtime.prompt import Prompt
from autotune.runtime.target import Target

ENTROPY_QUERIES = 64  # tokens of one example of a batch whose attention is looked at


@dataclass(frozen=True)
class Example:
    """A prompt with its answer, encoded as one text. The tokens from ``first_taught`` on are followed by the answer's."""

    prompt: Prompt
    first_taught: int


@dataclass(frozen=True)
class Lesson:
    """A batch of examples, padded on the right, and what the target makes of them."""

    embeddings: Tensor
    """What the target's layers read, [batch, n, hidden]."""
    is_visual: Tensor
    """[batch, n]"""
    is_token: Tensor
    """False in the padding, [batch, n]."""
    is_taught: Tensor
    """Tokens that are followed by the answer's, [batch, n]."""
    hidden: dict[int, Tensor]
    """Outputs of layers, [batch, n, hidden] each; the last one behind the final norm."""
    logits: Tensor
    """Behind the taught tokens, [taught, vocabulary]."""
    visual_scores: dict[int, Tensor]
    """By row with visual tokens: their ranking for pruning (STAR, eq. 2)."""
    entropies: Tensor | None
    """Mean attention entropy of each layer (AE), where it was asked for, [layers]."""
    head: Callable[[Tensor], Tensor]
    """The target's: logits of states in place of its last features."""


class Teacher:
    """Reads lessons with one target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.num_layers = len(target.text.layers)

    @torch.no_grad()
    def lesson(self, examples: Sequence[Example], *, seed: int, with_entropies: bool = False) -> Lesson:
        """Run the target over the examples. ``seed`` chooses the tokens whose entropy is looked at."""
        prompts = [example.prompt for example in examples]
        lengths = [len(prompt) for prompt in prompts]
        longest, device = max(lengths), self.target.device
        columns = torch.arange(longest, device=device)
        is_token = columns < torch.tensor(lengths, device=device)[:, None]
        first = torch.tensor([example.first_taught for example in examples], device=device)[:, None]
        is_taught = is_token & (columns >= first)
        rng = torch.Generator().manual_seed(seed)
        asked_row = int(torch.randint(len(prompts), (), generator=rng))
        asked = torch.randint(lengths[asked_row], (ENTROPY_QUERIES,), generator=rng).to(device)
        scores: dict[int, Tensor] = {}
        entropies: dict[int, Tensor] = {}
        rows: Sequence[int] = ()  # of the lesson, that the forward under way reads

        def watch(attention: LayerAttention) -> None:
            for place, row in enumerate(rows):
                if with_entropies and row == asked_row:
                    entropies[attention.layer] = attention_entropy(attention, place, asked)
                if attention.layer == self.num_layers - 1 and prompts[row].num_visual_tokens:
                    text_end = examples[row].first_taught + 1
                    scores[row] = visual_scores(attention, place, prompts[row].is_visual, text_end)

        embeddings = [self._embeddings(prompt) for prompt in prompts]
        # Masks and further inputs of some families are made for one prompt.
        is_plain = all(prompt.mask is None and not prompt.extra for prompt in prompts)
        groups = [range(len(prompts))] if is_plain else [range(row, row + 1) for row in range(len(prompts))]
        found: list[tuple[Tensor, ...]] = []
        with watched_attention(self.target.text, watch):
            for rows in groups:
                found.append(self._hidden([prompts[row] for row in rows], [embeddings[row] for row in rows]))
        padded = [[_padded(states, longest, 1) for states in layer] for layer in zip(*found, strict=True)]
        hidden = {layer: torch.cat(states) for layer, states in enumerate(padded)}
        return Lesson(
            embeddings=torch.stack([_padded(one, longest) for one in embeddings]),
            is_visual=torch.stack([_padded(prompt.is_visual, longest) for prompt in prompts]),
            is_token=is_token,
            is_taught=is_taught,
            hidden=hidden,
            logits=self.target.text.logits(hidden[self.num_layers][is_taught]).float(),
            visual_scores=scores,
            entropies=torch.stack([entropies[layer] for layer in range(self.num_layers)]) if entropies else None,
            head=self.target.text.logits,
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
