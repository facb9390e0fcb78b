"""``autotune check``: does a profile still decode losslessly, and fast enough?"""

from __future__ import annotations

from pathlib import Path

import torch

from autotune.console import Console
from autotune.decoding_profile import load
from autotune.errors import UserError
from autotune.files import Document
from autotune.profile_runner import TUNED, ProfileRunner
from autotune.provenance import Provenance, stamp
from autotune.runtime.divergence import Divergence, first_divergence
from autotune.runtime.token_rule import TokenRule
from autotune.search.finalists import AR, Arm, Run, summarise
from autotune.workload import Workload, load_workload


class CheckResult(Document):
    """What the check found. ``exit_code`` is 0 passed, 1 failed."""

    provenance: Provenance
    profile: str
    lossless: bool
    """What the profile promises, of all of its points."""
    num_prompts: int
    identical_outputs: int
    divergences: list[str]
    """Where outputs in reduced precision first differ from plain decoding, with the target's margin there."""
    speedup: float
    ci95: tuple[float, float]
    min_speedup: float | None
    verdict: str
    exit_code: int


def run_check(
    profile: Path, workload: str, min_speedup: float | None, num_prompts: int, seed: int, device: str, console: Console
) -> CheckResult:
    """Decode with the profile and plainly, side by side, and judge.

    An output that differs from plain decoding fails, unless the profile says that the prompt's point is lossy, or every difference begins at a near tie in a precision
    below float32. So does a speedup whose whole 95 % interval lies below ``min_speedup``: noise alone fails nothing.

    Raises:
        UserError: a minimum that is not positive, or the profile or workload cannot be read.
    """
    if min_speedup is not None and not min_speedup > 0:
        raise UserError(f"--min-speedup must be above 0; got {min_speedup}; give for example --min-speedup 1.5")
    prompts = load_workload(workload, "evaluate", num_prompts=num_prompts)
    decoder = load(profile, device=device)
    tuned = Arm(AR if decoder.draft is None else TUNED)
    runner = ProfileRunner(decoder)
    with console.stage("check") as update:
        runs = runner.compare([Arm(AR), tuned], prompts, seed=seed, report=lambda done, of: update(done, of, ""))
    summary = summarise(tuned.name, runs[tuned.name], runs[AR], seed=seed)
    verdict, code = "passed", 0
    lossless = all(point.lossless for point in decoder.profile.points)
    found = divergences(runner, tuned, prompts, runs)
    for name, divergence in found.items():
        console.say(f"{name}: output differs at {divergence}")
    rounds_off = decoder.target.dtype != torch.float32 and all(one.is_near_tie for one in found.values())
    if found and not rounds_off:
        verdict, code = "failed: the output is not that of plain decoding", 1
    elif min_speedup is not None and summary.ci95[1] < min_speedup:
        verdict, code = f"failed: the speedup lies below {min_speedup:g}", 1
    console.say(
        f"{verdict}; {'' if lossless else 'LOSSY profile, '}{summary.identical_outputs}/{summary.num_prompts} outputs identical, "
        f"speedup {summary.speedup:.2f}x ({summary.ci95[0]:.2f}-{summary.ci95[1]:.2f})"
    )
    return CheckResult(
        provenance=stamp(),
        profile=str(profile),
        lossless=lossless,
        num_prompts=summary.num_prompts,
        identical_outputs=summary.identical_outputs,
        divergences=[f"{name}: {divergence}" for name, divergence in found.items()],
        speedup=summary.speedup,
        ci95=summary.ci95,
        min_speedup=min_speedup,
        verdict=verdict,
        exit_code=code,
    )


def divergences(
    runner: ProfileRunner, arm: Arm, prompts: Workload, runs: dict[str, list[Run]]
) -> dict[str, Divergence]:
    """Where an arm's outputs part from plain decoding's though the prompt's point is lossless, by prompt; decoding is repeated,
    as runs keep no tokens.
    """
    found = {}
    assert runner.decoder.profile is not None
    points = runner.decoder.profile.points
    for prompt, run, plain_run in zip(prompts.prompts, runs[arm.name], runs[AR], strict=False):
        if run.tokens_sha256 == plain_run.tokens_sha256 or not points[run.point].lossless:
            continue
        target, settings = runner.decoder.target, prompt.settings
        inputs = prompt.inputs(runner.processor, target.device)
        plain, other = (runner.decode(one, inputs, prompt)[0] for one in (Arm(AR), arm))
        rule = TokenRule(
            temperature=settings.temperature, top_p=settings.top_p, seed=settings.seed, device=target.device
        )
        divergence = first_divergence(target, inputs, plain, other, rule)
        if divergence is not None:
            found[prompt.name] = divergence
    return found
