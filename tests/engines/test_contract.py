"""Both engines, played back from transcripts, keep the contract of backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.engines.contract import BackendContract
from autotune.engines.engine import EngineBackend
from autotune.workloads.prompt import WorkloadPrompt
from tests.engines.conftest import llama, vllm
from tests.engines.recorded_images import image_prompts


class TestLlamaBackend(BackendContract):
    @pytest.fixture
    def backend(self, folder: Path) -> EngineBackend:
        return llama(folder)


class TestVllmBackend(BackendContract):
    @pytest.fixture
    def backend(self, folder: Path) -> EngineBackend:
        return vllm(folder)


class TestVllmBackendWithImages(TestVllmBackend):
    """The server knows its images pixel by pixel, and the last prompt has the tokens of the first."""

    @pytest.fixture
    def prompts(self) -> list[WorkloadPrompt]:
        return image_prompts()
