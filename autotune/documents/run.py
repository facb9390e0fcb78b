"""One arm on one prompt: counts and times, as the ledger of real runs holds them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.documents.decoding_profile import PromptEvidence
from autotune.files import Document
from autotune.trees.acceptance_counts import Rows
from autotune.trees.limits import Ints

if TYPE_CHECKING:
    from pandas import Categorical, DataFrame


NESTED = ("arm", "acceptance_counts")  # of a run's JSON, not columns of a table


class Run(Document):
    """One arm on one prompt. Times are milliseconds.

    ``decode_ms`` runs from the first token to the last and includes the draft's prefill; ``vision_ms`` is part of
    ``target_prefill_ms``. Inside Hugging Face's generate ``draft_ms`` and ``verify_ms`` cannot be measured and are 0.
    """

    arm: str
    """``Arm.key``."""
    prompt: str
    prompt_sha256: str
    answer_key: str = ""
    """Key of what the target's answer follows from, see ``runtime.answer_keys``."""
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
    acceptance_counts: Rows
    perplexity: float | None = None
    """Perplexity of the answer under the target; None if it was not requested."""
    agreement: float | None = None
    """Share of the answer's tokens that plain decoding emits after the tokens before them; None as ``perplexity``."""
    point: int = 0
    """Index of the profile's operating point that decoded the prompt."""
    plain_steps: int
    verified_nodes: int
    captures: int
    """Forward passes that were captured meanwhile; above 0 where that happened in every repetition too."""
    task: str | None = None

    @property
    def forward_ms(self) -> float:
        """Mean time of a target forward after the prefill; 0 where forwards are not measured, or there are none."""
        return self.verify_ms / max(1, self.target_forwards)


def prompt_evidence(run: Run, plain: Run) -> PromptEvidence:
    """The counts and times that a profile stores of a prompt, for checks to compare with."""
    return PromptEvidence(
        name=run.prompt,
        sha256=run.prompt_sha256,
        accepted_tokens=sum(run.accepted_lengths),
        ar_decode_ms=plain.decode_ms,
        **{name: getattr(run, name) for name in PromptEvidence.model_fields if hasattr(run, name)},
    )


def runs_dataframe(runs: Mapping[str, Sequence[Run | Mapping[str, Any]]]) -> DataFrame:
    """A row for every run: arm, prompt, task, counts, times in milliseconds, and the band of the answer's length.

    ``rest_ms`` is the decoding time outside the models; NaN where times inside the models are not measured.

    Args:
        runs: by arm name; runs, or their JSON.
    """
    import pandas as pd

    rows = []
    for name, arm_runs in runs.items():
        for number, run in enumerate(arm_runs):
            values = run.model_dump() if isinstance(run, Run) else dict(run)
            first = {"arm": name, "number": number, "prompt": values.pop("prompt"), "task": values.pop("task", None)}
            counts = {"accepted_tokens": sum(values.pop("accepted_lengths"))}
            rows.append({**first, **counts, **{key: value for key, value in values.items() if key not in NESTED}})
    frame = pd.DataFrame(rows)
    if len(frame):
        inside_ms = frame.draft_prefill_ms + frame.draft_ms + frame.verify_ms
        frame["rest_ms"] = (frame.decode_ms - inside_ms).where(frame.verify_ms > 0)
        frame["length"] = length_bands(frame.new_tokens.to_numpy()).astype(str)
    return frame


PARTS = {
    "target prefill": "target_prefill_ms",
    "verification": "verify_ms",
    "draft prefill": "draft_prefill_ms",
    "draft forward passes": "draft_ms",
}
REST = "tree building and the rest"


def time_shares(runs: Sequence[Run | Mapping[str, Any]]) -> dict[str, float]:
    """Share of each part in the time of all runs, prefill included (SAGE, table 6); empty where parts are not
    measured.
    """
    rows = [run.model_dump() if isinstance(run, Run) else run for run in runs]
    total_ms = sum(row["target_prefill_ms"] + row["decode_ms"] for row in rows)
    if total_ms == 0 or not any(row["verify_ms"] > 0 for row in rows):
        return {}
    shares = {part: float(sum(row[name] for row in rows) / total_ms) for part, name in PARTS.items()}
    return {**shares, REST: 1.0 - sum(shares.values())}


def length_bands(new_tokens: Sequence[int] | Ints) -> Categorical:
    """The band of each answer's number of tokens, in order: ``1-16``, ``17-32``, ``33-64``, and so on."""
    import pandas as pd

    tokens = np.asarray(new_tokens, np.int64)
    ends = [0, 16]
    while ends[-1] < tokens.max(initial=0):
        ends.append(2 * ends[-1])
    labels = [f"{first + 1}-{last}" for first, last in itertools.pairwise(ends)]
    numbers = np.maximum(np.searchsorted(ends, tokens) - 1, 0)
    return pd.Categorical([labels[number] for number in numbers], categories=labels, ordered=True)
