"""Options: in groups of the help, from a file and from the environment; what is printed first."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import pytest
from click.testing import CliRunner

from autotune.cli.main import VERBS, main
from autotune.cli.verb import GROUPS, Verb, in_group, options_of, word_of
from autotune.search import pipeline
from autotune.study.search_settings import SearchSettings
from tests.cli.test_main import ENVIRONMENT, HEAVY, REPOSITORY
from tests.sample_documents import decoding_profile

MOST_VISIBLE = 16


def verb(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[SearchSettings]:
    """The settings of searches, which do nothing, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    found: list[SearchSettings] = []
    monkeypatch.setattr(pipeline, "search", lambda settings, console: found.append(settings) or Mock())
    return found


def search(*words: str, **environment: str) -> str:
    """The lines of standard error."""
    return CliRunner().invoke(main, ["search", *words], env=environment).stderr


@pytest.mark.parametrize("name", VERBS)
def test_help_describes_few_options_in_groups_and_names_the_rare_ones(name: str) -> None:
    options, page = options_of(verb(name)), CliRunner().invoke(main, [name, "--help"]).stdout
    visible = [option for option in options if not option.hidden]
    assert len(visible) <= MOST_VISIBLE
    assert sorted(word_of(one) for group in GROUPS for one in in_group(options, group)) == sorted(map(word_of, options))
    described = page.partition("\nRare options")[0]
    for option in options:
        name = rf"--{word_of(option)}\b(?!-)"
        assert bool(re.search(f"^  (-o, )?{name}", described, re.M)) == (not option.hidden), option.name
        assert re.search(name, page), option.name


def test_an_option_means_one_thing_in_all_verbs() -> None:
    names: dict[str, set[str | None]] = {}
    for verb_name in VERBS:
        for option in options_of(verb(verb_name)):
            names.setdefault(word_of(option), set()).add(option.name)
            assert word_of(option) != "target" or "--model" in option.opts, verb_name
    assert all(len(names[word]) == 1 for word in ("gpu", "device", "target", "study", "against", "arms", "set"))


def test_a_file_gives_options_and_the_environment_and_the_command_line_come_first(
    searched: list[SearchSettings],
) -> None:
    content: dict[str, Any] = {
        "budget": "10m",
        "draft": "retrieval",
        "seed": 3,
        "capture-sizes": [64, 160],
        "jobs": None,
    }
    content |= {"set": {"heads": [1.0, 0.5], "d_max": 8}, "chat-template-kwargs": {"a": True}, "model": "digits/target"}
    Path("options.yaml").write_text(json.dumps(content))
    assert "demonstration" not in search("--config", "options.yaml", "--seed", "4", AUTOTUNE_SEARCH_BUDGET="20m")
    (found,) = searched
    assert (found.budget_s, found.seed, found.drafts, found.capture_sizes) == (1200.0, 4, ("retrieval",), (64, 160))
    assert found.changes == ("heads=[1.0, 0.5]", "d_max=8") and found.chat_template_kwargs == {"a": True}
    assert found.command.count("""--chat-template-kwargs '{"a": true}'""") == 1
    search(AUTOTUNE_SEARCH_CONFIG="options.yaml", AUTOTUNE_SEARCH_MAX_NEW_TOKENS="9")
    assert (searched[1].budget_s, searched[1].max_new_tokens) == (600.0, 9)


