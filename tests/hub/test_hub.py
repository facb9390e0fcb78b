"""Models of the Hub by their ids: what is downloaded, what is refused and how, and the cache without network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils.tqdm import tqdm

from autotune.drafters.checkpoint import load_draft
from autotune.engines.vllm import VllmBackend
from autotune.errors import UserError
from autotune.modeling import hub as hub_models
from autotune.modeling.gguf import find_gguf
from autotune.modeling.loading import load_model, load_processor, reference, resolve
from autotune.modeling.target import Target
from tests.hub.conftest import asked
from tests.hub.server import Hub
from tests.tiny_models import Pair

IDS = ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B", "mistralai/Mistral-7B-v0.1")
TOKEN = "hf_secretsecretsecret"


@pytest.fixture
def hub(text_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with one model under the ids that people use, and an empty cache."""
    monkeypatch.setattr(hub_models, "KNOWN_MODELS", IDS)
    with asked(Hub(dict.fromkeys(IDS, text_pair.target_folder)), tmp_path, monkeypatch) as served:
        yield served


def refusal(name: str) -> str:
    with pytest.raises(UserError) as caught:
        resolve(name)
    line = str(caught.value)
    assert "\n" not in line and line.startswith(name[:40]), line
    return line


@pytest.mark.parametrize("id", IDS)
def test_a_model_is_loaded_by_its_id_and_again_without_network(
    id: str, hub: Hub, text_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reference is that of the folder, so that profiles know its weights."""
    folder = str(text_pair.target_folder)
    for is_offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
        hub_models.repository.cache_clear()
        num_requests = len(hub.requests)
        assert reference(id).sha256 == reference(folder).sha256
        assert load_processor(id).chat_template == load_processor(folder).chat_template
        assert (len(hub.requests) > num_requests) is not is_offline
    draft = load_draft(id, Target(load_model(id)))
    assert draft.kind == "independent"


def test_only_files_that_transformers_reads_are_downloaded(hub: Hub, text_pair: Pair, tmp_path: Path) -> None:
    """Configs alone for random weights; no weights of other formats."""
    folder = shutil.copytree(text_pair.target_folder, tmp_path / "source")
    for other in ("consolidated.safetensors", "onnx/model.onnx", "original/params.json", "model.Q4_0.gguf"):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_bytes(b"large")
    hub.folders = {IDS[0]: folder}
    assert not (Path(resolve(IDS[0], weights=False)) / "model.safetensors").exists()
    names = {path.name for path in Path(resolve(IDS[0])).rglob("*") if not path.is_dir()}
    assert names == {path.name for path in text_pair.target_folder.iterdir()}


def test_progress_is_of_a_download_alone(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model in the cache is loaded in silence, on a terminal too."""
    shown: list[bool] = []
    start = tqdm.__init__

    def note(bar: Any, *arguments: Any, **options: Any) -> None:
        shown.append(not options["disable"])
        start(bar, *arguments, **options)

    monkeypatch.setattr(tqdm, "__init__", note)
    monkeypatch.setattr(hub_models.sys.stderr, "isatty", lambda: True)
    for is_needed in (True, False):
        shown.clear()
        resolve(IDS[0])
        assert ("downloading" in capsys.readouterr().err) == any(shown) == is_needed


def test_a_gated_model_needs_a_token_that_no_line_shows(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated = {IDS[0]}
    assert f"huggingface.co/{IDS[0]}" in refusal(IDS[0])
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "for a private one" in (line := refusal("nobody/zzzz")) and TOKEN not in line
    assert Path(resolve(f"{IDS[1]}@main")).is_dir() and Path(resolve(IDS[0])).is_dir()


def test_without_network_and_cache_the_hub_is_asked_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "does not answer" in (line := refusal(IDS[0])) and "connect to the network" in line
    assert "did you mean" not in line and "did you mean 'Qwen/Qwen3-0.6B'?" in refusal("Qwen/Qwen3-0.6")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "does not answer" in refusal(IDS[0]) and not hub.requests


def test_renamed_and_slow_repositories_work(hub: Hub) -> None:
    hub.renamed, hub.delay_s = {"old/Name-1.5": IDS[0]}, 0.05
    assert reference("old/Name-1.5").sha256 == reference(IDS[0]).sha256


def test_a_folder_and_a_model_of_one_name(hub: Hub, text_pair: Pair, tmp_path: Path) -> None:
    shutil.copytree(text_pair.target_folder, tmp_path / IDS[0])
    assert f"./{IDS[0]}" in refusal(IDS[0])
    assert resolve(f"./{IDS[0]}") == f"./{IDS[0]}"
    (tmp_path / "nobody" / "else").mkdir(parents=True)
    assert "run in another folder" in refusal("nobody/else")
    assert not hub.requests


def test_gguf_files_are_chosen_by_name_or_quantization(hub: Hub, tmp_path: Path) -> None:
    (folder := tmp_path / "files").mkdir()
    parts = [f"M-1.5.BF16-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name in ("M-1.5.Q4_K_M.gguf", "M-1.5.Q4_K.gguf", "M-1.5.IQ4_XS.gguf", "mmproj-M-1.5.F16.gguf", *parts):
        (folder / name).write_bytes(b"GGUF" + name.encode())
    hub.folders = {"a/M-1.5-GGUF": folder}
    for wanted, file in (("q4_k", "M-1.5.Q4_K.gguf"), ("Q4_K_M", "M-1.5.Q4_K_M.gguf"), ("M-1.5.IQ4_XS.gguf",) * 2):
        found = find_gguf(f"a/M-1.5-GGUF:{wanted}")
        assert found is not None and found.name == file and found.read_bytes().endswith(file.encode())
    assert "M-1.5.Q4_K_M.gguf" in refusal("a/M-1.5-GGUF")
    assert "means 0 GGUF files" in refusal("a/M-1.5-GGUF:Q2_K")
    assert "in 2 parts" in refusal("a/M-1.5-GGUF:BF16")
    found = find_gguf("a/M-1.5-GGUF:BF16", is_split=True)
    assert found is not None and [path.name for path in sorted(found.parent.glob("*BF16*"))] == parts


def test_engines_load_models_of_the_hub_by_their_ids(hub: Hub) -> None:
    """Target and draft are the cached files that this runtime loads."""
    name, reference_of = VllmBackend.find_model(IDS[0]) or ("", None)
    assert name == str(Path(resolve(IDS[0])).resolve()) and reference_of == reference(IDS[0])
    assert VllmBackend.find_draft(IDS[2], IDS[0]) == ("draft_model", Path(resolve(IDS[2])).resolve())
    for find in (VllmBackend.find_model, lambda name: VllmBackend.find_draft(name, IDS[0])):
        with pytest.raises(UserError, match=r"did you mean 'Qwen/Qwen3-0\.6B'"):
            find("Qwen/Qwen3-0.6")
