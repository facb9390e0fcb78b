"""Plain ``transformers``: assisted generation, as a patch of the draft's ``generation_config``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from autotune.export.choose import BatchRange, EngineTree
from autotune.export.engine import Engine, Pair
from autotune.files import Document
from autotune.trees.eagle2 import Eagle2Policy


class TransformersSettings(Document):
    """Of the draft's ``generation_config``, for that is where ``generate`` looks for them, whatever the target's says.

    ``num_assistant_tokens`` is the depth of our chain: draft tokens of a round, the root not among them. A constant schedule and
    a threshold of 0 make every round as long; transformers' own threshold, 0.4, ends rounds early, and learns.
    """

    num_assistant_tokens: int = Field(ge=1)
    num_assistant_tokens_schedule: Literal["constant", "heuristic", "heuristic_transient"] = "constant"
    assistant_confidence_threshold: float = Field(default=0.0, ge=0, lt=1)


class Transformers(Engine):
    """See ``Engine``."""

    methods: ClassVar[Mapping[str, str]] = {"independent": "assistant_model"}
    has_schedule = False
    settings_kind = TransformersSettings
    lossless = (
        "assisted generation keeps the target's distribution at any temperature: at temperature 0 the target's own tokens, but for "
        "near ties in reduced precision, above 0 other draws than autotune's, whose noise is keyed by seed and position"
    )
    notes = (
        "generate spends more outside the models than the price of a round allows for: autotune bench PROFILE --against ar,hf,hf-assisted "
        "measures what is left of the speedup",
        "where tokens are sampled, assisted generation samples its drafts as well, and accepts fewer of them than predicted",
    )

    def grows(self, pair: Pair, tree: Eagle2Policy) -> bool:
        return False

    def settings(self, pair: Pair, tree: EngineTree, schedule: Sequence[BatchRange]) -> TransformersSettings:
        return TransformersSettings(num_assistant_tokens=tree.max_depth)

    def file_name(self, variant: str) -> str:
        return "generation_config.json"

    def command(self, pair: Pair, settings: Document, path: Path) -> str:
        return (
            f'draft.generation_config.update(**json.load(open("{path}"))); target.generate(**inputs, assistant_model=draft)'
            f"  # target: {pair.target}, draft: {pair.draft}"
        )
