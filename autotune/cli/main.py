"""The command line: one verb per stage. Each parses, calls one function, and prints; torch is loaded by the verbs that
need it.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from autotune.documents.provenance import version_of
from autotune.errors import UserError
from autotune.modeling.loading import BUNDLED_DRAFT, BUNDLED_TARGET
from autotune.workloads.workload import BUNDLED

EXPORT_ENGINES = ("vllm", "sglang", "tensorrt-llm", "transformers")


class _Duration(click.ParamType[float]):
    """``90``, ``90s``, ``10m`` or ``1h``, as seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*([smh]?)", str(value).strip())
        if not found:
            self.fail(f"{value!r} is not a duration; write for example 90s, 10m or 1h", param, ctx)
        return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


class _Percent(click.ParamType[float]):
    """``5%`` or ``0.05``, as a share."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", str(value).strip())
        if not found or (float(found[1]) >= 1 and not found[2]):
            self.fail(f"{value!r} is not a percentage; write for example 5% or 0.05", param, ctx)
        return float(found[1]) / (100 if found[2] else 1)


class _Sizes(click.ParamType[tuple[int, ...]]):
    """``4,8,16,32,64``, as numbers."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        from autotune.execution import check_capture_sizes

        if isinstance(value, tuple):
            return value
        try:
            sizes = [int(size) for size in str(value).split(",") if size.strip()]
        except ValueError:
            self.fail(f"{value!r} is no list of sizes; write for example 4,8,16,32,64", param, ctx)
        return check_capture_sizes(sizes)


class _Verbs(click.Group):
    """Says what users can mend in one line, in one place, for every verb: our own exception and click's."""

    def main(self, args: Sequence[str] | None = None, *_: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        if not standalone_mode:  # the caller handles what is raised
            return super().main(args, prog_name="autotune", standalone_mode=False)
        try:
            code = super().main(args, prog_name="autotune", standalone_mode=False)
        except (UserError, click.UsageError) as error:
            message = str(error)
            if isinstance(error, click.UsageError):  # which may list choices line by line
                message = " ".join(error.format_message().split())
            click.echo(f"autotune: {message}", err=True)
            sys.exit(error.exit_code)
        except click.Abort:
            click.echo("autotune: interrupted; the same command goes on", err=True)
            sys.exit(130)
        sys.exit(code or 0)


def _model_options(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option(
        "--draft",
        "drafts",
        multiple=True,
        default=(BUNDLED_DRAFT,),
        show_default=True,
        help="Draft: a bundled name, a path or a Hugging Face id; may be repeated.",
    )(command)
    return click.option(
        "--target",
        default=BUNDLED_TARGET,
        show_default=True,
        help="Target: a bundled name, a path or a Hugging Face id.",
    )(command)


_workload_option = click.option(
    "--workload", default=BUNDLED, show_default=True, help="'digits', or a JSONL file of prompts."
)
_buckets_option = click.option(
    "--capture-sizes",
    type=_Sizes(),
    default=(),
    help="Sizes that forwards are rounded up to, for devices that prepare them: 4,8,16,32,64. Every size as it is where left out.",
)
_runner_option = click.option(
    "--mode",
    type=click.Choice(["eager", "compile", "cuda-graph"]),
    default="eager",
    show_default=True,
    help="How steps run: as transformers runs them, compiled, or as CUDA graphs; the last two prepare sizes (--capture-sizes).",
)
_injection_option = click.option(
    "--injection-layer", type=int, default=None, help="Layer of the target whose output the draft reads: star has five."
)


def _heads_option(*, multiple: bool = False) -> Any:
    repeated = "; may be repeated, to measure several" if multiple else ""
    return click.option(
        "--heads",
        type=float,
        multiple=multiple,
        default=None,
        help=f"Share of heads kept: star has quarters{repeated}.",
    )


_json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
_device_option = click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda:N.")


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, allow_nan=False))


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version_of("autotune"), prog_name="autotune")
def main() -> None:
    """Finds the fit of draft, token tree and hardware for speculative decoding, and decodes with it.

    Without options every verb works on the bundled pair and workload, offline, on the CPU. Exit codes: 0 done, 1 the
    check found a regression, 2 a mistake you can mend, 3 the check is inconclusive, 4 not comparable.
    """


