"""The profile of a serving engine: its own speculation settings, with the counts and prices behind them. Loads no
torch.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance
from autotune.files import Document

EngineName = Literal["llama.cpp", "vllm"]
NgramType = Literal["ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache", "ngram", "suffix"]
ModelType = Literal["draft_model", "eagle3", "mtp", "draft-simple", "draft-eagle3"]
SpeculationType = NgramType | ModelType
Clock = Literal["wall", "cpu"]
Natural = Annotated[int, Field(ge=0, lt=1 << 31)]
"""A token's id, or a number of tokens."""
Milliseconds = Annotated[float, Field(ge=0)]
Options = dict[str, int | float]
OPTIONS: dict[SpeculationType, Options] = {
    "ngram-simple": {"size-n": 12, "size-m": 48},
    "ngram-map-k": {"size-n": 12, "size-m": 48},
    "ngram-map-k4v": {"size-n": 12, "size-m": 48, "min-hits": 1},
    "ngram-mod": {"n-match": 24, "n-min": 48, "n-max": 64},
    "ngram-cache": {},
    "ngram": {"prompt_lookup_min": 4, "prompt_lookup_max": 4, "num_speculative_tokens": 5},
    "suffix": {
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
        "num_speculative_tokens": 24,
    },
    **{name: {"n-max" if name.startswith("draft-") else "num_speculative_tokens": 3} for name in get_args(ModelType)},
}
"""The options that change a type's drafts, with the engines' defaults, in the order in which a server of several types
asks them; of vLLM's ``ngram`` the values of its documentation, and three tokens of a draft model.
"""
REAL_OPTIONS = {"suffix_decoding_max_spec_factor": 64, "suffix_decoding_min_token_prob": 1}
"""Options that are no whole numbers, with the largest value."""
TYPES: dict[EngineName, list[SpeculationType]] = {
    "llama.cpp": [name for name in OPTIONS if name.startswith("ngram-")],
    "vllm": ["ngram", "suffix"],
}
"""The types that need no draft model."""


class Speculation(Document):
    """One type of an engine's speculation with all of its options: llama.cpp's by their names without
    ``--spec-TYPE-``.
    """

    type: SpeculationType
    options: Options = Field(default_factory=dict)
    model: str = ""
    """Folder or Hugging Face id of the draft model, of a type that has one."""

    @model_validator(mode="after")
    def _has_its_options(self) -> Speculation:
        if list(self.options) != list(OPTIONS[self.type]):
            raise ValueError(f"{self.type} has the options {', '.join(OPTIONS[self.type]) or 'none'}")
        for name, value in self.options.items():
            least = 0 if name == "n-min" or name in REAL_OPTIONS else 1
            if not least <= value <= REAL_OPTIONS.get(name, 1024) or (value % 1 and name not in REAL_OPTIONS):
                kind = "a number" if name in REAL_OPTIONS else "a whole number"
                raise ValueError(f"{name} is {kind} from {least} to {REAL_OPTIONS.get(name, 1024)}")
        if self.options.get("prompt_lookup_min", 0) > self.options.get("prompt_lookup_max", 0):
            raise ValueError("prompt_lookup_min is at most prompt_lookup_max")
        if bool(self.model) != (self.type in get_args(ModelType)):
            raise ValueError(f"{self.type} {'has no' if self.model else 'needs a'} model")
        return self

    @property
    def is_default(self) -> bool:
        """Whether these are the type's options in ``OPTIONS``."""
        return self.options == OPTIONS[self.type]

    @property
    def label(self) -> str:
        return (
            f"{self.type}({','.join(f'{value:g}' for value in self.options.values())})" if self.options else self.type
        )


class SpeculationCounts(Document):
    """Verifications of drafts, their draft tokens, and the accepted ones."""

    verifications: Natural
    drafted: Natural
    accepted: Natural

    @property
    def text(self) -> str:
        return f"{self.verifications} verifications, {self.drafted} drafted, {self.accepted} accepted"


