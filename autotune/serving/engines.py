"""The serving engines that a search tunes. Loads no torch."""

from __future__ import annotations

from autotune.documents.engine_profile import EngineName
from autotune.serving.engine import Engine
from autotune.serving.llama_server import LlamaCpp
from autotune.serving.vllm_server import Vllm

ENGINES: dict[EngineName, type[Engine]] = {engine.name: engine for engine in (LlamaCpp, Vllm)}
