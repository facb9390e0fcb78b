"""A stand-in for the Hub with all its repositories, which this process and the commands that it runs ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from autotune.modeling import hub as hub_models
from tests.hub import repositories
from tests.hub.server import Hub, serving


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> repositories.Folders:
    return repositories.Folders(tmp_path_factory.mktemp("hub"))


@contextmanager
def asked(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve a Hub that this process asks, with an empty cache in a folder, which becomes the working directory."""
    with serving(hub):
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "120")  # a repository is written when it is first asked for
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        files = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        monkeypatch.chdir(folder)
        hub_models.repository.cache_clear()
        close_session()
        yield hub
    hub_models.repository.cache_clear()
    close_session()


@pytest.fixture
def public_hub(folders: repositories.Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """All ids of the stand-in, and an empty cache."""
    hub = Hub(folders, {repositories.GATED}, dict(repositories.RENAMED))
    with asked(hub, tmp_path, monkeypatch):
        yield hub
