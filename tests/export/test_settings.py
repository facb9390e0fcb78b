"""vLLM's settings of a chain: the fields that the documentation lists, and numbers that mean the same as ours."""

from __future__ import annotations

import re
from pathlib import Path

from autotune.export.vllm import SERVED, VERSION, Pair, settings
from tests.trees.drafts import TreeSession, random_draft


def test_documentation_lists_every_field_with_its_version() -> None:
    """The table lists no other field."""
    table = (Path(__file__).parents[2] / "docs" / "export.md").read_text().partition("## Fields")[2]
    rows = re.findall(r"^\|(.*?)\| `(\w+)` \|", table, flags=re.M)
    assert rows[0][0].strip().endswith(VERSION)
    for kind in SERVED:
        assert [field for _, field in rows] == list(settings(Pair("some/target", "some/draft", kind), 5))


def test_chains_of_engines_equal_ours() -> None:
    """A chain of depth k has k draft tokens and a verification of k + 1."""
    for depth in (1, 4):
        session = TreeSession("chain", depth=depth)
        assert len(session.grow(random_draft(0, 0.3))) == depth and len(session.expanded) == depth
        assert settings(Pair("t", "d", "independent"), depth)["num_speculative_tokens"] == depth
