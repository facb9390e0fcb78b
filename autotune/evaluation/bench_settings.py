"""Settings of ``autotune bench``. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.documents.decoding_profile import AR, TUNED, DecodingProfile
from autotune.documents.deployment import RUNTIME
from autotune.documents.published_defaults import ARM_NAMES
from autotune.errors import UserError, nearest
from autotune.evaluation.arms import Arm
from autotune.workloads.chat import Variables
from autotune.workloads.formats import Format
from autotune.workloads.workload import Workload, load_workload


@dataclass(frozen=True)
class EvaluationPrompts:
    """The prompts of a workload that are decoded."""

    workload: str
    """Name or file."""
    workload_format: Format | None = None
    """Format of the file; None finds it out."""
    num_prompts: int = 32
    is_whole: bool = False
    """Decode the prompts of both splits."""
    max_new_tokens: int | None = None
    """Limit of all answers; None: each prompt's own."""
    temperature: float | None = None
    """Temperature of all prompts; None: each prompt's own."""
    chat_template_kwargs: Variables | None = None
    """Variables of the chat template that the prompts do not set."""

    def load(self) -> Workload:
        """Load the prompts."""
        workload = load_workload(
            self.workload, "evaluate", num_prompts=self.num_prompts, format=self.workload_format, is_whole=self.is_whole
        ).cut(self.num_prompts, self.max_new_tokens)
        workload = workload.with_variables(self.chat_template_kwargs)
        return workload if self.temperature is None else workload.sampled(self.temperature)


@dataclass
class BenchArms:
    """The arms of a bench, plain decoding first, and the prompts that they decode."""

    arms: list[Arm]
    prompts: Workload
    unavailable: dict[str, str] = field(default_factory=dict)
    """Why other arms cannot run, by name."""
    notes: dict[str, str] = field(default_factory=dict)
    """Limitations of arms that run, by name."""


def require_arms(profile: DecodingProfile, names: Sequence[str]) -> None:
    """Refuse names of arms that a profile's backend does not have."""
    own = tuple(filter(None, (AR, profile.evidence.best_default, TUNED)))
    known = ARM_NAMES if profile.backend == RUNTIME else own
    for name in names:
        if name not in known:
            raise UserError(f"--arms {name}: no such arm of {profile.backend}; {nearest(name, known)}")
