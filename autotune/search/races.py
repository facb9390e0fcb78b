"""Real runs of a search: configurations beside plain decoding, timed by one runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotune.console import Console
from autotune.cost.table import CostTable
from autotune.documents.configuration import Configuration
from autotune.documents.decoding_profile import HF
from autotune.evaluation.arms import Arm
from autotune.evaluation.race import Fastest, Race, TimeLimit, race
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.runtime_arms import HuggingFaceArm, RuntimeArms, arms_of_pool
from autotune.search.tuning import Tuning
from autotune.study.storage import RUNS
from autotune.workloads.prompt import WorkloadPrompt


class Races:
    """Races of arms that one runner times."""

    def __init__(self, arms: RuntimeArms, runner: ArmRunner, console: Console) -> None:
        self.arms, self.runner, self.console = arms, runner, console

    @classmethod
    def of(cls, tuning: Tuning, table: CostTable) -> Races:
        """Races on the CPU threads of a cost table, whose runs the study keeps."""
        arms = arms_of_pool(tuning.pool, table)
        context = [tuning.pool.key, (table.threads, table.prefill_threads)]
        return cls(arms, arms.runner(tuning.folder / RUNS, context=context), tuning.console)

    def hugging_face(self) -> Arm:
        """Hugging Face's ``generate`` with the same target and threads."""
        return HuggingFaceArm(HF, self.arms, threads=self.arms.decoder.threads)

    def run(
        self,
        name: str,
        configurations: Mapping[str, Configuration],
        prompts: Sequence[WorkloadPrompt],
        rule: Fastest,
        time_limit: TimeLimit,
        *,
        seed: int,
        others: Sequence[Arm] = (),
    ) -> Race:
        """A race of plain decoding, configurations by the names of their arms, and ``others``."""
        arms = [self.arms.plain, *(self.arms.arm(arm, c) for arm, c in configurations.items()), *others]
        with self.console.stage(f"{name}, measured", rule.passes * len(prompts)) as update:
            return race(self.runner, arms, prompts, rule, time_limit=time_limit, seed=seed, report=update)
