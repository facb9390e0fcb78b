"""Measures what the documentation shows, one set after the other, into ``benchmarks/results/NAME.json``.

Leave the machine alone meanwhile. A set that is there is skipped unless ``--again`` is given, and an interrupted one
continues from its folder below ``.autotune/results``. Then ``make figures`` draws the figures and writes the tables and
numbers of README and docs.

    python -m benchmarks.measure all                        # make results: about two hours for both pairs, without
    dimensions python -m benchmarks.measure default-searches           # 7 minutes a search of digits, 12 of smollm2;
    --repeats 5 for the spread python -m benchmarks.measure repeated-searches FILE ... # a second: collects what
    default_searches.py has written python -m benchmarks.measure steps                      # 3 minutes a pair python -m
    benchmarks.measure predictions                # 15 minutes a pair, after its default search python -m
    benchmarks.measure peers                      # 10 minutes a pair, after its default search python -m
    benchmarks.measure engine-search ENGINE MODEL COMMAND    # 10 minutes; the engine must be there: make engines python
    -m benchmarks.measure dimensions                 # 50 minutes, digits only python -m benchmarks.measure acceptance
    # a second: collects drafts/*/*/acceptance.jsonl python -m benchmarks.measure published                  # seconds:
    estimates from datasheets against papers

``--pair digits`` or ``--pair smollm2`` measures one pair. ``default-searches --pair benchmarks``, ``--pair sampled``
and ``engine-search`` need the file ``.autotune/results/benchmarks.jsonl``, which ``benchmarks/published_prompts.py``
writes. Also as ``python benchmarks/measure.py``; a set takes minutes, as listed.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from autotune.documents.contention import Contention
from autotune.files import read_lines
from benchmarks.evidence import searches
from benchmarks.evidence.result import RESULTS, ROOT, WORK, Result, Rows, load_result, path_of, stamped

PAIRS = {
    "digits": {"target": "digits/target", "budget": "5m", "table": "90s", "configurations": "12", "prompts": "8"},
    "smollm2": {"target": "smollm2", "budget": "10m", "table": "90s", "configurations": "6", "prompts": "4"},
}
"""Bundled pairs: target, budgets of a default search and of a cost table; random configurations of every policy and
prompts that test predictions.
"""
PUBLISHED = "benchmarks.jsonl"
SEARCHES = {
    **{name: ("--target", pair["target"], "--budget", pair["budget"]) for name, pair in PAIRS.items()},
    "benchmarks": ("--target", "smollm2", "--workload", f"../../{PUBLISHED}", "--budget", "10m"),
    "sampled": ("--target", "smollm2", "--workload", f"../../{PUBLISHED}", "--temperature", "1", "--budget", "10m"),
}
"""Searches that are measured: of the pairs, and of prompts that ``benchmarks/published_prompts.py`` writes, greedy and
sampled.
"""
SECONDS = {"s": 1, "m": 60, "h": 3600}
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64)


def autotune(folder: Path, log: str, *arguments: str) -> float:
    """Run a verb in a folder, whose output a log there keeps; returns the seconds that it took."""
    return _run(folder, log, [sys.executable, "-m", "autotune", *arguments])


def script(folder: Path, log: str, name: str, *arguments: str) -> float:
    """Run a benchmark in a folder, likewise."""
    return _run(folder, log, [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *arguments])


def _run(folder: Path, log: str, command: list[str]) -> float:
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    began = time.monotonic()
    with (folder / log).open("w") as file:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        output = (folder / log).read_text()[-2000:]
        raise click.ClickException(f"{' '.join(command[1:])} ended with {done.returncode}:\n{output}")
    return time.monotonic() - began


def is_there(name: str, again: bool) -> bool:
    """Whether a result needs no measurement; says so."""
    known = load_result(name)
    skip = known is not None and known.source != "diary" and not again
    busy = known is not None and known.contention is not None and known.contention.is_busy
    found = f"is there{', measured beside other processes' if busy else ''}, skipped; --again measures it again"
    click.echo(f"{name}: {found if skip else 'measuring'}")
    return skip


def pairs_of(pair: str | None) -> list[str]:
    """The chosen pair, or all that are bundled here."""
    return [pair] if pair else [name for name in PAIRS if (ROOT / "drafts" / name / "workload.jsonl").exists()]


def study_of(pair: str) -> Path:
    """Folder of the first default search of a pair, with its profile."""
    folder = WORK / f"default-search-{pair}" / "1"
    if not (folder / searches.PROFILE).exists():
        raise click.ClickException(f"{pair}: no default search yet; run python -m benchmarks.measure default-searches")
    return folder


def study_folder(folder: Path) -> Path:
    return next(path for path in (folder / ".autotune").iterdir() if any(path.glob("study*.json")))


pair_option = click.option("--pair", type=click.Choice(list(PAIRS)), help="One pair. Left out: all that are bundled.")
again_option = click.option("--again", is_flag=True, help="Measure what is there, too.")


@click.group()
def main() -> None:
    """Measure the sets of results that figures and tables are made from."""


@main.command("default-searches")
@click.option("--pair", type=click.Choice(list(SEARCHES)), help="One pair. Left out: all that are bundled.")
@again_option
@click.option("--repeats", default=1, show_default=True, help="Searches of each pair, each from nothing.")
@click.option("--budget", help="Budget of each search. Left out: that of the pair.")
@click.option("--note", default="", help="What a reader must know, such as other processes.")
def default_searches(pair: str | None, again: bool, repeats: int, budget: str | None, note: str) -> None:
    """Default searches: speedups by task, predictions, and what each stage left."""
    for name in pairs_of(pair):
        *search, usual = SEARCHES[name]
        result_name, chosen = f"default-search-{name}", budget or usual
        known = load_result(result_name)
        num_known = len(known.samples.get("searches", ())) if known else 0
        if num_known >= repeats and not again:
            click.echo(f"{result_name}: is there, skipped; --again measures it again")
            continue
        click.echo(f"{result_name}: measuring {repeats} searches of {chosen}")
        work, tables = WORK / result_name, {}
        arguments = ("search", *search, chosen, "-o", searches.PROFILE)
        for number in range(1, repeats + 1):
            folder = work / f"{number}"
            if again and folder.exists() and (folder / searches.COMMAND).exists():
                folder.rename(work / f"before-{time.time_ns()}")
            if not (folder / searches.COMMAND).exists():
                seconds = autotune(folder, searches.LOG, *arguments)
                ran = {"seconds": round(seconds, 1), "budget_s": int(chosen[:-1]) * SECONDS[chosen[-1]]}
                (folder / searches.COMMAND).write_text(json.dumps(ran))
            for table, rows in searches.samples_of(folder, number).items():
                tables.setdefault(table, []).extend(rows)
            save_search(result_name, f"autotune {' '.join(arguments)}", tables, work / "1", note)


def save_search(name: str, command: str, samples: dict[str, Rows], folder: Path, note: str) -> None:
    """Write the result of searches, with the contention of the first one's real runs."""
    from autotune.documents.decoding_profile import DecodingProfile

    profile = DecodingProfile.load(folder / searches.PROFILE)
    minutes = sum(row["seconds"] for row in samples["searches"]) / 60
    write(
        stamped(
            name,
            command=command,
            minutes=round(minutes, 1),
            contention=profile.provenance.contention,
            note=note,
            samples=samples,
            values=searches.values_of(samples),
        )
    )


