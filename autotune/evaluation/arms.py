"""Arms of a comparison, and their runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import AliasChoices, Field

from autotune.documents.configuration import Configuration
from autotune.documents.decoding_profile import AR as AR  # for those who run it
from autotune.files import Document

HF, HF_ASSISTED, PROMPT_LOOKUP = "hf", "hf-assisted", "prompt_lookup"


class Run(Document):
    """One arm on one prompt. Times in milliseconds; ``decode_ms`` runs from the first token to the last, the draft's
    prefill included; ``vision_ms`` is part of ``target_prefill_ms``. Inside Hugging Face's generate ``draft_ms`` and
    ``verify_ms`` are not measured, and 0.
    """

    arm: str
    prompt: str
    prompt_sha256: str
    tokens_sha256: str
    new_tokens: int
    rounds: int
    accepted_lengths: list[int]
    target_forwards: int
    draft_forwards: int
    target_prefill_ms: float
    vision_ms: float
    draft_prefill_ms: float
    draft_ms: float
    verify_ms: float
    decode_ms: float
    acceptance_counts: dict[str, Any] = Field(validation_alias=AliasChoices("acceptance_counts", "health"))
    """``AcceptanceCounts.to_json()``; runs of earlier versions call it ``health``."""
    perplexity: float | None = None
    """Of the answer, under the target, where it was asked for."""
    point: int = 0
    """Of a profile: which of its points decoded."""
    plain_steps: int | None = None
    """This and the next are null in runs of earlier versions."""
    verified_nodes: int | None = None

    @property
    def forward_ms(self) -> float:
        """Mean of the target's forwards behind the prefill; 0 where they are not measured, or there is none."""
        return self.verify_ms / max(1, self.target_forwards)


@dataclass(frozen=True)
class Arm:
    """A way to decode, under a name: a configuration, or None for ``ar`` (our plain decoding), ``hf`` and
    ``hf-assisted`` (Hugging Face's generate, alone and with the draft).
    """

    name: str
    configuration: Configuration | None = None
    drafter: str | None = None
    """Who drafts: ``prompt_lookup``, or None for the runner's own draft."""

    @property
    def key(self) -> str:
        if self.configuration is None:
            return self.name
        return self.configuration.key if self.drafter is None else f"{self.drafter}-{self.configuration.key}"


# The free baseline: no model drafts. As many tokens at once as the other published chain.
PROMPT_LOOKUP_ARM = Arm(PROMPT_LOOKUP, Configuration(tree={"policy": "chain", "depth": 5}), drafter=PROMPT_LOOKUP)
