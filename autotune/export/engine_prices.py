"""A serving engine's own prices of rounds, measured in the engine by draft length and number of requests at a time."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from pydantic import Field, field_validator

from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import ModelReference, Provenance
from autotune.errors import UserError
from autotune.files import Document


class RoundTimes(Document):
    """Times of an engine that drafts ``draft_tokens`` a round and decodes ``requests_at_once`` requests at a time. Each sample is of
    all prompts; times are milliseconds of the engine's time per round, or per prefill, of one request: requests share a step.
    """

    requests_at_once: int = Field(ge=1)
    draft_tokens: int = Field(ge=0)
    """0: plain decoding, in which every token is a round."""
    round_ms: list[float] = Field(min_length=1)
    prefill_ms: list[float] = Field(min_length=1)


class EnginePrices(Document, kind="engine-prices", made_by="autotune bench-server --prices FILE"):
    """Prices of one engine, target and draft on one machine."""

    provenance: Provenance
    engine: str
    engine_version: str
    hardware: Fingerprint
    target: ModelReference
    draft: ModelReference
    workload: str
    times: list[RoundTimes]

    @field_validator("times")
    @classmethod
    def _is_grid(cls, times: list[RoundTimes]) -> list[RoundTimes]:
        lengths = {row.draft_tokens for row in times}
        sizes = {row.requests_at_once for row in times}
        measured = {(row.requests_at_once, row.draft_tokens) for row in times}
        if not len(times) == len(measured) == len(lengths) * len(sizes) or not {0, 1} <= lengths or 1 not in sizes:
            raise ValueError(
                "times are of every draft length with every number of requests, among them 0 and 1 draft tokens and 1 request"
            )
        return times

    @functools.cached_property
    def _medians(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Medians of ``round_ms`` and ``prefill_ms`` by number of requests and draft tokens."""
        return {
            (row.requests_at_once, row.draft_tokens): (float(np.median(row.round_ms)), float(np.median(row.prefill_ms)))
            for row in self.times
        }

    @property
    def batch_sizes(self) -> list[int]:
        """Numbers of requests at a time that were measured."""
        return sorted({row.requests_at_once for row in self.times})

    @property
    def draft_lengths(self) -> list[int]:
        return sorted({row.draft_tokens for row in self.times})

    def round_ms(self, batch: int, draft_tokens: int) -> float:
        """Milliseconds per round of one request. Steps, of ``batch`` rounds each, are interpolated between the measured numbers of
        requests, and rounds that draft between the measured lengths.
        """
        lengths = [0] if draft_tokens == 0 else self.draft_lengths[1:]
        steps = [
            np.interp(draft_tokens, lengths, [size * self._medians[size, length][0] for length in lengths])
            for size in self.batch_sizes
        ]
        return float(np.interp(batch, self.batch_sizes, steps)) / batch

    def draft_prefill_ms(self, batch: int) -> float:
        """Time that the draft adds to the prefill of one request, the mean over draft lengths."""
        added = []
        for size in self.batch_sizes:
            plain = self._medians[size, 0][1]
            added.append(np.mean([self._medians[size, length][1] for length in self.draft_lengths[1:]]) - plain)
        return max(0.0, float(np.interp(batch, self.batch_sizes, added)))

    def check_is_of(
        self, engine: str, version: str, target: ModelReference, draft: ModelReference, *, source: Path
    ) -> None:
        """Check that the prices are of this engine, target and draft.

        Raises:
            UserError: they are not.
        """
        for what, recorded, given, is_same in (
            ("engine", self.engine, engine, self.engine == engine),
            ("version", self.engine_version, version, self.engine_version == version),
            ("target", self.target.id, target.id, self.target.is_same(target)),
            ("draft", self.draft.id, draft.id, self.draft.is_same(draft)),
        ):
            if not is_same:
                raise UserError(
                    f"{source}: prices are valid for the {what} that they were measured with; these are of {recorded}, not of {given} with "
                    "these weights; measure them again with autotune bench-server --prices"
                )
