"""Profiles of the Hub: pushed with a card, loaded by their names in every verb, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from huggingface_hub import ModelCard, constants

import autotune
from autotune.cli.main import main
from autotune.documents.decoding_profile import DecodingProfile, Measured
from autotune.documents.deployment import Deployment
from autotune.documents.provenance import ModelReference
from autotune.documents.speculation import Speculation
from autotune.engines.llama_cpp import LlamaBackend
from autotune.machine.device import fingerprint
from autotune.modeling import hub as hub_models
from autotune.modeling.gguf import find_gguf
from autotune.modeling.loading import reference, resolve
from autotune.report.shared import shared_profile
from tests.engine_profiles import engine_profile
from tests.hub.conftest import asked
from tests.hub.server import Hub
from tests.sample_documents import decoding_profile, write_workload
from tests.tiny_models import Pair

TARGET, DRAFT, NAME = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-0.6B", "you/llama-on-abacus"
GGUF = "bartowski/SmolLM2-135M-Instruct-GGUF"
TOKEN = "hf_secretsecretsecret"
MEASURED = Measured(
    speedup=1.54, ci95=(1.42, 1.69), tokens_per_round=2.5, tokens_per_second=90.0, num_prompts=2, identical_outputs=2
)


@pytest.fixture
def hub(text_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with a target and a draft, one user who may write, and ``profile.json`` with both models."""
    gguf = tmp_path / "gguf"
    gguf.mkdir()
    (gguf / "M-Q8_0.gguf").write_bytes(b"GGUF")
    folders = {TARGET: text_pair.target_folder, DRAFT: text_pair.draft_folder, GGUF: gguf}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with asked(Hub(folders, tokens={TOKEN}, uploads=tmp_path / "uploads"), tmp_path, monkeypatch) as served:
        decoding_profile(reference(TARGET), reference(DRAFT), hardware=fingerprint("cpu")).save("profile.json")
        write_workload(tmp_path, [{"prompt": "Count.", "max_new_tokens": 8}, {"prompt": "Go on.", "max_new_tokens": 8}])
        yield served


def run(*words: object) -> str:
    """Standard output of a command that succeeds."""
    result = CliRunner().invoke(main, list(map(str, words)), standalone_mode=False, catch_exceptions=False)
    assert result.return_value in (None, 0), result.output
    return result.stdout


def refusal(*words: object) -> str:
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == 2 and result.stdout == "" and TOKEN not in result.output, result.output
    (line,) = [line for line in result.stderr.splitlines() if not re.match(r"loading |\S+: downloading ", line)]
    return line


def with_draft(id: str) -> DecodingProfile:
    profile = DecodingProfile.load("profile.json")
    assert profile.point.draft is not None
    draft = profile.point.draft.model_copy(update={"id": id})
    return profile.model_copy(update={"point": profile.point.model_copy(update={"draft": draft, "measured": MEASURED})})


