"""Measures what the documentation shows, one set after the other, into ``benchmarks/results/NAME.json``.

Leave the machine alone meanwhile. A set that is there is skipped unless ``--again`` is given, and an interrupted one
continues from its folder below ``.autotune/results``. Then ``make figures`` draws the figures and writes the tables and
numbers of README and docs. ``--help`` lists the sets with their times.

    python -m benchmarks.measure all
    python -m benchmarks.measure peers-smollm2 -- --prompts 24 --engine llama.cpp /FOLDER/MODEL.gguf llama-server
    python -m benchmarks.measure engine-vllm -- --backend vllm=/FOLDER --set 'vllm:command=vllm --enforce-eager'

Words after ``--`` are added to the set's commands, with absolute paths. Also as ``python benchmarks/measure.py``.
Everything takes about an hour.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click

from autotune.documents.contention import Contention
from autotune.files import append_line, read_json, read_lines
from benchmarks.evidence import searches
from benchmarks.evidence.result import RESULTS, ROOT, WORK, Result, Rows, load_result, stamped

Samples = dict[str, Rows]

TARGETS = {"digits": "digits/target", "smollm2": "smollm2"}
PUBLISHED = ("--workload", "../benchmarks.jsonl")
"""Prompts that ``benchmarks/published_prompts.py`` writes."""
DRAFTS = tuple(word for name in ("star", "dream", "specvlm", "independent") for word in ("--draft", f"digits/{name}"))
CONDITIONS = ["quiet"] * 5 + ["busy"] * 5 + ["bursts"] * 3
"""Other processes beside each of the repeated searches (``benchmarks/default_searches.py``)."""
STUDY = ".autotune/STUDY"
"""Stands in commands for the folder of a study."""
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64)


class Collected(NamedTuple):
    """Files that the finished commands of a set have left."""

    samples: Samples
    contention: Contention | None = None
    note: str = ""


class MeasuredSet(NamedTuple):
    """How a result comes about."""

    collect: Callable[[Path, Rows], Collected]
    """From the set's folder, and a row with ``seconds`` and ``command`` for each command that ran there."""
    derive: Callable[[Samples], Samples]
    """The values that the samples give."""
    commands: list[tuple[str, ...]]
    """As a reader would type them, run in the set's folder one after the other."""
    source: Literal["measured", "counted"] = "measured"
    """Commands of sets that are counted do not run: the repository holds what they have written."""
    study: str = ""
    """The set whose profile and study the commands read, if not its own."""


def collect_search(folder: Path, ran: Rows) -> Collected:
    """Samples of a default search, with the contention of its real runs."""
    from autotune.documents.decoding_profile import DecodingProfile

    contention = DecodingProfile.load(folder / searches.PROFILE).provenance.contention
    return Collected(searches.samples_of(folder, ran[0]["command"], ran[0]["seconds"]), contention)


def collect_repeated(folder: Path, _: Rows) -> Collected:
    return Collected({"searches": read_lines(folder / "searches.jsonl")})


DISTURBED = {
    "quiet": "quiet",
    "busy": "one core busy half of the time",
    "burning": "one core busy all the time",
    "bursts": "three processes in bursts while the cost table was measured",
}
"""Conditions of ``benchmarks/default_searches.py``."""


def repeated_values(samples: Samples) -> Samples:
    """Speedups by condition, and predictions of the winners."""
    by_condition: dict[str, Rows] = {}
    for row in samples["searches"]:
        by_condition.setdefault(" ".join([DISTURBED[row["condition"]], row["arguments"]]).strip(), []).append(row)
    columns = {"tuned": "tuned", "over_default": "over default", "prompts": "prompts", "budget_s": "of budget"}
    return {
        "searches": [
            {"condition": name, **{key: [round(row[column], 2) for row in rows] for key, column in columns.items()}}
            for name, rows in by_condition.items()
        ],
        "predictions": [
            {"label": name, **{key: round(row[key], 4) for key in ("predicted", "measured", "error")}}
            for name, rows in by_condition.items()
            for row in rows
        ],
    }


