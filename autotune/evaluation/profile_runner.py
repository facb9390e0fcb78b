"""Runs a profile's own decoder beside other arms: every prompt by the point that a request like it gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.documents.condition import first_match
from autotune.documents.decoding_profile import TUNED as TUNED  # for those who run it
from autotune.documents.decoding_profile import DecodingProfile, PromptEvidence
from autotune.evaluation.arms import Arm, Run
from autotune.evaluation.runner import ArmRunner
from autotune.runtime.decoder import Decoder
from autotune.workloads.workload import WorkloadPrompt


class ProfileArmRunner(ArmRunner):
    """Runs the arm ``tuned`` with the decoder itself, as it was loaded from a profile."""

    def __init__(self, decoder: Decoder, ledger: Path | None = None, **options: Any) -> None:
        super().__init__(decoder, decoder.processor, ledger, **options)

    def decoder_of(self, arm: Arm) -> Decoder:
        """An arm's own decoder, or the profile's."""
        return self.decoder if arm.name == TUNED else super().decoder_of(arm)

    def compare(self, *args: Any, **options: Any) -> dict[str, list[Run]]:
        """Every arm on the same prompts, as in ``ArmRunner``."""
        for point in self.decoder.points if not options.get("goes_on") else ():
            point.fallback.forget()
        return super().compare(*args, **options)

    def shape_of(self, arm: Arm, inputs: dict[str, Any], prompt: WorkloadPrompt) -> tuple[Any, ...]:
        """As in ``ArmRunner``; every point of the profile is warmed up by itself."""
        shape = super().shape_of(arm, inputs, prompt)
        if arm.name != TUNED:
            return shape
        conditions = [point.when for point in self.decoder.points]
        settings, num_tokens = prompt.settings, inputs["input_ids"].shape[1]
        temperature = settings.temperature or 0.0
        point = first_match(conditions, temperature=temperature, prompt_tokens=num_tokens, workload=settings.task)
        return (*shape, point)

    def settings_of(self, arm: Arm, prompt: WorkloadPrompt) -> dict[str, Any]:
        """As in ``ArmRunner``; a prompt's task is its tag."""
        task = {"workload": prompt.settings.task} if arm.name == TUNED else {}
        return {**super().settings_of(arm, prompt), **task}


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