@main.command("repeated-searches")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
def repeated_searches(files: tuple[Path, ...]) -> None:
    """Collect searches of digits beside other processes, from FILES that ``benchmarks/default_searches.py --results``
    has written.
    """
    samples = {"searches": [row for file in files for row in read_lines(file)]}
    minutes = round(sum(row["seconds"] for row in samples["searches"]) / 60, 1)
    command = "python benchmarks/default_searches.py CONDITION ... --results FILE"
    values = repeated_values(samples)
    write(stamped("repeated-searches-digits", command=command, minutes=minutes, samples=samples, values=values))


DISTURBED = {
    "quiet": "quiet",
    "busy": "one core busy half of the time",
    "burning": "one core busy all the time",
    "bursts": "three processes in bursts while the cost table was measured",
}
"""Conditions of ``benchmarks/default_searches.py``."""


def repeated_values(samples: dict[str, Rows]) -> dict[str, Rows]:
    """Speedups by condition, and predictions of the winners."""
    found: dict[str, Rows] = {}
    for row in samples["searches"]:
        found.setdefault(" ".join([DISTURBED[row["condition"]], row["arguments"]]).strip(), []).append(row)
    columns = {"tuned": "tuned", "over_default": "over default", "prompts": "prompts", "budget_s": "of budget"}
    return {
        "searches": [
            {"condition": name, **{key: [round(row[column], 2) for row in rows] for key, column in columns.items()}}
            for name, rows in found.items()
        ],
        "predictions": [
            {"label": name, **{key: round(row[key], 4) for key in ("predicted", "measured", "error")}}
            for name, rows in found.items()
            for row in rows
        ],
    }


