"""The serving engines that a search tunes. Loads no torch."""

from __future__ import annotations

from autotune.documents.engine_profile import EngineName
from autotune.serving.engine import ServingEngine
from autotune.serving.llama_server import LlamaEngine
from autotune.serving.vllm_server import VllmEngine

ENGINES: dict[EngineName, type[ServingEngine]] = {engine.name: engine for engine in (LlamaEngine, VllmEngine)}
