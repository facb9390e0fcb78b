"""What one request did: counts and times, and the tokens that came out."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from autotune.errors import UserError
from autotune.trees.acceptance_counts import AcceptanceCounts


@dataclass
class DecodingStats:
    """What one request did. Times are milliseconds of wall clock, the device synchronised where they are read."""

    point: int = 0
    """Number of the operating point that decoded, in the order of the profile."""
    prompt_tokens: int = 0
    new_tokens: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    """τ of every round: draft tokens accepted and emitted. A plain step is a round that drafted nothing."""
    verified_nodes: list[int] = field(default_factory=list)
    """Draft nodes sent to verification in every round."""
    target_forwards: int = 0
    """After the prefill."""
    draft_forwards: int = 0
    plain_steps: int = 0
    """Target forwards without a draft."""
    target_prefill_ms: float = 0.0
    """Until the first token, vision included."""
    vision_ms: float = 0.0
    """Of the target's prefill: vision tower and projector."""
    draft_prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    decode_ms: float = 0.0
    """From the first token to the last: draft prefill, drafting, verification and everything between them."""

    acceptance_counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    """Which proposals the target took."""

    @property
    def rounds(self) -> int:
        return len(self.accepted_lengths)

    @property
    def tokens_per_round(self) -> float | None:
        """M = mean tokens emitted by a round; the first token, which the prefill emits, is not counted. None without
        rounds.
        """
        return (self.new_tokens - 1) / self.rounds if self.rounds else None

    @property
    def overhead_ms(self) -> float:
        """Decoding time spent outside the two models."""
        return self.decode_ms - self.draft_prefill_ms - self.draft_ms - self.verify_ms

    def to_json(self) -> dict[str, Any]:
        return {
            **{entry.name: getattr(self, entry.name) for entry in fields(self)},
            "acceptance_counts": self.acceptance_counts.to_json(),
            "rounds": self.rounds,
            "tokens_per_round": self.tokens_per_round,
            "overhead_ms": self.overhead_ms,
        }


@dataclass(frozen=True)
class DecodingOutput:
    """``sequences`` is [batch, prompt + new tokens], as Hugging Face's generate returns it: rows that ended early are
    padded.
    """

    sequences: Tensor
    row_stats: list[DecodingStats]

    @property
    def stats(self) -> DecodingStats:
        """Of a single prompt.

        Raises:
            UserError: several rows have stats of their own.
        """
        if len(self.row_stats) != 1:
            raise UserError(f"stats are those of one prompt; this batch has {len(self.row_stats)}; read row_stats")
        return self.row_stats[0]
