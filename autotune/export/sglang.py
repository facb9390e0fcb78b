"""SGLang: EAGLE-2's dynamic trees and chains, as flags of its server."""

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


class SglangSettings(Document):
    """Server arguments, by the names that ``sglang.Engine`` takes them under.

    ``num_steps`` is our ``depth``: levels of draft tokens. ``eagle_topk`` is our ``k``: nodes of a level that are expanded, and
    children of each. ``num_draft_tokens`` is what one verification reads, the root included: our ``budget`` and 1. A chain
    is ``eagle_topk`` 1, and reads all that it drafts.
    """

    speculative_algorithm: Literal["EAGLE3", "STANDALONE"]
    speculative_draft_model_path: str = Field(min_length=1)
    speculative_num_steps: int | None = Field(default=None, ge=1)
    speculative_eagle_topk: int | None = Field(default=None, ge=1)
    speculative_num_draft_tokens: int | None = Field(default=None, ge=2)

    @model_validator(mode="after")
    def _rules(self) -> SglangSettings:
        steps, topk, tokens = (
            self.speculative_num_steps,
            self.speculative_eagle_topk,
            self.speculative_num_draft_tokens,
        )
        if steps is None or topk is None or tokens is None:
            if (steps, topk, tokens) != (None, None, None):
                raise ValueError(
                    "SGLang takes num_steps, eagle_topk and num_draft_tokens together; set all three, or none"
                )
            return self
        if topk == 1 and tokens != steps + 1:
            raise ValueError(
                f"a chain of {steps} steps has {steps + 1} draft tokens, its root among them; got {tokens}"
            )
        if tokens - 1 > topk + (steps - 1) * topk**2:
            raise ValueError(
                f"{steps} steps of top-k {topk} draft {topk + (steps - 1) * topk**2} tokens, and the root; got {tokens} in all"
            )
        return self

    @property
    def flags(self) -> list[str]:
        """For the command line."""
        arguments = self.model_dump(exclude_none=True)
        return [word for name, value in arguments.items() for word in (f"--{name.replace('_', '-')}", str(value))]


class Sglang(Engine):
    """See ``Engine``."""

    methods: ClassVar[Mapping[str, str]] = {"independent": "STANDALONE", "eagle3": "EAGLE3"}
    has_schedule = False
    settings_kind = SglangSettings
    lossless = (
        "speculative_accept_threshold_single and speculative_accept_threshold_acc at their default, 1.0, keep the target's "
        "distribution at any temperature (less is lossy); at temperature 0 that is the target's own tokens, but for near ties in "
        "reduced precision, and above 0 other draws than autotune's, whose noise is keyed by seed and position"
    )
    notes = (
        "newer schedulers of SGLang accept eagle_topk 1 only: take the chain there",
        "whether STANDALONE shows its draft the image depends on SGLang's version; a draft that sees text alone gets less accepted",
    )

    def grows(self, pair: Pair, tree: Eagle2Policy) -> bool:
        return tree.budget <= tree.max_grown

    def settings(self, pair: Pair, tree: EngineTree, schedule: Sequence[BatchRange]) -> SglangSettings:
        return SglangSettings.model_validate(
            {
                "speculative_algorithm": self.methods[pair.kind],
                "speculative_draft_model_path": pair.draft,
                "speculative_num_steps": tree.max_depth,
                "speculative_eagle_topk": tree.max_width,
                "speculative_num_draft_tokens": tree.max_nodes + 1,
            }
        )

    def file_name(self, variant: str) -> str:
        return f"{variant}.json"

    def command(self, pair: Pair, settings: Document, path: Path) -> str:
        assert isinstance(settings, SglangSettings)
        return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", pair.target, *settings.flags])
