"""Both engines, played back from transcripts, keep the contract of backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.engines.contract import BackendContract
from autotune.engines.engine import EngineBackend
from tests.engines.conftest import llama, vllm


class TestLlamaBackend(BackendContract):
    @pytest.fixture
    def backend(self, folder: Path) -> EngineBackend:
        return llama(folder)


class TestVllmBackend(BackendContract):
    @pytest.fixture
    def backend(self, folder: Path) -> EngineBackend:
        return vllm(folder)
