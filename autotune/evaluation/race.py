"""A race: arms decode blocks of the same prompts, and a rule says after every block which of them go on.

Loads no torch, and knows nothing of decoders: whatever implements ``Arm`` can run.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autotune.documents.decoded import Decoded
from autotune.evaluation.arms import Arm
from autotune.evaluation.runner import ArmRunner
from autotune.evaluation.summary import is_significantly_slower, ms_per_token, spent_share
from autotune.workloads.prompt import WorkloadPrompt

Report = Callable[[int, int], None]
LEAST_PROMPTS = 2  # of a race, for which its variance is known


@dataclass(frozen=True)
class TimeLimit:
    """Until when a race may begin prompts. Times are values of ``time.monotonic``."""

    deadline: float = math.inf
    """After ``min_prompts``, no prompt is begun that is expected to end later."""
    min_prompts: int = 0
    last: float = math.inf
    """``min_prompts`` may end past the deadline, and all but ``LEAST_PROMPTS`` until then."""

    def allows(self, number: int, end: float) -> bool:
        """Whether the prompt ``number``, from 0, may begin if it ends at a time."""
        if number < min(LEAST_PROMPTS, self.min_prompts):
            return True
        return end <= (self.last if number < self.min_prompts else self.deadline)


@dataclass(frozen=True)
class Look:
    """What a rule is told after a block."""

    number: int
    """Of the look, from 0."""
    num_looks: int
    runs: Mapping[str, list[Decoded]]
    """All runs so far, by arm name."""
    running: list[str]
    """Arms that have decoded the block."""
    remaining: list[str]
    """Arms that earlier looks left in the race, whether or not they have decoded the block."""
    num_done: int
    """Prompts."""
    num_left: int
    left_s: float
    """Time until the deadline, in seconds."""
    prompt_s: Mapping[str, float]
    """Expected duration of a run by arm, in seconds."""


@dataclass(frozen=True)
class Judgement:
    """What a rule decides after a block."""

    remaining: list[str]
    """Arms that are left in the comparison, the fastest first."""
    running: list[str]
    """Arms that decode the next block; without any, the race is over."""


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
    """Runs of all arms, and the arms that are left."""

    runs: dict[str, list[Decoded]]
    """By arm name; arms that left have fewer runs."""
    remaining: list[str]
    """Names of the compared arms that are left, the fastest first."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why arms could not go on, by name."""


def race(
    runner: ArmRunner,
    arms: Sequence[Arm],
    prompts: Sequence[WorkloadPrompt],
    rule: Rule,
    *,
    time_limit: TimeLimit = TimeLimit(),
    seed: int = 0,
    report: Report | None = None,
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
    rest = [prompt for block in blocks for prompt in block]
    num_planned = len(rest)
    runs: dict[str, list[Decoded]] = {name: [] for name in by_name}
    unseen: dict[str, list[WorkloadPrompt]] = {name: [] for name in by_name}
    failed: dict[str, str] = {}
    judged = Judgement([*by_name], [*by_name])
    number = 0
    if report is not None:
        report(0, num_planned)
    for look, block in enumerate(blocks):
        racing = [by_name[name] for name in judged.running]
        comparison = runner.comparison(racing)
        known = runner.known(comparison)
        is_prepared = False
        for prompt in block:
            key = runner.key_of(prompt)
            found = {a.name: known[number, key, a.key] for a in racing if (number, key, a.key) in known}
            if len(found) < len(racing):  # all arms of an interrupted prompt are measured again
                if not time_limit.allows(number, time.monotonic() + runner.prompt_s(racing)):
                    break
                if not is_prepared:
                    for arm in racing:
                        arm.prepare(rest)
                        if arm.keeps_state:
                            for seen in unseen.pop(arm.name, ()):
                                arm.decode(seen)
                    is_prepared = True
                found, failures = runner.run(racing, prompt, random.Random(f"{seed}/{number}"))
                failed |= failures
                racing = [arm for arm in racing if arm.name in found]
                runner.keep(comparison, number, prompt, list(found.values()))
            else:
                for arm in racing:
                    unseen[arm.name].append(prompt)
            for name, run in found.items():
                runs[name].append(run)
            number += 1
            rest = rest[1:]
            if report is not None:
                report(number, num_planned)
        is_cut = number + len(rest) == num_planned and len(rest) > sum(map(len, blocks[look + 1 :]))
        judged = rule.judge(
            Look(
                number=look,
                num_looks=len(blocks),
                runs=runs,
                running=[arm.name for arm in racing],
                remaining=[name for name in judged.remaining if name not in failed],
                num_done=number,
                num_left=len(rest),
                left_s=time_limit.deadline - time.monotonic(),
                prompt_s={arm.name: runner.prompt_s([arm]) for arm in racing},
            )
        )
        if is_cut or not judged.running:
            break
    return Race(runs, judged.remaining, failed)


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
    """

    risk: float
    """Probability that any of equal arms leaves."""
    prompts_per_block: int
    """Number of prompts between two looks."""
    passes: int = 1
    """Over the prompts."""
    always: Collection[str] = ()
    """Names of arms that run on every prompt and are not compared."""
    briefly: Collection[str] = ()
    """The same, but they leave after a block where not all prompts can end before the deadline."""
    defaults: Collection[str] = ()
    """Names of arms that leave when they are slower than the fastest of these."""
    kept_prompts: int = 0
    """That ``always`` are to run before the deadline; defaults run no more when another block with them leaves too
    little time.
    """
    ends: Callable[[Sequence[str]], bool] = lambda leaders: len(leaders) <= 1
    """Whether the race is over, given the names of the arms and defaults that are not significantly slower than the
    fastest of them; by default, when one is left.
    """

    def blocks(self, prompts: Sequence[WorkloadPrompt]) -> list[Sequence[WorkloadPrompt]]:
        size = self.prompts_per_block
        return [prompts[begin : begin + size] for begin in range(0, len(prompts), size)] * self.passes

    def judge(self, look: Look) -> Judgement:
        compared = [name for name in look.remaining if name in look.running and not self._only_runs(name)]
        pair_risk = self.risk * spent_share(look.number, look.num_looks) / max(1, len(compared) * (len(compared) - 1))
        leaders = not_slower(look.runs, compared, pair_risk)
        remaining = [name for name in leaders if name not in self.defaults]
        waiting = [name for name in look.remaining if name in self.defaults and name not in look.running]
        defaults = not_slower(look.runs, [name for name in compared if name in self.defaults], pair_risk)
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


def not_slower(runs: Mapping[str, Sequence[Decoded]], names: Sequence[str], risk: float) -> list[str]:
    """The arms that are not significantly slower than the fastest of them, the fastest first. All have run equally
    often.
    """
    by_speed = sorted(names, key=lambda name: ms_per_token(runs[name]))
    return [name for name in by_speed if not is_significantly_slower(runs[name], runs[by_speed[0]], risk=risk)]
