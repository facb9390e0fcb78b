"""Writes the bundled prompts that come from installed sources, so that they are the same on every machine.

    python benchmarks/bundled_prompts.py code      # drafts/code/workload.jsonl and drafts/code/corpus.json
    python benchmarks/bundled_prompts.py passages  # drafts/digits/passages.json

The first takes about a minute, the second a few seconds. Both depend on the versions of Python and of the packages: another interpreter writes other files, with which the bundled
models were neither trained nor judged. ``corpus.json`` records the versions, licences and sizes that the stored files are from.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from autotune.files import data_root, write_bytes
from autotune.workloads.code.corpus import (
    CODE_SPLITS,
    STANDARD_LIBRARY,
    CodeSplit,
    common_lines,
    corpus,
    installed_versions,
    packages,
    share_known,
)
from autotune.workloads.code.examples import CODE_TASKS, make_example
from autotune.workloads.prompt import AnsweredPrompt

PROMPTS_PER_TASK = 40
MAX_NEW_TOKENS, PASSAGE_TOKENS = 250, 128
MAX_CHARS = 1500  # prompt and answer together: about 450 tokens
MAX_KNOWN = 0.2  # share of a judged text's long lines that may occur in training files
JUDGED: tuple[CodeSplit, ...] = ("tune", "evaluate")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@click.group()
def main() -> None:
    """Write the bundled prompts."""


@main.command()
def code() -> None:
    """Write the judged prompts of the pair `code`, with reference answers, the tasks in turn."""
    known = common_lines(corpus("train"))
    lines = []
    for split in JUDGED:
        chosen: dict[str, list[AnsweredPrompt]] = {task: [] for task in CODE_TASKS}
        seen: set[str] = set()
        for task, found in chosen.items():
            index = 0
            while len(found) < PROMPTS_PER_TASK:
                example = make_example(split, task, index)
                index += 1
                text = f"{example.prompt}\n{example.answer}"
                if text in seen or len(text) > MAX_CHARS or share_known(text, known) > MAX_KNOWN:
                    continue
                seen.add(text)
                limit = PASSAGE_TOKENS if example.is_open else MAX_NEW_TOKENS
                found.append(
                    AnsweredPrompt(
                        prompt=example.prompt, task=task, split=split, max_new_tokens=limit, answer=example.answer
                    )
                )
        for number in range(PROMPTS_PER_TASK):
            lines += [chosen[task][number].model_dump_json(exclude_unset=True) for task in CODE_TASKS]
    folder = data_root() / "drafts" / "code"
    write_bytes(folder / "workload.jsonl", "".join(f"{line}\n" for line in lines).encode())
    write_bytes(folder / "corpus.json", (json.dumps(inventory(), indent=1) + "\n").encode())
    click.echo(f"{len(lines)} prompts")


def inventory() -> list[dict[str, Any]]:
    """Split, package, version, licence, files and characters of every part of the corpus."""
    versions, rows = installed_versions(), []
    for split in CODE_SPLITS:
        licences = {STANDARD_LIBRARY: "PSF-2.0", **packages().of(split)}
        files, chars = Counter[str](), Counter[str]()
        for file in corpus(split):
            files[file.package] += 1
            chars[file.package] += len(file.text)
        rows += [
            {
                "split": split,
                "package": name,
                "version": versions[name],
                "licence": licences[name],
                "files": files[name],
                "characters": chars[name],
            }
            for name in sorted(files, key=str.lower)
        ]
    return rows


@main.command()
def passages() -> None:
    """Write the docstrings of the standard library that the task `continue` of the digits uses."""
    texts = docstrings(Path(sysconfig.get_path("stdlib")))
    write_bytes(data_root() / "drafts" / "digits" / "passages.json", (json.dumps(texts, indent=0) + "\n").encode())
    click.echo(f"{len(texts)} passages")


def docstrings(source: Path) -> list[str]:
    """Long ASCII docstrings below a folder, in one line each, sorted."""
    found = set()
    for path in sorted(source.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue  # some distributions contain deliberately broken sources
        for node in documented(tree):
            text = " ".join((ast.get_docstring(node, clean=False) or "").split())
            if len(text) >= 200 and text.isascii():
                found.add(text)
    return sorted(found)


def documented(node: ast.AST) -> Iterator[Documented]:
    """Nodes that may have a docstring. Expressions are skipped, because they define nothing."""
    if isinstance(node, Documented):
        yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield from documented(child)


if __name__ == "__main__":
    main()
