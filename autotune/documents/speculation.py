"""Speculation settings of serving engines: the types, their options, and their defaults. Loads no torch."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from autotune.errors import UserError
from autotune.files import Document, content_key

ModelType = Literal[
    "draft_model", "eagle3", "dflash", "mtp", "draft-simple", "draft-eagle3", "draft-dflash", "draft-mtp"
]
"""Types that draft with a model or a head of the target: chains, of which shorter ones begin longer ones."""
DEEPEST = 8
"""Depth at which a chain is recorded; those of fewer tokens are its beginnings."""
OF_THE_TARGET = ("mtp", "draft-mtp")
"""Types whose head the target's own files may have, so that no model is named."""
Natural = Annotated[int, Field(ge=0, lt=1 << 31)]
"""A token's id, or a number of tokens."""
Milliseconds = Annotated[float, Field(ge=0)]
Options = dict[str, int | float]
OPTIONS: dict[str, Options] = {
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
The last option of a type is its depth. vLLM documents no default for ``ngram``; these values are its example's. A draft
model drafts three tokens.
"""


class Speculation(Document):
    """One type of an engine's speculation with its options; llama.cpp's options without ``--spec-TYPE-``."""

    type: str = Field(min_length=1)
    """A key of ``OPTIONS``, or a type of another engine."""
    options: Options = Field(default_factory=dict)
    """All options of a type in ``OPTIONS``. Those of other types are not checked."""
    model: str = ""
    """Folder or Hugging Face id of the draft; empty for a type without one, and for a head in the target's files."""
    schedule: list[tuple[Natural, Natural, Natural]] = Field(default_factory=list)
    """First and last number of requests at once, and the depth for them, where it is not the same for all."""

    @model_validator(mode="after")
    def _has_its_options(self) -> Speculation:
        if self.type not in OPTIONS:
            return self
        if list(self.options) != list(OPTIONS[self.type]):
            raise ValueError(f"{self.type} has the options {', '.join(OPTIONS[self.type]) or 'none'}")
        if bool(self.model) != self.is_chain and self.type not in OF_THE_TARGET:
            raise ValueError(f"{self.type} {'has no' if self.model else 'needs a'} model")
        return self

    @property
    def key(self) -> str:
        """Hash of the settings, as ``Configuration.key``."""
        return content_key(self.model_dump(mode="json", exclude=None if self.schedule else {"schedule"}))

    @property
    def is_chain(self) -> bool:
        """Whether a model or a head drafts, a token after the other."""
        return self.type in get_args(ModelType)

    @property
    def depth(self) -> int | None:
        """The most tokens of a draft; None for a type that is not in ``OPTIONS``."""
        return int(self.options[list(OPTIONS[self.type])[-1]]) if self.type in OPTIONS else None

    def at_depth(self, k: int) -> Speculation | None:
        """These settings with drafts of at most ``k`` tokens; None for 0, which is no speculation.

        Raises:
            UserError: the type is not in ``OPTIONS``.
        """
        if k == 0:
            return None
        if self.type not in OPTIONS:
            raise UserError(f"{self.type}: the option that limits its drafts is not known; choose another type")
        *others, depth = OPTIONS[self.type]
        least = {name: min(self.options[name], k) for name in others if name == "n-min"}  # of a draft that is used
        return self.model_copy(update={"options": self.options | least | {depth: k}, "schedule": []})

    def for_requests(self, at_once: int) -> Speculation | None:
        """The settings for a number of requests at once, by the schedule if there is one."""
        depths = [depth for first, last, depth in self.schedule if first <= at_once <= last]
        return self.at_depth(depths[0]) if depths else self

    @property
    def is_default(self) -> bool:
        """Whether the options are those of the type in ``OPTIONS``; for another type, whether it has none."""
        return self.options == OPTIONS.get(self.type, {})

    @property
    def label(self) -> str:
        values = ",".join(f"{value:g}" for value in self.options.values())
        return f"{self.type}({values})" if values else self.type
