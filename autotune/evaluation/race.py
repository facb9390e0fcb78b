"""A race: arms decode blocks of the same prompts until the fastest is known.

After every block comes an interim look. Arms leave when they are significantly slower than the fastest arm; published
defaults leave only when they are significantly slower than the fastest default, so that the best default is known as
well.

The risk that a race between equal arms loses any of them is spent over the planned looks (``spent_share``) and divided
by the number of ordered pairs of arms in the race (Bonferroni), because the runs themselves say which arm is the
fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autotune.documents.decoded import Decoded
from autotune.evaluation.arms import Arm
from autotune.evaluation.runner import ArmRunner, Report
from autotune.evaluation.summary import is_significantly_slower, ms_per_token, spent_share
from autotune.workloads.workload import Workload


@dataclass(frozen=True)
class Race:
    """Runs of all arms, and the arms that are left."""

    runs: dict[str, list[Decoded]]
    """By arm name; arms that left have fewer runs."""
    remaining: list[str]
    """Names of the arms that are left, the fastest first."""
    remaining_defaults: list[str]
    """Names of the defaults that are left, the fastest first."""


def race(
    runner: ArmRunner,
    arms: Sequence[Arm],
    workload: Workload,
    *,
    always: Sequence[Arm] = (),
    briefly: Sequence[Arm] = (),
    defaults: Sequence[Arm] = (),
    risk: float,
    prompts_per_block: int,
    min_prompts: int,
    kept_prompts: int = 0,
    passes: int = 1,
    ends: Callable[[Sequence[str]], bool] = lambda leaders: len(leaders) <= 1,
    seed: int = 0,
    deadline: float | None = None,
    report: Report | None = None,
) -> Race:
    """Run arms on blocks of prompts, and leave out those that are significantly slower.

    Args:
        arms: leave when they are slower than the fastest arm or default.
        always: run on every prompt and are not compared.
        briefly: the same, but they leave after a block where not all prompts can end before the deadline.
        defaults: leave when they are slower than the fastest default.
        risk: probability that any of equal arms leaves.
        prompts_per_block: number of prompts between two looks.
        min_prompts: are run even past the deadline, but no more than a block.
        kept_prompts: that ``always`` are to run before the deadline; defaults leave when another block with them leaves
            too little time.
        passes: over the prompts.
        ends: whether the race is over, given the names of the arms and defaults that are not significantly slower than
            the fastest of them; by default, when one is left.
        deadline: of ``time.monotonic``. No prompt is begun that is expected to end later.
    """
    prompts = workload.prompts
    blocks = [prompts[begin : begin + prompts_per_block] for begin in range(0, len(prompts), prompts_per_block)]
    names, default_names = [arm.name for arm in arms], [arm.name for arm in defaults]
    runs: dict[str, list[Decoded]] = {arm.name: [] for arm in (*always, *briefly, *arms, *defaults)}
    num_done, num_looks, all_in_time = 0, passes * len(blocks), True
    runner.reserve(workload)

    def report_prompt(done: int, _: int) -> None:
        if report is not None:
            report(num_done + done, passes * len(prompts))

    for look in range(num_looks):
        block = blocks[look % len(blocks)]
        competing = [*arms, *defaults] if all_in_time else arms
        remaining = [*always, *briefly, *(arm for arm in competing if arm.name in {*names, *default_names})]
        block_runs = runner.compare(
            remaining,
            Workload(workload.name, workload.split, block),
            seed=seed + look,
            deadline=deadline,
            min_prompts=min_prompts if look == 0 else 0,
            repeat=look // len(blocks),
            report=report_prompt,
        )
        for name, more in block_runs.items():
            runs[name] += more
        num_more = max(map(len, block_runs.values()))
        num_done += num_more
        in_race = [*names, *default_names] if all_in_time else names
        pair_risk = risk * spent_share(look, num_looks) / max(1, len(in_race) * (len(in_race) - 1))
        leaders = _not_slower(runs, in_race, pair_risk)
        names = [name for name in leaders if name in names]
        default_names = _not_slower(runs, default_names, pair_risk) if all_in_time else default_names
        if num_more < len(block) or ends(leaders):
            break
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if (passes * len(prompts) - num_done) * runner.prompt_s(remaining) > left_s:
                briefly = ()
            decode_s = {arm.name: sum(run.decode_ms for run in runs[arm.name]) / 1e3 / num_done for arm in remaining}
            kept_s = sum(decode_s[arm.name] for arm in always) * max(0, kept_prompts - num_done - prompts_per_block)
            kept_s += sum(decode_s[arm.name] for arm in remaining if arm not in briefly) * prompts_per_block
            all_in_time = all_in_time and (num_done >= kept_prompts or kept_s <= left_s)
    return Race(runs, names, default_names)


def _not_slower(runs: Mapping[str, Sequence[Decoded]], names: Sequence[str], risk: float) -> list[str]:
    """The arms that are not significantly slower than the fastest of them, the fastest first. All have run equally
    often.
    """
    by_speed = sorted(names, key=lambda name: ms_per_token(runs[name]))
    return [name for name in by_speed if not is_significantly_slower(runs[name], runs[by_speed[0]], risk=risk)]
