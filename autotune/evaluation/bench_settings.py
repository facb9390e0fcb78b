"""Settings of ``autotune bench``. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.documents.decoding_profile import AR
from autotune.documents.published_defaults import ARM_NAMES, COMPARED
from autotune.errors import UserError, nearest
from autotune.modeling.loading import Dtype
from autotune.workloads.chat import Variables
from autotune.workloads.formats import Format
from autotune.workloads.workload import Workload, load_workload


@dataclass(frozen=True)
class EvaluationPrompts:
    """The prompts of a workload that are decoded."""

    workload: str
    """Name or file."""
    format: Format | None = None
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
            self.workload, "evaluate", num_prompts=self.num_prompts, format=self.format, is_whole=self.is_whole
        ).cut(self.num_prompts, self.max_new_tokens)
        workload = workload.with_variables(self.chat_template_kwargs)
        return workload if self.temperature is None else workload.sampled(self.temperature)


@dataclass(frozen=True)
class BenchSettings:
    """Arms that a profile is compared with, and how they are measured.

    Raises:
        UserError: an arm does not exist.
    """

    prompts: EvaluationPrompts
    given_arms: tuple[str, ...] | None = None
    """Names in ``ARM_NAMES``; None compares with the names in ``COMPARED`` that can run."""
    draft: str | None = None
    """Draft of the published configurations; None: the profile's."""
    seed: int = 0
    """Seed of the order of the runs."""
    device: str = "auto"
    dtype: Dtype | None = None
    """Data type of the target; None: the profile's."""
    wait_until_idle_s: float | None = None
    """The longest time to wait until the machine is idle, in seconds; None: do not wait."""

    def __post_init__(self) -> None:
        for name in self.given_arms or ():
            if name not in ARM_NAMES:
                raise UserError(f"--arms {name}: no such arm; {nearest(name, ARM_NAMES)}")

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of all arms except the profile's own, plain decoding first."""
        return (AR, *(COMPARED if self.given_arms is None else self.given_arms))
