"""The tiny pair as a decoder, and a small workload. Models are imported by the fixture that needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from autotune.workloads.workload import Workload, load_workload
from tests.sample_documents import write_image, write_workload

if TYPE_CHECKING:
    from autotune.evaluation.runtime_arms import RuntimeArms
    from autotune.runtime.decoder import Decoder
    from tests.tiny_models import Pair


@pytest.fixture(scope="session")
def evaluate(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Greedy prompts with and without an image."""
    folder = tmp_path_factory.mktemp("evaluate")
    images = [write_image(folder / "0.png", 0)]
    prompts: list[dict[str, Any]] = [
        {"prompt": "Count to ten, then stop.", "task": "count"},
        {"prompt": "Read the digits row by row.", "images": images, "task": "read"},
        {"prompt": "And row 2?", "images": images, "task": "read"},
    ]
    lines = [{"split": "evaluate", "max_new_tokens": 16, **prompt} for prompt in prompts]
    return load_workload(str(write_workload(folder, lines)), "evaluate")


@pytest.fixture(scope="session")
def decoder(pair: Pair) -> Decoder:
    from autotune.drafters.independent import IndependentDraft
    from autotune.modeling.target import Target
    from autotune.runtime.decoder import Decoder

    return Decoder(Target(pair.target), IndependentDraft(pair.draft))


@pytest.fixture
def arms(decoder: Decoder, processor: Any) -> RuntimeArms:
    from autotune.evaluation.runtime_arms import RuntimeArms

    return RuntimeArms(decoder, processor)