def collect_steps(folder: Path, _: Rows) -> Collected:
    """Measured points of a cost table, and its prices at the middle KV length."""
    from autotune.cost.table import CostTable

    table = CostTable.load(folder / "pair.cost.json")
    points = json.loads(table.to_dataframe().round(4).to_json(orient="records"))
    return Collected({"points": points, "prices": prices_of(table)}, table.provenance.contention)


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


def step_values(samples: Samples) -> Samples:
    """Prices, also in plain steps."""
    plain = samples["prices"][0]["ms"]
    return {"steps": [{**row, "plain_steps": round(row["ms"] / plain, 4)} for row in samples["prices"]]}


def collect_predictions(folder: Path, _: Rows) -> Collected:
    columns = ["draft", "subnet", "policy", "predicted_speedup", "measured_speedup", "num_same", "num_prompts"]
    return Collected({"configurations": rows_of_csv(folder / "predictions.csv", columns)})


def rows_of_csv(path: Path, columns: list[str]) -> Rows:
    import pandas as pd

    return json.loads(pd.read_csv(path)[columns].round(4).to_json(orient="records"))


def prediction_values(samples: Samples) -> Samples:
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


def collect_peers(folder: Path, _: Rows) -> Collected:
    measured = read_json(folder / "peers.json")
    contention = Contention.model_validate_json(json.dumps(measured["contention"]))
    return Collected({"runs": measured["runs"]}, contention, measured["note"])


def peer_values(samples: Samples) -> Samples:
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


