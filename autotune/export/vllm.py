"""vLLM: chains, as long as the batch size asks for, in the JSON of ``--speculative-config``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from autotune.export.choose import BatchRange, EngineTree
from autotune.export.engine import Engine, Pair
from autotune.files import Document
from autotune.trees.eagle2 import Eagle2Policy


class VllmSettings(Document):
    """``num_speculative_tokens`` k is the depth of our chain: k draft tokens a round, the root not among them, of which each
    takes one forward of the draft, and a verification of k + 1 tokens.
    """

    method: Literal["draft_model", "eagle3"]
    model: str = Field(min_length=1)
    num_speculative_tokens: int = Field(ge=1)
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
    """(first batch size, last one, k): inclusive, ascending, from 1 on; k = 0 drafts nothing."""
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
                    f"batch sizes {start} to {end} are given {draft_tokens}"
                )
            last = end
        if (self.synthetic_acceptance_rates is not None) != (self.rejection_sample_method == "synthetic"):
            raise ValueError(
                "synthetic_acceptance_rates go with rejection_sample_method synthetic; give both, or neither"
            )
        return self


class Vllm(Engine):
    """See ``Engine``."""

    methods: ClassVar[Mapping[str, str]] = {"independent": "draft_model", "eagle3": "eagle3"}
    has_schedule = True
    settings_kind = VllmSettings
    lossless = (
        "rejection_sample_method standard, as written, keeps the target's distribution at any temperature (block does too, "
        "synthetic does not); at temperature 0 that is the target's own tokens, but for near ties in reduced precision, and above "
        "0 other draws than autotune's, whose noise is keyed by seed and position"
    )
    notes = (
        "the accepted lengths are those of drafts that propose their most probable token (vLLM's default, draft_sample_method greedy)",
        "whether draft_model takes a target that sees images depends on vLLM's version; under data parallelism vLLM leaves the "
        "schedule by batch size aside",
    )

    def grows(self, pair: Pair, tree: Eagle2Policy) -> bool:
        return False

    def settings(self, pair: Pair, tree: EngineTree, schedule: Sequence[BatchRange]) -> VllmSettings:
        ranges = [(one.start, one.end, one.draft_tokens) for one in schedule]
        return VllmSettings.model_validate(
            {
                "method": self.methods[pair.kind],
                "model": pair.draft,
                "num_speculative_tokens": tree.max_depth,
                "num_speculative_tokens_per_batch_size": ranges or None,
            }
        )

    def file_name(self, variant: str) -> str:
        return "speculative-config.json"

    def command(self, pair: Pair, settings: Document, path: Path) -> str:
        config = json.dumps(settings.model_dump(exclude_none=True))
        return shlex.join(["vllm", "serve", pair.target, "--speculative-config", config])
