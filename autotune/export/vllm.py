"""vLLM: chains whose length may depend on the batch size, as the JSON of ``--speculative-config``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from autotune.export.document import BatchPrediction
from autotune.export.engine import SAMPLING, Engine, Pair
from autotune.export.engine_replay import EngineTree
from autotune.files import Document


class VllmSettings(Document):
    """``num_speculative_tokens`` k is our chain's depth: k draft tokens per round without the root, one draft forward pass
    each, and a verification of k + 1 tokens.
    """

    method: Literal["draft_model", "eagle3"]
    model: str = Field(min_length=1)
    num_speculative_tokens: int = Field(ge=1)
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
    """(first batch size, last batch size, k): inclusive ranges in ascending order from 1; k = 0 drafts nothing."""
    draft_tensor_parallel_size: int | None = Field(default=None, ge=1)
    quantization: str | None = None
    rejection_sample_method: Literal["standard", "synthetic", "block"] = "standard"
    synthetic_acceptance_rates: list[float] | None = None

    @model_validator(mode="after")
    def _rules(self) -> VllmSettings:
        last = 0
        for start, end, draft_tokens in self.num_speculative_tokens_per_batch_size or ():
            if not (start == 1 if last == 0 else start > last) or end < start:
                raise ValueError(f"batch sizes ascend from 1 without overlap; {start} to {end} comes after {last}")
            if not 0 <= draft_tokens <= self.num_speculative_tokens:
                raise ValueError(
                    f"a schedule drafts at most num_speculative_tokens, {self.num_speculative_tokens}; "
                    f"batch sizes {start} to {end} have {draft_tokens}"
                )
            last = end
        if (self.synthetic_acceptance_rates is not None) != (self.rejection_sample_method == "synthetic"):
            raise ValueError(
                "synthetic_acceptance_rates require rejection_sample_method synthetic and vice versa; set both, or neither"
            )
        return self


class Vllm(Engine):
    """See ``Engine``."""

    methods: ClassVar = {"independent": "draft_model", "eagle3": "eagle3"}
    settings_type = VllmSettings
    settings_file = "speculative-config.json"
    has_schedule = True
    lossless = (
        "rejection_sample_method standard, as exported, preserves the target's distribution at any temperature (block does too, "
        f"synthetic does not); {SAMPLING}"
    )
    notes = (
        "accepted lengths assume drafts that propose their most probable token (vLLM's default, draft_sample_method greedy)",
        "some versions of vLLM do not accept draft_model with a multimodal target; with data parallelism vLLM ignores the schedule "
        "by batch size",
    )

    def settings(self, pair: Pair, tree: EngineTree, schedule: Sequence[BatchPrediction] = ()) -> VllmSettings:
        ranges = [(batch.start, batch.end, batch.draft_tokens) for batch in schedule]
        return VllmSettings.model_validate(
            {
                "method": self.methods[pair.draft_kind],
                "model": pair.draft,
                "num_speculative_tokens": tree.max_depth,
                "num_speculative_tokens_per_batch_size": ranges or None,
            }
        )

    def command(self, pair: Pair, settings: Document, path: Path) -> str:
        config = json.dumps(settings.model_dump(exclude_none=True))
        return shlex.join(["vllm", "serve", pair.target, "--speculative-config", config])
