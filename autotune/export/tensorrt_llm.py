"""TensorRT-LLM: dynamic trees of EAGLE-3 heads, and chains, as the YAML of ``trtllm-serve --config``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from autotune.export.document import BatchPrediction
from autotune.export.engine import SAMPLING, Engine, Pair, of_version
from autotune.export.engine_replay import EngineTree
from autotune.files import Document
from autotune.trees.eagle2 import Eagle2Policy

DYNAMIC_TREES = "Eagle3"


class TensorRtLlmDecoding(Document):
    """``max_draft_len`` is our ``depth``, ``dynamic_tree_max_topK`` our ``k``, ``max_total_draft_tokens`` our ``budget``: the
    draft tokens of a verification without the root. A chain has as many of them as levels.
    """

    decoding_type: Literal["Eagle3", "Draft_Target"]
    speculative_model: str = Field(min_length=1)
    max_draft_len: int = Field(ge=1)
    max_total_draft_tokens: int | None = Field(default=None, ge=1)
    use_dynamic_tree: bool | None = None
    dynamic_tree_max_topK: int | None = Field(default=None, ge=1)
    draft_len_schedule: dict[int, int] | None = Field(default=None, min_length=1)
    """Draft length by the largest batch size that uses it; above the last batch size nothing is drafted. In 1.2.1 by the smallest
    batch size that uses it, from 1.
    """

    requires_batch_1: ClassVar[bool] = False
    """Whether the schedule has to begin with the key 1."""

    @model_validator(mode="after")
    def _rules(self) -> TensorRtLlmDecoding:
        longest, total, topk = self.max_draft_len, self.max_total_draft_tokens, self.dynamic_tree_max_topK
        schedule = self.draft_len_schedule
        if not self.use_dynamic_tree:
            if topk is not None or total not in (None, longest):
                raise ValueError(
                    f"a chain has max_total_draft_tokens = max_draft_len = {longest}, and no dynamic_tree_max_topK"
                )
        elif self.decoding_type != DYNAMIC_TREES or topk is None or schedule is not None:
            raise ValueError(
                "a dynamic tree needs decoding_type Eagle3 and dynamic_tree_max_topK, and takes no draft_len_schedule"
            )
        elif total is not None and not longest <= total <= topk * longest:
            raise ValueError(
                f"max_total_draft_tokens is between max_draft_len, {longest}, and dynamic_tree_max_topK * max_draft_len, "
                f"{topk * longest}; got {total}"
            )
        if schedule is not None:
            if min(schedule) < 1 or not all(0 <= length <= longest for length in schedule.values()):
                raise ValueError(
                    f"draft_len_schedule maps batch sizes of at least 1 to lengths up to {longest}; got {schedule}"
                )
            if self.requires_batch_1 and 1 not in schedule:
                raise ValueError(f"draft_len_schedule begins with batch size 1; got {schedule}")
            if schedule[min(schedule)] != longest:
                raise ValueError(
                    f"draft_len_schedule gives the smallest batches max_draft_len, {longest}; got {schedule}"
                )
        return self


class TensorRtLlmSettings(Document):
    """The part of the server's YAML that configures speculation."""

    speculative_config: TensorRtLlmDecoding


class TensorRtLlmDecoding121(TensorRtLlmDecoding):
    """The schedule of TensorRT-LLM 1.2.1."""

    requires_batch_1 = True


class TensorRtLlmSettings121(TensorRtLlmSettings):
    """See ``TensorRtLlmSettings``."""

    speculative_config: TensorRtLlmDecoding121


class TensorRtLlm(Engine):
    """See ``Engine``. The rules are those of the main branch after ``version``."""

    name = "tensorrt-llm"
    version = "1.3.0rc27"
    methods: ClassVar = {"independent": "Draft_Target", "eagle3": DYNAMIC_TREES}
    settings_type: type[TensorRtLlmSettings] = TensorRtLlmSettings
    settings_file = "{variant}.yaml"
    vision: ClassVar = {"independent": "text", "eagle3": "features"}
    lossless = (
        "a draft token is accepted if it equals the token that the target samples, which preserves the target's distribution at "
        f"any temperature; {SAMPLING}; relaxed and typical acceptance are lossy: leave them off"
    )
    notes: Sequence[str] = (
        "the keys of draft_len_schedule are the largest batch sizes of each length, and above the last key nothing is drafted; 1.2.1 "
        "reads them as smallest batch sizes: export for it with --engine-version 1.2.1",
    )

    def of_version(self, version: str | None) -> Engine:
        return of_version((self, TensorRtLlm121()), version)

    def caveats(self, pair: Pair) -> Sequence[str]:
        if pair.draft_kind == "independent":
            return (
                "what a Draft_Target model sees of an image has not been checked: predictions are for prompts without images",
            )
        if (target := pair.target_files) is None:
            return ("dynamic trees do not run with sliding windows or latent attention: use the chain there",)
        if target.has_sliding_window or target.has_latent_attention:
            return (
                "the target has sliding windows or latent attention, with which dynamic trees do not run: chains only",
            )
        return ()

    def supports_tree(self, pair: Pair, tree: Eagle2Policy) -> bool:
        target = pair.target_files
        is_supported = target is None or not (target.has_sliding_window or target.has_latent_attention)
        return (
            is_supported
            and self.methods[pair.draft_kind] == DYNAMIC_TREES
            and tree.depth <= tree.budget <= tree.k * tree.depth
        )

    def supports_schedule(self, pair: Pair) -> bool:
        return True

    def lengths(self, schedule: Sequence[BatchPrediction]) -> dict[int, int]:
        """The schedule by the keys of this version."""
        return {batch.end: batch.draft_tokens for batch in schedule if batch.draft_tokens > 0}

    def settings(self, pair: Pair, tree: EngineTree, schedule: Sequence[BatchPrediction] = ()) -> TensorRtLlmSettings:
        topk = tree.k if isinstance(tree, Eagle2Policy) else None
        decoding = {
            "decoding_type": self.methods[pair.draft_kind],
            "speculative_model": pair.draft,
            "max_draft_len": tree.max_depth,
            "max_total_draft_tokens": tree.max_nodes,
            "use_dynamic_tree": True if topk else None,
            "dynamic_tree_max_topK": topk,
            "draft_len_schedule": self.lengths(schedule) or None,
        }
        return self.settings_type.model_validate({"speculative_config": decoding})

    def command(self, pair: Pair, settings: Document, path: Path) -> str:
        return shlex.join(["trtllm-serve", pair.target, "--config", str(path)])


class TensorRtLlm121(TensorRtLlm):
    """See ``Engine``: chains, with the schedule of 1.2.1."""

    version = "1.2.1"
    settings_type = TensorRtLlmSettings121
    notes = (
        "the keys of draft_len_schedule are the smallest batch sizes of each length; later versions read them as the largest",
        "dynamic trees were checked in later versions only, so chains are exported",
    )

    def supports_tree(self, pair: Pair, tree: Eagle2Policy) -> bool:
        return False

    def caveats(self, pair: Pair) -> Sequence[str]:
        return super().caveats(pair) if pair.draft_kind == "independent" else ()

    def lengths(self, schedule: Sequence[BatchPrediction]) -> dict[int, int]:
        lengths = {batch.start: batch.draft_tokens for batch in schedule}
        if schedule and schedule[-1].draft_tokens > 0:  # nothing is predicted for larger batches
            lengths[schedule[-1].end + 1] = 0
        return lengths
