"""The documentation holds: commands parse, examples run, and the quick start does what the README says."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from autotune.cli.main import main
from autotune.training.recipe import Recipe
from autotune.workloads.prompt import Prompt
from autotune.workloads.workload import bundled_file, load_workload
from tests.tiny_models import Pair

ROOT = Path(__file__).parent.parent
GRID = bundled_file("digits").parent / "images" / "evaluate-0-read.png"
SHIPPED = ROOT / "profiles" / "cpu" / "digits.decode.json"
README = (ROOT / "README.md").read_text()
PAGES = {page.name: page.read_text() for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]}


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    # Fences come in pairs: language, block, "", text between blocks.
    parts = re.split(r"^```(.*)\n", text, flags=re.M)[1:]
    return [block for opening, block in zip(parts[::4], parts[1::4], strict=True) if opening == language]


def commands(text: str) -> list[str]:
    """Lines of the shell blocks, without comments."""
    lines = [line.partition("  #")[0].strip() for block in blocks(text, "sh") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_the_readme_is_short_and_shows_every_folder() -> None:
    assert len(README.splitlines()) <= 170 and len(README.encode()) <= 12 * 1024
    (listing,) = (block for block in blocks(README, "") if block.startswith("autotune/"))
    folders = {path.name for path in (ROOT / "autotune").iterdir() if path.is_dir() and "__" not in path.name}
    assert {
        word.strip("/") for word in re.findall(r"^  (?:(?:\w+/ ?)+)", listing, flags=re.M) for word in word.split()
    } == folders


def test_every_command_in_the_documentation_parses() -> None:
    """Verbs, options and values exist; files that the text talks about need not."""
    found = 0
    for page, text in PAGES.items():
        for command in commands(text) + [
            word
            for block in blocks(text, "yaml")
            for word in strings_of(yaml.safe_load(block))
            if word.startswith("autotune ")
        ]:
            words = shlex.split(re.sub(r"\$\{\{.*?\}\}|\$\w+", "main", command))
            if words[0] == "make":
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.M), f"{page}: {command}"
            elif words[0] == "python":
                assert (ROOT / words[1]).exists(), f"{page}: {command}"
            elif words[0] == "autotune":
                verb = main.get_command(click.Context(main), words[1])
                assert verb is not None, f"{page}: {command}"
                verb.make_context(words[1], words[2:], resilient_parsing=False)
                found += 1
    assert found >= 25


def test_inputs_in_the_documentation_are_valid() -> None:
    recipes = [block for text in PAGES.values() for block in blocks(text, "yaml") if "autotune.recipe" in block]
    for block in recipes:
        content = yaml.safe_load(block)
        content.pop("schema")
        Recipe.model_validate_json(json.dumps(content))
    prompts = [line for text in PAGES.values() for line in re.findall(r'^\{"prompt": .*\}$', text, flags=re.M)]
    for line in prompts:
        content = json.loads(line)
        content.pop("answer", None)
        Prompt.model_validate(content)
    for text in PAGES.values():
        for block in blocks(text, "json"):
            json.loads(block)
    assert recipes and len(prompts) >= 3


def strings_of(value: Any) -> Iterator[str]:
    """All strings in a nested document."""
    if isinstance(value, str):
        yield from (line.strip() for line in value.splitlines())
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings_of(part)


def test_every_command_of_the_quick_start_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``autotune run`` and the Python block of the README, with the shipped profile of the bundled pair."""

    monkeypatch.chdir(tmp_path)
    (tmp_path / "profile.json").write_text(SHIPPED.read_text())
    shutil.copy(GRID, tmp_path / "grid.png")
    run = [command for command in commands(README) if command.startswith("autotune run")]
    assert len(run) == 2
    for command in run:
        done = CliRunner().invoke(main, [*shlex.split(command)[1:], "--max-new-tokens", "8"])
        assert done.exit_code == 0 and done.stdout.strip(), done.output
    (block,) = blocks(README, "python")
    exec(compile(block.replace("max_new_tokens=64", "max_new_tokens=8"), "README.md", "exec"), {})