def collect_engine(folder: Path, _: Rows) -> Collected:
    """Settings that ran in turns on held-out prompts, and the one that the profile deploys."""
    from autotune.documents.decoding_profile import AR, DecodingProfile

    profile = DecodingProfile.load(folder / searches.PROFILE)
    assert profile.evidence.engine is not None, "an engine was tuned"
    defaults = {settings.label for settings in profile.evidence.engine.predicted if settings.is_default}
    counts = profile.evidence.engine.as_predicted
    arms = [
        {
            "engine": folder.name.removeprefix("engine-"),
            "role": "off" if arm.name == AR else "default" if arm.name in defaults else "searched",
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
    return Collected({"arms": arms, "verdict": [{"recommended": speculation and speculation.label}]})


def engine_values(samples: Samples) -> Samples:
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


def collect_dimensions(folder: Path, _: Rows) -> Collected:
    columns = ["dimensions", "configuration", "predicted", "measured", "low", "high"]
    return Collected({"arms": rows_of_csv(folder / "rows.csv", columns)})


def collect_acceptance(*_: object) -> Collected:
    """Acceptance by depth of the bundled drafts, which their cards hold."""
    paths = sorted((ROOT / "drafts").glob("*/*/acceptance.jsonl"))
    return Collected({"drafts": [row for path in paths for row in acceptance_rows(path)]})


def acceptance_rows(path: Path) -> Rows:
    """Acceptance of the whole draft at temperature 0, without ablations: of a draft's measurements the last one for its
    present weights.
    """
    whole = [
        row
        for row in read_lines(path)
        if not row["label"] and not row.get("temperature")
        if row["subnet"].get("visual_keep", 1.0) == 1.0 and len(row["subnet"]) <= 1
    ]
    shown = ("sha256", "parameters", "prompts", "identical", "tokens_per_round", "by_task", "by_depth")
    names = {"pair": path.parts[-3], "draft": path.parts[-2]}
    return [{**names, **{key: row[key] for key in shown if key in row}} for row in whole[-1:]]


def published_values(_: Samples) -> Samples:
    """Estimates from datasheets against speedups that papers published; nothing is timed."""
    import numpy as np

    from benchmarks import published_speedups

    pairs, inputs = published_speedups.load()
    estimates = published_speedups.predictions(pairs, inputs, published_speedups.CONSTANTS.layers_outside)
    frame = pairs.assign(size=np.abs(estimates / pairs.speedup - 1))
    groups = frame.groupby(["paper", "device"], sort=False)["size"]
    papers = [
        {"paper": paper, "device": device, "pairs": len(sizes), "median_error": round(float(sizes.median()), 4)}
        for (paper, device), sizes in groups
    ]
    summary = {"pairs": len(frame), "median_error": round(float(frame["size"].median()), 4)}
    return {"summary": [summary], "papers": papers}


def search_of(target: str, budget: str, *more: str) -> MeasuredSet:
    """A default search, from nothing."""
    command = ("autotune", "search", "--target", target, "--budget", budget, *more, "-o", searches.PROFILE)
    return MeasuredSet(collect_search, searches.values_of, [command])


def steps_of(target: str) -> MeasuredSet:
    command = ("autotune", "measure", "--target", target, "--budget", "90s", "-o", "pair.cost.json")
    return MeasuredSet(collect_steps, step_values, [command])


def predictions_of(pair: str, configurations: str, prompts: str) -> MeasuredSet:
    """Random configurations of every policy, predicted and measured."""
    counts = ("--configurations", configurations, "--prompts", prompts)
    command = ("python", "benchmarks/predictions.py", STUDY, *counts, "--table", "predictions.csv")
    return MeasuredSet(collect_predictions, prediction_values, [command], study=f"default-search-{pair}")


def peers_of(pair: str, *workload: str) -> MeasuredSet:
    """The profile beside transformers' own ways to decode, flashspec and serving engines, in one run."""
    files = ("--flashspec", str(WORK / "flashspec"), "--output", "peers.json")
    command = ("python", "benchmarks/peers.py", searches.PROFILE, *workload, *files)
    return MeasuredSet(collect_peers, peer_values, [command], study=f"default-search-{pair}")


ENGINE_SEARCH = MeasuredSet(
    collect_engine,
    engine_values,
    [("autotune", "search", *PUBLISHED, "--max-new-tokens", "64", "-o", searches.PROFILE)],
)


SETS = {
    "acceptance": MeasuredSet(
        collect_acceptance, dict, [("python", "benchmarks/draft_cards.py", "measure", "drafts/PAIR/DRAFT")], "counted"
    ),
    "published-estimates": MeasuredSet(
        lambda *_: Collected({}), published_values, [("python", "benchmarks/published_speedups.py")], "counted"
    ),
    "default-search-digits": search_of("digits", "5m"),
    "default-search-smollm2": search_of("smollm2", "10m"),
    "default-search-benchmarks": search_of("smollm2", "10m", *PUBLISHED),
    "default-search-sampled": search_of("smollm2", "10m", *PUBLISHED, "--temperature", "1"),
    "steps-digits": steps_of("digits"),
    "steps-smollm2": steps_of("smollm2"),
    "predictions-digits": predictions_of("digits", "12", "8"),
    "predictions-smollm2": predictions_of("smollm2", "6", "4"),
    "peers-digits": peers_of("digits"),
    "peers-smollm2": peers_of("smollm2"),
    "peers-benchmarks": peers_of("benchmarks", *PUBLISHED),
    "dimensions-digits": MeasuredSet(
        collect_dimensions,
        dict,
        [
            ("autotune", "search", *DRAFTS, "--space", "full", "--budget", "15m", "-o", searches.PROFILE),
            ("python", "benchmarks/dimensions.py", STUDY, *DRAFTS, "--table", "rows.csv"),
        ],
    ),
    "repeated-searches-digits": MeasuredSet(
        collect_repeated,
        repeated_values,
        [
            ("python", "benchmarks/default_searches.py", condition, "--results", "searches.jsonl")
            for condition in CONDITIONS
        ],
    ),
    **{name: ENGINE_SEARCH for name in ("engine-llama.cpp", "engine-llama.cpp-bf16", "engine-vllm")},
}
"""Sets by the names of their results."""
IN_ALL = [name for name in SETS if not name.startswith(("dimensions", "repeated", "engine"))]


def derived(result: Result) -> Samples | None:
    """The values that a result's samples give; None for those without samples, or of another script."""
    known = SETS.get(result.name)
    return known.derive(result.samples) if known and result.samples else None


def measure(name: str, added: tuple[str, ...], again: bool) -> None:
    """Run the commands of a set that have not run yet, and write its result."""
    measured_set, folder = SETS[name], WORK / name
    search = WORK / (measured_set.study or name)
    if measured_set.study and not (search / searches.PROFILE).exists():
        raise click.ClickException(f"first run python -m benchmarks.measure {measured_set.study}")
    marks = folder / "ran.jsonl"
    if again and len(read_lines(marks)) == len(measured_set.commands):
        folder.rename(WORK / f"{name}-before-{time.time_ns()}")
    if measured_set.source == "measured":
        for command in measured_set.commands[len(read_lines(marks)) :]:
            words = [*command, *added]
            seconds = run(folder, words, search)
            append_line(marks, {"command": words, "seconds": round(seconds, 1)})
    ran = read_lines(marks)
    collected = measured_set.collect(folder, ran)
    words = ran[-1]["command"] if ran else measured_set.commands[-1]
    fields: dict[str, Any] = collected._asdict() | {"values": measured_set.derive(collected.samples)}
    if measured_set.source == "measured":
        fields["minutes"] = round(sum(row["seconds"] for row in ran) / 60, 1)
    else:
        fields |= {"source": "counted", "machine": "any", "versions": {}}
    RESULTS.mkdir(exist_ok=True)
    stamped(name, command=without_folders(words), **fields).save(RESULTS / f"{name}.json")
    click.echo(f"{name}: written")


def without_folders(words: list[str]) -> str:
    """A command line in which absolute paths keep their last part."""
    return shlex.join(re.sub(r"(^|[ =])/\S*/", r"\1", word) for word in words)


def run(folder: Path, words: list[str], search: Path) -> float:
    """Run a command in a folder, whose output ``VERB.log`` or ``SCRIPT.log`` there keeps; returns the seconds that it
    took. The profile and the study that it names are those of ``search``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{Path(words[1]).stem}.log"
    places = {searches.PROFILE: str(search / searches.PROFILE), STUDY: str(search / STUDY)}
    if STUDY in words:
        places[STUDY] = str(searches.study_folder(search))
    program = ["-m", "autotune", words[1]] if words[0] == "autotune" else [str(ROOT / words[1])]
    command = [sys.executable, *program, *(places.get(word, word) for word in words[2:])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    began = time.monotonic()
    with log.open("a") as file:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise click.ClickException(f"{shlex.join(words)} ended with {done.returncode}:\n{log.read_text()[-2000:]}")
    return time.monotonic() - began


@click.command()
@click.argument("name", type=click.Choice(["all", *SETS]), metavar="NAME")
@click.argument("added", nargs=-1)
@click.option("--again", is_flag=True, help="Measure what is there, too.")
def main(name: str, added: tuple[str, ...], again: bool) -> None:
    """Measure the set NAME of results that figures and tables are made from.

    \b
    all                       the first four kinds, about an hour
    acceptance                seconds: collects drafts/*/*/acceptance.jsonl
    published-estimates       seconds: estimates from datasheets against papers
    default-search-PAIR       7 minutes for digits; 12 for smollm2, benchmarks, sampled
    steps-PAIR                3 minutes
    predictions-PAIR          15 minutes, after the pair's default search
    peers-PAIR                10 minutes, after the pair's default search
    dimensions-digits         50 minutes
    repeated-searches-digits  70 minutes: searches beside other processes
    engine-NAME               10 minutes, for llama.cpp, llama.cpp-bf16, vllm; needs make engines

    PAIR is digits, smollm2, benchmarks or sampled; the last two need the file .autotune/results/benchmarks.jsonl,
    which benchmarks/published_prompts.py writes.
    """
    for chosen in IN_ALL if name == "all" else [name]:
        known = load_result(chosen)
        if known is not None and known.source != "diary" and not again:
            busy = known.contention is not None and known.contention.is_busy
            beside = ", measured beside other processes" if busy else ""
            click.echo(f"{chosen}: is there{beside}, skipped; --again measures it again")
        else:
            click.echo(f"{chosen}: measuring")
            measure(chosen, added, again)


if __name__ == "__main__":
    main()