@main.command()
@_json_option
def devices(as_json: bool) -> None:
    """This machine's devices, and those with shipped cost tables."""
    from autotune.console import Console
    from autotune.cost.roofline import datasheets, load_limits
    from autotune.cost.table import shipped_tables
    from autotune.device import fingerprint, local_devices

    here = {device: fingerprint(device) for device in local_devices()}
    shipped = {
        name: [path.name.removesuffix(".cost.json") for path in paths] for name, paths in shipped_tables().items()
    }
    if as_json:
        local = {name: {**f.model_dump(), "key": f.key} for name, f in here.items()}
        _print_json(
            {
                "local": local,
                "measured": shipped,
                "estimated": {name: load_limits(name).model_dump() for name in datasheets()},
            }
        )
        return
    console = Console()
    rows = [[name, f.model, str(f.num_cores), f"{f.memory_bytes / 2**30:.0f} GiB"] for name, f in here.items()]
    console.table("This machine", ["device", "model", "cores", "memory"], rows)
    limits = {name: load_limits(name) for name in datasheets()}
    rows = [
        [
            name,
            limits[name].model if name in limits else "-",
            f"{limits[name].memory_gb_per_second:.0f} GB/s" if name in limits else "-",
            ", ".join(shipped.get(name, [])) or "none: estimated from the datasheet",
        ]
        for name in sorted({*limits, *shipped})
    ]
    console.table("Other devices (--gpu NAME)", ["name", "model", "bandwidth", "measured pairs"], rows)


@main.command()
@_model_options
@_heads_option(multiple=True)
@_injection_option
@_workload_option
@_device_option
@click.option("--budget", type=_Duration(), default="90s", show_default=True, help="Time for the steps' timings.")
@_buckets_option
@_runner_option
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("pair.cost.json"), show_default=True)
@_json_option
def profile(
    target: str,
    drafts: tuple[str, ...],
    heads: tuple[float, ...],
    injection_layer: int | None,
    workload: str,
    device: str,
    budget: float,
    capture_sizes: tuple[int, ...],
    mode: str,
    output: Path,
    as_json: bool,
) -> None:
    """Measure a cost table: what a step of target and drafts costs on a device."""
    from autotune.console import Console
    from autotune.device import choose_device
    from autotune.documents.subnet import Subnet
    from autotune.files import dump_document, require_writable, write_document
    from autotune.search.cost_tables import measure_table, print_table
    from autotune.search.model_pool import ModelPool
    from autotune.workloads.workload import load_workload

    require_writable(output)
    console = Console()
    prompts = load_workload(workload, "tune")
    model_pool = ModelPool(target, drafts, choose_device(device), capture_sizes, mode)
    subnets = [Subnet(heads=share, injection_layer=injection_layer) for share in heads or (None,)]
    variants = [(draft, subnet) for draft in model_pool.references for subnet in subnets]
    table = measure_table(model_pool, variants, prompts, console, budget)
    write_document(output, "cost-table", table)
    print_table(table, console)
    console.say(f"cost table written to {output}")
    if as_json:
        click.echo(dump_document("cost-table", table))


