"""JSON Schemas are published for every kind of document, and shipped documents match them.

``python -m tests.test_schemas`` writes the files again after a change of a document.
"""

from __future__ import annotations

import json
import re
from typing import Any

from autotune.files import data_root, read_json, read_yaml
from autotune.schemas import json_schemas
from tests.imports import ROOT

FOLDER = ROOT / "autotune" / "documents" / "schemas"


def texts() -> dict[str, str]:
    """The contents of the files by name."""
    return {f"{kind}.json": json.dumps(schema, indent=1) + "\n" for kind, schema in json_schemas().items()}


def assert_keys_match(content: dict[str, Any], schema: dict[str, Any]) -> None:
    assert content["schema"] == schema["properties"]["schema"]["const"]
    assert set(schema["required"]) <= content.keys() <= schema["properties"].keys()


def test_every_kind_has_a_schema() -> None:
    sources = (path.read_text() for path in (ROOT / "autotune").rglob("*.py"))
    kinds = {kind for source in sources for kind in re.findall(r'^class \w+\(\s*\w+,\s*kind="([\w-]+)"', source, re.M)}
    assert len(kinds) >= 10 and {name.partition("draft-")[0] or "draft" for name in json_schemas()} == kinds


def test_files_have_the_schemas_of_the_documents() -> None:
    assert {path.name: path.read_text() for path in FOLDER.iterdir()} == texts(), "run python -m tests.test_schemas"
    identities = {kind: schema["$id"] for kind, schema in json_schemas().items()}
    assert identities["decoding-profile"] == "urn:autotune-speculative:decoding-profile:2"
    assert len(set(identities.values())) == len(identities)


def test_shipped_documents_match_their_schemas() -> None:
    schemas, root = json_schemas(), data_root()
    assert_keys_match(read_json(root / "profiles" / "cpu" / "digits.decode.json"), schemas["decoding-profile"])
    for network in ("star", "dream", "specvlm", "mtp"):
        assert_keys_match(read_json(root / "drafts" / "digits" / network / "config.json"), schemas[f"draft-{network}"])
    for pattern, kind in (
        ("profiles/devices/*.yaml", "device-limits"),
        ("search_spaces/*.yaml", "search-space"),
        ("drafts/*/*/recipe.yaml", "recipe"),
    ):
        paths = list(root.glob(pattern))
        assert paths, pattern
        for path in paths:
            assert_keys_match(read_yaml(path), schemas[kind])


if __name__ == "__main__":
    for name, text in texts().items():
        (FOLDER / name).write_text(text)
