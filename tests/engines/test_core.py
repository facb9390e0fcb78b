"""The core, an install without extras: what its verbs import is what it depends on, and others name their extra."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.main import VERBS
from autotune.errors import EXTRAS
from tests.engines.recorded_images import image_prompts
from tests.engines.recorded_llama import LIMIT, PROMPTS
from tests.imports import ROOT
from tests.sample_documents import decoding_profile

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED_BY_OTHERS = {"pydantic_core", "starlette"}
"""Packages that another dependency, pydantic or fastapi, has in the right version."""
SEARCHES = {
    "llama": "--backend llama.cpp=model.gguf --set llama.cpp:command=bin/llama-server --workload prompts.jsonl",
    "vllm": "--backend vllm=model --set vllm:command=bin/vllm --workload prompts.jsonl",
    "images": "--backend vllm=digits/target --set vllm:command=bin/vllm --workload images.jsonl",
}
ENDED = [
    *(f"search {options} --budget 60s -o {name}.json" for name, options in SEARCHES.items()),
    *(f"{verb} {name}.json" for name in SEARCHES for verb in ("export", "report", "check", "bench")),
    "run llama.json --workload prompts.jsonl",
    *(f"{verb} --help" for verb in VERBS),
]
"""Commands that the core runs to their ends."""
REFUSED = {
    "serve llama.json --host 0.0.0.0": "which needs a key",
    "search --backend vllm=owner/name": "cache lacks files",
}
"""Commands that the core begins, and what they end with."""
NEEDING = {
    "runtime": [
        *("search", "search --gpu h100", "search --backend llama.cpp=model.gguf --backend runtime"),
        *("doctor", "measure --draft digits/star", "record", "run runtime.json --prompt x"),
        *("check runtime.json --workload digits", "bench runtime.json --workload digits"),
    ],
    "serve": ["serve runtime.json --port 0"],
    "parquet": ["bench llama.json --table runs.csv", "bench llama.json --table runs.parquet"],
}
"""Commands by the extra that they need."""
API = {"runtime": ["autotune.load('runtime.json')", "autotune.Decoder"]}


installed = functools.cache(packages_distributions)


def names_of(requirements: list[str]) -> set[str]:
    """Distributions of requirements, without the project itself."""
    names = {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements}  # type: ignore[index]
    return names - {PROJECT["name"]}


def distributions_of(packages: set[str]) -> set[str]:
    """Distributions of import names, which are installed here, without those that others pin."""
    known = installed()
    return {known.get(package, [package])[0].lower().replace("_", "-") for package in packages - PINNED_BY_OTHERS}


@pytest.fixture
def commands(folder: Path) -> list[list[str]]:
    """The commands above, in a folder with all that they read."""
    texts = [{"prompt": text, "max_new_tokens": LIMIT} for text in PROMPTS]
    images = []
    for number, prompt in enumerate(image_prompts()):
        prompt.images[0].save(folder / f"{number}.png")
        asked = {"prompt": prompt.settings.text, "max_new_tokens": prompt.settings.max_new_tokens}
        images.append(asked | {"images": [f"{number}.png"]})
    for name, rows in (("prompts", texts), ("images", images)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    decoding_profile().save(folder / "runtime.json")
    lines = [*ENDED, *REFUSED, *(line for lines in NEEDING.values() for line in lines)]
    return [line.split() for line in lines] + [["python", code] for lines in API.values() for code in lines]


def drive(commands: list[list[str]], folder: Path, python: Path | str, *switches: str, **environment: str) -> Any:
    (folder / "commands.json").write_text(json.dumps(commands))
    driver = ROOT / "tests" / "engines" / "core_driver.py"
    words = [str(python), "-P", str(driver), "commands.json", "output.json", *switches]
    environment = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(folder)} | environment
    subprocess.run(words, cwd=folder, env=environment, check=True)
    return json.loads((folder / "output.json").read_text())


def check_outcomes(commands: list[list[str]], outcomes: list[tuple[int, str]]) -> None:
    found = {
        " ".join(words).removeprefix("python "): outcome for words, outcome in zip(commands, outcomes, strict=True)
    }
    for line in ENDED:
        assert found[line][0] == 0, (line, found[line])
    for line, message in REFUSED.items():
        assert found[line][0] == 2 and message in found[line][1], (line, found[line])
    for needing, code in ((NEEDING, 2), (API, 1)):
        for extra, lines in needing.items():
            advice = f"this needs the extra {extra}: pip install 'autotune-speculative[{extra}]'"
            for line in lines:
                assert found[line][0] == code and found[line][1].endswith(advice), (line, found[line])


@pytest.mark.long
def test_the_core_imports_what_it_depends_on(commands: list[list[str]], folder: Path) -> None:
    """In both directions, with text and images."""
    output = drive(commands, folder, sys.executable, "--here", PYTHONPATH=str(ROOT))
    check_outcomes(commands, output["outcomes"])
    others = {*output["imported"]} - set(sys.stdlib_module_names) - {"autotune"}
    assert distributions_of(others) == names_of(PROJECT["dependencies"])


def test_packages_are_named_with_an_extra_that_installs_them() -> None:
    extras = PROJECT["optional-dependencies"]
    for extra in set(EXTRAS.values()):
        packages = {package for package, name in EXTRAS.items() if name == extra}
        assert distributions_of(packages) <= names_of(extras[extra]), extra
    missing = names_of(extras["runtime"]) - distributions_of(set(EXTRAS))
    assert not missing, "autotune/errors.py does not name them"


@functools.cache
def wheel(folder: Path) -> Path:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True)
    return next(folder.glob("*.whl"))


@pytest.mark.nightly
def test_the_wheel_alone_runs_the_verbs_of_engines(commands: list[list[str]], folder: Path) -> None:
    """In an environment with nothing but the core; the engines are processes of this one."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    subprocess.run([str(venv / "bin" / "pip"), "install", "--quiet", str(wheel(folder / "dist"))], check=True)
    output = drive(commands, folder, venv / "bin" / "python")
    check_outcomes(commands, output["outcomes"])
    listed = subprocess.run([str(venv / "bin" / "pip"), "list", "--format=json"], capture_output=True, check=True)
    installed = {entry["name"].lower().replace("_", "-") for entry in json.loads(listed.stdout)}
    assert names_of(PROJECT["dependencies"]) <= installed
    assert not installed & names_of(PROJECT["optional-dependencies"]["runtime"])
