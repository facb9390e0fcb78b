"""The stage that judges the winner: on held-out prompts, beside plain decoding, Hugging Face and published defaults."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence

from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR, HF, TUNED, Differences
from autotune.evaluation.divergence import divergences_from_plain
from autotune.evaluation.race import Fastest, TimeLimit
from autotune.evaluation.runtime_arms import DecoderArm
from autotune.evaluation.summary import ms_per_token
from autotune.search import thresholds
from autotune.search.evidence import Evaluation, print_evaluation
from autotune.search.finalists import Finalists, Races, block_s
from autotune.search.plan import Plan
from autotune.search.tuning import Tuning
from autotune.workloads.workload import Workload


def evaluate_held_out(tuning: Tuning, plan: Plan, finalists: Finalists, races: Races) -> Evaluation:
    """Run the winner, plain decoding, Hugging Face and the best defaults on held-out prompts until the end of the
    stage. The winner and plain decoding run on as many as the plan has kept time for, if need be without the defaults.
    """
    deadline, winner = tuning.clock.deadline_of("evaluation"), finalists.winner.configuration
    evaluator, prompts = finalists.prompts.full, tuning.held_out.prompts
    defaults = dict(itertools.islice(finalists.best_defaults.items(), thresholds.MAX_HELD_OUT_DEFAULTS))
    left_s = max(0.0, deadline - time.monotonic())
    is_long = 3 * block_s({TUNED: winner, **defaults}, evaluator, thresholds.HELD_OUT_PROMPTS) > left_s
    may_differ = not tuning.pool.target.text.is_exact
    end = deadline - may_differ * thresholds.EXAMINATION_SHARE * left_s
    others = {name: default for name, default in defaults.items() if default.key != winner.key}
    rule = Fastest(
        risk=thresholds.RISK,
        prompts_per_block=thresholds.MIN_PROMPTS if is_long else thresholds.HELD_OUT_PROMPTS,
        always=[AR, TUNED],
        briefly=[HF],
        defaults=[*others],
        kept_prompts=plan.kept_prompts[0],
        ends=lambda _: False,
    )
    limit = TimeLimit(end, thresholds.MIN_PROMPTS, deadline)
    seed = tuning.settings.seed + 1
    measured = races.run(
        "evaluation", {TUNED: winner, **others}, prompts, rule, limit, seed=seed, others=[races.hugging_face()]
    )
    equal = [name for name in defaults if name not in others]  # have the runs of the winner
    runs = measured.runs | dict.fromkeys(equal, measured.runs[TUNED])
    configurations = {AR: None, HF: None, **defaults, TUNED: winner}
    evaluation = Evaluation(
        runs={name: runs[name] for name in configurations},
        configurations=configurations,
        predicted={name: evaluator.speedup(c) for name, c in configurations.items() if c is not None},
        best_default=min([*measured.remaining, *equal], key=lambda name: ms_per_token(runs[name]), default=None),
        differences=differences_of(races.arms.arm(TUNED, winner), tuning.held_out, measured.runs, deadline),
    )
    print_evaluation(evaluation, tuning.console)
    return evaluation


def differences_of(
    tuned: DecoderArm, workload: Workload, runs: Mapping[str, Sequence[Decoded]], deadline: float
) -> Differences:
    """Examine the answers of the winner that differ from plain decoding, until ``deadline`` of ``time.monotonic``."""
    num = sum(a.tokens_sha256 != b.tokens_sha256 for a, b in zip(runs[tuned.name], runs[AR], strict=True))
    if num == 0:
        return Differences()
    decoded = tuned.arms.conversations.follow_all(workload.prompts[: len(runs[tuned.name])])
    longest_s = max(run.target_prefill_ms + run.decode_ms for run in runs[AR]) / 1e3  # an examination decodes plainly
    examined = divergences_from_plain(tuned, decoded, runs[tuned.name], runs[AR], deadline - longest_s)
    is_exact = tuned.decoder.target.text.is_exact
    other = [
        f"{prompt}: {difference}" for prompt, difference in examined.items() if is_exact or not difference.is_near_tie
    ]
    return Differences(rounding=len(examined) - len(other), other=other, unexamined=num - len(examined))
