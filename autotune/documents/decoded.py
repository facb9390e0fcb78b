"""One arm on one prompt: counts and times, as the ledger of real runs holds them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from autotune.files import Document
from autotune.trees.acceptance_counts import AcceptanceCounts, Rows

if TYPE_CHECKING:
    from pandas import DataFrame


NESTED = ("arm", "acceptance_counts", "tokens")  # of a run's JSON, not columns of a table


class Decoded(Document):
    """An arm's answer to one prompt: its tokens, rounds, counts and times, as ledgers and profiles hold them.

    Times are milliseconds. ``decode_ms`` runs from the first token to the last and includes the draft's prefill;
    ``vision_ms`` is part of ``target_prefill_ms``. What an arm cannot measure is 0: inside Hugging Face's generate
    ``draft_ms`` and ``verify_ms``, and in an engine everything but ``decode_ms`` and ``cpu_ms``.
    """

    arm: str
    """``Arm.key``."""
    prompt: str
    prompt_sha256: str
    answer_key: str = ""
    """Key of what the target's answer follows from, see ``runtime.answer_keys``."""
    task: str | None = None
    tokens: list[int] = Field(default_factory=list)
    """The new tokens; empty where only their hash is kept, as in profiles."""
    tokens_sha256: str
    new_tokens: int
    rounds: int = 0
    accepted_lengths: list[int] = Field(default_factory=list)
    """Accepted draft tokens of each round; of an engine that counts them per request, their sum alone."""
    target_forwards: int = 0
    """Forward passes after the prefill."""
    draft_forwards: int = 0
    plain_steps: int = 0
    """Target forwards without a draft; each also counts as a round."""
    verified_nodes: int = 0
    """Draft tokens that the target verified."""
    target_prefill_ms: float = 0.0
    vision_ms: float = 0.0
    draft_prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    decode_ms: float
    cpu_ms: float = 0.0
    """CPU time of an engine's server in ``decode_ms``; 0 if it is not known."""
    acceptance_counts: Rows = Field(default_factory=lambda: AcceptanceCounts().to_json())
    perplexity: float | None = None
    """Perplexity of the answer under the target; None if it was not requested."""
    agreement: float | None = None
    """Share of the answer's tokens that plain decoding emits after the tokens before them; None as ``perplexity``."""
    captures: int = 0
    """Forward passes that were captured meanwhile; above 0 where that happened in every repetition too."""

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_lengths)

    @property
    def draft_counts(self) -> tuple[int, int, int]:
        """Verifications, draft tokens and accepted ones."""
        return self.rounds - self.plain_steps, self.verified_nodes, self.accepted_tokens

    @property
    def token_ms(self) -> float:
        """Decoding time per token after the first."""
        return self.decode_ms / max(1, self.new_tokens - 1)

    @property
    def counts(self) -> tuple[object, ...]:
        """The answer and the work of decoding it, which follow from models, tree and prompt, without noise."""
        work = (self.target_forwards, self.draft_forwards, self.verified_nodes, self.plain_steps)
        return self.tokens_sha256, *work, *self.accepted_lengths

    def without_tokens(self) -> Decoded:
        """The record as profiles keep it: hash and counts in place of tokens and acceptance by depth and rank."""
        return self.model_copy(update={"tokens": [], "acceptance_counts": AcceptanceCounts().to_json()})

    @property
    def in_passes(self) -> Decoded:
        """The record of an engine with all of its passes as rounds: each emits a token beside the accepted ones."""
        return self.model_copy(update={"rounds": num_passes(self.new_tokens - 1, self.rounds, self.accepted_tokens)})

    @property
    def forward_ms(self) -> float:
        """Mean time of a target forward after the prefill; 0 where forwards are not measured, or there are none."""
        return self.verify_ms / max(1, self.target_forwards)


def num_passes(tokens: int, verifications: int, accepted: int) -> int:
    """Forward passes of an engine over the tokens after the first. vLLM also counts accepted tokens beyond the end."""
    return max(verifications, tokens - accepted)


def tokens_per_pass(requests: Iterable[tuple[int, int, int]]) -> float:
    """Tokens that a pass gives in the mean, of requests with the arguments of ``num_passes``."""
    tokens, passes = map(
        sum, zip(*((tokens, num_passes(tokens, *counts)) for tokens, *counts in requests), strict=True)
    )
    return tokens / max(1, passes)


def tokens_key(tokens: Sequence[int]) -> str:
    """Hash of an answer's tokens, as ``Decoded.tokens_sha256``."""
    return hashlib.sha256(repr(list(tokens)).encode()).hexdigest()[:16]


def runs_dataframe(runs: Mapping[str, Sequence[Decoded | Mapping[str, Any]]]) -> DataFrame:
    """A row for every run: arm, prompt, task, counts and times in milliseconds.

    ``rest_ms`` is the decoding time outside the models; NaN where times inside the models are not measured.

    Args:
        runs: by arm name; runs, or their JSON.
    """
    import pandas as pd

    rows = []
    for name, arm_runs in runs.items():
        for number, run in enumerate(arm_runs):
            values = run.model_dump() if isinstance(run, Decoded) else dict(run)
            first = {"arm": name, "number": number, "prompt": values.pop("prompt"), "task": values.pop("task", None)}
            counts = {"accepted_tokens": sum(values.pop("accepted_lengths"))}
            rows.append({**first, **counts, **{key: value for key, value in values.items() if key not in NESTED}})
    frame = pd.DataFrame(rows)
    if len(frame):
        inside_ms = frame.draft_prefill_ms + frame.draft_ms + frame.verify_ms
        frame["rest_ms"] = (frame.decode_ms - inside_ms).where(frame.verify_ms > 0)
    return frame
