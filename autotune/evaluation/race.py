"""A race: arms decode blocks of the same prompts, and a rule says after every block which of them go on.

Loads no torch, and knows nothing of decoders: whatever implements ``Arm`` can run.
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autotune.documents.decoded import Decoded
from autotune.errors import ArmFailed
from autotune.evaluation.arms import Arm
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.summary import in_one_clock, is_significantly_slower, ms_per_token, spent_share
from autotune.workloads.prompt import WorkloadPrompt

Report = Callable[[int, int], None]
LEAST_PROMPTS = 2  # of a race, for which its variance is known


@dataclass(frozen=True)
class TimeLimit:
    """Until when a race may begin prompts.

    Args:
        deadline: of ``time.monotonic``. After ``min_prompts``, no prompt is begun that is expected to end later.
        last: ``min_prompts`` may end past the deadline, and all but ``LEAST_PROMPTS`` of them until then.
    """

    deadline: float = math.inf
    min_prompts: int = 0
    last: float = math.inf

    def allows(self, number: int, end: float) -> bool:
        """Whether the prompt ``number``, from 0, may begin if it ends at a time."""
        if number < min(LEAST_PROMPTS, self.min_prompts):
            return True
        return end <= (self.last if number < self.min_prompts else self.deadline)


@dataclass(frozen=True)
class Look:
    """The state that a rule is given after a block.

    Args:
        number: of the look, from 0.
        num_looks: that are planned.
        runs: all so far, by arm name.
        running: arms that have decoded the block.
        remaining: arms that earlier looks left in the comparison, whether or not they have decoded the block.
        num_done: number of prompts that are decoded.
        num_left: number of prompts that are planned after them.
        left_s: time until the deadline, in seconds.
        prompt_s: expected duration of a run by arm, in seconds.
    """

    number: int
    num_looks: int
    runs: Mapping[str, list[Decoded]]
    running: list[str]
    remaining: list[str]
    num_done: int
    num_left: int
    left_s: float
    prompt_s: Mapping[str, float]


@dataclass(frozen=True)
class Judgement:
    """The decision of a rule after a block.

    Args:
        remaining: names of arms that are left in the comparison, the fastest first.
        running: names of arms that decode the next block; without any, the race is over.
    """

    remaining: list[str]
    running: list[str]


class Rule(Protocol):
    """Says what a race compares, and when it is decided."""

    def blocks(self, prompts: Sequence[WorkloadPrompt]) -> list[Sequence[WorkloadPrompt]]:
        """The prompts between two looks, for all looks that are planned."""
        ...

    def judge(self, look: Look) -> Judgement:
        """The arms that go on. A block that the deadline has cut short is judged too, and is the last one."""
        ...


@dataclass(frozen=True)
class Race:
    """The result of a race.

    Args:
        runs: by arm name; arms that left have fewer.
        remaining: names of the compared arms that are left, the fastest first.
        failed: why arms could not go on, by name.
    """

    runs: dict[str, list[Decoded]]
    remaining: list[str]
    failed: dict[str, str] = field(default_factory=dict)


def race(
    runner: ArmRunner,
    arms: Sequence[Arm],
    prompts: Sequence[WorkloadPrompt],
    rule: Rule,
    *,
    time_limit: TimeLimit = TimeLimit(),
    seed: int = 0,
    report: Report = lambda done, planned: None,
) -> Race:
    """Run arms on prompts, block by block, until a rule has decided, the prompts or the time are over.

    Args:
        runner: keeps the runs; a race that was interrupted goes on with those that it has.
        arms: of equal names the last one counts.
        seed: of the order in which arms take turns.
        report: is told the numbers of prompts: done, and planned.
    """
    by_name = {arm.name: arm for arm in arms}
    blocks = rule.blocks(prompts)
    course = _Course(runner, [prompt for block in blocks for prompt in block], time_limit, seed, report)
    runs: dict[str, list[Decoded]] = {name: [] for name in by_name}
    judged = Judgement([*by_name], [*by_name])
    report(0, len(course.prompts))
    for number, block in enumerate(blocks):
        is_whole = course.decode_block([by_name[name] for name in judged.running], len(block), runs)
        running = [name for name in judged.running if name not in course.failed]
        judged = rule.judge(
            Look(
                number=number,
                num_looks=len(blocks),
                runs=runs,
                running=running,
                remaining=[name for name in judged.remaining if name not in course.failed],
                num_done=course.num_done,
                num_left=len(course.prompts) - course.num_done,
                left_s=time_limit.deadline - time.monotonic(),
                prompt_s={name: runner.prompt_s([by_name[name]]) for name in running},
            )
        )
        if not judged.running or not is_whole:
            break
    return Race(runs, judged.remaining, course.failed)


@dataclass
class _Course:
    """The prompts of a race in their order, and how far it has come."""

    runner: ArmRunner
    prompts: Sequence[WorkloadPrompt]
    time_limit: TimeLimit
    seed: int
    report: Report
    num_done: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    unseen: defaultdict[str, list[WorkloadPrompt]] = field(default_factory=lambda: defaultdict(list))
    """Prompts of known runs, by arm."""

    def decode_block(self, arms: Sequence[Arm], size: int, runs: Mapping[str, list[Decoded]]) -> bool:
        """Run arms on the next ``size`` prompts, and add the runs; returns whether the time has allowed all of them."""
        comparison = self.runner.comparison(arms)
        known = self.runner.known(comparison)
        is_prepared = False
        for number in range(self.num_done, self.num_done + size):
            prompt = self.prompts[number]
            place = number, self.runner.key_of(prompt)
            racing = [arm for arm in arms if arm.name not in self.failed]
            decoded = {arm.name: known[*place, arm.key] for arm in racing if (*place, arm.key) in known}
            if len(decoded) < len(racing):  # all arms of an interrupted prompt are measured again
                if not self.time_limit.allows(number, time.monotonic() + self.runner.prompt_s(racing)):
                    return False
                if not is_prepared:
                    self._prepare(racing)
                    is_prepared = True
                racing = [arm for arm in racing if arm.name not in self.failed]
                decoded, failed = self.runner.run(racing, prompt, random.Random(f"{self.seed}/{number}"))
                self.failed |= failed
                self.runner.keep(comparison, number, prompt, [*decoded.values()])
            else:
                for arm in racing:
                    self.unseen[arm.name].append(prompt)
            for name, run in decoded.items():
                runs[name].append(run)
            self.num_done += 1
            self.report(self.num_done, len(self.prompts))
        return True

    def _prepare(self, arms: Sequence[Arm]) -> None:
        """Prepare arms for the next block; those that keep state decode what the ledger knows, in its order."""
        for arm in arms:
            try:
                arm.prepare(self.prompts[self.num_done :])
                for prompt in self.unseen.pop(arm.name, ()) if arm.keeps_state else ():
                    arm.decode(prompt)
            except ArmFailed as error:
                self.failed[arm.name] = str(error)


class Everyone:
    """All arms decode all prompts, and nobody leaves."""

    def blocks(self, prompts: Sequence[WorkloadPrompt]) -> list[Sequence[WorkloadPrompt]]:
        return [prompts]

    def judge(self, look: Look) -> Judgement:
        return Judgement(look.remaining, look.running)


@dataclass(frozen=True)
class Fastest:
    """Finds the fastest arm: arms leave when they are significantly slower than the fastest one.

    Published defaults leave only when they are significantly slower than the fastest default, so that the best default
    is known as well. The risk that a race between equal arms loses any of them is spent over the planned looks
    (``spent_share``) and divided by the number of ordered pairs of compared arms (Bonferroni), because the runs
    themselves say which arm is the fastest.

    Args:
        risk: probability that any of equal arms leaves.
        prompts_per_block: number of prompts between two looks.
        passes: over the prompts.
        always: names of arms that run on every prompt and are not compared.
        briefly: the same, but they leave after a block where not all prompts can end before the deadline.
        tolerance: relative difference that does not count, as between two processes of one program.
        defaults: names of arms that leave when they are slower than the fastest of these.
        kept_prompts: that ``always`` are to run before the deadline; defaults run no more when another block with them
            leaves too little time.
        ends: whether the race is over, given the names of the arms and defaults that are not significantly slower than
            the fastest of them; by default, when one is left.
    """

    risk: float
    prompts_per_block: int
    passes: int = 1
    always: Collection[str] = ()
    briefly: Collection[str] = ()
    defaults: Collection[str] = ()
    kept_prompts: int = 0
    tolerance: float = 0.0
    ends: Callable[[Sequence[str]], bool] = lambda leaders: len(leaders) <= 1

    def blocks(self, prompts: Sequence[WorkloadPrompt]) -> list[Sequence[WorkloadPrompt]]:
        size = self.prompts_per_block
        return [prompts[begin : begin + size] for begin in range(0, len(prompts), size)] * self.passes

    def judge(self, look: Look) -> Judgement:
        compared = [name for name in look.remaining if name in look.running and not self._only_runs(name)]
        pair_risk = self.risk * spent_share(look.number, look.num_looks) / max(1, len(compared) * (len(compared) - 1))
        leaders = not_slower(look.runs, compared, pair_risk, self.tolerance)
        remaining = [name for name in leaders if name not in self.defaults]
        waiting = [name for name in look.remaining if name in self.defaults and name not in look.running]
        running_defaults = [name for name in compared if name in self.defaults]
        defaults = not_slower(look.runs, running_defaults, pair_risk, self.tolerance)
        goes_on = [] if self.ends(leaders) else self._with_time(look, {*remaining, *defaults})
        return Judgement([*remaining, *defaults, *waiting], goes_on)

    def _only_runs(self, name: str) -> bool:
        return name in self.always or name in self.briefly

    def _with_time(self, look: Look, left: Collection[str]) -> list[str]:
        """The arms that decode the next block."""
        brief_s = look.num_left * sum(look.prompt_s.values())
        decode_s = {name: sum(run.decode_ms for run in look.runs[name]) / 1e3 / look.num_done for name in look.running}
        num_later = max(0, self.kept_prompts - look.num_done - self.prompts_per_block)
        kept_s = num_later * sum(decode_s[name] for name in look.running if name in self.always)
        kept_s += self.prompts_per_block * sum(decode_s[name] for name in look.running if name not in self.briefly)
        left_out = {*(self.briefly if brief_s > look.left_s else ())}
        if look.num_done < self.kept_prompts and kept_s > look.left_s:
            left_out |= {*self.defaults}
        return [name for name in look.running if name not in left_out and (name in left or self._only_runs(name))]


def not_slower(
    runs: Mapping[str, Sequence[Decoded]], names: Sequence[str], risk: float, tolerance: float = 0.0
) -> list[str]:
    """The arms that are not significantly slower than the fastest of them, the fastest first. All have run equally
    often.
    """
    timed = in_one_clock({name: runs[name] for name in names})
    by_speed = sorted(names, key=lambda name: ms_per_token(timed[name]))
    return [
        name
        for name in by_speed
        if not is_significantly_slower(timed[name], timed[by_speed[0]], risk=risk, tolerance=tolerance)
    ]
