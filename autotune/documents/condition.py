"""Conditions: the requests that an operating point serves."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

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

    def overlaps(self, values: range) -> bool:
        """Whether this range includes any of some consecutive integers."""
        return (self.min is None or self.min <= values[-1]) and (self.max is None or self.max >= values[0])

    def covers(self, other: Range) -> bool:
        """Whether this range includes all values of the other."""
        return (self.min is None or (other.min is not None and other.min >= self.min)) and (
            self.max is None or (other.max is not None and other.max <= self.max)
        )


class Condition(Document):
    """Requirements on a request. Those left out match everything, so an empty condition matches every request."""

    temperature: Range | None = None
    """0 for greedy decoding."""
    prompt_tokens: Range | None = None
    """Includes visual tokens, excludes padding."""
    context_tokens: Range | None = None
    """Tokens in the target's KV cache at the start of a round, prompt included."""
    has_image: bool | None = None
    """Whether the prompt has visual tokens, of images or videos."""
    workload: str | None = Field(default=None, min_length=1)
    """Tag that the caller gives to a request: the name of a workload or of one of its tasks."""

    @property
    def label(self) -> str:
        ranges = (
            ("temperature", self.temperature),
            ("prompt tokens", self.prompt_tokens),
            ("context tokens", self.context_tokens),
        )
        words = [f"{name} {values.label}" for name, values in ranges if values is not None]
        if self.has_image is not None:
            words.append("with image" if self.has_image else "without image")
        if self.workload is not None:
            words.append(f"workload {self.workload}")
        return ", ".join(words) or "any request"

    @property
    def of_request(self) -> Condition:
        """The requirements that do not change during a request: all but ``context_tokens``."""
        return self.model_copy(update={"context_tokens": None})

    def matches(
        self,
        *,
        temperature: float,
        prompt_tokens: int,
        has_image: bool,
        workload: str | None,
        context_tokens: int | None = None,
    ) -> bool:
        """Whether a request meets all requirements. A request without a tag matches no ``workload``.

        Args:
            context_tokens: at the start of a round; None for the first round, at which it equals ``prompt_tokens``.
        """
        context = prompt_tokens if context_tokens is None else context_tokens
        return (
            (self.temperature is None or temperature in self.temperature)
            and (self.prompt_tokens is None or prompt_tokens in self.prompt_tokens)
            and (self.context_tokens is None or context in self.context_tokens)
            and self.has_image in (None, has_image)
            and (self.workload is None or workload == self.workload)
        )

    def covers(self, other: Condition) -> bool:
        """Whether this condition matches every request that the other one matches."""
        ranges = (
            (self.temperature, other.temperature),
            (self.prompt_tokens, other.prompt_tokens),
            (self.context_tokens, other.context_tokens),
        )
        return (
            self.workload in (None, other.workload)
            and self.has_image in (None, other.has_image)
            and all(mine is None or (others is not None and mine.covers(others)) for mine, others in ranges)
        )


def first_match(
    conditions: Iterable[Condition],
    *,
    temperature: float,
    prompt_tokens: int,
    has_image: bool,
    workload: str | None = None,
    context_tokens: int | None = None,
) -> int:
    """Index of the first condition that matches a request; the last condition must match every request.

    The arguments are those of ``Condition.matches``.
    """
    return next(
        number
        for number, condition in enumerate(conditions)
        if condition.matches(
            temperature=temperature,
            prompt_tokens=prompt_tokens,
            has_image=has_image,
            workload=workload,
            context_tokens=context_tokens,
        )
    )


def context_group(conditions: Sequence[Condition], number: int) -> list[int]:
    """Indices of the conditions that differ from that of ``number`` in ``context_tokens`` alone, itself included.

    A request that one of them matches is switched between their points while its context grows.
    """
    of_request = conditions[number].of_request
    return [index for index, condition in enumerate(conditions) if condition.of_request == of_request]


def first_at_context(ranges: Iterable[tuple[int, Range | None]], context_tokens: int) -> int:
    """The number whose range of context lengths is the first to include ``context_tokens``; None includes all."""
    return next(number for number, values in ranges if values is None or context_tokens in values)


def context_boundaries(conditions: Iterable[Condition]) -> list[int]:
    """Context lengths, ascending, at which the first matching condition may change."""
    ranges = [condition.context_tokens for condition in conditions if condition.context_tokens is not None]
    starts = {math.ceil(values.min) for values in ranges if values.min is not None}
    ends = {math.floor(values.max) + 1 for values in ranges if values.max is not None}
    return sorted(starts | ends)


def check_switches(conditions: Sequence[Condition], variants: Sequence[Hashable]) -> None:
    """Check the points between which a request is switched while its context grows.

    Every context must have a point, so a condition with ``context_tokens`` is followed by one with the same other
    requirements; and a switch must be free, so these points share one draft variant or decode plainly.

    Args:
        variants: each point's draft and choice of visual tokens, as a hashable value; None for plain decoding.

    Raises:
        ValueError: they do not.
    """
    for number, condition in enumerate(conditions):
        if condition.context_tokens is None:
            continue
        if number + 1 == len(conditions) or conditions[number + 1].of_request != condition.of_request:
            raise ValueError(
                f"point {number} has context_tokens, so the next point must have the same other conditions, for all other "
                "contexts; add that point, or leave context_tokens out"
            )
        group = context_group(conditions, number)
        if len({variants[member] for member in group} - {None}) > 1:
            raise ValueError(
                f"points {group[0]} to {group[-1]} differ only in context_tokens, and requests switch between them, so they "
                "must share one draft and subnet or decode plainly; give them the same draft and subnet"
            )
