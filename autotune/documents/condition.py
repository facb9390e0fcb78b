"""Conditions: the requests that an operating point serves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NotRequired, TypedDict, Unpack

from pydantic import Field, model_validator

from autotune.files import Document


class Range(Document):
    """A range that includes both ends; an end that is left out is unbounded."""

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
        if self.min == self.max:
            return f"{self.min:g}"
        return " ".join(f"{word} {end:g}" for word, end in (("from", self.min), ("up to", self.max)) if end is not None)

    def covers(self, other: Range) -> bool:
        """Whether this range includes all values of the other."""
        return (self.min is None or (other.min is not None and other.min >= self.min)) and (
            self.max is None or (other.max is not None and other.max <= self.max)
        )


class RequestProperties(TypedDict):
    """The arguments of ``Condition.matches``."""

    temperature: float
    prompt_tokens: int
    has_image: bool
    workload: NotRequired[str | None]


class Condition(Document):
    """Requirements on a request. Those left out match everything, so an empty condition matches every request."""

    temperature: Range | None = None
    """0 for greedy decoding."""
    prompt_tokens: Range | None = None
    """Includes visual tokens, excludes padding."""
    has_image: bool | None = None
    """Whether the prompt has visual tokens, of images or videos."""
    workload: str | None = Field(default=None, min_length=1)
    """Tag that the caller gives to a request: the name of a workload or of one of its tasks."""

    @property
    def label(self) -> str:
        ranges = (("temperature", self.temperature), ("prompt tokens", self.prompt_tokens))
        words = [f"{name} {values.label}" for name, values in ranges if values is not None]
        if self.has_image is not None:
            words.append("with image" if self.has_image else "without image")
        if self.workload is not None:
            words.append(f"workload {self.workload}")
        return ", ".join(words) or "any request"

    def matches(self, *, temperature: float, prompt_tokens: int, has_image: bool, workload: str | None = None) -> bool:
        """Whether a request meets all requirements. A request without a tag matches no ``workload``."""
        return (
            (self.temperature is None or temperature in self.temperature)
            and (self.prompt_tokens is None or prompt_tokens in self.prompt_tokens)
            and self.has_image in (None, has_image)
            and (self.workload is None or workload == self.workload)
        )

    def covers(self, other: Condition) -> bool:
        """Whether this condition matches every request that the other one matches."""
        ranges = ((self.temperature, other.temperature), (self.prompt_tokens, other.prompt_tokens))
        return (
            self.workload in (None, other.workload)
            and self.has_image in (None, other.has_image)
            and all(mine is None or (others is not None and mine.covers(others)) for mine, others in ranges)
        )


def first_match(conditions: Iterable[Condition], **request: Unpack[RequestProperties]) -> int:
    """Index of the first condition that matches a request; the last condition must match every request."""
    return next(number for number, condition in enumerate(conditions) if condition.matches(**request))