def test_examples_run(tmp_path: Path, text_pair: Pair) -> None:
    """The shipped profile, and a pair without a profile."""

    image = tmp_path / "grid.png"
    shutil.copy(GRID, image)
    runpy.run_path(str(ROOT / "examples/decode_with_profile.py"))["main"](SHIPPED, image)
    runpy.run_path(str(ROOT / "examples/transformers_generate.py"))["main"](SHIPPED, "USER: Count to ten. ASSISTANT:")
    arguments = str(text_pair.target_folder), str(text_pair.draft_folder), "Count to ten."
    runpy.run_path(str(ROOT / "examples/decode_without_profile.py"))["main"](*arguments)


@pytest.mark.nightly
@pytest.mark.long
def test_quick_start_in_processes_of_its_own(tmp_path: Path, postgresql: str) -> None:
    """Every command of the README, in order, as a newcomer types it. Searches are cut to a few prompts."""

    lines = []
    prompts = load_workload("digits", "evaluate", num_prompts=12).prompts
    for index, first in enumerate((0, 8)):
        for prompt in prompts[first : first + 4]:
            name = f"{prompt.settings.task}{index}.png"
            prompt.pixels[0].save(tmp_path / name)
            lines.append(json.dumps({"prompt": prompt.settings.prompt, "images": [name], "max_new_tokens": 40}))
        lines.append(json.dumps({"prompt": f"The number {index} is", "max_new_tokens": 40}))
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    shutil.copy(GRID, tmp_path / "grid.png")

    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment["OMP_NUM_THREADS"] = "1"  # the other cores run other tests

    def run(command: str) -> str:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    quick = "--workload prompts.jsonl --budget 40s --trials 20"
    run(f"autotune search {quick} -o profile.json")
    # tests/serving runs the search of an engine, which refuses images.
    for number, command in enumerate(one for one in commands(README) if "--engine" not in one):
        command = command.replace("--target TARGET --draft DRAFT --workload prompts.jsonl", "")
        # Of 210 subnets those with all heads at one layer, and the ten of the other draft.
        command = command.replace("--space full --budget 15m", "--space full --heads 1 --injection-layer 11")
        command = command.replace("postgresql://user@host/studies", postgresql)
        if command.startswith("autotune search"):
            command += f" {quick}" + ("" if " -o " in command else f" -o profile{number}.json")
        for verb in ("bench", "check"):
            command = command.replace(f"autotune {verb}", f"autotune {verb} --workload prompts.jsonl")
        run(command)
        if "--gpu h100" in command:
            point = json.loads((tmp_path / "h100.json").read_text())["points"][0]
            assert point["measured"] is None and point["predicted"]["estimated"]
    (tmp_path / "example.py").write_text(blocks(README, "python")[0])
    assert run(f"{sys.executable} example.py").strip()


@pytest.mark.nightly
def test_the_commands_that_repeat_a_paper_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the bundled pair, 12 tokens of a few prompts, and recipes of two steps."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for number, prompt in enumerate(load_workload("digits", "evaluate", num_prompts=12).prompts):
        prompt.images[0].save(f"{number}.png")
        split = ["train", "tune", "evaluate"][number % 3]
        rows.append({"prompt": prompt.settings.text, "images": [f"{number}.png"], "max_new_tokens": 12, "split": split})
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = {"TARGET": "digits/target", "SMALL": "digits/independent", "30m": "60s"}
    page = re.sub("|".join(names), lambda found: names[found[0]], PAGES["repeat-a-paper.md"])
    (recipe,) = (re.sub(r"steps: \d+", "steps: 2", block) for block in blocks(page, "yaml"))
    for kind in ("star", "dream", "specvlm"):
        text = recipe if kind == "star" else recipe.replace(", subnets: random", "")
        Path(f"{kind}.yaml").write_text(text.replace("model: star", f"model: {kind}"))
    for command in commands(page):
        verb = shlex.split(command)[1]
        few = {"bench": ["--prompts", "2", "--max-new-tokens", "12"], "search": ["--trials", "2", "--jobs", "1"]}
        done = CliRunner().invoke(main, [*shlex.split(command)[1:], *few.get(verb, [])])
        assert done.exit_code == 0, f"{command}: {done.output}"
