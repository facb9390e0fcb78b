"""Runs with given times."""

from __future__ import annotations

from typing import Any

from autotune.documents.decoded import Decoded
from autotune.trees.acceptance_counts import AcceptanceCounts


def run(
    decode_ms: float,
    *,
    arm: str = "x",
    prompt_sha256: str = "0",
    tokens: int = 11,
    rounds: int = 5,
    output: str = "same",
    **values: Any,
) -> Decoded:
    """A run of ``tokens`` new tokens, the first of which the prefill emitted."""
    zero = dict.fromkeys(("target_prefill_ms", "vision_ms", "draft_prefill_ms", "draft_ms"), 0.0)
    known = {**zero, "verify_ms": decode_ms, "plain_steps": 0, "verified_nodes": rounds, "captures": 0, **values}
    return Decoded(
        arm=arm,
        prompt="p",
        prompt_sha256=prompt_sha256,
        tokens_sha256=output,
        new_tokens=tokens,
        rounds=rounds,
        accepted_lengths=[1] * rounds,
        target_forwards=rounds,
        draft_forwards=rounds,
        decode_ms=decode_ms,
        acceptance_counts=AcceptanceCounts().to_json(),
        **known,
    )
