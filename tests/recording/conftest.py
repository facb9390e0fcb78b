"""The tiny pair, a workload on disk and a recorder."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.documents.provenance import ModelReference
from autotune.drafters.independent import IndependentDraft
from autotune.modeling.loading import reference
from autotune.modeling.target import Target
from autotune.recording.recorder import Recorder
from autotune.workloads.workload import Workload, load_workload
from tests.sample_documents import write_image, write_workload
from tests.tiny_models import Pair


@pytest.fixture(scope="session")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    """Prompts with and without an image, short and long, greedy and sampled, and one with an answer of a single
    token.
    """
    folder = tmp_path_factory.mktemp("workload")
    images = [write_image(folder / f"{seed}.png", seed) for seed in range(3)]
    long = "Row 1 reads 3, 1, 4. That makes 3 digits in all. " * 3
    prompts: list[dict[str, Any]] = [
        {"prompt": "Count to ten, then stop.", "task": "count"},
        {"prompt": "Read the digits row by row.", "images": images[:1], "task": "read"},
        {"prompt": long + "And row 2?", "images": images[1:2], "task": "read"},
        {"prompt": "And row 3?", "images": images[2:], "temperature": 1.0, "seed": 7, "task": "read"},
        {"prompt": "One word!", "max_new_tokens": 1, "task": "count"},
    ]
    lines = [{"split": "tune", "max_new_tokens": 20, **prompt} for prompt in prompts]
    return load_workload(str(write_workload(folder, lines)), "tune")


@pytest.fixture(scope="session")
def target(pair: Pair) -> Target:
    return Target(pair.target)


@pytest.fixture(scope="session")
def draft(pair: Pair) -> IndependentDraft:
    return IndependentDraft(pair.draft)


@pytest.fixture(scope="session")
def draft_reference(pair: Pair) -> ModelReference:
    return reference(str(pair.draft_folder))


@pytest.fixture(scope="session")
def recorder(pair: Pair, target: Target, processor: Any, tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """A recorder shared by all tests, so that answers are recorded once. Forests are separate by visual keep and
    bounds.
    """
    return Recorder(target, reference(str(pair.target_folder)), processor, tmp_path_factory.mktemp("records"))
