"""Speculation settings of serving engines: the types, their options, and their defaults. Loads no torch."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from autotune.files import Document, content_key

ModelType = Literal["draft_model", "eagle3", "mtp", "draft-simple", "draft-eagle3"]
SpeculationType = str
"""A key of ``OPTIONS``, or a type of another engine."""
Natural = Annotated[int, Field(ge=0, lt=1 << 31)]
"""A token's id, or a number of tokens."""
Milliseconds = Annotated[float, Field(ge=0)]
Options = dict[str, int | float]
OPTIONS: dict[SpeculationType, Options] = {
    "ngram-simple": {"size-n": 12, "size-m": 48},
    "ngram-mod": {"n-match": 24, "n-min": 48, "n-max": 64},
    "ngram": {"prompt_lookup_min": 4, "prompt_lookup_max": 4, "num_speculative_tokens": 5},
    "suffix": {
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
        "num_speculative_tokens": 24,
    },
    **{name: {"n-max" if name.startswith("draft-") else "num_speculative_tokens": 3} for name in get_args(ModelType)},
}
"""Options that affect a type's drafts, with the engine's defaults, in the order in which llama-server tries the types.
vLLM documents no default for ``ngram``; these values are its example's. A draft model drafts three tokens.
"""


class Speculation(Document):
    """One type of an engine's speculation with its options; llama.cpp's options without ``--spec-TYPE-``."""

    type: SpeculationType = Field(min_length=1)
    options: Options = Field(default_factory=dict)
    """All options of a type in ``OPTIONS``. Those of other types are not checked."""
    model: str = ""
    """Folder or Hugging Face id of the draft model; empty for a type without one."""

    @model_validator(mode="after")
    def _has_its_options(self) -> Speculation:
        if self.type not in OPTIONS:
            return self
        if list(self.options) != list(OPTIONS[self.type]):
            raise ValueError(f"{self.type} has the options {', '.join(OPTIONS[self.type]) or 'none'}")
        if bool(self.model) != (self.type in get_args(ModelType)):
            raise ValueError(f"{self.type} {'has no' if self.model else 'needs a'} model")
        return self

    @property
    def key(self) -> str:
        """Hash of the settings, as ``Configuration.key``."""
        return content_key(self.model_dump(mode="json"))

    @property
    def is_default(self) -> bool:
        """Whether the options are those of the type in ``OPTIONS``; for another type, whether it has none."""
        return self.options == OPTIONS.get(self.type, {})

    @property
    def label(self) -> str:
        values = ",".join(f"{value:g}" for value in self.options.values())
        return f"{self.type}({values})" if values else self.type
