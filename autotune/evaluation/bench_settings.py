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


def evaluation_prompts(
    workload: str,
    *,
    workload_format: Format | None = None,
    num_prompts: int = 32,
    is_whole: bool = False,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    chat_template_kwargs: Variables | None = None,
) -> Workload:
    """Load the prompts of a workload that are decoded.

    Args:
        workload: name or file.
        workload_format: of the file; None finds it out.
        is_whole: load the prompts of both splits.
        max_new_tokens: limit of all answers; None: each prompt's own.
        temperature: of all prompts; None: each prompt's own.
        chat_template_kwargs: variables of the chat template that the prompts do not set.
    """
    loaded = load_workload(
        workload, "evaluate", num_prompts=num_prompts, format=workload_format, is_whole=is_whole
    ).cut(num_prompts, max_new_tokens)
    loaded = loaded.with_variables(chat_template_kwargs)
    return loaded if temperature is None else loaded.sampled(temperature)


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
