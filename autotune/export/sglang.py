"""SGLang: EAGLE-2's dynamic trees, and chains, as server flags."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, RootModel, field_validator, model_validator

from autotune.export.document import BatchPrediction
from autotune.export.engine import SAMPLING, Engine, Pair, unequal_vocabularies
from autotune.export.engine_replay import EngineTree
from autotune.files import Document
from autotune.trees.eagle2 import Eagle2Policy


class SglangSettings(Document):
    """Server arguments, named as in ``sglang.Engine``.

    ``num_steps`` is our ``depth``, the number of draft levels. ``eagle_topk`` is our ``k``: nodes expanded in a level, and
    children of each. ``num_draft_tokens`` counts the tokens of one verification with the root: our ``budget`` plus 1. A
    chain has ``eagle_topk`` 1 and verifies every token that it drafts.
    """

    speculative_algorithm: Literal["EAGLE3", "STANDALONE"]
    speculative_draft_model_path: str = Field(min_length=1)
    speculative_num_steps: int | None = Field(default=None, ge=1)
    speculative_eagle_topk: int | None = Field(default=None, ge=1)
    speculative_num_draft_tokens: int | None = Field(default=None, ge=2)
    speculative_adaptive: Literal[True] | None = None
    """Choose the steps of a chain by the batch size; see ``AdaptiveSteps``."""
    speculative_adaptive_config: str | None = None
    attention_backend: str | None = None
    page_size: int | None = Field(default=None, ge=1)
    speculative_use_rejection_sampling: Literal[True] | None = None

    @model_validator(mode="after")
    def _rules(self) -> SglangSettings:
        steps, topk, tokens = sizes = (
            self.speculative_num_steps,
            self.speculative_eagle_topk,
            self.speculative_num_draft_tokens,
        )
        if self.speculative_adaptive and (self.speculative_algorithm != "EAGLE3" or topk != 1):
            raise ValueError("speculative_adaptive takes EAGLE3 with eagle_topk 1")
        if self.speculative_adaptive_config is not None and not self.speculative_adaptive:
            raise ValueError("speculative_adaptive_config requires speculative_adaptive")
        if self.speculative_use_rejection_sampling and self.speculative_algorithm != "EAGLE3":
            raise ValueError("speculative_use_rejection_sampling takes EAGLE3")
        if topk is not None and topk > 1:
            self._require_trees()
        if steps is None or topk is None or tokens is None:
            if sizes != (None, None, None):
                raise ValueError(
                    "SGLang takes num_steps, eagle_topk and num_draft_tokens together; set all three, or none"
                )
            return self
        if topk == 1 and tokens != steps + 1:
            raise ValueError(f"a chain of {steps} steps has {steps + 1} draft tokens with its root; got {tokens}")
        if tokens - 1 > (grown := topk + (steps - 1) * topk**2):
            raise ValueError(
                f"{steps} steps of top-k {topk} draft at most {grown} tokens plus the root; got {tokens} in all"
            )
        return self

    def _require_trees(self) -> None:
        """Check the options that exclude trees; backend and page size may be SGLang's own choice, which is not known here."""
        backend = self.attention_backend
        if backend == "trtllm_mha":
            raise ValueError("attention_backend trtllm_mha takes eagle_topk 1 only")
        if (self.page_size or 1) > 1 and backend not in TREE_BACKENDS_WITH_PAGES:
            raise ValueError(
                f"eagle_topk above 1 with page_size {self.page_size} takes attention_backend {', '.join(TREE_BACKENDS_WITH_PAGES)}"
            )
        if self.speculative_use_rejection_sampling:
            raise ValueError("speculative_use_rejection_sampling takes eagle_topk 1 only")


class AdaptiveSlot(Document):
    candidate_steps: list[int] = Field(min_length=1)
    """Numbers of draft levels between which SGLang chooses by acceptance; a single one is fixed. 0 drafts nothing."""


class AdaptiveSteps(Document):
    """The file of ``speculative_adaptive_config``: steps by the smallest batch size that uses them."""


class Sglang(Engine):
    """See ``Engine``."""

    methods: ClassVar = {"independent": "STANDALONE", "eagle3": "EAGLE3"}
    settings_type = SglangSettings
    lossless = (
        "speculative_accept_threshold_single and speculative_accept_threshold_acc at their default, 1.0, preserve the target's "
        f"distribution at any temperature (lower values are lossy); {SAMPLING}"
    )
    notes = (
        "newer SGLang schedulers accept eagle_topk 1 only: use the chain there",
        "some versions of SGLang do not show the image to a STANDALONE draft; a draft that sees only text is accepted less often",
    )

    def supports_tree(self, pair: Pair, tree: Eagle2Policy) -> bool:
        return tree.budget <= tree.max_grown

    def settings(self, pair: Pair, tree: EngineTree, schedule: Sequence[BatchPrediction] = ()) -> SglangSettings:
        return SglangSettings.model_validate(
            {
                "speculative_algorithm": self.methods[pair.draft_kind],
                "speculative_draft_model_path": pair.draft,
                "speculative_num_steps": tree.max_depth,
                "speculative_eagle_topk": tree.max_width,
                "speculative_num_draft_tokens": tree.max_nodes + 1,
            }
        )

    def command(self, pair: Pair, settings: Document, path: Path) -> str:
        arguments = settings.model_dump(exclude_none=True)
        flags = [word for name, value in arguments.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", pair.target, *flags])
