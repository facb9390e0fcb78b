"""Markdown tables of the documentation, from result files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.evidence.drawing import PICTURES, Results, pairs_with, shown_speedups
from benchmarks.evidence.result import ROOT, Result, Rows
from benchmarks.evidence.searches import ALL

MODELS = {
    "digits": "LLaVA of 6.3 M parameters, `digits`",
    "smollm2": "SmolLM2-135M-Instruct, `smollm2`",
    "benchmarks": "the same on MT-Bench, HumanEval and GSM8K",
    "sampled": "the same at temperature 1",
}
PEERS = {
    "ar": "plain decoding, autotune",
    "tuned": "**tuned profile, autotune**",
    "hf": "transformers' `generate`",
    "hf-assisted": "transformers' assisted generation",
    "hf-prompt-lookup": "transformers' prompt lookup",
    "flashspec-lookup": "flashspec 0.3.1, prompt lookup",
    "flashspec": "flashspec 0.3.1, its default strategy",
    "llama.cpp": "llama.cpp b11434, quantized weights (Q4_1)",
    "llama.cpp --spec-default ngram-mod(24,48,64)": "llama.cpp b11434, Q4_1, `--spec-default`",
    "vllm": "vLLM 0.32.0, bfloat16",
    "vllm documented ngram(4,4,5)": "vLLM 0.32.0, bfloat16, the n-grams of its documentation",
}
ENGINES = {
    "engine-llama.cpp-bf16": "llama.cpp, bfloat16",
    "engine-llama.cpp": "llama.cpp, 4 bits (Q4_1)",
    "engine-vllm": "vLLM, bfloat16",
}
QUIET_CORES = 0.15
"""Cores that other processes may use on a machine that is called quiet."""
NOT_YET = "Not measured yet: `make results`."


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_interval(row: dict[str, Any], value: str = "speedup", *, strong: bool = False) -> str:
    """``1.86x (1.76-1.98)``."""
    text = f"{row[value]:.2f}x"
    return f"{f'**{text}**' if strong else text} ({row['low']:.2f}-{row['high']:.2f})"


def pooled_row(results: Results, pair: str, arm: str, over: str) -> dict[str, Any] | None:
    """Over all tasks, of the search that is shown; ``default`` stands for the best published default."""
    rows = shown_speedups(results[f"default-search-{pair}"])
    default = best_default(results, pair)
    wanted = [default if name == "default" else name for name in (arm, over)]
    return next((row for row in rows if row["task"] == ALL and [row["arm"], row["over"]] == wanted), None)


def search_row(results: Results, pair: str) -> dict[str, Any]:
    """The summary of the search that is shown."""
    result = results[f"default-search-{pair}"]
    shown = result.values["summary"][0]["shown"]
    return next(row for row in result.samples["searches"] if row["search"] == shown)


def best_default(results: Results, pair: str) -> str:
    return str(search_row(results, pair)["best_default"])


def headline(results: Results) -> str:
    """One row a pair: tuned over plain, over the best default, and Hugging Face."""
    rows = []
    for pair in pairs_with(results, "default-search"):
        cells = []
        for arm, over in (("tuned", "ar"), ("default", "ar"), ("tuned", "default"), ("hf", "ar")):
            row = pooled_row(results, pair, arm, over)
            name = f" `{best_default(results, pair)}`" if arm == "default" else ""
            cells.append("-" if row is None else with_interval(row, strong=arm == "tuned") + name)
        tuned = pooled_row(results, pair, "tuned", "ar")
        rows.append([MODELS[pair], *cells, str(tuned["prompts"]) if tuned else "-"])
    columns = [
        "target",
        "tuned",
        "best published default",
        "tuned over that default",
        "transformers' `generate`",
        "held-out prompts",
    ]
    return table(columns, rows)


def readme_headline(results: Results) -> str:
    """One row a pair and machine, for the README."""
    rows = []
    for pair in pairs_with(results, "default-search"):
        shown = [
            pooled_row(results, pair, arm, over) for arm, over in (("tuned", "ar"), ("tuned", "default"), ("hf", "ar"))
        ]
        cells = ["-" if row is None else with_interval(row, strong=number == 0) for number, row in enumerate(shown)]
        rows.append([MODELS[pair], results[f"default-search-{pair}"].machine, *cells])
    if "gpu-h100" in results:
        arms = {row["arm"]: row for row in results["gpu-h100"].values["arms"]}
        pooled = next(row for row in results["gpu-h100"].values["tasks"] if row["task"] == "all tasks")
        over = {"speedup": pooled["over_default"], "low": pooled["over_low"], "high": pooled["over_high"]}
        cells = [with_interval(arms["tuned"], strong=True), with_interval(over), with_interval(arms["hf"])]
        rows.append(["SmolLM2-135M-Instruct, on a GPU", results["gpu-h100"].machine.partition(",")[0], *cells])
    columns = ["target", "machine", "tuned profile", "over the best published default", "transformers' `generate`"]
    return table(columns, rows)


def readme_engines(results: Results) -> str:
    """One row an engine: its fastest default and the recommended settings, for the README."""
    rows = []
    for name, described in ENGINES.items():
        arms = results[name].values["arms"] if name in results else []
        default = next((row for row in arms if row["role"] == "default"), None)
        chosen = next((row for row in arms if row["is_recommended"]), None)
        if default is not None:
            best = f"`{chosen['label']}`: {with_interval(chosen, strong=True)}" if chosen else "no speculation"
            rows.append([described, f"`{default['label']}`: {with_interval(default)}", best])
    return table(["engine, weights", "the fastest default", "recommended by the search"], rows) if rows else NOT_YET


def by_task(results: Results) -> str:
    """Tuned over plain and over the best default, by pair and task."""
    rows = []
    for pair in pairs_with(results, "default-search"):
        speedups = shown_speedups(results[f"default-search-{pair}"])
        default = best_default(results, pair)
        for task in dict.fromkeys(row["task"] for row in speedups):
            over = {row["over"]: row for row in speedups if row["task"] == task and row["arm"] == "tuned"}
            cells = [with_interval(over[name]) if name in over else "-" for name in ("ar", default)]
            rows.append([pair, "all tasks" if task == ALL else task, *cells, str(over["ar"]["prompts"])])
    return table(["pair", "task", "over plain decoding", "over the best published default", "prompts"], rows)


def spread(results: Results) -> str:
    """Repeated default searches by machine and condition."""
    rows = []
    for pair in pairs_with(results, "default-search"):
        result = results[f"default-search-{pair}"]
        summary = result.values["summary"][0]
        span = f"{summary['smallest']:.2f}x to {summary['largest']:.2f}x"
        over = f"{summary['smallest_over_default']:.2f}x to {summary['largest_over_default']:.2f}x"
        rows.append([f"`{pair}`, {result.machine}", condition(result), f"{summary['searches']}", span, over])
    for pair in pairs_with(results, "repeated-searches"):
        result = results[f"repeated-searches-{pair}"]
        for row in result.values["searches"]:
            cells = [f"{min(row[key]):.2f}x to {max(row[key]):.2f}x" for key in ("tuned", "over_default")]
            rows.append([f"`{pair}`, {result.machine}", row["condition"], str(len(row["tuned"])), *cells])
    return table(["pair, machine", "condition", "searches", "tuned over plain decoding", "over the best default"], rows)


def condition(result: Result) -> str:
    """The work of other processes."""
    others = result.contention.other_cores if result.contention else None
    if others is None:
        return result.note or "-"
    return (
        "quiet" if others < QUIET_CORES else f"other processes used {others:.1f} of {result.contention.num_cores} cores"
    )


def prediction_errors(results: Results) -> str:
    """How far predictions were from measurements."""
    rows = []
    for name in PICTURES["predictions"].inputs(results):
        result = results[name]
        errors = sorted(abs(row["error"]) for row in result.values["predictions"])
        if errors:
            median = errors[len(errors) // 2] if len(errors) % 2 else sum(errors[len(errors) // 2 - 1 :][:2]) / 2
            within = sum(error <= 0.1 for error in errors)
            cells = [
                f"{100 * median:.1f} %",
                f"{100 * errors[-1]:.1f} %",
                f"{within} of {len(errors)}",
                condition(result),
            ]
            rows.append([DESCRIBED.get(name.rpartition("-")[0], name), name.rpartition("-")[2], *cells])
    return table(["predictions", "pair", "median error", "largest", "within 10 %", "machine"], rows)


DESCRIBED = {
    "default-search": "finalists (before their rounds) and winner of default searches",
    "predictions": "random configurations of every policy",
    "repeated-searches": "winners of searches beside other processes",
}


def steps(results: Results) -> str:
    """Times of a step in plain steps."""
    tokens = (1, 4, 8, 16, 32, 64)
    rows = []
    for pair in pairs_with(results, "steps"):
        found = results[f"steps-{pair}"].values["steps"]
        plain = next(row for row in found if row["part"] == "plain step")
        for part in dict.fromkeys(row["part"] for row in found):
            by_tokens = {row["tokens"]: row["plain_steps"] for row in found if row["part"] == part}
            name = (
                f"plain step ({plain['ms']:.1f} ms)"
                if part == "plain step"
                else "verification"
                if part == "target"
                else f"`{part}`, a level"
            )
            rows.append([pair, name, *(f"{by_tokens[n]:.2f}" if n in by_tokens else "-" for n in tokens)])
    return table(["pair", "step", *(f"{n} tokens" for n in tokens)], rows)


def acceptance(results: Results) -> str:
    """M and acceptance by depth of every draft."""
    rows = []
    found = results["acceptance"].values["drafts"] if "acceptance" in results else []
    depth = max((len(row["by_depth"]) for row in found), default=0)
    for row in sorted(found, key=lambda row: (row["pair"], -row["tokens_per_round"])):
        shares = [f"{100 * share:.0f} %" for share in row["by_depth"]]
        size = f"{row['parameters'] / 1e6:.2f} M" if row.get("parameters") else "-"
        rows.append(
            [
                f"`{row['pair']}/{row['draft']}`",
                size,
                f"**{row['tokens_per_round']:.2f}**",
                *shares,
                *["-"] * (depth - len(shares)),
            ]
        )
    return table(["draft", "parameters", "M", *(f"depth {n}" for n in range(1, depth + 1))], rows)


def peers(results: Results) -> str:
    """Every program beside plain decoding, of one run."""
    rows = []
    for pair in pairs_with(results, "peers"):
        found = sorted(results[f"peers-{pair}"].values["peers"], key=lambda row: -row["request"])
        for row in found:
            request = {"speedup": row["request"], "low": row["request_low"], "high": row["request_high"]}
            tokens = f"{row['tokens_per_round']:.2f}" if row["tokens_per_round"] else "-"
            same = f"{row['same_output']}/{row['prompts']}"
            rows.append(
                [pair, PEERS.get(row["arm"], row["arm"]), with_interval(request), with_interval(row), tokens, same]
            )
    columns = [
        "pair",
        "program",
        "whole answer, over autotune's plain decoding",
        "without the prefill",
        "M",
        "same tokens",
    ]
    notes = [
        f"{pair}: {results[f'peers-{pair}'].note}."
        for pair in pairs_with(results, "peers")
        if results[f"peers-{pair}"].note
    ]
    return "\n\n".join([table(columns, rows), *notes]) if rows else NOT_YET


def engines(results: Results) -> str:
    """Settings of serving engines that ran in turns on held-out prompts."""
    rows = []
    for name in (name for name in results if name.startswith("engine-")):
        for row in results[name].values["arms"]:
            settings = f"`{row['label']}`" if row["role"] != "off" else "no speculation"
            role = {"searched": "found by replay", "off": "-", "default": "the fastest default"}[row["role"]]
            shown = [
                row["engine"],
                settings,
                role,
                f"{row['predicted']:.2f}x",
                with_interval(row, strong=row["is_recommended"]),
            ]
            counts = "-" if row["exact"] is None else f"{row['exact']}/{row['prompts']}"
            rows.append([*shown, f"{row['tokens_per_step']:.2f}", counts])
    columns = ["engine", "settings", "from", "predicted", "measured", "tokens a pass", "counts as predicted"]
    return table(columns, rows) if rows else NOT_YET


def gpu(results: Results) -> str:
    """The search of SmolLM2 on a GPU: its arms on held-out prompts."""
    rows = [
        [
            f"**{row['arm']}**" if row["arm"] == "tuned" else PEERS.get(row["arm"], f"`{row['arm']}`"),
            f"{row['predicted']:.2f}x" if row["predicted"] else "-",
            with_interval(row),
            f"{row['tokens_per_round']:.2f}",
            f"{row['tokens_per_second']}",
            row["same_output"],
        ]
        for row in results["gpu-h100"].values["arms"]
    ]
    return table(["decoded by", "predicted", "measured", "M", "tokens/s", "same output"], rows)


def gpu_tasks(results: Results) -> str:
    """The same by task."""
    rows = [
        [
            row["task"],
            with_interval(row),
            f"{row['over_default']:.2f}x ({row['over_low']:.2f}-{row['over_high']:.2f})",
            f"{row['prompts']}",
        ]
        for row in results["gpu-h100"].values["tasks"]
    ]
    return table(["task", "over plain decoding", "over `sage`, the best published default", "prompts"], rows)


def gpu_rounds(results: Results) -> str:
    """Times of rounds on a GPU."""
    times = ("eager_ms", "captured_ms", "sampled_ms", "nucleus_ms")
    plain = {
        row["target"]: row["captured_ms"] for row in results["gpu-h100"].values["rounds"] if row["tree"] == "plain"
    }
    rows = [
        [
            row["target"],
            "plain step" if row["tree"] == "plain" else f"`{row['tree']}`",
            f"{row['levels']:.1f}, {row['nodes']:.0f}",
            *(f"{row[name]:.1f}" for name in times),
            f"{row['captured_ms'] / plain[row['target']]:.2f}",
        ]
        for row in results["gpu-h100"].values["rounds"]
    ]
    columns = [
        "target",
        "round",
        "levels, nodes",
        "eager, ms",
        "captured, ms",
        "T = 1",
        "T = 1, top-p 0.9",
        "plain steps",
    ]
    return table(columns, rows)


def coverage(results: Results) -> str:
    """Parts that are measured, estimated and neither, by device, mode and kind of model."""
    kinds = {"vision-language": "digits", "text": "smollm2"}
    measured = {kind: f"default-search-{pair}" in results for kind, pair in kinds.items()}
    cpu = ["**measured**" if measured[kind] else "neither" for kind in ("text", "vision-language")]
    gpus = len(list((ROOT / "profiles" / "devices").glob("*.yaml")))
    rows = [
        ["CPU, Linux", "`eager`", *cpu, "neither", "neither"],
        [
            "NVIDIA H100",
            "`cuda-graph`, `eager`",
            "**measured**",
            "steps measured, weights at random",
            "neither",
            "neither",
        ],
        [
            f"{gpus} GPUs and variants with a datasheet",
            "`cuda-graph`",
            "estimated",
            "estimated",
            "refused",
            "estimated",
        ],
        ["the same", "`eager`", "estimated", "estimated, compared with papers", "estimated", "estimated"],
        ["CPU, macOS and Windows; other GPUs of NVIDIA and AMD", "all", *["neither"] * 4],
        ["Apple Metal, Intel GPUs", "-", *["refused"] * 4],
    ]
    return table(["device", "mode", "text", "vision-language", "hybrid (recurrent states)", "quantized"], rows)


def published(results: Results) -> str:
    """Estimates from datasheets against published speedups."""
    found = results["published-estimates"].values["papers"] if "published-estimates" in results else []
    rows = [[row["paper"], row["device"], str(row["pairs"]), f"{100 * row['median_error']:.0f} %"] for row in found]
    for row in results["published-estimates"].values["summary"] if found else ():
        rows.append(["all", "", str(row["pairs"]), f"{100 * row['median_error']:.0f} %"])
    return table(["paper", "device", "published speedups", "median error of the estimate"], rows)


def dimensions(results: Results) -> str:
    rows: Rows = results["dimensions-digits"].values["arms"] if "dimensions-digits" in results else []
    cells = [
        [row["dimensions"], f"{row['predicted']:.2f}x" if row["predicted"] else "-", with_interval(row, "measured")]
        for row in rows
    ]
    return table(["searched", "predicted", "measured"], cells)


def stages(results: Results) -> str:
    """Seconds of each stage of the search that is followed."""
    result = results["default-search-digits"]
    shown = result.values["summary"][0]["shown"]
    seconds = {row["stage"]: row["seconds"] for row in result.samples["stages"] if row["search"] == shown}
    return table(list(seconds), [[f"{value:.0f} s" for value in seconds.values()]])


def followed(results: Results) -> str:
    """The numbers of the search that is followed, by stage."""
    result, search = results["default-search-digits"], search_row(results, "digits")
    summary = result.values["summary"][0]
    tuned, over = (pooled_row(results, "digits", "tuned", name) for name in ("ar", "default"))
    rows = [
        ["machine", f"{result.machine}, {condition(result)}"],
        ["budget", f"{search['budget_s'] / 60:.0f} minutes"],
        ["subnets screened", f"{search['screened']:,} of {search['subnets']:,}"],
        ["subnets kept", f"{search['survivors']}"],
        ["configurations replayed", f"{search['configurations']:,}"],
        ["configurations ranked again on other prompts", f"{search['confirmed']}"],
        ["tuning prompts", f"{search['tune_prompts']}"],
        ["finalists and published defaults that ran", f"{search['finalists']} and {search['defaults']}"],
        ["winner", f"`{search['winner']}`"],
        ["held-out prompts", f"{tuned['prompts'] if tuned else 0}"],
        ["measured over plain decoding", with_interval(tuned) if tuned else "-"],
        [f"measured over `{search['best_default']}`, the best default", with_interval(over) if over else "-"],
        ["predictions within 10 %", f"{summary['within_band']} of {summary['predictions']}"],
    ]
    return table(["of this search", "value"], rows)


def finalists(results: Results) -> str:
    """Finalists of the search that is followed, predicted and measured on confirming prompts."""
    result = results["default-search-digits"]
    shown = result.values["summary"][0]["shown"]
    rows = [
        [
            f"`{row['label']}`",
            f"{row['predicted']:.2f}x",
            f"{row['measured']:.2f}x ({row['low']:.2f}-{row['high']:.2f})",
            f"{row['prompts']}",
        ]
        for row in result.samples["measured"]
        if row["search"] == shown and row["role"] == "finalist"
    ]
    return table(["finalist", "predicted", "measured", "prompts"], rows)


def sources(results: Results) -> str:
    """Where every result comes from."""
    rows = [
        [
            f"`{name}`",
            {"diary": "diary, not repeated yet"}.get(result.source, result.source),
            f"`{result.command}`",
            f"{result.machine}; {condition(result)}" if result.source == "measured" else result.machine,
            f"{result.date}, {result.commit}",
        ]
        for name, result in results.items()
    ]
    return table(["result", "source", "command", "machine", "date, commit"], rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "headline": headline,
    "readme": readme_headline,
    "readme-engines": readme_engines,
    "followed": followed,
    "by-task": by_task,
    "spread": spread,
    "prediction-errors": prediction_errors,
    "steps": steps,
    "acceptance": acceptance,
    "peers": peers,
    "engines": engines,
    "gpu": gpu,
    "gpu-tasks": gpu_tasks,
    "gpu-rounds": gpu_rounds,
    "coverage": coverage,
    "published": published,
    "dimensions": dimensions,
    "stages": stages,
    "finalists": finalists,
    "sources": sources,
}
