"""Answers of an engine's server, with what their replay needs. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from autotune.documents.decoded import Decoded, tokens_key
from autotune.documents.speculation import Natural
from autotune.errors import UserError
from autotune.workloads.prompt import WorkloadPrompt


class Served(Decoded):
    """A greedy answer of a server to a prompt. ``rounds`` are verifications of drafts, and ``accepted_lengths`` has the
    sum of what they accepted.
    """

    arm: str = ""
    prompt: str = ""
    prompt_sha256: str = ""
    prompt_tokens: list[Natural] = Field(min_length=1)
    tokens: list[Natural] = Field(min_length=1)
    limit: int = Field(ge=1)
    """The most tokens that the request asked for."""
    is_ended: bool = False
    """Whether the last token ends the generation."""
    beyond: list[Natural] = Field(default_factory=list)
    """Tokens that greedy decoding gives after the end, of an engine whose drafts reach there."""
    verifications: list[list[Natural]] = Field(default_factory=list)
    """For a chain, in any order: tokens of the answer before a draft, draft tokens, and those that were accepted."""

    @classmethod
    def of(cls, prompt_tokens: list[int], tokens: list[int], limit: int, **fields: Any) -> Served:
        """An answer with what follows from its tokens.

        Raises:
            UserError: the engine made no tokens of the prompt.
        """
        if not prompt_tokens:
            raise UserError("the engine makes no tokens of a prompt; check its chat template and tokenizer")
        key, fields = tokens_key(tokens), {"decode_ms": 0.0} | fields
        return cls(
            prompt_tokens=prompt_tokens, tokens=tokens, limit=limit, tokens_sha256=key, new_tokens=len(tokens), **fields
        )

    @model_validator(mode="after")
    def _is_possible(self) -> Served:
        if len(self.tokens) > self.limit or not 0 <= self.accepted_tokens <= self.verified_nodes or self.decode_ms < 0:
            raise ValueError("an answer is no longer than its limit, and accepts no more tokens than are drafted")
        return self


def require_served(prompts: Sequence[WorkloadPrompt], *, reads_images: bool) -> None:
    """Refuse prompts that an engine is not tuned for: it decodes at temperature 0, and may read no images."""
    for prompt in prompts:
        if prompt.videos or (prompt.images and not reads_images):
            kind = "a video" if prompt.videos else "an image"
            raise UserError(f"{prompt.name}: has {kind}; llama.cpp is tuned on text, and vllm on text and images")
        if prompt.settings.temperature > 0:
            raise UserError(f"{prompt.name}: engines are tuned at temperature 0; set the prompt's temperature to 0")
