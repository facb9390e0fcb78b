"""Tables show names as they are."""

from __future__ import annotations

import pytest

from autotune.console import Console


def test_names_in_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.table(
        "Drafts [/x]", ["[bold]task", "[red]share"], [["[/x]", "[b]1"], ["draft[v1]", ":smile:"]], emphasised=1
    )
    console.say("draft[v1] [/x]")
    with console.stage("stage [/x]") as update:
        update(1, 1, "[/y]")
    console.say("http://u:SECRET@host/v1 answers")
    console.table("x", ["url"], [["http://u:SECRET@host"]])
    said = capsys.readouterr().err
    assert "SECRET" not in said and said.count("http://u:***@host") == 2
    for name in ("Drafts [/x]", "[bold]task", "[red]share", "[/x]", "[b]1", "draft[v1] ", ":smile:", "stage [/x]"):
        assert name in said