class ServedAnswer(Document):
    """A greedy answer of the engine, with its own counts of draft tokens and its time from the first token to
    the last.
    """

    prompt_tokens: list[Natural] = Field(min_length=1)
    tokens: list[Natural] = Field(min_length=1)
    limit: int = Field(ge=1)
    """The most tokens that the request asked for."""
    is_ended: bool = False
    """Whether the last token ends the generation."""
    beyond: list[Natural] = Field(default_factory=list)
    """Tokens that greedy decoding gives after the end, of an engine whose drafts reach there."""
    rounds: list[tuple[Natural, Natural]] = Field(default_factory=list)
    """Draft tokens and accepted ones of every verification, in a server whose draft model drafts before each pass."""
    drafted: Natural = 0
    accepted: Natural = 0
    wall_ms: Milliseconds = 0.0
    cpu_ms: Milliseconds = 0.0
    """CPU time of the server's threads; 0 if they are not on this machine."""

    @model_validator(mode="after")
    def _is_possible(self) -> ServedAnswer:
        if len(self.tokens) > self.limit or self.accepted > self.drafted:
            raise ValueError("an answer is no longer than its limit, and accepts no more tokens than are drafted")
        return self


class PricedStep(Document):
    """Times of one forward pass over ``tokens`` tokens of a request after ``context`` tokens."""

    tokens: int = Field(ge=1)
    context: int = Field(ge=0)
    wall_ms: list[Milliseconds] = Field(min_length=1)
    cpu_ms: list[Milliseconds] = Field(min_length=1)


class ConfirmedArm(Document):
    """Settings that were measured in turns with the engine without speculation, on held-out prompts."""

    label: str
    speculation: Speculation | None
    predicted: float
    """Speedup by replay and prices."""
    measured: float
    ci95: tuple[float, float]
    clock: Clock
    tokens_per_step: float
    replayed: SpeculationCounts
    counts: SpeculationCounts
    """Counted by the engine; ``replayed`` are the predicted ones."""
    exact: int | None
    """Prompts whose counts are the replay's; None with a draft model, whose chain is replayed from its own rounds."""
    identical: int
    """Prompts with plain decoding's answer."""
    prompts: int
    timed: int
    """Prompts that the speedups are of; in the others another process disturbed a request."""


class PredictedSettings(Document):
    """The speedup of settings over no speculation by replay and prices, pooled over the tuning prompts, with a
    bootstrap interval.
    """

    speculation: Speculation
    speedup: float
    ci95: tuple[float, float]


class ServedLoad(Document):
    """Settings that served a number of requests at a time in a new server; times are the client's, prompts are read in
    them.
    """

    label: str
    requests_at_once: int = Field(ge=1)
    requests: int = Field(ge=1)
    tokens: int
    seconds: float
    """From the first request to the last reply."""
    first_token_ms: tuple[float, float]
    """Median and 95th percentile over requests."""
    token_ms: tuple[float, float]
    """The same for the time from a request's first token to its last, over the tokens after the first."""
    identical: int
    """Requests with plain decoding's answer, one request at a time."""


class EngineProfile(Document, kind="engine-profile", version=6, made_by="autotune search --engine"):
    """The fastest speculation settings of one engine for a model, a workload and a machine; or that it should
    be off.
    """

    provenance: Provenance
    engine: EngineName
    build: str
    """SHA-256 of the engine's executable and libraries, or what a server says of itself."""
    target: ModelReference
    arguments: list[str]
    """Arguments of every server, besides the model and the speculation."""
    command: list[str]
    """Starts the engine as recommended."""
    speculation: Speculation | None
    """The recommended settings; None: leave speculation off."""
    workload: str
    workload_sha256: str
    hardware: Fingerprint
    context: int = Field(ge=1)
    """Most tokens of a request."""
    left_out: dict[SpeculationType, str]
    """Types that the build does not have, or whose counts are not the replay's, with the reason."""
    num_replayed: dict[SpeculationType, int]
    """Settings of each type that were replayed."""
    fastest: list[PredictedSettings] = Field(min_length=1)
    """The fastest three of each type, and its default."""
    prices: list[PricedStep] = Field(min_length=1)
    price_factor: float
    """Time of verifications in served requests over the prices' own."""
    step_factor: float
    """The same of passes over one token."""
    plain_factor: float
    """Time of passes without speculation over theirs, in an engine that runs another loop then; else 1."""
    draft_ms: tuple[float, float]
    """Time of a draft model for a verification, and for each draft token; 0 without one."""
    arms: list[ConfirmedArm]
    """Empty where a server that ran was not to be started anew."""
    loads: list[ServedLoad]
    """Empty unless ``--requests-at-once`` asked for them."""
    checked: Speculation
    """Settings of ``answers``: the recommended ones, or those of the tried that drafted most."""
    answers: list[ServedAnswer]
    """The first answers of a new server, in their order."""
    counts: SpeculationCounts
    """Totals of ``answers``."""
