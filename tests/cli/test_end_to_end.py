"""The command line from end to end, in real processes; and no finished work is lost to ``kill -9``."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd

from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.published_defaults import COMPARED_DEFAULTS
from autotune.modeling.loading import reference
from autotune.replay.trace import TraceHeader
from autotune.workloads.workload import load_workload
from tests.cli.processes import run_command, search_briefly, start_command
from tests.sample_documents import decoding_profile, write_image, write_workload
from tests.tiny_models import Pair

SPACE = """
schema: autotune.search-space/1
name: small
visual_keep: [1.0, 0.5]
trees:
  chain: {depth: {low: 1, high: 3}}
  sage: {d_max: {low: 3, high: 6}, w_max: {low: 2, high: 8}, upper: {low: 3.0, high: 5.0}}
"""


def write_small_job(folder: Path) -> list[str]:
    """Write seven short prompts and a small space; returns the option that names the prompts."""
    images = [write_image(folder / f"{seed}.png", seed) for seed in range(2)]
    tune: list[dict[str, Any]] = [
        {"prompt": "Count to ten, then stop."},
        {"prompt": "Read the digits row by row.", "images": images[:1], "task": "read"},
        {"prompt": "Go on.", "temperature": 0.7, "seed": 3},
        {"prompt": "And row 2?", "images": images[1:], "task": "read"},
    ]
    evaluate = [{**prompt, "prompt": f"{prompt['prompt']} Again?"} for prompt in tune[:3]]
    lines = [{"max_new_tokens": 12, "split": "tune", **prompt} for prompt in tune]
    lines += [{"max_new_tokens": 12, "split": "evaluate", **prompt} for prompt in evaluate]
    (folder / "small.yaml").write_text(SPACE)
    return ["--workload", str(write_workload(folder, lines))]


def test_every_stage_from_end_to_end(pair: Pair, tmp_path: Path) -> None:
    """Every verb with --json: standard output holds only that, progress and tables are on standard error."""
    models = ["--target", pair.target_folder, "--draft", pair.draft_folder]
    workload = write_small_job(tmp_path)

    def stage(*arguments: object) -> Any:
        done = run_command(*arguments, "--json", folder=tmp_path, prepare=search_briefly)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr and "Warning" not in done.stderr
        return json.loads(done.stdout)

    diagnosis = stage("doctor", *models[:2], *workload, "--tokens", "4")
    assert diagnosis["target"]["near_ties"]["num_tokens"] > 0 and diagnosis["defects"] == []

    table = stage("measure", *models, *workload, "--budget", "1s", "-o", "pair.cost.json", "--table", "cost.parquet")
    assert table == json.loads((tmp_path / "pair.cost.json").read_text())
    assert table["schema"] == "autotune.cost-table/3"

    frame = pd.read_parquet(tmp_path / "cost.parquet")
    assert {"part", "tokens", "kv_length", "ms"} <= set(frame.columns) and len(frame) > 10

    traces = stage("record", *models, *workload, "--set", "keep=1,0.5", "-o", "traces")
    assert [trace["visual_keep"] for trace in traces] == [1.0, 0.5]
    assert set(traces[0]["agreement"]) == {"prompt", "read"}
    assert all(list(tmp_path.glob(f"traces/traces/*/keep-{keep}-*.trace.json")) for keep in ("1", "0.5"))

    stage("record", *models, *workload, "--max-new-tokens", "5", "--temperature", "0", "-o", "engine")
    (path,) = tmp_path.glob("engine/traces/*/keep-1-*.trace.json")
    header = TraceHeader.load(path)
    assert header.workload_sha256 == load_workload(workload[1], "tune").sampled(0.0).cut(4, 5).sha256

    small = ["--space", "small.yaml", "--trials", "8", "--budget", "1h"]
    profile = stage("search", *models, *workload, *small, "-o", "profile.json", "--table", "trials.csv")
    assert {"speedup", "policy", "d_max"} <= set(pd.read_csv(tmp_path / "trials.csv").columns)
    assert profile == json.loads((tmp_path / "profile.json").read_text())
    assert_complete(tmp_path / "profile.json")

    predicted = stage("search", *models, *workload, *small, "--gpu", "h100", "-o", "h100.json")
    assert predicted["hardware"]["name"] == "h100" and predicted["point"]["measured"] is None
    assert predicted["point"]["predicted"]["estimated"], "the shipped datasheet gives an estimate"
    assert predicted["mode"] == "cuda-graph", "as forward passes run on a GPU"

    # Whether a tree pays with models this small depends on the machine; the following stages must have one.
    target, draft = (reference(str(path)) for path in (pair.target_folder, pair.draft_folder))
    hardware = DecodingProfile.load(tmp_path / "profile.json").hardware
    tree = {"policy": "sage", "d_max": 5}
    decoding_profile(target, draft, tree=tree, visual_keep=0.5, hardware=hardware).save(tmp_path / "tree.json")

    answer = stage("run", "tree.json", "--prompt", "What is this?", "--image", "0.png", "--max-new-tokens", "16")
    assert answer["prompt"] == "What is this?" and answer["lossless"] and answer["stats"]["draft_forwards"] > 0
    assert isinstance(answer["text"], str) and answer["stats"]["new_tokens"] <= 16
    answers = stage("run", "tree.json", *workload, "--temperature", "1")
    assert len(answers) == 3

    bench = stage("bench", "tree.json", *workload, "--arms", "ar,hf,chain,sage", "--table", "runs.csv")
    names = ["ar", "hf", "chain", "sage", "tuned"]
    assert [arm["name"] for arm in bench["arms"]] == names
    assert {arm["num_prompts"] for arm in bench["arms"]} == {3}
    assert Counter(pd.read_csv(tmp_path / "runs.csv")["arm"]) == dict.fromkeys(names, 3)
    identical = {arm["name"]: arm["identical_outputs"] for arm in bench["arms"]}
    assert identical.pop("hf") >= 2 and set(identical.values()) == {3}, "Hugging Face samples other numbers"
    assert bench["speedup_by_task"]["ar"] == {"prompt": 1.0, "read": 1.0}

    failed = run_command("check", "tree.json", *workload, "--min-speedup", "1000", "--json", folder=tmp_path)
    check = json.loads(failed.stdout)
    assert (check["schema"], check["exit_code"], failed.returncode) == ("autotune.check-result/1", 1, 1)
    assert check["verdict"].startswith("failed: the speedup is below 1000")
    assert check["workloads"][0]["identical_outputs"] == 3


def test_workers_of_one_storage_agree_and_all_print_the_result(pair: Pair, tmp_path: Path) -> None:
    """Each in a folder of its own."""
    command = ["search", "--target", pair.target_folder, "--draft", pair.draft_folder, *write_small_job(tmp_path)]
    command += ["--space", tmp_path / "small.yaml", "--trials", "1", "--budget", "1h", "--max-new-tokens", "8"]
    (tmp_path / "small.yaml").write_text(SPACE.partition("  sage")[0])
    command += ["--storage", f"sqlite:///{tmp_path / 'shared.sqlite'}"]
    logs = [tmp_path / name / "log" for name in ("first", "second")]
    for log in logs:
        log.parent.mkdir()
    workers = [start_command(*command, folder=log.parent, log=log, prepare=search_briefly) for log in logs]
    for worker, log in zip(workers, logs, strict=True):
        worker.join()
        said = log.with_suffix(".err").read_text()
        assert worker.exitcode == 0, said
        assert "Evaluation on" in said
    assert logs[0].with_suffix(".out").read_text() == logs[1].with_suffix(".out").read_text() != ""
    profiles = [(log.parent / "profile.json").read_bytes() for log in logs]
    assert profiles[0] == profiles[1]


def assert_complete(path: Path) -> None:
    """The profile has a measured point, its evidence, and every arm that it was compared with."""
    profile = DecodingProfile.load(path)
    measured = profile.point.measured
    assert measured is not None and profile.point.predicted is not None
    assert 2 <= measured.num_prompts == len(profile.evidence.prompts) <= 3, "a busy machine may have time for two"
    names = [arm.name for arm in profile.evidence.compared]
    assert names[:2] == ["ar", "hf"] and names[-1] == "tuned"
    assert set(names[2:-1]) <= set(COMPARED_DEFAULTS) and profile.evidence.best_default in names
    assert profile.evidence.configurations_replayed >= 6


def progress(study: Path) -> int:
    """Number of complete records and lines: it grows with every unit of work."""
    runs = study / "runs.jsonl"
    lines = runs.read_bytes().count(b"\n") if runs.exists() else 0
    return lines + sum(path.is_file() and not path.name.startswith(".") for path in study.rglob("*"))


def test_kill_9_loses_no_finished_work(pair: Pair, tmp_path: Path) -> None:
    """A search is killed after random amounts of work and then finishes: nothing that was on disk is made again."""
    models = ["--target", pair.target_folder, "--draft", pair.draft_folder]
    small = ["--space", "small.yaml", "--trials", "8", "--budget", "1h", "--study", "study", "-o", "profile.json"]
    command = ["search", *models, *write_small_job(tmp_path), *small]
    study = tmp_path / ".autotune" / "study"
    kept: dict[Path, int] = {}
    was_killed = 0
    for amount in sorted(random.Random(0).sample(range(1, 45), 4)):
        process = start_command(*command, folder=tmp_path, prepare=search_briefly)
        while process.exitcode is None and progress(study) < amount:
            time.sleep(0.01)
        process.kill()
        process.join()
        was_killed += process.exitcode == -9
        assert not (tmp_path / "profile.json").exists() or process.exitcode == 0
        records = [path for kind in ("answers", "forests") for path in (study / kind).rglob("*") if path.is_file()]
        kept |= {path: path.stat().st_mtime_ns for path in records if not path.name.startswith(".")} | kept
    assert was_killed >= 2 and kept
    done = run_command(*command, folder=tmp_path, prepare=search_briefly)
    assert done.returncode == 0, done.stderr
    assert_complete(tmp_path / "profile.json")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    lines = (study / "runs.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines if line.endswith("}")]
    counted = Counter((run["comparison"], run["arm"], run["prompt_sha256"]) for run in runs)
    assert max(counted.values()) == 1 and len(counted) == len(runs) >= 2 * 5 + 2 * 3
