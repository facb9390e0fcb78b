"""Settings of ``autotune check``. Each field with a description is an option of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue

from autotune.documents.option_fields import setting
from autotune.errors import UserError
from autotune.modeling.loading import Dtype
from autotune.workloads.formats import Format


class CheckSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: Path
    workloads: tuple[str, ...] = setting(
        (),
        "Prompts: 'digits', 'smollm2', or a file, which may be hf://datasets/...: our JSONL, or the file of a public benchmark. Repeatable; default: those that the profile was tuned on, in a file beside it or in this folder.",
        option="workload",
    )
    workload_format: Format | None = setting(
        None,
        "Format of the files of all workloads; default: found out from their first rows.",
        option="format",
        rare=True,
    )
    chat_template_kwargs: dict[str, JsonValue] | None = None
    """Variables of the chat template, in place of the profile's."""
    max_new_tokens: int | None = setting(None, "Longest answer; default: each prompt's own.", ge=1)
    num_prompts: int = setting(16, "Number of prompts of each workload.", option="prompts", ge=1)
    min_speedup: float | None = setting(
        None, "Fail if the whole confidence interval of the speedup over plain decoding is below this.", gt=0
    )
    against: str | None = setting(None, "Git revision or profile to compare with: fail if significantly slower.")
    limit: float = setting(0.05, "Slowdown that must be detected.", unit="fraction", rare=True)
    tolerance: float = setting(0.01, "Slowdown that is acceptable.", unit="fraction", ge=0, rare=True)
    budget_s: float = setting(480.0, "Time limit of the pairs of --against.", option="budget", unit="s", gt=0)
    on_inconclusive: Literal["fail", "warn"] = setting("fail", "Exit with 3 (fail) or 0 (warn) if inconclusive.")
    seed: int = setting(0, "Seed of all random orders.", rare=True)
    engine_command: str | None = None
    """Executable of a profile's engine with further arguments, in place of the profile's."""
    device: str = setting("auto", "auto, cpu or cuda:N.")
    dtype: Dtype | None = setting(None, "Data type of the target; default: the profile's.")
    junit: Path | None = setting(None, "JUnit XML file to write.")
    github: bool = setting(False, "Annotate the run on GitHub Actions.")

    def require_consistent(self) -> None:
        if not self.tolerance < self.limit:
            raise UserError(
                f"--tolerance must be below --limit; got {100 * self.tolerance:g} % and {100 * self.limit:g} %; "
                "give for example --tolerance 1% --limit 5%"
            )
        if len(set(self.workloads)) < len(self.workloads):
            raise UserError(f"--workload {self.workloads[0]} is given twice; give each workload once")
