"""The composite action of GitHub: its steps run in bash with the environment that GitHub gives them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from autotune.documents.decoding_profile import DecodingProfile
from tests.check.engine_folder import autotune
from tests.imports import ROOT
from tests.sample_documents import DEVICE

TEXT = (ROOT / "action.yml").read_text()
ACTION: dict[str, Any] = yaml.safe_load(TEXT)
PROGRAM = f'PYTHONPATH={ROOT} exec {sys.executable} -m autotune "$@"'
SHELL = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")  # as GitHub starts it


@dataclass
class Job:
    """The result of the steps that are shell scripts."""

    code: int
    """The exit code of the first step that failed, or of the last."""
    log: str
    summary: str
    outputs: dict[str, str]
    installed: str
    """The arguments of ``python`` in the step that installs."""


@contextmanager
def program_in_this_process(folder: Path) -> Iterator[str]:
    """The line of a script that hands its arguments to ``autotune`` in a thread here, whose engines start at once."""
    request, reply = folder / "request", folder / "reply"

    def answer() -> None:
        while words := request.read_text().split("\0")[:-1]:
            done = autotune(*words)
            reply.write_text(f"{done.exit_code}\n{done.output}")

    for pipe in (request, reply):
        os.mkfifo(pipe)
    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield f'printf "%s\\0" "$@" > {request}; {{ read -r code; cat; }} < {reply}; exit $code'
    finally:
        request.write_text("")
        thread.join()


def run_action(folder: Path, program: str = PROGRAM, **given: str) -> Job:
    """Run the action in a folder, in which ``python`` writes its arguments down.

    Args:
        program: the line of the script that is ``autotune``.
    """
    inputs = {name: str(one.get("default", "")) for name, one in ACTION["inputs"].items()} | given
    known = {f"inputs.{name}": value for name, value in inputs.items()} | {"github.action_path": "/the action"}
    runner = folder / "runner"
    scripts = {"python": f'echo "$@" >> {runner}/python.txt', "autotune": program}
    runner.mkdir(exist_ok=True)
    for name, line in scripts.items():
        (runner / name).write_text(f"#!/bin/bash\n{line}\n")
        (runner / name).chmod(0o755)
    files = {"GITHUB_STEP_SUMMARY": runner / "summary.md", "GITHUB_OUTPUT": runner / "output.txt"}
    for file in (*files.values(), runner / "python.txt"):
        file.write_text("")
    job = Job(0, "", "", {}, "")
    for step in ACTION["runs"]["steps"]:
        if "run" not in step or job.code:
            continue
        own = {name: resolved(value, known) for name, value in step.get("env", {}).items()}
        path = f"{runner}:{os.environ['PATH']}"
        done = subprocess.run(
            [*SHELL, step["run"]],
            cwd=folder / resolved(step.get("working-directory", "."), known),
            env={**os.environ, **map_text(files), "RUNNER_TEMP": str(runner), "PATH": path, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        job.code, job.log = done.returncode, job.log + done.stdout
    job.summary = files["GITHUB_STEP_SUMMARY"].read_text()
    job.outputs = dict(line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines())
    job.installed = (runner / "python.txt").read_text().strip()
    return job


def map_text(values: dict[str, Path]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def resolved(text: str, known: dict[str, str]) -> str:
    """A value with the expressions that a shell step has in its environment."""
    return re.sub(r"\$\{\{ (\S+) \}\}", lambda match: known[match[1]], text)


def test_actions_are_pinned_and_every_input_is_used() -> None:
    uses = re.findall(r"uses: (.*)", TEXT)
    assert len(uses) == 3
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in uses), uses
    assert {*re.findall(r"inputs\.([\w-]+)", TEXT)} == ACTION["inputs"].keys()
    steps = ACTION["runs"]["steps"]
    assert all("${{" not in step.get("run", "") for step in steps), "a script reads the text of others from variables"
    assert all(step["shell"] == "bash" for step in steps if "run" in step)


@pytest.mark.parametrize(
    ("given", "package"),
    [
        ({}, "/the action"),
        ({"extra": "runtime"}, "/the action[runtime]"),
        ({"version": "0.1.0", "extra": "runtime"}, "autotune-speculative[runtime]==0.1.0"),
    ],
)
def test_the_installed_package(given: dict[str, str], package: str, tmp_path: Path) -> None:
    job = run_action(tmp_path, profile="none.json", **given)
    assert job.installed == f"-m pip install --quiet {package}"
    assert job.code == int(job.outputs["exit-code"]) == 2 and "no such file" in job.summary


def test_exit_codes_reports_and_the_summary(engine_folder: Path) -> None:
    """On another device than the profile's, counts decide; on its own, a second is too short for the times."""
    profile = DecodingProfile.load("profile.json")
    profile.model_copy(update={"hardware": DEVICE}).save("other.json")
    engine = f"{engine_folder}/llama-server --seed 1"
    cases: list[tuple[dict[str, str], int, int, str]] = [
        ({"profile": "other.json", "command": engine}, 0, 0, "| passed | counts | prompts.jsonl | 6 of 6 prompts"),
        ({"profile": "other.json", "command": f"{engine} --loses-one"}, 0, 0, "| warned | counts | prompts.jsonl |"),
        ({"command": f"{engine} --loses-one"}, 1, 1, "| failed | counts | prompts.jsonl | 5 of 6 prompts have"),
        ({"command": engine, "budget": "0.1s"}, 0, 3, "| inconclusive | time against the profile | prompts.jsonl |"),
        ({"command": engine, "budget": "0.1s", "strict": "true"}, 3, 3, "profile.json**: inconclusive: --budget 0s"),
        ({"workload": "none.jsonl"}, 2, 2, "profile.json**: autotune: none.jsonl: no such file"),
    ]
    with program_in_this_process(engine_folder) as program:
        for given, code, exit_code, text in cases:
            job = run_action(engine_folder, program, **{"profile": "profile.json", **given})
            assert (job.code, int(job.outputs["exit-code"])) == (code, exit_code), job.log
            assert text in job.summary, job.summary
            assert ("::warning title=autotune check::inconclusive" in job.log) is (exit_code == 3 > code)
            reported = ElementTree.parse(job.outputs["junit"]).findall(".//testcase")
            assert reported[0].get("name") == ("check" if code == 2 else "lossless")


@pytest.mark.parametrize("seeds", [range(1, 2), pytest.param(range(2, 21), marks=pytest.mark.nightly)])
def test_jobs_with_the_engine_of_the_profile_pass_and_those_with_another_build_do_not(
    engine_folder: Path, seeds: range
) -> None:
    with program_in_this_process(engine_folder) as program:
        for switches, codes in (("", {0}), ("--slower 1.15", {1}), ("--loses-one", {1})):
            engines = [f"{engine_folder}/llama-server --seed {seed} {switches}" for seed in seeds]
            jobs = [run_action(engine_folder, program, profile="profile.json", command=engine) for engine in engines]
            for seed, job in zip(seeds, jobs, strict=True):
                print(f"seed {seed} {switches}: exit code {job.code}\n{job.summary}")
            assert {job.code for job in jobs} == codes
