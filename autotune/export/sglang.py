"""SGLang: EAGLE-2's dynamic trees, and chains, as server flags."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from autotune.export.document import BatchPrediction
from autotune.export.engine import SAMPLING, Engine, Pair, unequal_vocabularies
from autotune.files import Document
from autotune.trees.base import TreePolicy

ADAPTIVE_FILE = "adaptive.json"
"""The file of ``speculative_adaptive_config``: by the smallest batch size that uses them, after SGLang has rounded the
batch up to one of its CUDA graphs, the ``candidate_steps`` among which SGLang chooses by the accepted lengths; 0 drafts
nothing.
"""


class SglangSettings(Document):
    """Server arguments, named as in ``sglang.Engine``.

    ``num_steps`` is our ``depth``, the number of draft levels. ``eagle_topk`` is our ``k``: nodes expanded in a level, and
    children of each. ``num_draft_tokens`` counts the tokens of one verification with the root: our ``budget`` plus 1. A
    chain has ``eagle_topk`` 1 and verifies every token that it drafts.
    """

    speculative_algorithm: Literal["EAGLE3", "STANDALONE"]
    speculative_draft_model_path: str = Field(min_length=1)
    speculative_num_steps: int = Field(ge=1)
    speculative_eagle_topk: int = Field(ge=1)
    speculative_num_draft_tokens: int = Field(ge=2)
    speculative_adaptive: Literal[True] | None = None
    """Choose the steps of a chain by the batch size."""
    speculative_adaptive_config: str | None = None
    """Path of an ``ADAPTIVE_FILE``, which has to hold ``speculative_num_steps``."""

    @model_validator(mode="after")
    def _rules(self) -> SglangSettings:
        steps, topk = self.speculative_num_steps, self.speculative_eagle_topk
        drafted, grown = self.speculative_num_draft_tokens - 1, topk + (steps - 1) * topk**2
        if drafted > grown or (topk == 1 and drafted != steps):
            raise ValueError(
                f"{steps} steps of top-k {topk} draft at most {grown} tokens plus the root, and a chain all of them; got "
                f"{drafted + 1} in all"
            )
        if self.speculative_adaptive and (self.speculative_algorithm != "EAGLE3" or topk != 1):
            raise ValueError("speculative_adaptive takes EAGLE3 with eagle_topk 1")
        return self


class Sglang(Engine):
    name = "sglang"
    version = "0.5.23"
    settings_type = SglangSettings
    runs_trees = True
    lossless = (
        "on CUDA, speculative_accept_threshold_single and speculative_accept_threshold_acc at their default, 1.0, preserve the "
        f"target's distribution at any temperature (lower values are lossy); {SAMPLING}; on CPUs, on XPUs, and on ROCm without "
        "speculative_use_rejection_sampling SGLang commits the most probable token whatever the temperature: greedy requests only"
    )
    notes = (
        "trees (eagle_topk above 1) are refused with attention_backend trtllm_mha, with speculative_use_rejection_sampling, and with "
        "a page_size above 1 unless attention_backend is flashinfer, fa3, triton: use the chain there",
    )

    def refusal(self, pair: Pair) -> str | None:
        return unequal_vocabularies(pair, with_tokens=True)

    def caveats(self, pair: Pair) -> Sequence[str]:
        if not pair.is_complete_model:
            return (
                f"{ADAPTIVE_FILE} chooses the steps of the chain by batch size; SGLang switches it off, and runs num_steps, with "
                "attention data parallelism, two-batch overlap or PD multiplexing",
            )
        return (
            "a STANDALONE draft reads the prompt without its first token, one position early, as EAGLE heads do (read in the source); "
            "accepted lengths may be a little shorter than predicted",
            "what a STANDALONE draft sees of an image has not been checked: predictions are for prompts without images",
        )

    def supports_schedule(self, pair: Pair) -> bool:
        """The worker of STANDALONE has no adaptive steps."""
        return not pair.is_complete_model

    def companions(self, schedule: Sequence[BatchPrediction]) -> dict[str, dict[str, Any]]:
        if not schedule:
            return {}
        slots = {str(batch.start): {"candidate_steps": [batch.draft_tokens]} for batch in schedule}
        if schedule[-1].draft_tokens > 0:  # nothing is predicted for larger batches
            slots[str(schedule[-1].end + 1)] = {"candidate_steps": [0]}
        return {ADAPTIVE_FILE: slots}

    def settings(self, pair: Pair, tree: TreePolicy, schedule: Sequence[BatchPrediction] = ()) -> SglangSettings:
        settings: dict[str, Any] = {
            "speculative_algorithm": self.served[pair.draft_kind].method,
            "speculative_draft_model_path": pair.draft,
            "speculative_num_steps": tree.max_depth,
            "speculative_eagle_topk": tree.max_width,
            "speculative_num_draft_tokens": tree.max_nodes + 1,
        }
        if schedule:
            settings |= {"speculative_adaptive": True, "speculative_adaptive_config": ADAPTIVE_FILE}
        return SglangSettings.model_validate(settings)

    def command(self, pair: Pair, settings: Document, path: Path) -> str:
        words = ["python", "-m", "sglang.launch_server", "--model-path", pair.target]
        words += [] if pair.dtype is None else ["--dtype", pair.dtype]
        for name, value in settings.model_dump(exclude_none=True).items():
            words.append(f"--{name.replace('_', '-')}")
            if value == ADAPTIVE_FILE:
                words.append(str(path.parent / ADAPTIVE_FILE))
            elif value is not True:
                words.append(str(value))
        return shlex.join(words)
