"""Samples of a finished ``autotune search``, and the values that they give."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from autotune.cli.options import DURATION
from autotune.documents.decoding_profile import AR, HF, TUNED, DecodingProfile
from autotune.evaluation.summary import bootstrap_product
from autotune.files import read_lines
from autotune.search.thresholds import NUM_CONFIRMED
from autotune.study.document import load_study
from autotune.study.storage import RUNS
from benchmarks.evidence.result import Rows

PROFILE = "profile.json"
ALL = "all"
"""Stands for the prompts of all tasks."""


def study_folder(folder: Path) -> Path:
    """The folder of the only study of a search that has run in ``folder``."""
    (study,) = (path for path in (folder / ".autotune").glob("*") if any(path.glob("study*.json")))
    return study


def samples_of(folder: Path, command: list[str], seconds: float) -> dict[str, Rows]:
    """Samples of a search, whose profile, study and output are in ``folder``; rows carry its number, 1."""
    profile = DecodingProfile.load(folder / PROFILE)
    study = load_study(study_folder(folder), profile)
    assert study is not None
    log = (folder / "search.log").read_text()
    screened = re.search(r"(\d[\d,]*) subnets screened", log)
    of_all = re.search(r"(\d[\d,]*) of (\d[\d,]*) subnets were screened", log)
    survivors = re.search(r"(\d+) survivors", log)
    loading = re.search(r"models loaded in (\d+) s", log)
    num_screened = _number(screened[1]) if screened else 0
    summary = {
        "seconds": seconds,
        "budget_s": DURATION.convert(command[command.index("--budget") + 1], None, None),
        "loading_s": _number(loading[1]) if loading else 0,
        "subnets": _number(of_all[2]) if of_all else num_screened,
        "screened": num_screened,
        "survivors": _number(survivors[1]) if survivors else 0,
        "configurations": profile.evidence.configurations_replayed,
        "confirmed": NUM_CONFIRMED,
        "finalists": len(study.finalists),
        "defaults": len(study.defaults),
        "tune_prompts": profile.workload.num_tune_prompts,
        "best_default": profile.evidence.best_default,
        "winner": _label(profile),
        "tokens_per_round": next(
            (arm.tokens_per_round for arm in profile.evidence.compared if arm.name == TUNED), None
        ),
        "threads": profile.threads,
        "same_output": profile.point.measured.identical_outputs if profile.point.measured else 0,
    }
    measured: Rows = [
        {
            "label": finalist.configuration.label,
            "role": "finalist",
            "predicted": finalist.predicted_speedup,
            "measured": finalist.speedup,
            "low": finalist.ci95[0],
            "high": finalist.ci95[1],
            "prompts": finalist.num_runs,
            "left": finalist.is_eliminated,
        }
        for finalist in study.finalists
    ]
    measured += [
        {
            "label": arm.name,
            "role": "profile" if arm.name == TUNED else "default",
            "predicted": arm.predicted_speedup,
            "measured": arm.speedup,
            "low": arm.ci95[0],
            "high": arm.ci95[1],
            "prompts": arm.num_prompts,
            "left": False,
        }
        for arm in profile.evidence.compared
        if arm.predicted_speedup is not None
    ]
    point = profile.point
    if point.predicted is not None and point.measured is not None:  # by the prices that the finalists' rounds updated
        measured.append(
            {
                "label": summary["winner"],
                "role": "winner",
                "predicted": point.predicted.speedup,
                "measured": point.measured.speedup,
                "low": point.measured.ci95[0],
                "high": point.measured.ci95[1],
                "prompts": point.measured.num_prompts,
                "left": False,
            }
        )
    stages = [{"stage": stage, "seconds": round(seconds, 1)} for stage, seconds in study.stage_seconds.items()]
    tables: dict[str, Rows] = {
        "searches": [summary],
        "stages": stages,
        "measured": measured,
        "runs": held_out_runs(profile, study_folder(folder) / RUNS),
    }
    return {name: [{"search": 1, **row} for row in rows] for name, rows in tables.items()}


def held_out_runs(profile: DecodingProfile, ledger: Path) -> Rows:
    """Runs of plain decoding, Hugging Face, the defaults and the profile on held-out prompts, in milliseconds and
    decoded tokens.
    """
    held_out = {prompt.sha256 for prompt in profile.evidence.prompts}
    by_arm: dict[str, dict[str, dict[str, Any]]] = {}
    for line in read_lines(ledger):
        if line["prompt_sha256"] in held_out:
            by_arm.setdefault(line["arm"], {})[line["prompt_sha256"]] = line
    plain = by_arm[AR]
    names = {AR: AR, HF: HF}
    for arm in profile.evidence.compared:  # the ledger has keys of configurations: an arm is known by its exact speedup
        for key, lines in by_arm.items():
            if key not in names and abs(_pooled(lines, plain) / arm.speedup - 1) < 1e-9:
                names[key] = arm.name
    return [
        {
            "arm": names[key],
            "prompt": line["prompt"],
            "task": line["task"] or "",
            "decode_ms": round(line["decode_ms"], 3),
            "tokens": line["new_tokens"] - 1,
            "rounds": line["rounds"],
        }
        for key, lines in by_arm.items()
        if key in names
        for line in lines.values()
    ]


def values_of(samples: dict[str, Rows]) -> dict[str, Rows]:
    """Speedups by search, task and arm; predictions with their errors; the search whose figures are shown, and a
    summary of all.
    """
    speedups: Rows = []
    for search in samples["searches"]:
        number, default = search["search"], search["best_default"]
        runs = [run for run in samples["runs"] if run["search"] == number]
        tasks = list(dict.fromkeys(run["task"] for run in runs))
        for task in (ALL, *(tasks if len(tasks) > 1 else ())):
            for arm, over in ((TUNED, AR), (default, AR), (HF, AR), (TUNED, default), (TUNED, HF)):
                row = speedup_row(runs, arm, over, task)
                if row is not None:
                    speedups.append({"search": 1, **row})
    pooled = {
        row["search"]: row["speedup"] for row in speedups if (row["task"], row["arm"], row["over"]) == (ALL, TUNED, AR)
    }
    shown = sorted(pooled, key=lambda number: pooled[number])[(len(pooled) - 1) // 2]
    over_default = [
        row["speedup"] for row in speedups if row["task"] == ALL and row["arm"] == TUNED and row["over"] not in (AR, HF)
    ]
    predictions = [
        {**row, "error": row["predicted"] / row["measured"] - 1}
        for row in samples["measured"]
        if row["predicted"] is not None
    ]
    errors = np.abs([row["error"] for row in predictions])
    summary = {
        "shown": shown,
        "searches": len(pooled),
        "smallest": min(pooled.values()),
        "largest": max(pooled.values()),
        "smallest_over_default": min(over_default, default=None),
        "largest_over_default": max(over_default, default=None),
        "median_error": float(np.median(errors)) if len(errors) else None,
        "largest_error": float(errors.max()) if len(errors) else None,
        "within_band": int((errors <= 0.1).sum()),
        "predictions": len(errors),
    }
    return {"summary": [summary], "speedups": speedups, "predictions": predictions}


def speedup_row(
    runs: Rows, arm: str | None, over: str | None, task: str, ms: str = "decode_ms"
) -> dict[str, Any] | None:
    """Pooled speedup of an arm over another on the prompts that both decoded, with a 95 % paired bootstrap interval."""
    first, second = (
        {run["prompt"]: run for run in runs if run["arm"] == name and task in (ALL, run["task"]) and run["tokens"] > 0}
        for name in (arm, over)
    )
    pairs = [(first[prompt], second[prompt]) for prompt in first if prompt in second]
    if not pairs or arm is None or over is None:
        return None
    arm_ms, arm_tokens, over_ms, over_tokens = (
        np.array([pair[side][key] for pair in pairs], np.float64) for side in (0, 1) for key in (ms, "tokens")
    )
    low, high = bootstrap_product([over_ms, arm_tokens], [arm_ms, over_tokens])
    speedup = float(over_ms.sum() / over_tokens.sum() * (arm_tokens.sum() / arm_ms.sum()))
    return {
        "task": task,
        "arm": arm,
        "over": over,
        "speedup": round(speedup, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "prompts": len(pairs),
    }


def _pooled(lines: dict[str, dict[str, Any]], plain: dict[str, dict[str, Any]]) -> float:
    pairs = [(line, plain[key]) for key, line in lines.items() if key in plain and line["new_tokens"] > 1]
    ms, plain_ms = sum(line["decode_ms"] for line, _ in pairs), sum(line["decode_ms"] for _, line in pairs)
    tokens, plain_tokens = sum(a["new_tokens"] - 1 for a, _ in pairs), sum(b["new_tokens"] - 1 for _, b in pairs)
    return float(plain_ms / plain_tokens * tokens / ms) if ms else float("nan")


def _label(profile: DecodingProfile) -> str:
    """The draft and the policy of the operating point."""
    point = profile.point
    return "plain decoding" if point.draft is None or point.tree is None else f"{point.draft.id}, {point.tree.policy}"


def _number(text: str) -> int:
    return int(text.replace(",", ""))