@main.command()
@_model_options
@_heads_option()
@_injection_option
@_workload_option
@_device_option
@click.option(
    "--visual-keep",
    multiple=True,
    type=float,
    default=(1.0,),
    show_default=True,
    help="Share of visual tokens that the draft sees; may be repeated.",
)
@click.option(
    "--prompts", "num_prompts", type=click.IntRange(min=1), default=64, show_default=True, help="How many prompts."
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("traces"), show_default=True, help="Folder."
)
@_json_option
def record(
    target: str,
    drafts: tuple[str, ...],
    heads: float | None,
    injection_layer: int | None,
    workload: str,
    device: str,
    visual_keep: tuple[float, ...],
    num_prompts: int,
    output: Path,
    as_json: bool,
) -> None:
    """Record traces: what the draft proposes along the target's answers."""
    from autotune.console import Console
    from autotune.device import choose_device
    from autotune.documents.subnet import Subnet
    from autotune.files import require_writable
    from autotune.search.cost_tables import print_agreement
    from autotune.search.model_pool import ModelPool
    from autotune.search.traces import record_traces
    from autotune.workloads.workload import load_workload

    require_writable(output / "keep-1.trace.json")
    for keep in visual_keep:
        if not 0.0 < keep <= 1.0:
            raise UserError(f"--visual-keep must be above 0 and at most 1; got {keep:g}; 1 keeps every visual token")
    console = Console()
    prompts = load_workload(workload, "tune", num_prompts=num_prompts)
    model_pool = ModelPool(target, drafts, choose_device(device))
    variants = [
        (draft, Subnet(heads=heads, visual_keep=keep, injection_layer=injection_layer))
        for draft in model_pool.references
        for keep in visual_keep
    ]
    traces = record_traces(model_pool, variants, prompts, output, console)
    print_agreement(traces, console)
    if as_json:
        _print_json(
            [
                {
                    "draft": trace.header.draft.id,
                    "visual_keep": trace.header.visual_keep,
                    "agreement": trace.agreement().pivot(index="rank", columns="task", values="share").to_dict(),
                }
                for trace in traces
            ]
        )


@main.command()
@click.option(
    "--gpu",
    default="auto",
    show_default=True,
    help="auto (the local accelerator, or the CPU), a local device, or the name of another one.",
)
@_model_options
@_heads_option()
@_injection_option
@_workload_option
@click.option("--space", default="quick", show_default=True, help="Search space: a shipped name or a YAML file.")
@click.option("--budget", type=_Duration(), default="5m", show_default=True, help="Time to aim for, as 90s, 10m or 1h.")
@click.option(
    "--trials",
    type=int,
    default=200,
    show_default=True,
    help="Sampled configurations; small policies are enumerated beside them.",
)
@click.option(
    "--storage",
    default=None,
    help="postgresql://... that several workers share; a file in the study's folder where left out.",
)
@click.option("--study", default=None, help="Name of the study's folder in .autotune/, to go on with or keep apart.")
@click.option(
    "--measure",
    type=click.Choice(["finalists", "all"]),
    default="finalists",
    show_default=True,
    help="What is run for real: finalists, or every subnet before its trees are searched as well.",
)
@click.option("--max-round-ms", type=click.FloatRange(min=0), default=None, help="Longest latency of a round allowed.")
@click.option(
    "--max-draft-mib", type=click.FloatRange(min=0), default=None, help="Most memory of a draft and its cache allowed."
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=None,
    help="Replays and recordings at once; one for each core if left out.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@_buckets_option
@_runner_option
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("profile.json"), show_default=True)
@_json_option
def search(
    gpu: str,
    target: str,
    drafts: tuple[str, ...],
    heads: float | None,
    injection_layer: int | None,
    workload: str,
    space: str,
    budget: float,
    trials: int,
    storage: str | None,
    study: str | None,
    measure: str,
    max_round_ms: float | None,
    max_draft_mib: float | None,
    jobs: int | None,
    seed: int,
    capture_sizes: tuple[int, ...],
    mode: str,
    output: Path,
    as_json: bool,
) -> None:
    """The main job: profile, record, search, measure, and write the decoding profile. Interrupted, the same command
    goes on.
    """
    started = time.monotonic()  # what is imported and loaded takes a part of the budget
    from autotune.console import Console
    from autotune.files import dump_document
    from autotune.search.settings import check_settings, settings_from

    settings = settings_from(
        target=target,
        drafts=drafts,
        heads=heads,
        injection_layer=injection_layer,
        workload=workload,
        space=space,
        gpu=gpu,
        budget_s=budget,
        num_trials=trials,
        storage=storage,
        study=study,
        measure=measure,
        max_round_ms=max_round_ms,
        max_draft_mib=max_draft_mib,
        jobs=jobs,
        seed=seed,
        capture_sizes=capture_sizes,
        mode=mode,
        output=output,
    )
    check_settings(settings)
    from autotune.search.pipeline import search as run_search

    document = run_search(settings, Console(), started=started)
    if as_json:
        click.echo(dump_document("decoding-profile", document))