@main.command()
@pair_option
@again_option
def steps(pair: str | None, again: bool) -> None:
    """Times of a step by its tokens, of the target and every draft."""
    for name in pairs_of(pair):
        if is_there(f"steps-{name}", again):
            continue
        folder, target = WORK / f"steps-{name}", PAIRS[name]["target"]
        arguments = ("measure", "--target", target, "--budget", PAIRS[name]["table"], "-o", "pair.cost.json")
        seconds = autotune(folder, "measure.log", *arguments)
        command = f"autotune {' '.join(arguments)}"
        write(steps_result(f"steps-{name}", folder / "pair.cost.json", command=command, minutes=round(seconds / 60, 1)))


def steps_result(name: str, table_file: Path, **fields: Any) -> Result:
    """The result of a cost table: measured points as samples, prices at the middle KV length as values."""
    from autotune.cost.table import CostTable

    table = CostTable.load(table_file)
    frame = table.to_dataframe().round(4)
    samples = {"points": json.loads(frame.to_json(orient="records")), "prices": prices_of(table)}
    return stamped(name, contention=table.provenance.contention, samples=samples, values=step_values(samples), **fields)


def prices_of(table: Any) -> Rows:
    """Prices in milliseconds at the middle KV length, of the target's step and of a whole draft's levels after the
    first.
    """
    import numpy as np

    from autotune.cost.latency_table import middle_kv_length

    kv_length = middle_kv_length(table)
    lengths = np.array([float(kv_length)])
    plain_ms = float(table.decode.latency_ms(np.ones(1), lengths)[0, 0])
    rows: Rows = [{"part": "plain step", "tokens": 1, "kv_length": kv_length, "ms": round(plain_ms, 4)}]
    parts = {"target": table.verify}
    parts |= {costs.draft.id: costs.draft_level for costs in table.drafts if not costs.subnet.label}
    for part, surface in parts.items():
        most = max(point.tokens for point in surface.points)
        tokens = np.array([n for n in STEP_TOKENS if n <= most], np.float64)
        ms = surface.latency_ms(tokens, lengths)[:, 0]
        rows += [
            {"part": part, "tokens": int(n), "kv_length": kv_length, "ms": round(float(t), 4)}
            for n, t in zip(tokens, ms, strict=True)
        ]
    return rows


def step_values(samples: dict[str, Rows]) -> dict[str, Rows]:
    """Prices, also in plain steps."""
    plain = samples["prices"][0]["ms"]
    return {"steps": [{**row, "plain_steps": round(row["ms"] / plain, 4)} for row in samples["prices"]]}


@main.command()
@pair_option
@again_option
@click.option("--configurations", type=int, help="Of every policy. Left out: those of the pair.")
@click.option("--prompts", type=int, help="Left out: those of the pair.")
def predictions(pair: str | None, again: bool, configurations: int | None, prompts: int | None) -> None:
    """Random configurations of every policy: predicted against measured."""
    for name in pairs_of(pair):
        if is_there(f"predictions-{name}", again):
            continue
        folder = study_of(name)
        counts = ["--configurations", str(configurations or PAIRS[name]["configurations"])]
        counts += ["--prompts", str(prompts or PAIRS[name]["prompts"])]
        arguments = [str(study_folder(folder)), *counts, "--table", "predictions.csv"]
        seconds = script(folder, "predictions.log", "predictions", *arguments)
        command = f"python benchmarks/predictions.py .autotune/STUDY {' '.join(counts)}"
        samples = {"configurations": rows_of_csv(folder / "predictions.csv", PREDICTION_COLUMNS)}
        values = prediction_values(samples)
        write(
            stamped(
                f"predictions-{name}", command=command, minutes=round(seconds / 60, 1), samples=samples, values=values
            )
        )


