"""What is on its way: a call of ``generate``, and each of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autotune.modeling.prompt import Prompt
from autotune.runtime.stats import DecodingStats
from autotune.runtime.token_sampler import TokenSampler


@dataclass
class Call:
    """A call of ``generate`` as Hugging Face prepared it: a batch of prompts and what holds for all of them."""

    inputs: dict[str, Any]
    max_new_tokens: int
    """Beyond the length of the padded prompts."""
    eos_token_ids: frozenset[int]
    pad_token_id: int
    temperature: float
    """0 is greedy."""
    seed: int
    """Row r is decoded with ``seed + r``, so that equal prompts give different samples."""
    processors: Sequence[Any] = ()
    stops: Sequence[Any] = ()
    returns_dict: bool = False
    workload: str | None = None
    """What kind of request the caller says that it is."""
    prompts: Sequence[Prompt] = ()
    """As the target reads them."""
    draft_prompts: dict[Any, Sequence[Any]] = field(default_factory=dict)
    """As a draft reads them, by draft, made when the first of them is needed."""


@dataclass
class Request:
    """One row on its way: what stops it, and where its figures go."""

    rule: TokenSampler
    prompt: Prompt
    prefix: Tensor
    """The row as it was given, padding included, [1, tokens]: what logits processors read and what is returned."""
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    stops: Sequence[Any] = ()
    row: int = 0
    stats: DecodingStats = field(default_factory=DecodingStats)
    tokens: list[int] = field(default_factory=list)
    near_image_until: int = 0
    """The first position that is no longer near the prompt's last image."""
    is_finished: bool = False

    def emit(self, tokens: list[int]) -> list[int]:
        """Take up to the first end of sequence, and no more than asked for; returns what was taken."""
        taken: list[int] = []
        for token in tokens:
            taken.append(token)
            self.tokens.append(token)
            if (
                token in self.eos_token_ids
                or len(self.tokens) >= self.max_new_tokens
                or any(bool(stop(self.sequence(), None).all()) for stop in self.stops)
            ):
                self.is_finished = True
                break
        return taken

    def sequence(self) -> Tensor:
        return torch.cat([self.prefix, torch.tensor([self.tokens], dtype=torch.long, device=self.prefix.device)], dim=1)