@main.command()
@click.argument("profile", type=click.Path(path_type=Path))
@click.option("--prompt", default=None, help="Text; with --image the question about it.")
@click.option("--image", "images", multiple=True, type=click.Path(path_type=Path), help="Image file; may be repeated.")
@click.option("--workload", default=None, help="Decode a workload's evaluation prompts instead of one prompt.")
@click.option("--task", default=None, help="What kind of request it is, for profiles with a point for some kinds.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@_device_option
@_json_option
def run(
    profile: Path,
    prompt: str | None,
    images: tuple[Path, ...],
    workload: str | None,
    task: str | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    device: str,
    as_json: bool,
) -> None:
    """Decode with a profile. Without a prompt: one bundled example."""
    from pydantic import ValidationError

    from autotune.evaluation.answers import answer_prompts
    from autotune.files import describe
    from autotune.workloads.workload import Prompt, WorkloadPrompt, load_image, load_workload

    if workload is not None and (prompt is not None or images):
        raise UserError("give either --workload or --prompt with --image; got both; drop one")
    if images and prompt is None:
        raise UserError("an image needs a question; add --prompt TEXT")
    settings: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "seed": seed}
    if task is not None:
        settings["task"] = task
    try:
        if prompt is not None:
            one = Prompt(prompt=prompt, max_new_tokens=max_new_tokens, **settings)
            prompts = [WorkloadPrompt("prompt", one, tuple(load_image(path) for path in images))]
        else:
            prompts = []
            for p in load_workload(workload or BUNDLED, "evaluate", num_prompts=None if workload else 1).prompts:
                limit = {"max_new_tokens": min(p.settings.max_new_tokens, max_new_tokens)}
                prompts.append(replace(p, settings=Prompt(**{**p.settings.model_dump(), **settings, **limit})))
    except ValidationError as error:
        raise UserError(f"--{describe(error, Prompt).replace('_', '-')}") from None
    answers = []
    for answer in answer_prompts(profile, prompts, device=device):
        answers.append(answer)
        if not as_json:
            click.echo(answer["text"])
            click.echo(answer["summary"], err=True)
    if as_json:
        _print_json(answers if workload is not None else answers[0])


