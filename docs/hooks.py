"""Hook of MkDocs: publish the JSON Schema of every document kind below ``schemas/``."""

from __future__ import annotations

import json
from typing import Any

from mkdocs.structure.files import File, Files

from autotune.schemas import json_schemas


def on_files(files: Files, *, config: Any) -> Files:
    for kind, schema in json_schemas().items():
        files.append(File.generated(config, f"schemas/{kind}.json", content=json.dumps(schema, indent=1) + "\n"))
    return files
