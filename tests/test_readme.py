"""Documentation runs: every command and every line of Python in the README, as a newcomer would type them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from autotune.cli.main import main
from autotune.workloads.digits import TASKS, make_example

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "profiles" / "cpu" / "digits.decode.json"
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """Fenced blocks of a language; fences come in pairs, so every second one opens."""
    parts = re.split(r"^```(.*)\n", README, flags=re.M)[1:]
    return [parts[i + 1] for i in range(0, len(parts), 4) if parts[i] == language]


def test_every_file_of_the_tree_is_in_the_readme():
    listing = next(block for block in blocks("") if block.startswith("autotune/"))
    missing = [
        path.name
        for path in (ROOT / "autotune").rglob("*.py")
        if path.name != "__init__.py" and path.name not in listing
    ]
    assert not missing


def test_ci_examples_are_yaml_and_their_commands_exist() -> None:
    """As the CI would read them; variables are put in as it does."""
    checks = []
    for block in blocks("yaml"):
        words = list(strings_of(yaml.safe_load(block)))
        checks += [re.sub(r"\$\{\{.*?\}\}|\$\w+", "main", word) for word in words if word.startswith("autotune check")]
    assert len(checks) == 2, "one for GitHub and one for GitLab"
    for command in checks:
        check = main.get_command(click.Context(main), "check")
        assert check is not None
        context = check.make_context("check", command.split()[2:])
        assert context.params["against"] and context.params["budget_s"] == 900 and context.params["junit"]


def strings_of(value: Any) -> Iterator[str]:
    """All of a document, however deep."""
    if isinstance(value, str):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings_of(part)


@pytest.mark.slow
@pytest.mark.long
def test_readme_runs(tmp_path: Path, postgresql: str) -> None:
    """The search comes first, on a few prompts, for the other commands need its profile."""
    from PIL import Image

    lines = []
    for index in range(2):
        for task in TASKS[:4]:
            example = make_example("held-out", task, 500_000 + index)
            Image.fromarray(example.image).save(tmp_path / f"{task}{index}.png")
            lines.append(json.dumps({"prompt": example.prompt, "images": [f"{task}{index}.png"], "max_new_tokens": 40}))
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    Image.fromarray(make_example("held-out", "read", 500_000).image).save(tmp_path / "grid.png")

    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment["OMP_NUM_THREADS"] = "1"  # the other cores have tests of their own

    def run(command: str) -> str:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    quick = "--workload prompts.jsonl --budget 20s --trials 20"
    run(f"autotune search {quick} -o profile.json")
    commands = [line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    assert len(commands) >= 8
    for number, command in enumerate(filter(None, commands)):
        command = command.replace("--target TARGET --draft DRAFT --workload prompts.jsonl", "")
        # Of 220 subnets those with whole heads at one layer, and the ten of each other draft.
        command = command.replace("--space full --budget 15m", "--space full --heads 1 --injection-layer 11")
        command = command.replace("postgresql://user@host/studies", postgresql)
        if command.startswith("autotune search"):
            command += f" {quick} -o profile{number}.json"
        command = command.replace("autotune record", "autotune record --workload prompts.jsonl")
        command = command.replace("autotune profile", "autotune profile --workload prompts.jsonl --budget 10s")
        command = command.replace("autotune bench", "autotune bench --workload prompts.jsonl")
        command = command.replace("autotune check", "autotune check --workload prompts.jsonl")
        # On so few prompts, or so fast a machine, the profile may say to decode without a draft.
        command = command.replace("profile.json --against ar,wetap-lossy", f"{SHIPPED} --against ar,wetap-lossy")
        command = command.replace(
            "autotune export profile.json", "autotune export profile.json --draft digits/independent"
        )
        # The short answers of this test decide nothing about speed, and its folder has no history to time against.
        command = command.replace("--min-speedup 1.3", "--min-speedup 0.1").replace("--against main", "")
        run(command)
        if "--gpu h100" in command:
            point = json.loads((tmp_path / f"profile{number}.json").read_text())["points"][0]
            assert point["measured"] is None and point["predicted"]["estimated"]
    for number, block in enumerate(blocks("python")):
        (tmp_path / f"example{number}.py").write_text(block)
        assert run(f"{sys.executable} example{number}.py").strip()
