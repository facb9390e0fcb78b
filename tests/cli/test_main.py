"""The command line: light help, one line for every mistake, JSON and nothing else on stdout, and no work lost to kill -9."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune.cli.main import main
from autotune.device import fingerprint
from autotune.documents.configuration import PUBLISHED_DEFAULTS
from autotune.documents.decoding_profile import load_profile, save_profile
from autotune.modeling.loading import reference
from tests.sample_documents import decoding_profile, write_image, write_workload
from tests.tiny_models import Pair, new_llama

REPOSITORY = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-c", "from autotune.cli.main import main; main()"]
VERBS = ("devices", "profile", "record", "search", "run", "bench", "check", "report", "export", "train")


def run_command(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command line as a user runs it, in a process of its own."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)


# ----------------------------------------------------------------------------------------------------------------- help

HELP = f"""
import sys
from autotune.cli.main import main

assert set(main.commands) == set({VERBS!r}), "a verb without a test"
for verb in ([], *([verb] for verb in {VERBS!r})):
    main([*verb, "--help"], standalone_mode=False)
main(["--version"], standalone_mode=False)
heavy = {{"torch", "transformers", "optuna", "numba", "sklearn"}} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HELP], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and done.stdout.count("Usage:") == 1 + len(VERBS)
    assert not any(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------- mistakes


@pytest.fixture(scope="module")
def world(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the cases below speak of."""
    folder = tmp_path_factory.mktemp("world")
    target, draft = (reference(str(path)) for path in (pair.target_folder, pair.draft_folder))
    save_profile(folder / "profile.json", decoding_profile(target, draft, hardware=fingerprint("cpu")))
    whole = (folder / "profile.json").read_text()
    (folder / "truncated.json").write_text(whole[: len(whole) // 2])
    (folder / "typo.json").write_text(whole.replace('"verification"', '"verificatoin"'))
    (folder / "newer.json").write_text(whole.replace("decoding-profile/1", "decoding-profile/2"))
    write_image(folder / "photo.png", 0)
    (folder / "text.png").write_text("no image")
    write_workload(folder, [{"prompt": "Count."}, {"prompt": "Go on."}])
    write_workload(folder, [{"prompt": "x", "images": ["text.png"]}], name="no-image.jsonl")
    write_workload(folder, [{"promt": "x"}], name="typo.jsonl")
    (folder / "file").write_text("in the way")
    (folder / "no-model").mkdir()
    new_llama(1, vocabulary_size=310).save_pretrained(folder / "other-vocabulary")
    return folder


# Where TARGET, DRAFT and PAIR stand, the tiny pair is put.
SEARCH = ["search", "PAIR", "--workload", "workload.jsonl", "-o", "new.json"]
MISTAKES: dict[str, tuple[list[str], str]] = {
    "missing profile": (["run", "nowhere.json", "--prompt", "x"], r"nowhere\.json: no such file; check the path"),
    "missing profile, bench": (["bench", "nowhere.json"], r"nowhere\.json: no such file"),
    "missing profile, check": (["check", "nowhere.json"], r"nowhere\.json: no such file"),
    "truncated profile": (["run", "truncated.json", "--prompt", "x"], "not a complete JSON document"),
    "unknown key": (["run", "typo.json", "--prompt", "x"], "unknown key 'points.0.verificatoin'; did you mean 'verification'"),
    "newer schema": (["run", "newer.json", "--prompt", "x"], "'autotune.decoding-profile/2' is newer .* update autotune"),
    "no budget": ([*SEARCH, "--budget", "0"], "--budget must be longer than nothing; got 0 s"),
    "negative budget": ([*SEARCH, "--budget", "-3m"], "--budget must be longer than nothing; got -180 s"),
    "no trials": ([*SEARCH, "--trials", "0"], "--trials must be at least 1; got 0"),
    "sizes": ([*SEARCH, "--buckets", "8,many"], "'8,many' is no list of sizes; write for example 4,8,16,32,64"),
    "size": ([*SEARCH, "--buckets", "8,900"], "buckets are numbers of tokens from 1 to 160; got 900"),
    "too small": ([*SEARCH, "--buckets", "2,4"], "space quick: steps are priced up to 4 tokens; .*narrow the space"),
    "unknown gpu": ([*SEARCH, "--gpu", "h1000"], "--gpu h1000: neither a device .*did you mean 'h100'"),
    "unknown device": (
        ["profile", "PAIR", "--workload", "workload.jsonl", "--device", "tpu", "-o", "new.json"],
        "unknown device 'tpu'; this machine has: cpu",
    ),
    "missing device": (["run", "profile.json", "--prompt", "x", "--device", "cuda:99"], "device 'cuda:99' is not on this"),
    "output below a file": ([*SEARCH[:-1], "file/new.json"], r"file/new\.json: cannot be written .* with -o"),
    "output is a folder": ([*SEARCH[:-1], "no-model"], "no-model: the output must be a file; got a folder"),
    "cost table below a file": (["profile", "PAIR", "-o", "file/new.json"], r"file/new\.json: cannot be written"),
    "traces below a file": (["record", "PAIR", "-o", "file"], "cannot be written"),
    "other vocabulary": (
        ["search", "TARGET", "--draft", "other-vocabulary", "--workload", "workload.jsonl", "-o", "new.json"],
        "must share one vocabulary; the target has 300 tokens, the draft 310; use a draft made for this target",
    ),
    "no image": (["run", "profile.json", "--prompt", "x", "--image", "text.png"], r"text\.png: not an image"),
    "missing image": (["run", "profile.json", "--prompt", "x", "--image", "gone.png"], r"gone\.png: no such image"),
    "no image in a workload": (["bench", "profile.json", "--workload", "no-image.jsonl"], r"text\.png: not an image"),
    "image without a question": (["run", "profile.json", "--image", "photo.png"], "an image needs a question"),
    "prompt and workload": (
        ["run", "profile.json", "--prompt", "x", "--workload", "workload.jsonl"],
        "give either --workload or --prompt",
    ),
    "negative temperature": (["run", "profile.json", "--prompt", "x", "--temperature", "-1"], "--temperature: input should be"),
    "temperature that is no number": (
        ["run", "profile.json", "--prompt", "x", "--temperature", "nan"],
        "--temperature: input should be",
    ),
    "missing workload": (["check", "profile.json", "--workload", "gone.jsonl"], r"gone\.jsonl: no such file"),
    "typo in a workload": (["check", "profile.json", "--workload", "typo.jsonl"], r"typo\.jsonl:1: .*'prompt'|did you mean"),
    "unknown arm": (
        ["bench", "profile.json", "--workload", "workload.jsonl", "--against", "ar,chian"],
        "--against chian: no such arm; did you mean 'chain'",
    ),
    "unknown space": ([*SEARCH, "--space", "quik"], "unknown search space 'quik'; did you mean 'quick'"),
    "missing space": ([*SEARCH, "--space", "gone.yaml"], r"gone\.yaml: no such file"),
    "unknown bundled model": (
        ["search", "--target", "digits/targt", "--workload", "workload.jsonl", "-o", "new.json"],
        "digits/targt: (no such model; did you mean 'digits/target'|transformers cannot load it)",
    ),
    "folder without a model": (
        ["search", "--target", "no-model", "--workload", "workload.jsonl", "-o", "new.json"],
        r"no-model: a model folder has a config\.json",
    ),
    "no minimum": (
        ["check", "profile.json", "--workload", "workload.jsonl", "--min-speedup", "0"],
        r"--min-speedup must be above 0; got 0\.0",
    ),
    "limit that is no percentage": (["check", "profile.json", "--limit", "5"], "'5' is not a percentage; write for example 5% or 0.05"),
    "limit below the tolerance": (
        ["check", "profile.json", "--limit", "1%", "--tolerance", "0.02"],
        "--tolerance must lie below --limit, and not below 0; got 2 % and 1 %",
    ),
    "no such base": (
        ["check", "profile.json", "--workload", "workload.jsonl", "--against", "nowhere"],
        "--against nowhere: (no such file, and this folder is in no git repository|neither a file nor a git revision)",
    ),
    "base that is no profile": (
        ["check", "profile.json", "--workload", "workload.jsonl", "--against", "workload.jsonl"],
        r"workload\.jsonl: not a complete JSON document",
    ),
    "unwritable JUnit": (
        ["check", "profile.json", "--workload", "workload.jsonl", "--junit", "file/junit.xml"],
        r"file/junit\.xml: cannot be written .* with --junit",
    ),
    "missing profile, export": (["export", "nowhere.json", "--to", "vllm"], r"nowhere\.json: no such file; check the path"),
    "no engine": (["export", "profile.json"], "Missing option '--to'. Choose from: vllm, sglang, tensorrt-llm, transformers"),
    "export without a study": (["export", "profile.json", "--to", "vllm"], "name the study's folder with --study, or run autotune search"),
    "export below a file": (["export", "profile.json", "--to", "vllm", "-o", "file"], r"file/export\.json: cannot be written"),
    "missing recipe": (["train", "gone.yaml"], r"gone\.yaml: no such file"),
    "no probability": (["run", "profile.json", "--prompt", "x", "--top-p", "0"], "top.p"),
    "negative seed": (["run", "profile.json", "--prompt", "x", "--seed", "-3"], "seed"),
    "image token without an image": (["run", "profile.json", "--prompt", "x <image> y"], "<image>"),
}  # fmt: skip


# Each shows its traceback yet. Strict: whoever mends one takes it out of here.
REPORTED = ("no probability", "negative seed", "image token without an image")
MISTAKE_NAMES = [pytest.param(name) if name in REPORTED else name for name in MISTAKES]


def arguments_of(case: list[str], pair: Pair) -> list[str]:
    target, draft = ["--target", str(pair.target_folder)], ["--draft", str(pair.draft_folder)]
    known = {"TARGET": target, "DRAFT": draft, "PAIR": [*target, *draft]}
    return [argument for word in case for argument in known.get(word, [word])]


def contents(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def assert_one_line(stdout: str, stderr: str, message: str) -> None:
    assert stdout == ""
    assert len(stderr.splitlines()) == 1 and stderr.startswith("autotune: "), stderr
    assert re.search(message, stderr), stderr


@pytest.mark.parametrize("name", MISTAKE_NAMES)
def test_a_mistake_is_one_line_and_exit_code_2(
    name: str, world: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, for a fresh one takes seconds to load torch. Nothing is written before the mistake is found."""
    case, message = MISTAKES[name]
    monkeypatch.chdir(world)
    before = contents(world)
    result = CliRunner().invoke(main, arguments_of(case, pair))
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert_one_line(result.stdout, result.stderr, message)
    assert contents(world) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["missing profile", "other vocabulary", "unknown gpu", "missing device"])
def test_a_mistake_is_one_line_in_a_process_of_its_own(name: str, world: Path, pair: Pair) -> None:
    """Nothing that libraries print on loading comes with it."""
    case, message = MISTAKES[name]
    before = contents(world)
    done = run_command(*arguments_of(case, pair), folder=world)
    assert done.returncode == 2
    assert_one_line(done.stdout, done.stderr, message)
    assert contents(world) == before


def test_what_cannot_be_compared_exits_with_4(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, as every mistake, and before anything is loaded."""
    monkeypatch.chdir(world)
    profile = load_profile(world / "profile.json")
    other = profile.target.model_copy(update={"id": "another/model", "sha256": "f" * 64})
    save_profile(world / "another.json", profile.model_copy(update={"target": other}))
    case = ["check", "profile.json", "--workload", "workload.jsonl", "--against", "another.json"]
    result = CliRunner().invoke(main, case)
    assert isinstance(result.exception, SystemExit) and result.exit_code == 4, result.exception
    assert_one_line(
        result.stdout, result.stderr, r"--against another\.json: its target is another/model, that of profile\.json"
    )


def test_answers_of_one_token_are_nothing_to_compare(
    world: Path, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill gives the only token: a draft has no part in it, and there is no speedup to speak of."""
    monkeypatch.chdir(world)
    single = write_workload(tmp_path, [{"prompt": "Count.", "max_new_tokens": 1, "split": "evaluate"}])
    result = CliRunner().invoke(main, ["check", "profile.json", "--workload", str(single)])
    assert isinstance(result.exception, SystemExit) and result.exit_code == 2, result.exception
    assert result.stderr.splitlines()[-1].startswith("autotune: ")


def test_devices_are_listed_as_json() -> None:
    """Of this machine, and those that are known by datasheet."""
    result = CliRunner().invoke(main, ["devices", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and result.stderr == ""
    assert found["local"]["cpu"]["key"] == fingerprint("cpu").key
    assert set(found) == {"local", "measured", "estimated"} and "h100" in found["estimated"]


# ----------------------------------------------------------------------------------------------------------- end to end

SPACE = """
schema: autotune.search-space/1
name: small
visual_keep: {choices: [1.0, 0.5]}
trees:
  chain: {depth: {low: 1, high: 3}}
  sage: {d_max: {low: 3, high: 6}, w_max: {low: 2, high: 8}, upper: {low: 3.0, high: 5.0}}
"""


def write_small_job(folder: Path) -> list[str]:
    """Seven short prompts and a small space; returns the options that name them."""
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


@pytest.mark.slow
def test_every_stage_from_end_to_end(pair: Pair, tmp_path: Path) -> None:
    """Each with --json: stdout is that and nothing else, progress and tables are on stderr."""
    models = ["--target", pair.target_folder, "--draft", pair.draft_folder]
    workload = write_small_job(tmp_path)

    def stage(*arguments: object) -> Any:
        done = run_command(*arguments, "--json", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr and "Warning" not in done.stderr
        return json.loads(done.stdout)

    table = stage("profile", *models, *workload, "-o", "pair.cost.json")
    assert table == json.loads((tmp_path / "pair.cost.json").read_text())
    assert table["schema"] == "autotune.cost-table/4"

    traces = stage("record", *models, *workload, "--visual-keep", "1", "--visual-keep", "0.5", "-o", "traces")
    assert [trace["visual_keep"] for trace in traces] == [1.0, 0.5]
    assert set(traces[0]["agreement"]) == {"prompt", "read"}
    assert {path.name for path in tmp_path.glob("traces/**/*.json")} >= {"keep-1.trace.json", "keep-0.5.trace.json"}

    small = ["--space", "small.yaml", "--trials", "8", "--budget", "30s"]
    profile = stage("search", *models, *workload, *small, "-o", "profile.json")
    assert profile == json.loads((tmp_path / "profile.json").read_text())
    assert_complete(tmp_path / "profile.json")

    # Whether a tree pays with models this small is the machine's business; these stages are to have one.
    target, draft = (reference(str(path)) for path in (pair.target_folder, pair.draft_folder))
    hardware = load_profile(tmp_path / "profile.json").hardware
    tree = {"policy": "sage", "d_max": 5}
    save_profile(tmp_path / "tree.json", decoding_profile(target, draft, tree=tree, visual_keep=0.5, hardware=hardware))

    answer = stage("run", "tree.json", "--prompt", "What is this?", "--image", "0.png", "--max-new-tokens", "16")
    assert answer["prompt"] == "What is this?" and answer["lossless"] and answer["stats"]["draft_forwards"] > 0
    assert isinstance(answer["text"], str) and answer["stats"]["new_tokens"] <= 16
    answers = stage("run", "tree.json", *workload, "--temperature", "1")
    assert len(answers) == 3

    bench = stage("bench", "tree.json", *workload, "--against", "ar,hf,chain,sage")
    assert [arm["name"] for arm in bench["arms"]] == ["ar", "hf", "chain", "sage", "tuned"]
    assert {arm["num_prompts"] for arm in bench["arms"]} == {3}
    identical = {arm["name"]: arm["identical_outputs"] for arm in bench["arms"]}
    assert identical.pop("hf") >= 2 and set(identical.values()) == {3}, "Hugging Face samples other numbers"
    assert bench["speedup_by_task"]["ar"] == {"prompt": 1.0, "read": 1.0}

    check = stage("check", "tree.json", *workload, "--min-speedup", "0.001")
    assert (check["schema"], check["verdict"], check["exit_code"]) == ("autotune.check-result/1", "passed", 0)
    assert check["workloads"][0]["identical_outputs"] == 3
    failed = run_command("check", "tree.json", *workload, "--min-speedup", "1000", "--json", folder=tmp_path)
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["verdict"].startswith("failed: the speedup lies below 1000")


def assert_complete(path: Path) -> None:
    """A profile with a measured point, its evidence, and every arm that it was compared with."""
    profile = load_profile(path)
    measured = profile.point.measured
    assert measured is not None and profile.point.predicted is not None
    assert measured.num_prompts == len(profile.evidence.prompts) == 3
    assert [arm.name for arm in profile.evidence.compared] == ["ar", *PUBLISHED_DEFAULTS, "tuned"]
    assert profile.evidence.configurations_replayed >= 6


# -------------------------------------------------------------------------------------------------------------- kill -9


def progress(study: Path) -> int:
    """Whole records and lines so far: grows by one with every piece of work that is done."""
    runs = study / "runs.jsonl"
    lines = runs.read_bytes().count(b"\n") if runs.exists() else 0
    return lines + sum(path.is_file() and not path.name.startswith(".") for path in study.rglob("*"))


@pytest.mark.slow
def test_kill_9_loses_no_finished_work(pair: Pair, tmp_path: Path) -> None:
    """Killed after random amounts of work, and then let finish: nothing that was on disk is done again."""
    models = ["--target", pair.target_folder, "--draft", pair.draft_folder]
    small = ["--space", "small.yaml", "--trials", "8", "--budget", "30s", "--study", "study", "-o", "profile.json"]
    command = [*COMMAND, *map(str, ["search", *models, *write_small_job(tmp_path), *small])]
    study = tmp_path / ".autotune" / "study"
    kept: dict[Path, int] = {}
    was_killed = 0
    for amount in sorted(random.Random(0).sample(range(1, 45), 4)):
        process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
        while process.poll() is None and progress(study) < amount:
            time.sleep(0.01)
        process.kill()
        was_killed += process.wait() == -9
        assert not (tmp_path / "profile.json").exists() or process.returncode == 0
        records = [path for kind in ("answers", "forests") for path in (study / kind).rglob("*") if path.is_file()]
        kept |= {path: path.stat().st_mtime_ns for path in records if not path.name.startswith(".")} | kept
    assert was_killed >= 2 and kept
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_complete(tmp_path / "profile.json")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    lines = (study / "runs.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines if line.endswith("}")]
    counted = Counter((run["comparison"], run["arm"], run["prompt_sha256"]) for run in runs)
    assert max(counted.values()) == 1 and len(counted) == len(runs) >= 7 + 3 * 3