@pytest.mark.parametrize("name", VERBS)
def test_every_option_has_an_environment_variable(name: str) -> None:
    arguments = ["x" for part in verb(name).params if isinstance(part, click.Argument) and part.required]
    command = verb(name)
    command.make_context(name, arguments)
    names = {option.envvar for option in options_of(command)} - {"AUTOTUNE_API_KEY"}
    prefix = f"AUTOTUNE_{name.upper()}_"
    assert isinstance(command, Verb) and f"{prefix}CONFIG" in names
    assert all(isinstance(known, str) and known.startswith(prefix) and known.isupper() for known in names)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("bugdet: 10m", "search has no option 'bugdet'; did you mean 'budget'"),
        ("budget_s: 10m", "no option 'budget_s'; did you mean 'budget'"),
        ("config: x.yaml", "no option 'config'"),
        ("budget: 10x", "'--budget': '10x' is not a duration"),
        ("seed: [1, 2]", "'--seed': '1,2' is not a valid integer"),
        ("json: perhaps", "'--json': 'perhaps' is not a valid boolean"),
        ("set: {d_mx: 8}", "--set d_mx=8: space quick has no dimension 'd_mx'"),
        ("- budget", "a file of options has lines such as 'budget: 10m'"),
        ("", "a file of options has lines"),
        ("budget: 1\nbudget: 2", "occurs twice"),
    ],
)
def test_a_mistake_in_a_file_of_options_is_one_line(searched: list[SearchSettings], content: str, message: str) -> None:
    Path("options.yaml").write_text(content)
    result = CliRunner().invoke(main, ["search", "--config", "options.yaml"])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and message in result.stderr, result.stderr
    assert not searched


def test_no_command_prints_the_help_as_it_is() -> None:
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 2
    assert result.stderr == CliRunner().invoke(main, ["--help"]).stdout.replace("Usage: main", "Usage: autotune")


FIRST = f"""
import sys
from autotune.cli.main import main

class Stop(BaseException): ...

class Watched:
    def write(self, text):
        if not text:  # click asks whether bytes can be written
            return
        text = text.decode() if isinstance(text, bytes) else text
        print(sorted({HEAVY!r} & set(sys.modules)), text, flush=True)
        raise Stop
    def flush(self): ...
    def isatty(self): return False

sys.stderr = Watched()
try:
    main(sys.argv[1:])
except Stop: ...
"""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["search"],
            "no --target: tuning the bundled demonstration `digits`; give --target MODEL for a model of your own",
        ),
        (["search", "--model", "digits/target", "--draft", "retrieval"], "tuning digits/target"),
        (["search", "--backend", "vllm", "--target", "t", "--workload", "digits"], "tuning t in vllm"),
        (["doctor", "--target", "digits/target"], "examining this machine and digits/target"),
        (["run", "profile.json", "--prompt", "x"], "loading the models of profile.json"),
        (["serve", "profile.json"], "loading the models of profile.json"),
        (["bench", "profile.json", "--workload", "digits"], "measuring profile.json"),
        (["check", "profile.json", "--workload", "digits"], "checking profile.json"),
    ],
)
def test_the_first_line_comes_before_heavy_imports(words: list[str], line: str, tmp_path: Path) -> None:
    decoding_profile().save(tmp_path / "profile.json")
    command = [sys.executable, "-c", FIRST, *words]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    heavy, _, said = done.stdout.partition("] ")
    assert said.strip() == line and "torch" not in heavy, done.stdout
    assert words[0] != "search" or heavy == "[", "numba takes seconds"


def test_the_page_of_the_command_line_has_every_option_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mkdocs", "mkdocs.structure", "mkdocs.structure.files"):
        monkeypatch.setitem(sys.modules, name, Mock())
    monkeypatch.syspath_prepend(REPOSITORY / "docs")
    import hooks

    source = (REPOSITORY / "docs/cli.md").read_text()
    page = hooks.on_page_markdown(source, page=Mock(file=Mock(src_uri="cli.md")))
    assert "UNSET" not in page and "<!--" not in page
    for name in VERBS:
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert all(
            f"`--{word_of(option)}" in section or f", --{word_of(option)}" in section
            for option in options_of(verb(name))
        )
    assert "Time in which the search ends once its models are loaded, such as 90s, 10m or 1h.  [default: 5m]" in page
    without = [name for name in VERBS if "json" not in map(word_of, options_of(verb(name)))]
    assert "Every verb but `{}`, `{}`, `{}` and `{}` accepts `--json`.".format(*without) in source