PREDICTION_COLUMNS = ("draft", "subnet", "policy", "predicted_speedup", "measured_speedup", "num_same", "num_prompts")


def rows_of_csv(path: Path, columns: tuple[str, ...]) -> Rows:
    import pandas as pd

    return json.loads(pd.read_csv(path)[list(columns)].round(4).to_json(orient="records"))


def prediction_values(samples: dict[str, Rows]) -> dict[str, Rows]:
    """Predictions with their errors, and a summary."""
    import numpy as np
    from scipy.stats import spearmanr

    rows = [
        {
            "label": row["policy"],
            "predicted": row["predicted_speedup"],
            "measured": row["measured_speedup"],
            "error": row["predicted_speedup"] / row["measured_speedup"] - 1,
        }
        for row in samples["configurations"]
    ]
    errors = np.abs([row["error"] for row in rows])
    ranks = spearmanr([row["predicted"] for row in rows], [row["measured"] for row in rows]).statistic
    summary = {
        "configurations": len(rows),
        "median_error": round(float(np.median(errors)), 4),
        "p90_error": round(float(np.quantile(errors, 0.9)), 4),
        "within_band": int((errors <= 0.1).sum()),
        "spearman": round(float(ranks), 4),
        "rounds_equal": sum(row["num_same"] for row in samples["configurations"]),
        "rounds_compared": sum(row["num_prompts"] for row in samples["configurations"]),
    }
    return {"summary": [summary], "predictions": rows}


@main.command()
@click.option("--pair", type=click.Choice(list(SEARCHES)), help="One pair. Left out: all that are bundled.")
@again_option
@click.option("--prompts", default=16, show_default=True)
@click.option("--engine", "engines", nargs=3, multiple=True, help="Passed on, with paths from here.")
def peers(pair: str | None, again: bool, prompts: int, engines: tuple[tuple[str, str, str], ...]) -> None:
    """The profile beside transformers' own ways to decode, flashspec and serving engines, in one run."""
    for name in pairs_of(pair):
        if is_there(f"peers-{name}", again):
            continue
        folder = study_of(name)
        arguments, search = [searches.PROFILE, "--prompts", f"{prompts}"], SEARCHES[name]
        if "--workload" in search:  # a profile keeps the name alone
            arguments += ["--workload", search[search.index("--workload") + 1]]
        for engine, model, command in engines:
            arguments += ["--engine", engine, str(Path(model).absolute()), command]
        if again or not (folder / "peers.json").exists():
            kept = ["--output", "peers.json", "--flashspec", str(WORK / "flashspec")]
            script(folder, "peers.log", "peers", *arguments, *kept)
        measured = json.loads((folder / "peers.json").read_text())
        write(
            stamped(
                f"peers-{name}",
                command=shlex.join(["python", "benchmarks/peers.py", *(word.rpartition("/")[2] for word in arguments)]),
                minutes=round(measured["seconds"] / 60, 1),
                contention=Contention.model_validate_json(json.dumps(measured["contention"])),
                note=measured["note"],
                samples={"runs": measured["runs"]},
                values=peer_values({"runs": measured["runs"]}),
            )
        )


