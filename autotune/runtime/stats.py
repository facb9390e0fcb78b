"""Output and statistics of decoding, and the log of requests."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from torch import Tensor

from autotune.errors import UserError
from autotune.trees.acceptance_counts import AcceptanceCounts

logger = logging.getLogger("autotune.requests")
"""Logs a line for every request at the level INFO. Python shows none unless the service sets logging up."""
FINISHED, STOPPED = "finished", "stopped"


@dataclass
class DecodingStats:
    """Counts and times of one request. Times are wall-clock milliseconds, read with the device synchronised."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    """τ of every round: draft tokens accepted and emitted; 0 for a plain step."""
    verified_nodes: list[int] = field(default_factory=list)
    """Draft nodes sent to verification in every round; 0 for a plain step."""
    target_forwards: int = 0
    """Target forwards after the prefill."""
    draft_forwards: int = 0
    """Draft levels. Each is a forward pass, except those of ``retrieval``, which has none."""
    plain_steps: int = 0
    target_prefill_ms: float = 0.0
    """Time to the first new token, vision included."""
    vision_ms: float = 0.0
    """The part of ``target_prefill_ms`` that vision tower and projector took."""
    draft_prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    decode_ms: float = 0.0
    """Time from the first new token to the last: draft prefill, drafting, verification and all between them."""
    acceptance_counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    """Offered and accepted draft tokens, by depth and rank."""

    @property
    def rounds(self) -> int:
        """Rounds, plain steps included."""
        return len(self.accepted_lengths)

    @property
    def tokens_per_round(self) -> float | None:
        """M: mean number of tokens that a round emits, not counting the prefill's token; None without rounds."""
        return (self.new_tokens - 1) / self.rounds if self.rounds else None

    @property
    def overhead_ms(self) -> float:
        """Decoding time outside the two models."""
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
    """The output of ``Decoder.generate``."""

    sequences: Tensor
    """[batch, prompt + new tokens], as from Hugging Face's generate: rows that end early are padded."""
    row_stats: list[DecodingStats]
    """Statistics of each row."""

    @property
    def stats(self) -> DecodingStats:
        """Statistics of a single prompt; a ``UserError`` for a batch."""
        if len(self.row_stats) != 1:
            raise UserError(f"stats are those of one prompt; this batch has {len(self.row_stats)}; read row_stats")
        return self.row_stats[0]


class Observer(Protocol):
    """Is told about every request of a decoder."""

    def __call__(self, stats: DecodingStats, *, is_finished: bool) -> None: ...


def log_request(stats: DecodingStats, *, is_finished: bool) -> None:
    """Log a request; the record's attribute ``stats`` is ``DecodingStats.to_json()``."""
    if not logger.isEnabledFor(logging.INFO):
        return
    logger.info(
        "%s: %d prompt tokens, %d new tokens, %d rounds of which %d plain, %d of %d draft tokens accepted, "
        "first token after %.0f ms, decoding %.0f ms",
        FINISHED if is_finished else STOPPED,
        stats.prompt_tokens,
        stats.new_tokens,
        stats.rounds,
        stats.plain_steps,
        sum(stats.accepted_lengths),
        sum(stats.verified_nodes),
        stats.target_prefill_ms,
        stats.decode_ms,
        extra={"stats": stats.to_json()},
    )
