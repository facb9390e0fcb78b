"""The runtime keeps the contract of backends."""

from __future__ import annotations

import pytest

from autotune.console import Console
from autotune.documents.configuration import configuration_of
from autotune.engines.backend import Backend
from autotune.engines.contract import BackendContract
from autotune.search import prices
from autotune.search.runtime_backend import RuntimeBackend
from autotune.search.tuning import Tuning
from autotune.study.search_settings import SearchSettings
from autotune.workloads.prompt import WorkloadPrompt
from tests.sample_documents import cost_table, write_workload
from tests.tiny_models import Pair

SPACE = """
schema: autotune.search-space/1
name: small
visual_keep: {choices: [1.0]}
trees:
  chain: {depth: {low: 1, high: 6}}
  eagle2: {depth: {choices: [2, 7]}, k: {choices: [2, 10]}, budget: {choices: [3, 60]}}
  priced: {worth: {choices: [0.5, 0.9]}, width: {choices: [2]}}
"""


class TestRuntimeBackend(BackendContract):
    @pytest.fixture(scope="class")
    def made(self, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> RuntimeBackend:
        folder = tmp_path_factory.mktemp("runtime")
        (folder / "small.yaml").write_text(SPACE)
        lines = [{"prompt": f"Count from {n}, then stop.", "max_new_tokens": 12} for n in range(6)]
        target, drafts = str(pair.target_folder), (str(pair.draft_folder),)
        workload, space = str(write_workload(folder, lines)), str(folder / "small.yaml")
        settings = SearchSettings(
            target=target, drafts=drafts, workload=workload, space=space, folder=folder, jobs=1, device="cpu"
        )
        return RuntimeBackend(target, Tuning.load(settings, Console()))

    @pytest.fixture
    def backend(self, made: RuntimeBackend, monkeypatch: pytest.MonkeyPatch) -> RuntimeBackend:
        known, pool = cost_table(), made.tuning.pool
        draft = known.drafts[0].model_copy(update={"draft": next(iter(pool.references.values()))})
        table = known.model_copy(update={"target": pool.target_reference, "device": pool.device, "drafts": [draft]})
        monkeypatch.setattr(prices, "local_table", lambda *_: table)
        return made

    @pytest.fixture
    def prompts(self, made: RuntimeBackend) -> list[WorkloadPrompt]:
        return list(made.tuning.tune.prompts)

    def test_the_deployed_command_names_the_model_and_the_speculation(self, backend: Backend) -> None:
        """The runtime deploys an operating point of a profile."""
        chosen = backend.configurations()[-1]
        plain, tuned = backend.deploy(None), backend.deploy(chosen)
        assert plain.draft is plain.tree is None  # type: ignore[attr-defined]
        found = configuration_of(tuned)  # type: ignore[arg-type]
        assert found is not None and (found.draft, found.type) == (chosen.draft, chosen.type)
