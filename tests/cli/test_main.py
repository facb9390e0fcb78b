"""The command line: help and obvious mistakes answer at once, and every mistake of the user is one line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune.cli.main import CONTINUED, VERBS, main
from autotune.documents.decoding_profile import DecodingProfile
from autotune.machine.device import fingerprint
from autotune.modeling.loading import reference
from tests.engine_profiles import engine_profile
from tests.sample_documents import decoding_profile, write_image, write_workload
from tests.tiny_models import Pair, new_llama
from tests.training.conftest import STAGE, write_examples, write_recipe

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
MODULE = [sys.executable, "-m", "autotune"]
HEAVY = {"torch", "transformers", "optuna", "numba", "scipy", "sklearn", "pandas", "sqlalchemy"}


HELP = f"""
import sys
from autotune.cli.main import main

for verb in ([], *([verb] for verb in {VERBS!r})):
    main([*verb, "--help"], standalone_mode=False)
main(["--version"], standalone_mode=False)
heavy = {HEAVY!r} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HELP], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and done.stdout.count("Usage:") == 1 + len(VERBS)
    assert not any(tmp_path.iterdir())


def test_verbs_are_listed_in_workflow_order_with_their_whole_short_help() -> None:
    page = CliRunner().invoke(main, ["--help"], terminal_width=80).stdout
    listed = [line.split(maxsplit=1) for line in page.partition("Commands:\n")[2].splitlines()]
    assert tuple(verb for verb, _ in listed) == VERBS
    assert all(text.endswith(".") for _, text in listed), "truncated or wrapped"
    for verb in VERBS:
        page = CliRunner().invoke(main, [verb, "--help"], terminal_width=120).stdout
        assert max(map(len, page.splitlines())) <= 120


# Refused before anything heavy is imported.
INSTANT = {
    "run missing.json": "no such file",
    "serve missing.json": "no such file",
    "serve missing.json --port 70000": "--port: input should be less than or equal to 65535",
    "check missing.json": "no such file",
    "bench missing.json": "no such file",
    "export missing.json": "no such file",
    "train missing.yaml": "no such file",
    "search --budget 0": "--budget: input should be greater than 0",
    "search --gpu nope": "--gpu nope: neither a card",
    "search --gpu cpu": "--gpu cpu: neither a card of this machine nor one with a shipped cost table",
    "search --set d_mx=8": "--set d_mx=8: space quick has no dimension 'd_mx'; did you mean 'd_max'",
    "search --set heads=7": "--set heads=7: heads.0.*less than or equal to 1; got 7",
    "search --set policy=sag": "did you mean 'sage'",
    "search --set heads": "--set heads: heads.0.*got None",
    "search --workload tune.jsonl": "tune.jsonl: a workload needs prompts in both splits; none is in 'evaluate'",
    "search --set heads={": "--set heads={: no value of YAML",
    "record --set d_max=8": "has no dimension 'd_max'",
    "measure --set haeds=1": "did you mean 'heads'",
    "search --config missing.yaml": "no such file",
    "search --modle x": "No such option '--modle'. .*'--model'",
    "search --space quik": "did you mean 'quick'",
    "search --workload missing.jsonl": "no such file",
    "search -o /proc/nowhere/profile.json": "cannot be written",
    "record --workload missing.jsonl": "no such file",
    "measure -o /proc/nowhere/table.json": "cannot be written",
    "train kind.yaml": "got 'stra'; fix that value",
    "train key.yaml": "unknown key 'modle'; did you mean 'model'",
    "train contradiction.yaml": "got draft {'mlp_size': 4}; remove it",
    "train teacher.yaml": "no/where",
    "train data.yaml": "gone.jsonl: no such file; check the path",
    "train examples.yaml": "wrong.jsonl:1: unknown key 'anwser'; did you mean 'answer'",
    "check x.json --min-speedup 0": "--min-speedup: input should be greater than 0",
}
RECIPES: dict[str, dict[str, Any]] = {
    "kind": {"model": "stra"},
    "key": {"modle": "star"},
    "contradiction": {"model": "mtp", "draft": {"mlp_size": 4}, "stages": [STAGE]},
    "teacher": {"teacher": "no/where"},
    "data": {"data": {"file": "gone.jsonl"}},
    "examples": {"data": {"file": "wrong.jsonl"}},
}
INSTANT_PROGRAM = f"""
import io, re, sys
from contextlib import redirect_stderr
from autotune.cli.main import main

for command, message in {INSTANT!r}.items():
    said = io.StringIO()
    with redirect_stderr(said):
        try:
            main(command.split())
        except SystemExit as error:
            assert error.code == 2, command
    assert len(said.getvalue().splitlines()) == 1 and re.search(message, said.getvalue()), (command, said.getvalue())
    heavy = ({HEAVY!r} | {{"rich"}}) & set(sys.modules)
    assert not heavy, (command, heavy)
"""


