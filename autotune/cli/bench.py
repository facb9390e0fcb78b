"""``autotune bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.cli import options
from autotune.errors import UserError
from autotune.search.settings import SearchSettings
from autotune.workloads.formats import Format

if TYPE_CHECKING:
    from autotune.workloads.workload import Workload


@click.command(cls=options.Verb, short_help="Compare a profile with plain decoding and other configurations.")
@click.argument("profile", type=click.Path(path_type=Path))
@options.workload
@options.workload_format
@click.option(
    "--against",
    default=None,
    show_default="plain decoding, Hugging Face, prompt lookup and one published default a paper, where they can run",
    help="Arms, separated by commas: ar, hf, hf-assisted, prompt_lookup, or the name of a published configuration.",
)
@click.option(
    "--draft",
    default=None,
    show_default="the profile's",
    help="Draft of the published configurations, such as retrieval.",
)
@click.option(
    "--lossy-sweep",
    is_flag=True,
    help="Measure WETAP's lossy acceptance at several thresholds: tokens per round, perplexity and agreement.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=None,
    show_default="of each prompt",
    help="Temperature of all prompts, which are sampled with their numbers as seeds.",
)
@click.option(
    "--uncoupled",
    is_flag=True,
    help="Also measure every drafting arm without coupled sampling, which drafts with the target's noise.",
)
@options.num_prompts(32)
@click.option(
    "--whole",
    "is_whole",
    is_flag=True,
    help="Decode the prompts of both splits: for a workload that the profile was not tuned on.",
)
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=None, show_default="of each prompt", help="Longest answer."
)
@click.option(
    "--engine",
    default=None,
    help="Compare a serving engine with the prediction of its export instead: the address of one that runs the exported settings, "
    "http://HOST:PORT, or 'vllm' to start vLLM with them and without speculation.",
)
@click.option(
    "--engine-executable",
    envvar="AUTOTUNE_VLLM",
    show_envvar=True,
    default=None,
    help="Executable of --engine vllm.  [default: vllm on the PATH]",
)
@click.option(
    "--engine-arguments",
    default="",
    help="Further arguments of --engine vllm, in one word, such as '--gpu-memory-utilization 0.4'.",
)
@click.option(
    "--interleaved",
    is_flag=True,
    help="Run the engines that are started at the same time, taking turns prompt by prompt; each needs its share of the memory.",
)
@click.option(
    "--export",
    "export_folder",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder of the export that the engine runs.  [default: exports/ENGINE]",
)
@click.option(
    "--requests-at-once",
    type=click.IntRange(min=1),
    multiple=True,
    show_default="1; with --prices 1, 4 and 16",
    help="Also time the engine with this many requests at a time; may be repeated.",
)
@click.option(
    "--prices",
    type=click.Path(path_type=Path),
    default=None,
    help="With --engine vllm: time its rounds with 0, 1, 2, 4 and 8 draft tokens instead, and write them for autotune export --prices.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed of the order of the runs.")
@options.device
@options.settings_options(SearchSettings, "wait_until_quiet_s")
@options.table("a row for every run")
@options.as_json
def command(
    profile: Path,
    workload: str | None,
    workload_format: Format | None,
    against: str | None,
    draft: str | None,
    lossy_sweep: bool,
    temperature: float | None,
    uncoupled: bool,
    num_prompts: int,
    is_whole: bool,
    max_new_tokens: int | None,
    engine: str | None,
    engine_executable: str | None,
    engine_arguments: str,
    interleaved: bool,
    export_folder: Path | None,
    requests_at_once: tuple[int, ...],
    prices: Path | None,
    seed: int,
    device: str,
    wait_until_quiet_s: float | None,
    table: Path | None,
    as_json: bool,
) -> None:
    """Measure a profile side by side with plain decoding and other configurations, interleaved in one run."""
    from autotune.cli.preflight import require_arms, workload_for

    arms = None if against is None else [name.strip() for name in against.split(",") if name.strip()]
    require_arms(arms or ())
    chosen = workload_for(profile, workload, workload_format)
    if engine is not None:
        of_arms = {
            "--against": against,
            "--draft": draft,
            "--lossy-sweep": lossy_sweep,
            "--uncoupled": uncoupled,
            "--wait-until-quiet": wait_until_quiet_s,
            "--table": table,
        }
        if refused := [name for name, value in of_arms.items() if value]:
            raise UserError(f"--engine compares an engine with its export alone; leave {' and '.join(refused)} out")
        from autotune.cli.bench_engine import bench_engine

        result = bench_engine(
            engine,
            profile,
            lambda: _prompts(chosen, num_prompts, workload_format, is_whole, max_new_tokens, temperature),
            device,
            executable=engine_executable,
            arguments=engine_arguments,
            interleaved=interleaved,
            folder=export_folder,
            requests_at_once=requests_at_once,
            prices=prices,
        )
        if as_json:
            options.print_json(result)
        return
    if prices is not None:
        raise UserError("--prices: prices are measured in an engine; give --engine vllm")
    of_engines = {
        "--engine-arguments": engine_arguments,
        "--interleaved": interleaved,
        "--export": export_folder,
        "--requests-at-once": requests_at_once,
    }
    if given := [name for name, value in of_engines.items() if value]:
        raise UserError(f"{' and '.join(given)}: for a serving engine only; give --engine, or leave them out")

    from autotune.console import Console
    from autotune.evaluation.bench import run_bench
    from autotune.evaluation.runs import runs_dataframe
    from autotune.files import write_table

    result = run_bench(
        profile,
        chosen,
        arms,
        num_prompts,
        seed,
        device,
        Console(),
        draft=draft,
        lossy_sweep=lossy_sweep,
        temperature=temperature,
        uncoupled=uncoupled,
        workload_format=workload_format,
        is_whole=is_whole,
        max_new_tokens=max_new_tokens,
        wait_until_quiet_s=wait_until_quiet_s,
    )
    if table is not None:
        write_table(table, runs_dataframe(result["runs"]))
    if as_json:
        options.print_json(result)


def _prompts(
    name: str,
    num_prompts: int,
    workload_format: Format | None,
    is_whole: bool,
    max_new_tokens: int | None,
    temperature: float | None,
) -> Workload:
    from autotune.workloads.workload import load_workload

    found = load_workload(name, "evaluate", num_prompts=num_prompts, format=workload_format, is_whole=is_whole)
    prompts = found.cut(num_prompts, max_new_tokens)
    return prompts if temperature is None else prompts.sampled(temperature)