@main.command("engine-search")
@click.argument("engine", type=click.Choice(["llama.cpp", "vllm"]))
@click.argument("model")
@click.argument("command")
@click.option("--draft", help="A draft model beside the n-grams.")
@click.option("--requests-at-once", type=int, multiple=True)
@click.option("--name", "label", help="Of the results, if not the engine's.")
@again_option
def engine_search(
    engine: str,
    model: str,
    command: str,
    draft: str | None,
    requests_at_once: tuple[int, ...],
    label: str | None,
    again: bool,
) -> None:
    """A search of a serving engine for MODEL with the prompts of ``benchmarks/published_prompts.py``; COMMAND starts
    the engine.
    """
    name = f"engine-{label or engine}"
    if is_there(name, again):
        return
    backend, words = f"{engine}={Path(model).absolute()}", ["search", "--workload", f"../{PUBLISHED}"]
    words += ["--draft", draft] if draft else []
    words += [word for number in requests_at_once for word in ("--requests-at-once", str(number))]
    words += ["--max-new-tokens", "64", "--backend", backend, "--set", f"{engine}:command={command}"]
    folder, seconds = WORK / name, None
    if again or not (folder / searches.PROFILE).exists():
        seconds = autotune(folder, searches.LOG, *words, "-o", searches.PROFILE)
    from autotune.documents.decoding_profile import AR, DecodingProfile

    profile = DecodingProfile.load(folder / searches.PROFILE)
    assert profile.evidence.engine is not None, "an engine was tuned"
    settings = {one.label: one for one in profile.evidence.engine.predicted}
    counts = profile.evidence.engine.as_predicted
    arms = [
        {
            "engine": label or engine,
            "role": "off" if arm.name == AR else "default" if settings[arm.name].is_default else "searched",
            "label": "off" if arm.name == AR else arm.name,
            "predicted": arm.predicted_speedup or 1.0,
            "measured": arm.speedup,
            "ci95": arm.ci95,
            "tokens_per_step": arm.tokens_per_round or 1.0,
            "exact": counts.get(arm.name, (None, 0))[0],
            "prompts": arm.num_prompts,
        }
        for arm in profile.evidence.compared
    ]
    speculation = profile.point.deployment and profile.point.deployment.speculation
    samples = {"arms": arms, "verdict": [{"recommended": speculation and speculation.label}]}
    write(
        stamped(
            name,
            command=shlex.join(
                [
                    "autotune",
                    *(word if word == draft and not Path(word).exists() else word.rpartition("/")[2] for word in words),
                ]
            ),
            minutes=seconds and round(seconds / 60, 1),
            samples=samples,
            values=engine_values(samples),
        )
    )


def engine_values(samples: dict[str, Rows]) -> dict[str, Rows]:
    """The settings that ran in turns on held-out prompts, with their speedups over no speculation."""
    recommended = samples["verdict"][0]["recommended"]
    return {
        "arms": [
            {
                **{key: arm[key] for key in ("engine", "role", "label", "exact", "prompts")},
                "is_recommended": arm["label"] == recommended,
                "speedup": round(arm["measured"], 4),
                "low": round(arm["ci95"][0], 4),
                "high": round(arm["ci95"][1], 4),
                "predicted": round(arm["predicted"], 4),
                "tokens_per_step": round(arm["tokens_per_step"], 4),
            }
            for arm in samples["arms"]
        ]
    }


def peer_values(samples: dict[str, Rows]) -> dict[str, Rows]:
    """Speedups of every arm over plain decoding, without and with the prefill, and how many outputs are the same."""
    runs = samples["runs"]
    rows: Rows = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        decoding = searches.speedup_row(runs, arm, "ar", searches.ALL)
        request = searches.speedup_row(runs, arm, "ar", searches.ALL, ms="request_ms")
        of_arm = [run for run in runs if run["arm"] == arm]
        rounds = sum(run["rounds"] for run in of_arm)
        tokens = sum(run["tokens"] for run in of_arm)
        assert decoding is not None and request is not None
        rows.append(
            {
                **{key: decoding[key] for key in ("arm", "speedup", "low", "high", "prompts")},
                "request": request["speedup"],
                "request_low": request["low"],
                "request_high": request["high"],
                "tokens_per_round": round(tokens / rounds, 3) if rounds else None,
                "same_output": sum(run["is_same"] for run in of_arm),
            }
        )
    return {"peers": rows}


@main.command()
@again_option
def dimensions(again: bool) -> None:
    """What each dimension of the search space is worth, on digits: a search of the space ``full``, then the
    ablation.
    """
    name = "dimensions-digits"
    if is_there(name, again):
        return
    folder = WORK / name
    drafts = [word for draft in ("star", "dream", "specvlm", "independent") for word in ("--draft", f"digits/{draft}")]
    if not (folder / searches.PROFILE).exists():
        autotune(folder, searches.LOG, "search", *drafts, "--space", "full", "--budget", "15m", "-o", searches.PROFILE)
    seconds = script(folder, "dimensions.log", "dimensions", str(study_folder(folder)), *drafts, "--table", "rows.csv")
    columns = ("dimensions", "configuration", "predicted", "measured", "low", "high")
    samples = {"arms": rows_of_csv(folder / "rows.csv", columns)}
    command = f"python benchmarks/dimensions.py .autotune/STUDY {' '.join(drafts)}"
    write(
        stamped(
            name, command=command, minutes=round(seconds / 60, 1), samples=samples, values={"arms": samples["arms"]}
        )
    )