def test_obvious_mistakes_are_refused_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    write_workload(tmp_path, [{"prompt": "Go on.", "split": "tune"}] * 2).rename(tmp_path / "tune.jsonl")
    write_examples(tmp_path / "examples.jsonl")
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "x", "anwser": "y"}')
    for name, changes in RECIPES.items():
        write_recipe(tmp_path / f"{name}.yaml", **{"teacher": "digits/target", **changes})
    command = [sys.executable, "-c", INSTANT_PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SLOW = """
import sys, time
import click
from autotune.cli.main import Commands, main
from autotune.console import Console
from autotune.errors import UserError

@click.command()
def slow() -> None:
    "A command that takes long, or prints much."
    print("ready", flush=True)
    for _ in range(36_000):
        time.sleep(0.1)

@click.command()
def loud() -> None:
    for _ in range(100_000):
        print("a line of its result")

@click.command()
def chatty() -> None:
    for _ in range(100_000):
        Console().say("a line of its progress")

@click.command()
def wrong() -> None:
    time.sleep(1)
    raise UserError("a mistake")

@click.command()
def locked() -> None:
    raise PermissionError(13, "Permission denied", ".autotune")

@click.command()
@click.argument("name")
def faulty(name: str) -> None:
    import builtins
    raise getattr(builtins, name, type(name, (RuntimeError,), {}))("of some kind")

known = {"bench": faulty, "search": slow, "serve": slow, "report": loud, "check": chatty, "train": wrong, "run": locked}
Commands.get_command = lambda self, ctx, name: known[name]
main(sys.argv[1:])
"""


def start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_signals_end_a_command_with_a_line_and_their_exit_code() -> None:
    """As for Ctrl-C; ``nohup`` keeps it alive. Only verbs that keep their work promise to continue it."""
    assert set(CONTINUED) == {"search", "measure", "record", "train"} < set(VERBS)
    program, numbers = (sys.executable, "-c", SLOW, "search"), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    kept = start("sh", "-c", 'trap "" HUP; exec "$@"', "sh", *program)
    # Children inherit what tests under nohup, or in the background of a shell, ignore.
    numbers = tuple(number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN)
    server = start(sys.executable, "-c", SLOW, "serve")
    processes = [start(*program) for _ in numbers]
    for process, number in zip([kept, server, *processes], [signal.SIGHUP, signal.SIGTERM, *numbers], strict=True):
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
    for process, number in zip(processes, numbers, strict=True):
        said = process.communicate(timeout=600)[1].strip()
        assert (process.returncode, said) == (128 + number, "autotune: interrupted; run the same command to continue")
    assert server.communicate(timeout=600)[1].strip() == "autotune: interrupted"
    assert kept.poll() is None
    kept.kill()
    kept.communicate()


REDIRECTED = {
    "report | true; exit ${PIPESTATUS[0]}": (141, ""),
    "report 2>&- | true; exit ${PIPESTATUS[0]}": (141, ""),
    "check 2>&1 >/dev/null | true; exit ${PIPESTATUS[0]}": (141, ""),
    "train 2>&1 >/dev/null | true; exit ${PIPESTATUS[0]}": (2, ""),
    "report 2>&- > /dev/null": (0, ""),
    "report >&-": (0, ""),
    "report > /dev/full": (
        2,
        "autotune: .*cannot be read or written .No space left on device.; free some space, or .*",
    ),
    "run": (
        2,
        "autotune: .autotune: cannot be read or written .Permission denied.; free some space, or check its permissions",
    ),
}


def test_closed_streams_and_full_disks_have_exit_codes_of_their_own() -> None:
    """Never 1, which means a regression."""
    processes = [start("bash", "-c", f'"{sys.executable}" -c "$0" {redirected}', SLOW) for redirected in REDIRECTED]
    for process, (redirected, (code, message)) in zip(processes, REDIRECTED.items(), strict=True):
        said = process.communicate()[1].strip()
        assert process.returncode == code and re.fullmatch(message, said), (redirected, process.returncode, said)


@pytest.mark.parametrize("name", ["IndexError", "OSError", "MemoryError", "OutOfMemoryError"])
def test_a_fault_of_the_program_exits_with_70_and_a_full_memory_is_one_line(name: str) -> None:
    process = start(sys.executable, "-c", SLOW, "bench", name)
    *lines, last = process.communicate()[1].splitlines()
    if "Memory" in name:
        assert (process.returncode, lines) == (2, []) and "the memory is full (of some kind)" in last
    else:
        assert process.returncode == 70 and f"{name}: of some kind" in lines and "Traceback" in lines[0]
        assert last.startswith(f"autotune: a fault of the program, {name}; please report it")


@pytest.fixture(scope="module")
def world(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the cases below."""
    folder = tmp_path_factory.mktemp("world")
    target, draft = (reference(str(path)) for path in (pair.target_folder, pair.draft_folder))
    decoding_profile(target, draft, hardware=fingerprint("cpu")).save(folder / "profile.json")
    whole = (folder / "profile.json").read_text()
    (folder / "profile.csv").write_text(whole)
    (folder / "truncated.json").write_text(whole[: len(whole) // 2])
    (folder / "typo.json").write_text(whole.replace('"verification"', '"verificatoin"'))
    (folder / "other-version.json").write_text(whole.replace("decoding-profile/2", "decoding-profile/4"))
    engine_profile().save(folder / "engine.json")
    write_image(folder / "photo.png", 0)
    (folder / "text.png").write_text("no image")
    write_workload(folder, [{"prompt": "Count."}, {"prompt": "Go on."}])
    write_workload(folder, [{"prompt": "x", "images": ["text.png"]}], name="no-image.jsonl")
    write_workload(folder, [{"promt": "x"}], name="typo.jsonl")
    (folder / "file").write_text("in the way")
    (folder / "no-model").mkdir()
    (folder / "trained").mkdir()
    (folder / "trained" / "model.safetensors").write_text("weights")
    (folder / "recipe.yaml").write_text("name: x\n")
    new_llama(1, vocabulary_size=360).save_pretrained(folder / "other-vocabulary")
    return folder


# TARGET, DRAFT and PAIR are replaced by the options of the tiny pair.
SEARCH = ["search", "PAIR", "--workload", "workload.jsonl", "-o", "new.json"]
MISTAKES: dict[str, tuple[list[str], str]] = {
    "missing profile": (["run", "nowhere.json", "--prompt", "x"], r"nowhere\.json: no such file; check the path"),
    "missing target, doctor": (["doctor", "--target", "nowhere"], "nowhere: no such model"),
    "unknown device, doctor": (["doctor", "--device", "h100"], "unknown device 'h100'; this machine has: cpu"),
    "missing device, doctor": (["doctor", "--device", "cuda:99"], "device 'cuda:99' is not on this machine"),
    "unsupported device, doctor": (["doctor", "--device", "mps"], "device 'mps': autotune runs on CPUs"),
    "missing workload, doctor": (["doctor", "--target", "digits/target", "--workload", "nowhere.jsonl"], r"nowhere\.jsonl: no such file"),
    "no tokens, doctor": (["doctor", "--tokens", "1"], "1 is not in the range"),
    "profile of local models, pushed": (["push", "profile.json", "owner/name"], "which is on this machine alone; push that model"),
    "no repository": (["push", "engine.json", "name"], "name: a repository of the Hugging Face Hub is named OWNER/NAME"),
    "truncated profile": (["run", "truncated.json", "--prompt", "x"], "not a complete JSON document"),
    "unknown key": (["run", "typo.json", "--prompt", "x"], "unknown key 'point.verificatoin'; did you mean 'verification'"),
    "another version": (
        ["run", "other-version.json", "--prompt", "x"],
        "reads schema 'autotune.decoding-profile/2'; got 'autotune.decoding-profile/4'; make the file again with autotune search",
    ),
    "format of another benchmark": (
        ["bench", "profile.json", "--workload", "workload.jsonl", "--format", "sharegpt"],
        r"workload\.jsonl:1: key 'conversations' is required and missing; add it",
    ),
    "unknown format": (["run", "profile.json", "--format", "mtbench"], "'mtbench' is not one of 'autotune', 'mt-bench'"),
    "file on the Hub": ([*SEARCH, "--workload", "hf://datasets/o/n/x.jsonl"], r"x\.jsonl: cannot be downloaded"),
    "negative budget": ([*SEARCH, "--budget", "-3m"], "--budget: input should be greater than 0; got -180.0"),
    "no trials": ([*SEARCH, "--trials", "0"], "--trials: input should be greater than or equal to 1; got 0"),
    "sizes": ([*SEARCH, "--capture-sizes", "8,many"], "'8,many' is not a list of sizes .*; write for example 4,8,16,32,64"),
    "size": ([*SEARCH, "--capture-sizes", "8,900"], "capture sizes are numbers of tokens from 1 to 160; got 900"),
    "too small": ([*SEARCH, "--capture-sizes", "2,4"], "space quick: steps are priced up to 4 tokens; .*narrow the space"),
    "gpu of another kind": ([*SEARCH, "--gpu", "mps"], "device 'mps': autotune runs on CPUs and on GPUs of NVIDIA and AMD"),
    "slice that a gpu does not have": ([*SEARCH, "--gpu", "l4-mig-1g.3gb"], "--gpu l4-mig-1g.3gb: neither a card"),
    "no gpus": ([*SEARCH, "--gpu", "0xh100"], "--gpu 0xh100: neither a card .* nor 2 to 64 of one"),
    "more gpus than share a target": ([*SEARCH, "--gpu", "65xh100"], "--gpu 65xh100: neither a card .* did you mean 'h100'"),
    "several of an unknown gpu": ([*SEARCH, "--gpu", "4xh1000"], "--gpu 4xh1000: neither a card .*did you mean 'h100'"),
    "several gpus and a draft that is not there": (
        [*SEARCH, "--gpu", "4xh100", "--random-weights", "--draft", "not/there"],
        "not/there: the Hugging Face Hub does not answer",
    ),
    "gpu of doctor that nobody knows": (["doctor", "--gpu", "4xnope"], "--gpu 4xnope: neither a card"),
    "unknown gpu": ([*SEARCH, "--gpu", "h1000"], "--gpu h1000: neither a card .*did you mean 'h100'"),
    "unknown device": (
        ["measure", "PAIR", "--workload", "workload.jsonl", "--device", "tpu", "-o", "new.json"],
        "unknown device 'tpu'; this machine has: cpu",
    ),
    "missing device": (["run", "profile.json", "--prompt", "x", "--device", "cuda:99"], "device 'cuda:99' is not on this"),
    "output below a file": ([*SEARCH[:-1], "file/new.json"], r"file/new\.json: cannot be written .* with -o"),
    "output is a folder": ([*SEARCH[:-1], "no-model"], "no-model: the output must be a file; got a folder"),
    "cost table below a file": (["measure", "PAIR", "-o", "file/new.json"], r"file/new\.json: cannot be written"),
    "traces below a file": (["record", "PAIR", "-o", "file"], "cannot be written"),
    "other vocabulary": (
        ["search", "TARGET", "--draft", "other-vocabulary", "--workload", "workload.jsonl", "-o", "new.json"],
        "must share one vocabulary; the target has 300 tokens, the draft 360; use a draft made for this target",
    ),
    "no image": (["run", "profile.json", "--prompt", "x", "--image", "text.png"], r"text\.png: not a readable image"),
    "missing image": (["run", "profile.json", "--prompt", "x", "--image", "gone.png"], r"gone\.png: not a readable image"),
    "no image in a workload": (["bench", "profile.json", "--workload", "no-image.jsonl"], r"text\.png: not a readable image"),
    "image without a question": (["run", "profile.json", "--image", "photo.png"], "an image needs a question"),
    "prompt and workload": (
        ["run", "profile.json", "--prompt", "x", "--workload", "workload.jsonl"],
        "give either --workload, or --prompt",
    ),
    "negative temperature": (["run", "profile.json", "--prompt", "x", "--temperature", "-1"], "--temperature: input should be"),
    "temperature that is no number": (
        ["run", "profile.json", "--prompt", "x", "--temperature", "nan"],
        "--temperature: input should be",
    ),
    "missing workload": (["check", "profile.json", "--workload", "gone.jsonl"], r"gone\.jsonl: no such file"),
    "typo in a workload": (["check", "profile.json", "--workload", "typo.jsonl"], r"typo\.jsonl:1: .*'prompt'|did you mean"),
    "unknown arm": (
        ["bench", "profile.json", "--workload", "workload.jsonl", "--arms", "ar,chian"],
        "--arms chian: no such arm of runtime; did you mean 'chain'",
    ),
    "output of another search": (
        ["search", "PAIR", "--workload", "workload.jsonl", "-o", "profile.json"],
        r"profile\.json: holds another result, which is not replaced; delete it, or give another -o",
    ),
    "estimate over a measured profile": (["search", "--gpu", "h100", "-o", "profile.json"], r"profile\.json: holds another result"),
    "output that is no profile": (["search", "-o", "workload.jsonl"], r"workload\.jsonl: holds another result"),
    "profile of an engine": (
        ["search", "--backend", "vllm", "--target", "any/target", "--workload", "workload.jsonl", "-o", "profile.json"],
        r"profile\.json: holds another result",
    ),
    "cost table over a profile": (["measure", "PAIR", "-o", "profile.json"], r"profile\.json: holds another result"),
    "page over a profile": (["report", "profile.json", "-o", "profile.json"], r"profile\.json: holds another result"),
    "page of no profile": (["report", "recipe.yaml"], "not a complete JSON document"),
    "page of no study": (["report", "no-model"], r"no study of no-model is in this folder; give one in \.autotune/"),
    "page of a study that is none": (["report", "profile.json", "--study", "x"], r"x: no study of profile\.json is in this folder"),
    "study of a study": (["report", "no-model", "--study", "x"], "--study x: no-model is a study folder itself"),
    "study of an engine": (["report", "engine.json", "--study", "x"], "--study: not an option for a profile of llama.cpp; leave it out"),
    "page below a file": (["report", "profile.json", "-o", "file/r.html"], r"file/r\.html: cannot be written"),
    "page is a folder": (["report", "profile.json", "-o", "no-model"], "no-model: the output must be a file"),
    "table over a profile": (["search", "--table", "profile.csv"], r"profile\.csv: holds another result, .*another --table"),
    "JUnit file over a profile": (["check", "profile.json", "--junit", "profile.json"], "holds another result, .*another --junit"),
    "draft over another one": (["train", "recipe.yaml", "-o", "trained"], r"trained/model\.safetensors: holds another result"),
    "missing space": ([*SEARCH, "--space", "gone.yaml"], r"gone\.yaml: no such file"),
    "unknown bundled model": (
        ["search", "--target", "digits/targt", "--workload", "workload.jsonl", "-o", "new.json"],
        "digits/targt: (no such model; did you mean 'digits/target'|transformers cannot load it)",
    ),
    "folder without a model": (
        ["search", "--target", "no-model", "--workload", "workload.jsonl", "-o", "new.json"],
        r"no-model: a model folder has a config\.json",
    ),
    "duration without a unit": ([*SEARCH, "--budget", "10x"], "'10x' is not a duration .*; write for example 90s, 10m or 1h"),
    "variables that are no object": (["run", "profile.json", "--chat-template-kwargs", "[1]"], r"'\[1\]' is not an object of JSON"),
    "variables that are no JSON": (["serve", "profile.json", "--chat-template-kwargs", "a=1"], "'a=1' is not an object of JSON"),
    "a number that is none": (["bench", "profile.json", "--chat-template-kwargs", '{"a": NaN}'], "is not an object of JSON"),
    "variable that the program sets": (
        ["check", "profile.json", "--chat-template-kwargs", '{"tokenize": false}'],
        "'tokenize' is not a variable of a chat template",
    ),
    "table of no format": (["search", "--table", "table.txt"], "'table.txt' is not a file of a table"),
    "limit that is no percentage": (["check", "profile.json", "--limit", "5"], "'5' is not a percentage .*; write for example 5% or 0.05"),
    "limit below the tolerance": (
        ["check", "profile.json", "--limit", "1%", "--tolerance", "0.02"],
        "--tolerance must be below --limit; got 2 % and 1 %",
    ),
    "no such base": (
        ["check", "profile.json", "--workload", "workload.jsonl", "--against", "nowhere"],
        "--against nowhere: (no such file, and this folder is not in a git repository|neither a file nor a git revision)",
    ),
    "base that is no profile": (
        ["check", "profile.json", "--workload", "workload.jsonl", "--against", "workload.jsonl"],
        r"workload\.jsonl: not a complete JSON document",
    ),
    "a workload twice": (["check", "profile.json", *2 * ["--workload", "a"]], "--workload a is given twice; give each workload once"),
    "unwritable JUnit": (
        ["check", "profile.json", "--workload", "workload.jsonl", "--junit", "file/junit.xml"],
        r"file/junit\.xml: cannot be written .* with --junit",
    ),
    "export below a file": (["export", "profile.json", "--draft-tokens", "3", "--models", "file"], r"file/config\.json: cannot be written"),
    "no probability": (["run", "profile.json", "--prompt", "x", "--top-p", "0"], "top.p"),
    "negative seed": (["run", "profile.json", "--prompt", "x", "--seed", "-3"], "seed"),
    "server for other machines": (["serve", "profile.json", "--host", "0.0.0.0"], "other machines can reach this address, which needs a key"),
    "server at no address": (["serve", "profile.json", "--host", "x..y"], "no server can listen .*choose another --port or --host"),
    "password in an argument": (["report", "profile.json", "postgresql://u:SECRET@host/x"], r"postgresql://u:\*\*\*@host/x"),
    "empty key": (["serve", "profile.json", "--api-key", ""], "--api-key: string should have at least 1 character"),
    "image token without an image": (["run", "profile.json", "--prompt", "x <image> y"], "<image>"),
}  # fmt: skip


def arguments_of(case: list[str], pair: Pair) -> list[str]:
    target, draft = ["--target", str(pair.target_folder)], ["--draft", str(pair.draft_folder)]
    known = {"TARGET": target, "DRAFT": draft, "PAIR": [*target, *draft]}
    return [argument for word in case for argument in known.get(word, [word])]


def contents(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def assert_one_line(stdout: str, stderr: str, message: str) -> None:
    """The mistake is the only line; the command may have said before what it does."""
    first = (
        "tuning ",
        "pricing ",
        "also here ",
        "loading the models of ",
        "measuring ",
        "checking ",
        "examining this machine",
    )
    lines = [line for line in stderr.splitlines() if not line.startswith(first)]
    assert stdout == "" and len(lines) == 1 and lines[0].startswith("autotune: "), stderr
    assert re.search(message, lines[0]), stderr


def test_every_mistake_is_one_line_and_exit_code_2(world: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written before the mistake is found."""
    monkeypatch.chdir(world)
    before = contents(world)
    for name, (case, message) in MISTAKES.items():
        result = CliRunner().invoke(main, arguments_of(case, pair))
        assert isinstance(result.exception, SystemExit), (name, result.exception)
        assert result.exit_code == 2, name
        assert_one_line(result.stdout, result.stderr, message)
        assert contents(world) == before, name


def test_libraries_print_nothing_beside_the_one_line(world: Path, pair: Pair) -> None:
    """In a separate process that loads torch, transformers and both models."""
    case, message = MISTAKES["other vocabulary"]
    before = contents(world)
    command = [*MODULE, *arguments_of(case, pair)]
    done = subprocess.run(command, cwd=world, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 2
    assert_one_line(done.stdout, done.stderr, message)
    assert contents(world) == before


def test_what_cannot_be_compared_exits_with_4(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, like every mistake, and before models are loaded."""
    monkeypatch.chdir(world)
    profile = DecodingProfile.load(world / "profile.json")
    other = profile.target.model_copy(update={"id": "another/model", "sha256": "f" * 64})
    profile.model_copy(update={"target": other}).save(world / "another.json")
    case = ["check", "profile.json", "--workload", "workload.jsonl", "--against", "another.json"]
    result = CliRunner().invoke(main, case)
    assert isinstance(result.exception, SystemExit) and result.exit_code == 4, result.exception
    assert_one_line(
        result.stdout,
        result.stderr,
        r"--against another\.json: its target is another/model, that of the checked profile is ",
    )


def test_answers_of_one_token_cannot_be_compared(
    world: Path, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill gives the only token, so that there is no decoding time and no speedup."""
    monkeypatch.chdir(world)
    single = write_workload(tmp_path, [{"prompt": "Count.", "max_new_tokens": 1, "split": "evaluate"}])
    result = CliRunner().invoke(main, ["check", "profile.json", "--workload", str(single)])
    assert isinstance(result.exception, SystemExit) and result.exit_code == 2, result.exception
    assert result.stderr.splitlines()[-1].startswith("autotune: ")
