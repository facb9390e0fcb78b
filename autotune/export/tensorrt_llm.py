"""TensorRT-LLM: dynamic trees of EAGLE-3 heads, and chains, in the YAML that ``trtllm-serve --config`` takes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from autotune.export.choose import BatchRange, EngineTree
from autotune.export.engine import Engine, Pair
from autotune.files import Document
from autotune.trees.eagle2 import Eagle2Policy

DYNAMIC_TREES = "Eagle3"


class TensorRtLlmDecoding(Document):
    """``max_draft_len`` is our ``depth``, ``dynamic_tree_max_topK`` our ``k``, and ``max_total_draft_tokens`` our ``budget``: draft
    tokens of a verification, the root not among them. A chain has as many in all as it is long.
    """

    decoding_type: Literal["Eagle3", "Draft_Target"]
    speculative_model: str = Field(min_length=1)
    max_draft_len: int = Field(ge=1)
    max_total_draft_tokens: int | None = Field(default=None, ge=1)
    use_dynamic_tree: bool | None = None
    dynamic_tree_max_topK: int | None = Field(default=None, ge=1)
    draft_len_schedule: dict[int, int] | None = Field(default=None, min_length=1)
    """By the largest batch size that a length is for; above the last, speculation rests."""

    @model_validator(mode="after")
    def _rules(self) -> TensorRtLlmDecoding:
        longest, total, topk = self.max_draft_len, self.max_total_draft_tokens, self.dynamic_tree_max_topK
        if not self.use_dynamic_tree:
            if topk is not None or total not in (None, longest):
                raise ValueError(
                    f"a chain has max_total_draft_tokens = max_draft_len = {longest}, and no dynamic_tree_max_topK"
                )
        elif self.decoding_type != DYNAMIC_TREES or topk is None or self.draft_len_schedule is not None:
            raise ValueError(
                "a dynamic tree needs decoding_type Eagle3 and dynamic_tree_max_topK, and takes no draft_len_schedule"
            )
        elif total is not None and not longest <= total <= topk * longest:
            raise ValueError(
                f"max_total_draft_tokens lies between max_draft_len, {longest}, and dynamic_tree_max_topK times as many, "
                f"{topk * longest}; got {total}"
            )
        schedule = self.draft_len_schedule
        if schedule is not None:
            if min(schedule) < 1 or not all(0 <= length <= longest for length in schedule.values()):
                raise ValueError(
                    f"draft_len_schedule maps batch sizes from 1 on to lengths up to {longest}; got {schedule}"
                )
            if schedule[min(schedule)] != longest:
                raise ValueError(
                    f"draft_len_schedule gives the smallest batches max_draft_len, {longest}; got {schedule}"
                )
        return self


class TensorRtLlmSettings(Document):
    """The part of a server's YAML that speaks of speculation."""

    speculative_config: TensorRtLlmDecoding


class TensorRtLlm(Engine):
    """See ``Engine``."""

    methods: ClassVar[Mapping[str, str]] = {"independent": "Draft_Target", "eagle3": DYNAMIC_TREES}
    has_schedule = True
    settings_kind = TensorRtLlmSettings
    lossless = (
        "drafts are accepted where they are the token that the target draws, which keeps its distribution at any temperature; at "
        "temperature 0 that is the target's own tokens, but for near ties in reduced precision, and above 0 other draws than "
        "autotune's, whose noise is keyed by seed and position; relaxed and typical acceptance are lossy: leave them off"
    )
    notes = (
        "draft_len_schedule goes by the largest batch size of a length, and above its last size speculation rests; earlier versions "
        "read its keys as smallest sizes: take it out there",
    )

    def grows(self, pair: Pair, tree: Eagle2Policy) -> bool:
        return self.methods[pair.kind] == DYNAMIC_TREES and tree.depth <= tree.budget <= tree.k * tree.depth

    def settings(self, pair: Pair, tree: EngineTree, schedule: Sequence[BatchRange]) -> TensorRtLlmSettings:
        decoding = {
            "decoding_type": self.methods[pair.kind],
            "speculative_model": pair.draft,
            "max_draft_len": tree.max_depth,
            "max_total_draft_tokens": tree.max_nodes,
        }
        if isinstance(tree, Eagle2Policy):
            decoding |= {"use_dynamic_tree": True, "dynamic_tree_max_topK": tree.k}
        lengths = {one.end: one.draft_tokens for one in schedule if one.draft_tokens > 0}
        return TensorRtLlmSettings.model_validate(
            {"speculative_config": {**decoding, "draft_len_schedule": lengths or None}}
        )

    def file_name(self, variant: str) -> str:
        return f"{variant}.yaml"

    def command(self, pair: Pair, settings: Document, path: Path) -> str:
        return shlex.join(["trtllm-serve", pair.target, "--config", str(path)])
