"""Arms in processes that are started again for every block of a race."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

from autotune.documents.decoded import Decoded
from autotune.evaluation.arms import Arm
from autotune.evaluation.not_slower import PAIRS_PER_LAUNCH
from autotune.workloads.prompt import WorkloadPrompt

Launch = Callable[[], AbstractContextManager[Arm]]


class LaunchedArm(Arm, AbstractContextManager["LaunchedArm"]):
    """An arm in a new process for each launch, because a process may be slow for as long as it lives."""

    _arm: Arm  # since the first ``prepare``

    def __init__(self, name: str, key: str, launch: Launch) -> None:
        self.name, self.key, self.launch = name, f"{name}-{key}", launch
        self.rivals = [self]
        """Arms that are started together, and take turns in being the first."""
        self._process = ExitStack()
        self._is_new = False  # has decoded nothing but warm-ups

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def prepare(self, prompts: Sequence[WorkloadPrompt]) -> None:
        if not self._is_new:  # else a rival has started this one
            for rival in self.rivals:
                rival._renew()
            self.rivals.reverse()
        self._arm.prepare(prompts[:PAIRS_PER_LAUNCH])

    def decode(self, prompt: WorkloadPrompt) -> Decoded:
        self._is_new = False
        return self._arm.decode(prompt).model_copy(update={"arm": self.key})

    def _renew(self) -> None:
        self._process.close()
        self._arm = self._process.enter_context(self.launch())
        self._is_new = True