@pytest.mark.parametrize("draft", [DRAFT, "trained/draft"])
def test_a_pushed_profile_decodes_by_its_name_as_its_file_does(
    draft: str, hub: Hub, text_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every verb, and without network once it is in the cache; a draft beside the profile comes with it."""
    folder = tmp_path / "made"
    if draft != DRAFT:
        shutil.copytree(text_pair.draft_folder, folder / draft)
        (folder / draft / ".checkpoint").mkdir()
        (folder / draft / ".checkpoint" / "state").write_text("of the training")
    with_draft(draft).save(folder / "profile.json")
    words = ("--workload", "workload.jsonl", "--json")
    local = json.loads(run("run", folder / "profile.json", *words))
    assert run("push", folder / "profile.json", NAME).strip() == f"{hub.url}/{NAME}"
    beside = {f"{draft}/{path.name}" for path in text_pair.draft_folder.iterdir()} if draft != DRAFT else set()
    assert [(id, set(files)) for id, files in hub.commits] == [(NAME, {"profile.json", "README.md", *beside})]
    shutil.rmtree(folder)

    def counts(answers: list[dict[str, Any]]) -> list[object]:
        return [(answer["text"], answer["stats"]["rounds"], answer["stats"]["accepted_lengths"]) for answer in answers]

    assert counts(json.loads(run("run", NAME, *words))) == counts(local)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_models.repository.cache_clear()
    num_requests = len(hub.requests)
    assert counts(json.loads(run("run", NAME, *words))) == counts(local)
    assert autotune.load(NAME).draft is not None and autotune.load(f"{NAME}@main").draft is not None
    assert json.loads(run("bench", NAME, *words, "--arms", "ar"))["profile"] == NAME
    run("check", NAME, "--workload", "workload.jsonl", "--prompts", "2")
    run("report", NAME)
    assert "decodes" in Path("report.html").read_text()
    if draft == DRAFT:
        assert run("export", NAME).startswith("vllm serve")
    assert len(hub.requests) == num_requests


def test_the_card_has_the_result_its_conditions_and_the_commands(hub: Hub) -> None:
    with_draft(DRAFT).save("profile.json")
    run("push", "profile.json", NAME, "--private", "--license", "mit")
    assert hub.private == {NAME}
    card = ModelCard.load(hub.made[NAME] / "README.md")
    assert card.data.base_model == TARGET and card.data.license == "mit"
    assert card.data.tags == ["speculative-decoding", "autotune", "runtime"]
    for fact in (TARGET, DRAFT, "An abacus", "float32", "by hand", f"autotune run {NAME}", f"autotune export {NAME}"):
        assert fact in card.text or fact == "An abacus", fact
    run("push", "profile.json", NAME)  # again, into the same repository
    assert len(hub.commits) == 2


def test_paths_of_the_cache_become_ids(hub: Hub, tmp_path: Path) -> None:
    """Paths of a vLLM stand inside of JSON too, and the draft of a llama.cpp is found again."""
    target, draft = resolve(TARGET), resolve(DRAFT)
    speculation = Speculation(type="draft_model", options={"num_speculative_tokens": 3}, model=draft)
    words = ["/opt/vllm", "serve", target, "--speculative-config", json.dumps({"model": draft})]
    deployment = Deployment(
        backend="vllm", model=reference(TARGET), command=words, speculation=speculation, build="0.32.0"
    )
    profile = engine_profile()
    profile = profile.model_copy(
        update={
            "target": reference(TARGET),
            "workload": profile.workload.model_copy(update={"name": str(tmp_path / "workload.jsonl")}),
            "point": profile.point.model_copy(update={"deployment": deployment}),
        }
    )
    shared = shared_profile(profile, Path("profile.json"))
    found = shared.point.deployment
    assert found is not None and found.speculation is not None and found.speculation.model == DRAFT
    assert found.command == ["vllm", "serve", TARGET, "--speculative-config", json.dumps({"model": DRAFT})]
    assert shared.workload.name == "workload.jsonl" and shared.evidence == profile.evidence

    file = find_gguf(f"{GGUF}:Q8_0")
    assert file is not None
    model = ModelReference(id=f"{GGUF}:Q8_0", sha256="")
    speculation = Speculation(type="draft-simple", options={"n-max": 3}, model=str(file.resolve()))
    command = ["/opt/llama-server", "-m", str(file.resolve()), "-t", "2", "--spec-draft-model", str(file.resolve())]
    deployment = deployment.model_copy(
        update={"backend": "llama.cpp", "model": model, "command": command, "speculation": speculation}
    )
    profile = profile.model_copy(update={"point": profile.point.model_copy(update={"deployment": deployment})})
    found = shared_profile(profile, Path("profile.json")).point.deployment
    assert found is not None and found.speculation is not None
    name = f"{GGUF}:M-Q8_0"
    assert found.command == ["llama-server", "-hf", name, "-t", "2", "--spec-draft-hf", name]
    backend = LlamaBackend.__new__(LlamaBackend)
    backend.executable, backend.target, backend.arguments = Path("llama-server"), str(file), []
    words = backend.words(found.speculation)
    assert Path(words[words.index("--spec-draft-model") + 1]).read_bytes() == b"GGUF"


def test_a_push_is_refused_in_one_line(hub: Hub, text_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word of the token, whatever the Hub answers; nothing is written before it is known."""
    assert "OWNER/NAME" in refusal("push", "profile.json", "name")
    assert "OWNER/NAME" in refusal("push", "profile.json", f"{NAME}@main")
    assert "no such file" in refusal("push", "other.json", NAME)
    with_draft(str(text_pair.draft_folder)).save("local.json")
    assert f"hf upload OWNER/NAME {text_pair.draft_folder}" in refusal("push", "local.json", NAME)
    shutil.copytree(text_pair.draft_folder, "above/draft")
    with_draft("../above/draft").save("below/local.json")
    assert "../above/draft, which is on this machine alone" in refusal("push", "below/local.json", NAME)
    hub.echoes = True
    for token in ("hf_anotheranother", "of-another-kind"):
        monkeypatch.setenv("HF_TOKEN", token)
        assert token not in (line := refusal("push", "profile.json", NAME)) and "***" in line
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "check the network" in refusal("push", "profile.json", NAME)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "no-token")
    num_requests = len(hub.requests)
    assert "hf auth login" in refusal("push", "profile.json", NAME)
    assert not hub.made and len(hub.requests) == num_requests


def test_a_profile_that_is_not_there_is_refused_in_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such repository" in refusal("run", NAME)
    assert "holds no profile.json; " in refusal("run", TARGET)
    assert "no such file" in refusal("run", "you/profile.json")
    run("push", "profile.json", NAME)
    hub_models.repository.cache_clear()
    path = hub.made[NAME] / "profile.json"
    path.write_text(path.read_text().replace("decoding-profile/2", "decoding-profile/9"))
    assert "autotune.decoding-profile/9" in refusal("report", NAME)
    hub.private = {NAME}
    monkeypatch.delenv("HF_TOKEN")
    hub_models.repository.cache_clear()
    shutil.rmtree(constants.HF_HUB_CACHE)
    assert "for a private one" in refusal("serve", NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "does not answer" in refusal("check", NAME)
