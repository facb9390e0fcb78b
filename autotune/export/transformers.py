"""Plain ``transformers``: assisted generation, as an update of the draft's ``generation_config``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from autotune.export.engine import SAMPLING, Engine, Pair
from autotune.files import Document
from autotune.trees.chain import ChainPolicy


class TransformersSettings(Document):
    """Fields of the draft's ``generation_config``; ``generate`` ignores them in the target's.

    ``num_assistant_tokens`` is our chain's depth, without the root. A constant schedule and a threshold of 0 give every round
    the same length; transformers' default threshold, 0.4, ends rounds early and adapts.
    """

    num_assistant_tokens: int = Field(ge=1)
    num_assistant_tokens_schedule: Literal["constant"] = "constant"
    assistant_confidence_threshold: float = 0.0


class Transformers(Engine):
    name = "transformers"
    version = "5.23.0"
    settings_file = "generation_config.json"
    floor_note = "assistant_confidence_threshold also verifies the first token below it and adapts to acceptance"
    lossless = f"assisted generation preserves the target's distribution at any temperature; {SAMPLING}"
    notes = (
        "generate has more overhead per round than predicted: autotune bench PROFILE --against ar,hf,hf-assisted measures the "
        "speedup that remains",
        "generate gives an assistant no image: a vision-language model reads the placeholders as text, and predictions replay a trace "
        "recorded so",
        "with sampling, assisted generation samples its drafts too, so fewer of them are accepted than predicted",
    )

    def settings(self, pair: Pair, chain: ChainPolicy) -> TransformersSettings:
        return TransformersSettings(num_assistant_tokens=chain.depth)

    def command(self, pair: Pair, settings: Document, path: Path) -> str:
        return (
            f'draft.generation_config.update(**json.load(open("{path}"))); target.generate(**inputs, assistant_model=draft)'
            f"  # target: {pair.target}, draft: {pair.draft}"
        )