@main.command()
@click.argument("profile", type=click.Path(path_type=Path))
@_workload_option
@click.option(
    "--against",
    default=None,
    show_default="all that can run",
    help="Arms, separated by commas: ar, hf, hf-assisted, prompt_lookup, and published defaults.",
)
@click.option("--prompts", "num_prompts", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order in which arms take turns.")
@_device_option
@_json_option
def bench(
    profile: Path, workload: str, against: str | None, num_prompts: int, seed: int, device: str, as_json: bool
) -> None:
    """Measure a profile and other ways to decode side by side, in one run."""
    from autotune.console import Console
    from autotune.evaluation.bench import run_bench

    result = run_bench(
        profile,
        workload,
        None if against is None else [name.strip() for name in against.split(",") if name.strip()],
        num_prompts,
        seed,
        device,
        Console(),
    )
    if as_json:
        _print_json(result)


@main.command()
@click.argument("profile", type=click.Path(path_type=Path))
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    default=(BUNDLED,),
    show_default=True,
    help="'digits', or a JSONL file of prompts; may be repeated.",
)
@click.option(
    "--against", default=None, help="A git revision or another profile: is this slower than that, timed in pairs?"
)
@click.option(
    "--limit", type=_Percent(), default="5%", show_default=True, help="A slowdown from here on must be found."
)
@click.option("--tolerance", type=_Percent(), default="1%", show_default=True, help="A slowdown up to here is none.")
@click.option(
    "--budget", type=_Duration(), default="8m", show_default=True, help="For the pairs of --against and --aa."
)
@click.option(
    "--min-speedup",
    type=float,
    default=None,
    help="Fail if the speedup over plain decoding, with its interval, lies below this.",
)
@click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    default=None,
    help="Sessions of other days, which this one joins if it passes.",
)
@click.option(
    "--aa", "tests_machine", is_flag=True, help="Time the profile against itself: what can be found on this machine?"
)
@click.option("--prompts", "num_prompts", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of all orders.")
@click.option(
    "--on-inconclusive",
    type=click.Choice(["fail", "warn"]),
    default="fail",
    show_default=True,
    help="Whether a timing that decides nothing exits with 3 or with 0.",
)
@click.option("--junit", type=click.Path(path_type=Path), default=None, help="Write JUnit XML here.")
@click.option("--markdown", type=click.Path(path_type=Path), default=None, help="Write a page for people here.")
@click.option("--github", is_flag=True, help="Annotate the run, and add to its summary, on GitHub Actions.")
@_device_option
@_json_option
def check(profile: Path, on_inconclusive: str, budget: float, github: bool, as_json: bool, **options: Any) -> None:
    """Check that a profile still decodes losslessly, with the counts that it had, and not more slowly than before.

    Exit codes: 0 passed, 1 regressed, 2 a mistake you can mend, 3 inconclusive, 4 not comparable.
    """
    from autotune.check.job import CheckSettings, run_check
    from autotune.check.output import add_to_step_summary
    from autotune.check.output import github as annotations
    from autotune.console import Console
    from autotune.files import dump_document

    settings = CheckSettings(profile, budget_s=budget, inconclusive_fails=on_inconclusive == "fail", **options)
    result = run_check(settings, Console())
    if github:
        for line in annotations(result):
            click.echo(line, err=True)
        add_to_step_summary(result)
    if as_json:
        click.echo(dump_document("check-result", result))
    sys.exit(result.exit_code)


@main.command()
@click.argument("source", metavar="PROFILE|STUDY", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True)
@click.option(
    "--study",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder of the profile's study; looked for in .autotune/ beside it where left out.",
)
@click.option("--storage", default=None, help="Database of the study's records, where workers shared one.")
@click.option("--workload", default=None, help="Where the search's prompts are now, if they have moved.")
def report(source: Path, output: Path, study: Path | None, storage: str | None, workload: str | None) -> None:
    """Write a page that explains a profile: one HTML file that opens offline."""
    from autotune.console import Console
    from autotune.report.page import write_report

    write_report(source, output, Console(), study=study, storage=storage, workload=workload)
    click.echo(output)


@main.command()
@click.argument("profile", type=click.Path(path_type=Path))
@click.option("--to", "engine", type=click.Choice(EXPORT_ENGINES), required=True, help="The engine.")
@click.option(
    "--study",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder of the search's documents; looked for in .autotune, beside the profile and here, if left out.",
)
@click.option(
    "--point",
    type=int,
    default=None,
    help="Point of the profile, for a server of those requests alone; the last one, for all requests, if left out.",
)
@click.option("--draft", default=None, help="Another draft that the search recorded, in place of the point's.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=None, help="Folder; exports/ENGINE where left out."
)
@_json_option
def export(
    profile: Path,
    engine: str,
    study: Path | None,
    point: int | None,
    draft: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Write the nearest configuration that a serving engine can run, chosen by replay, and print the command that starts
    it.
    """
    from autotune.console import Console
    from autotune.export.exporter import export_profile
    from autotune.files import dump_document

    result = export_profile(profile, engine, study=study, point=point, draft=draft, output=output, console=Console())
    if as_json:
        click.echo(dump_document("export", result))
    else:
        for variant in result.variants:
            click.echo(variant.command)


@main.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=None, help="Folder; the recipe's own where left out."
)
def train(recipe: Path, output: Path | None) -> None:
    """Train a draft, or the bundled pair, from a recipe, going on from the last checkpoint."""
    from autotune.console import Console
    from autotune.training.trainer import train_with_progress

    train_with_progress(recipe, output, Console())
