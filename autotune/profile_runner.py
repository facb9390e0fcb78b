"""Runs a profile's own decoder beside other arms: every prompt by the point that a request like it gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.decoding_profile import TUNED as TUNED  # for those who run it
from autotune.decoding_profile import DecodingProfile, PromptEvidence
from autotune.runtime.decoder import Decoder
from autotune.runtime.stats import DecodingStats
from autotune.search.finalists import Arm, Run, Runner
from autotune.trees.fallback import RequestMemory
from autotune.workload import WorkloadPrompt


class ProfileRunner(Runner):
    """Runs the arm ``tuned`` with the decoder itself, as it was loaded from a profile; a prompt's task is its tag."""

    def __init__(self, decoder: Decoder, ledger: Path | None = None, **options: Any) -> None:
        super().__init__(decoder, decoder.processor, ledger, **options)
        self._warm_points: set[int] = set()
        self._memories: list[RequestMemory] = []  # of all points, before the run

    def decoder_of(self, arm: Arm) -> Decoder:
        """An arm's own decoder, or the profile's."""
        return self.decoder if arm.name == TUNED else super().decoder_of(arm)

    def compare(self, *args: Any, **options: Any) -> dict[str, list[Run]]:
        """Every arm on the same prompts, as in ``Runner``."""
        for way in self.decoder.ways if not options.get("goes_on") else ():
            way.fallback.forget()
        return super().compare(*args, **options)

    def run(self, arm: Arm, prompt: WorkloadPrompt) -> Run:
        """One arm on one prompt, as in ``Runner``."""
        self._memories = [way.fallback.memory for way in self.decoder.ways]
        return super().run(arm, prompt)

    def decode(self, arm: Arm, inputs: dict[str, Any], prompt: WorkloadPrompt) -> tuple[list[int], DecodingStats]:
        """The arm's new tokens for a prompt, and what it did. A point's first prompt is decoded twice: its warm-up, of which
        nothing is learnt.
        """
        if arm.name != TUNED:
            return super().decode(arm, inputs, prompt)
        is_warm = False
        while not is_warm:
            for way, memory in zip(self.decoder.ways, self._memories, strict=False):
                way.fallback.memory = memory
            output = self.decoder.generate(**inputs, **prompt.settings.generation, workload=prompt.settings.task)
            number = output.stats.point
            is_warm = number in self._warm_points
            self._warm_points.add(number)
        return output.sequences[0, output.stats.prompt_tokens :].tolist(), output.stats


def points_used(profile: DecodingProfile, runs: Sequence[Run]) -> str:
    """For people: how many prompts each point has decoded."""
    counts = Counter(run.point for run in runs)
    return ", ".join(f"{counts[n]} by point {n} ({point.when.label})" for n, point in enumerate(profile.points))


def prompt_evidence(run: Run, plain: Run) -> PromptEvidence:
    """What a profile keeps of a prompt, and a check compares."""
    return PromptEvidence(
        name=run.prompt,
        sha256=run.prompt_sha256,
        tokens_sha256=run.tokens_sha256,
        rounds=run.rounds,
        draft_forwards=run.draft_forwards,
        accepted_tokens=sum(run.accepted_lengths),
        target_forwards=run.target_forwards,
        plain_steps=run.plain_steps,
        verified_nodes=run.verified_nodes,
        accepted_lengths=run.accepted_lengths,
        decode_ms=run.decode_ms,
        ar_decode_ms=plain.decode_ms,
    )
