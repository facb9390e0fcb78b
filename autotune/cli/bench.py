"""``autotune bench``."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.cli.options import Verb, device_option, json_option, print_json, prompts_option, workload_option


@click.command(cls=Verb, short_help="Compare a profile with plain decoding and other configurations.")
@click.argument("profile", type=click.Path(path_type=Path))
@workload_option
@click.option(
    "--against",
    default=None,
    show_default="all lossless arms that can run",
    help="Arms, separated by commas: ar, hf, hf-assisted, prompt_lookup, or the name of a published configuration.",
)
@prompts_option(32)
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed of the order of the runs.")
@device_option
@json_option
def command(
    profile: Path, workload: str, against: str | None, num_prompts: int, seed: int, device: str, as_json: bool
) -> None:
    """Measure a profile side by side with plain decoding and other configurations, interleaved in one run."""
    from autotune.cli.preflight import require_arms, require_profile, require_workload

    arms = None if against is None else [name.strip() for name in against.split(",") if name.strip()]
    require_arms(arms or ())
    require_profile(profile)
    require_workload(workload)

    from autotune.console import Console
    from autotune.evaluation.bench import run_bench

    result = run_bench(profile, workload, arms, num_prompts, seed, device, Console())
    if as_json:
        print_json(result)
