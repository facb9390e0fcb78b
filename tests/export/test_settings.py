"""Settings of every engine: the engine's rules are enforced, and the numbers mean the same as ours."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from autotune.cli.export import EXPORT_ENGINES
from autotune.export.exporter import ENGINES
from autotune.export.vllm import Pair, VllmSettings
from autotune.files import Document
from autotune.trees.chain import ChainPolicy
from tests.trees.drafts import TreeSession, random_draft

CHAIN = ChainPolicy(depth=5)


def test_command_line_lists_every_engine() -> None:
    assert tuple(ENGINES) == EXPORT_ENGINES


def test_documentation_lists_every_field_with_its_version() -> None:
    """The table lists no other field."""
    table = (Path(__file__).parents[2] / "docs" / "export.md").read_text().partition("## Fields")[2]
    rows = re.findall(r"^\|(.*?)\| `(\w+)` \|", table, flags=re.M)
    listed: dict[str, list[str]] = {}
    for title, field in rows:
        listed.setdefault(title.strip() or list(listed)[-1], []).append(field)
    assert len(listed) == len(ENGINES)
    for (title, fields), engine in zip(listed.items(), ENGINES.values(), strict=True):
        assert title.endswith(engine.version), title
        assert fields == list(type(engine.settings(Pair("t", "d", "independent"), CHAIN)).model_fields), title


def test_settings_are_complete_without_fields_that_are_none() -> None:
    for name, engine in ENGINES.items():
        for kind in engine.served:
            settings = engine.settings(Pair("some/target", "some/draft", kind), CHAIN)
            text = json.dumps(settings.model_dump(exclude_none=True))
            assert type(settings).model_validate_json(text) == settings, (name, kind)


def vllm(k: int = 5) -> dict[str, Any]:
    return {"method": "draft_model", "model": "d", "num_speculative_tokens": k}


VALID: dict[str, tuple[type[Document], dict[str, Any]]] = {"vllm": (VllmSettings, vllm())}
INVALID: dict[str, tuple[type[Document], dict[str, Any], str]] = {
    "vllm, no draft token": (VllmSettings, vllm(k=0), "greater than or equal to 1"),
    "any engine, unknown key": (VllmSettings, vllm() | {"speculative_topk": 1}, "Extra inputs"),
}  # fmt: skip


def test_settings_that_an_engine_would_refuse_are_refused() -> None:
    for name, (settings_type, content) in VALID.items():
        assert settings_type.model_validate_json(json.dumps(content)), name
    for name, (settings_type, content, message) in INVALID.items():
        with pytest.raises(ValidationError) as caught:
            settings_type.model_validate_json(json.dumps(content))
        assert message in str(caught.value), (name, str(caught.value))


# -------------------------------------------------------------------------------------------------- meaning of the numbers


def test_chains_of_engines_equal_ours() -> None:
    """A chain of depth k has k draft tokens and a verification of k + 1."""
    for depth in (1, 4):
        session = TreeSession("chain", depth=depth)
        assert len(session.grow(random_draft(0, 0.3))) == depth and len(session.expanded) == depth
        pair, chain = Pair("t", "d", "independent"), ChainPolicy(depth=depth)
        found = {name: engine.settings(pair, chain).model_dump() for name, engine in ENGINES.items()}
        assert found["vllm"]["num_speculative_tokens"] == depth
