"""For which requests an operating point is."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field, model_validator

from autotune.files import Document


class Range(Document):
    """Both ends are in it; one that is left out is open."""

    min: int | float | None = Field(default=None, ge=0)
    max: int | float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _has_ends_in_order(self) -> Range:
        if self.min is None and self.max is None:
            raise ValueError("a range has a min, a max or both; leave the range out where every value matches")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min must be at most max, which is {self.max}")
        return self

    def __contains__(self, value: float) -> bool:
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)

    @property
    def label(self) -> str:
        """For people."""
        if self.min == self.max:
            return f"{self.min:g}"
        return " ".join(f"{word} {end:g}" for word, end in (("from", self.min), ("up to", self.max)) if end is not None)

    def covers(self, other: Range) -> bool:
        """Whether all of the other's values are in this one."""
        return (self.min is None or (other.min is not None and other.min >= self.min)) and (
            self.max is None or (other.max is not None and other.max <= self.max)
        )


class Condition(Document):
    """What a request must be like; what is left out does not matter. Empty, it matches every request."""

    temperature: Range | None = None
    """0 is greedy decoding."""
    prompt_tokens: Range | None = None
    """Visual tokens included, padding not."""
    workload: str | None = Field(default=None, min_length=1)
    """The tag that the caller gives with a request: the name of a workload or of one of its tasks."""

    @property
    def label(self) -> str:
        """For people."""
        ranges = (("temperature", self.temperature), ("tokens of prompt", self.prompt_tokens))
        words = [f"{name} {found.label}" for name, found in ranges if found is not None]
        if self.workload is not None:
            words.append(f"workload {self.workload}")
        return ", ".join(words) or "any request"

    def matches(self, *, temperature: float, prompt_tokens: int, workload: str | None) -> bool:
        """Whether a request is meant; one without a tag is of no ``workload``."""
        return (
            (self.temperature is None or temperature in self.temperature)
            and (self.prompt_tokens is None or prompt_tokens in self.prompt_tokens)
            and (self.workload is None or workload == self.workload)
        )

    def covers(self, other: Condition) -> bool:
        """Whether it matches every request that the other one does."""
        ranges = ((self.temperature, other.temperature), (self.prompt_tokens, other.prompt_tokens))
        return self.workload in (None, other.workload) and all(
            ours is None or (theirs is not None and ours.covers(theirs)) for ours, theirs in ranges
        )


def first_match(
    conditions: Iterable[Condition], *, temperature: float, prompt_tokens: int, workload: str | None = None
) -> int:
    """The number of the first condition that a request meets; the last one must match every request."""
    return next(
        number
        for number, condition in enumerate(conditions)
        if condition.matches(temperature=temperature, prompt_tokens=prompt_tokens, workload=workload)
    )
