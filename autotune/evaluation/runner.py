"""Runs arms on prompts, prompt by prompt, all arms one after the other in random order. Loads no torch.

Every prompt's runs are lines of a ledger as soon as all arms have decoded it, and an interrupted race continues from
there. Another race measures all of its arms again: a machine's speed changes from hour to hour, so arms are only
compared by runs of the same prompt that are seconds apart.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from autotune.documents.decoded import Decoded
from autotune.errors import ArmFailed
from autotune.evaluation.arms import Arm
from autotune.files import append_line, content_key, read_lines
from autotune.workloads.prompt import WorkloadPrompt

# A run is measured again if its prefill took this many times the median over the arms...
SLOW_PREFILL = 3.0
# ...or its mean forward took this many times the shortest of the arms: the largest tree does not.
SLOW_FORWARD = 8.0
MAX_REPEATS = 3


class ArmRunner:
    """Runs arms, keeps their runs, and knows how long they take.

    Args:
        ledger: file of the runs; None keeps none.
        context: names models and device in the ledger: runs of others are ignored.
        key_of: the key of a prompt in the ledger; by default its hash.
    """

    def __init__(
        self,
        ledger: Path | None = None,
        *,
        context: object = None,
        key_of: Callable[[WorkloadPrompt], str] = lambda prompt: prompt.sha256,
    ) -> None:
        self.ledger = ledger
        self.context = context
        self.key_of = key_of
        self.num_repeated = 0
        """Runs that were measured again because the machine was busy or something was captured."""
        self._run_s: defaultdict[str, list[float]] = defaultdict(list)  # durations with warm-ups, by arm key

    def prompt_s(self, arms: Sequence[Arm]) -> float:
        """Expected duration of runs of these arms on a prompt, in seconds; of unknown arms, that of the known ones."""
        known = {key: sum(seconds) / len(seconds) for key, seconds in self._run_s.items()}
        usual_s = sum(known.values()) / max(1, len(known))
        return sum(known.get(arm.key, usual_s) for arm in arms)

    def run(
        self, arms: Sequence[Arm], prompt: WorkloadPrompt, order: random.Random
    ) -> tuple[dict[str, Decoded], dict[str, str]]:
        """Run all arms on one prompt, in random order, and repeat the runs that something else slowed down. Returns
        the runs, and the reasons of arms that failed, by arm name.
        """
        runs: dict[str, Decoded] = {}
        failed: dict[str, str] = {}

        def decode(arm: Arm) -> None:
            try:
                runs[arm.name] = arm.decode(prompt)
            except ArmFailed as error:
                failed[arm.name] = str(error)
                runs.pop(arm.name, None)

        for arm in order.sample(list(arms), len(arms)):
            began = time.monotonic()
            decode(arm)
            self._run_s[arm.key].append(time.monotonic() - began)
        for _ in range(MAX_REPEATS):
            slowed = [arm for arm in arms if arm.name in _disturbed(runs) and not arm.keeps_state]
            self.num_repeated += len(slowed)
            for arm in slowed:
                decode(arm)
            if not slowed:
                break
        return runs, failed

    def comparison(self, arms: Sequence[Arm]) -> str:
        """The key of a comparison of these arms, whatever their order."""
        return content_key([self.context, sorted(arm.key for arm in arms)])

    def keep(self, comparison: str, number: int, prompt: WorkloadPrompt, runs: Sequence[Decoded]) -> None:
        """Write the runs of a prompt, which is the ``number``-th of its race, to the ledger."""
        if self.ledger is not None:
            place = {"comparison": comparison, "number": number, "key": self.key_of(prompt)}
            append_line(self.ledger, *({**place, **run.model_dump()} for run in runs))

    def known(self, comparison: str) -> dict[tuple[int, str, str], Decoded]:
        """Runs of a comparison in the ledger, by number and key of the prompt and key of the arm; the last one
        counts.
        """
        known: dict[tuple[int, str, str], Decoded] = {}
        for record in read_lines(self.ledger) if self.ledger is not None else []:
            if record.pop("comparison", None) == comparison:
                number, key = record.pop("number", None), record.pop("key", None)
                with suppress(ValidationError):  # what is no run is measured again
                    run = Decoded.model_validate(record)
                    known[number, key, run.arm] = run
        return known


def _disturbed(runs: Mapping[str, Decoded]) -> list[str]:
    """Names of arms whose run of a prompt something else on the machine slowed down.

    The target's prefill is the same work in every arm and not part of what is compared. A run whose prefill took
    several times as long as in the other arms was slowed down, and so was a run whose forwards took far longer, or in
    which forward passes were captured. Arms that measure neither have zeros, and are not judged.
    """
    prefill_ms = [run.target_prefill_ms for run in runs.values() if run.target_prefill_ms > 0]
    usual_ms = float(np.median(prefill_ms)) if prefill_ms else 0.0
    forward_ms = min((run.forward_ms for run in runs.values() if run.forward_ms > 0), default=0.0)
    return [
        name
        for name, run in runs.items()
        if run.captures > 0
        or run.target_prefill_ms > SLOW_PREFILL * usual_ms
        or run.forward_ms > SLOW_FORWARD * forward_ms
    ]
