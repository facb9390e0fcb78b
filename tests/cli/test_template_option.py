"""``--chat-template-kwargs``."""

from __future__ import annotations

import click
import pytest

from autotune.cli import options
from autotune.study.search_settings import SearchSettings

VERBS = ("search", "record", "run", "bench", "serve", "measure", "check")


@pytest.mark.parametrize(
    ("text", "found"), [('{"enable_thinking": false, "level": 2}', {"enable_thinking": False, "level": 2}), ("{}", {})]
)
def test_variables_are_an_object(text: str, found: object) -> None:
    assert options.JsonObject().convert(text, None, None) == found


@pytest.mark.parametrize("text", ["enable_thinking=false", "[1]", "3", '{"tokenize": false}', '{"a": NaN}'])
def test_other_variables_are_refused_in_a_line(text: str) -> None:
    with pytest.raises(click.BadParameter) as error:
        options.JsonObject().convert(text, None, None)
    assert "\n" not in str(error.value)


def test_a_search_is_repeated_with_its_variables() -> None:
    assert "chat-template" not in SearchSettings().command
    command = SearchSettings(chat_template_kwargs={"enable_thinking": False}).command
    assert command.count("""--chat-template-kwargs '{"enable_thinking": false}'""") == 1