@main.command()
def acceptance() -> None:
    """Collect acceptance by depth of the bundled drafts, which their cards hold."""
    rows: Rows = []
    for pair in pairs_of(None):
        for path in sorted((ROOT / "drafts" / pair).glob("*/acceptance.jsonl")):
            rows += acceptance_rows(pair, path)
    samples = {"drafts": rows}
    if rows:
        command = "python benchmarks/draft_cards.py measure drafts/PAIR/DRAFT"
        write(
            stamped(
                "acceptance",
                source="counted",
                command=command,
                machine="any",
                versions={},
                samples=samples,
                values={"drafts": rows},
            )
        )


def acceptance_rows(pair: str, path: Path) -> Rows:
    """Acceptance of the whole draft at temperature 0, without ablations: of a draft's measurements the last one for its
    present weights.
    """
    whole = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    whole = [
        row
        for row in whole
        if not row["label"] and not row.get("temperature")
        if row["subnet"].get("visual_keep", 1.0) == 1.0 and len(row["subnet"]) <= 1
    ]
    shown = ("sha256", "parameters", "prompts", "identical", "tokens_per_round", "by_task", "by_depth")
    return [
        {"pair": pair, "draft": path.parent.name, **{key: row[key] for key in shown if key in row}}
        for row in whole[-1:]
    ]


@main.command()
def published() -> None:
    """Estimates from datasheets against speedups that papers published: seconds, nothing is timed."""
    import numpy as np

    from autotune.cost import roofline
    from benchmarks import published_speedups

    pairs, inputs = published_speedups.load()
    found = published_speedups.predictions(pairs, inputs, roofline.LAYERS_OUTSIDE)
    frame = pairs.assign(size=np.abs(found / pairs.speedup - 1))
    groups = frame.groupby(["paper", "device"], sort=False)["size"]
    papers = [
        {"paper": paper, "device": device, "pairs": len(sizes), "median_error": round(float(sizes.median()), 4)}
        for (paper, device), sizes in groups
    ]
    summary = {"pairs": len(frame), "median_error": round(float(frame["size"].median()), 4)}
    write(
        stamped(
            "published-estimates",
            source="counted",
            command="python benchmarks/published_speedups.py",
            machine="any",
            versions={},
            values={"summary": [summary], "papers": papers},
        )
    )


def derived(result: Result) -> dict[str, Rows] | None:
    """The values that a result's samples give; None for those without samples."""
    derive: dict[str, Callable[[dict[str, Rows]], dict[str, Rows]]] = {
        "default-search": searches.values_of,
        "repeated-searches": repeated_values,
        "steps": step_values,
        "predictions": prediction_values,
        "peers": peer_values,
        "engine": engine_values,
        "dimensions": lambda samples: {"arms": samples["arms"]},
        "acceptance": lambda samples: {"drafts": samples["drafts"]},
    }
    if not result.samples:
        return None
    return derive[next(kind for kind in derive if result.name.startswith(kind))](result.samples)


def write(result: Result) -> None:
    RESULTS.mkdir(exist_ok=True)
    result.save(path_of(result.name))
    click.echo(f"{path_of(result.name).relative_to(ROOT)} written")


@main.command("all")
@again_option
@click.option("--repeats", default=3, show_default=True, help="Default searches of each pair.")
@click.option("--with-dimensions", is_flag=True, help="Also what each dimension is worth: 50 minutes more.")
@click.pass_context
def measure_all(context: click.Context, again: bool, repeats: int, with_dimensions: bool) -> None:
    """Every set, one after the other: about two hours for both pairs on two quiet cores."""
    context.invoke(acceptance)
    context.invoke(published)
    context.invoke(default_searches, again=again, repeats=repeats)
    for command in (steps, predictions, peers):
        context.invoke(command, again=again)
    if with_dimensions:
        context.invoke(dimensions, again=again)


if __name__ == "__main__":
    main()
