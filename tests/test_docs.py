"""The documentation holds: commands parse, examples run, and the quick start does what the README says. Every sentence
has a line of its own.
"""

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


def prose_lines(text: str) -> list[tuple[int, str]]:
    """Numbered lines outside of code blocks, tables, markers, pictures and headings."""
    block = r"^ *```.*?^ *```$|^<!-- (?:table|figure).*?^<!-- /"
    without_blocks = re.sub(block, lambda match: "\n" * match[0].count("\n"), text, flags=re.S | re.M)
    return [
        (number, line)
        for number, line in enumerate(without_blocks.splitlines(), start=1)
        if not re.match(r" *(?:\||<|!\[|#|:::|    )", line)
    ]


ABBREVIATIONS = r"(?<!\be\.g)(?<!\bi\.e)(?<!\bet al)(?<!\beq)(?<!\b[A-Z])(?<!^\d)"


def sentence_problems(text: str) -> list[str]:
    """Lines of prose that hold the end of one sentence and the beginning of another, or more than 200 characters."""
    found = []
    for number, line in prose_lines(text):
        plain = re.sub(r"`[^`]*`|\]\([^)]*\)|^ *(?:\* |\d+\. )?\*\*[^*]*\*\*", "code", line).strip()
        if re.search(ABBREVIATIONS + r"[.?!][\")*]* +\S", plain):
            found.append(f"line {number} holds two sentences: {line}")
        if len(line) > 200:
            found.append(f"line {number} has {len(line)} characters: {line}")
    return found


def test_the_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 110
    assert [line for line in lines if len(line) > 120 and not line.startswith(("|", "<!--"))] == []


def test_the_architecture_shows_every_folder() -> None:
    rows = re.findall(r"^\| (`\w+/`.*?) \|", PAGES["architecture.md"], flags=re.M)
    shown = {name for row in rows for name in re.findall(r"`(\w+)/`", row)}
    assert shown == {path.name for path in (ROOT / "autotune").iterdir() if path.is_dir() and "__" not in path.name}


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", *sorted(path.name for path in (ROOT / "docs").glob("*.md"))])
def test_every_sentence_has_a_line_and_no_cell_a_paragraph(page: str) -> None:
    assert sentence_problems(PAGES[page]) == []
    written = re.sub(r"^<!-- table.*?^<!-- /", "", PAGES[page], flags=re.S | re.M)
    cells = [cell for line in written.splitlines() if line.startswith("|") for cell in line.split(" | ")]
    assert [cell for cell in cells if len(cell) > 310] == []


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (1, line)
        for line in (
            "It runs. It ends.",
            "* It runs (`a. b`). `c` ends.",
            "See [it](a.md). [That](b.md) too.",
            "word " * 41,
            "Does it run? Yes.",
        )
    ]
    + [
        (0, line)
        for line in (
            "It reads `a. b` and [c](e. f.md).",
            "1. It runs.",
            "* **Bold words.** A sentence follows them.",
            "```text\nOne. Two.\n```",
            "| One. | Two. Three. |",
            "Li et al. 2024 differ, see eq. 3.",
        )
    ],
)
def test_second_sentences_and_long_lines_are_found_but_not_in_code_tables_and_abbreviations(
    number: int, line: str
) -> None:
    assert len(sentence_problems(f"# Title\n\n{line}\n")) == number


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M), flags=re.M)
    plain = [re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", title).lower()) for title in titles]
    return {re.sub(r"\s+", "-", title.strip()) for title in plain}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))])
def test_links_to_pages_and_sections_work(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        # Schemas are generated with the site; the anchors of pictures choose the scheme.
        if link.startswith("http") or name.startswith("schemas/"):
            continue
        linked = page.parent / name if name else page
        assert linked.exists(), link
        assert not anchor or linked.suffix != ".md" or anchor in anchors(linked.read_text()), link


def test_the_readme_says_which_verbs_print_json() -> None:
    context = click.Context(main)
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    verbs = {name: verb for name, verb in commands.items() if verb is not None and not verb.hidden}
    without = {name for name, verb in verbs.items() if all("--json" not in option.opts for option in verb.params)}
    (sentence,) = re.findall(r"^Every verb but (.*) prints its result as JSON with `--json`", README, flags=re.M)
    assert set(re.findall(r"`(\w+)`", sentence)) == without
    shown = re.findall(r"^\| (`autotune .*?) \|", README, flags=re.M)
    assert {name for row in shown for name in re.findall(r"`(?:autotune )?(\w+)`", row)} == set(verbs)


def test_the_front_page_shows_a_command_on_its_first_screen() -> None:
    assert "```sh\nautotune search" in "\n".join(PAGES["index.md"].splitlines()[:25])


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
    assert run
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
    shown = [command for command in commands(README) if command.startswith("autotune")]
    shown += ["autotune bench profile.json --workload prompts.jsonl --prompts 16"]
    shown += ["autotune check profile.json --workload prompts.jsonl", "autotune report profile.json -o report.html"]
    shown += [f"autotune search --storage {postgresql}"]
    for number, command in enumerate(shown):
        command = command.replace("--target TARGET --workload prompts.jsonl", "")
        command = command.replace("--target smollm2 --budget 10m", "")
        if command.startswith("autotune search"):
            command += f" {quick}" + ("" if " -o " in command else f" -o profile{number}.json")
        run(command)
        if "--gpu h100" in command:
            point = json.loads((tmp_path / "h100.json").read_text())["point"]
            assert point["measured"] is None and point["predicted"]["estimated"]
    (tmp_path / "example.py").write_text(blocks(README, "python")[0])
    assert run(f"{sys.executable} example.py").strip()


@pytest.mark.nightly
def test_the_commands_that_repeat_a_paper_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the bundled pair, 12 tokens of a few prompts, and recipes of two steps."""
    monkeypatch.chdir(tmp_path)
    rows = []
    prompts = [prompt for prompt in load_workload("digits", "evaluate", num_prompts=32).prompts if prompt.images]
    for number, prompt in enumerate(prompts[:12]):
        prompt.images[0].save(f"{number}.png")
        split = ["train", "tune", "evaluate"][number % 3]
        rows.append({"prompt": prompt.settings.text, "images": [f"{number}.png"], "max_new_tokens": 12, "split": split})
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = {"TARGET": "digits/target", "SMALL": "digits/independent", "30m": "60s"}
    page = re.sub("|".join(names), lambda found: names[found[0]], PAGES["repeat-a-paper.md"])
    (recipe,) = (
        re.sub(r"steps: \d+, batch_size: \d+", "steps: 2, batch_size: 2", block) for block in blocks(page, "yaml")
    )
    for kind in ("star", "dream", "specvlm"):
        text = recipe if kind == "star" else recipe.replace(", subnets: random", "")
        Path(f"{kind}.yaml").write_text(text.replace("model: star", f"model: {kind}"))
    for command in commands(page):
        verb = shlex.split(command)[1]
        few = {"bench": ["--prompts", "2", "--max-new-tokens", "12"], "search": ["--trials", "2", "--jobs", "1"]}
        done = CliRunner().invoke(main, [*shlex.split(command)[1:], *few.get(verb, [])])
        assert done.exit_code == 0, f"{command}: {done.output}"
