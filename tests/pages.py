"""Code blocks of the documentation."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest

from tests.imports import ROOT


def code_block(page: str, language: str) -> str:
    """The code block of a language on a page of ``docs``, which has one of each."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "docs" / page).read_text(), flags=re.M | re.S)
    return str(found)


def added_module(page: str, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The Python file of a page as a module of that name, until the test ends."""
    module = ModuleType(name)
    exec(compile(code_block(page, "python"), f"{name.replace('.', '/')}.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, name, module)
    return module
