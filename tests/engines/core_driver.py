"""Runs commands in one process in which the packages of all extras are missing, and says what the package imports.

``python -P core_driver.py COMMANDS.json OUTPUT.json``: the commands are lists of words, of the command ``autotune``, or
an expression of Python after ``python``. The output has each one's exit code and last line on standard error, and the
names that modules of ``autotune`` import. With ``--here`` the engines play transcripts back in this process.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.abc
import io
import json
import sys
from pathlib import Path
from typing import Any

from autotune.errors import EXTRAS

original = builtins.__import__
imported: set[str] = set()


class _Missing(importlib.abc.MetaPathFinder):
    """Finds no package of an extra, as in the core."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def noted(name: str, namespace: Any = None, *others: Any, **options: Any) -> Any:
    """Import a module, and note its name if a module of the package asks for it."""
    module = original(name, namespace, *others, **options)
    if (namespace or {}).get("__name__", "").partition(".")[0] == "autotune":
        imported.add(name.partition(".")[0])
    return module


def outcome(words: list[str]) -> tuple[int, str]:
    """Run a command; returns its exit code and the last line on standard error."""
    from autotune.cli.main import main

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            if words[0] == "python":
                eval(words[1], {"autotune": original("autotune")})
            else:
                main(words)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            code = 1
    return code, (said.getvalue().splitlines() or [""])[-1]


def play_back_here() -> None:
    from autotune.engines import engine
    from autotune.engines.engine_server import EngineServer
    from autotune.engines.vllm import VllmBackend
    from tests.engines.conftest import running_here

    engine.running = running_here
    EngineServer.cpu_ms = lambda server: 0.0  # type: ignore[method-assign]
    VllmBackend.pause_s = 0.0


if __name__ == "__main__":
    commands, output, *switches = sys.argv[1:]
    builtins.__import__ = noted
    sys.meta_path.insert(0, _Missing())
    if switches:
        play_back_here()
    outcomes = [outcome(words) for words in json.loads(Path(commands).read_text())]
    Path(output).write_text(json.dumps({"outcomes": outcomes, "imported": sorted(imported)}))
