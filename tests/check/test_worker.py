"""The worker: its answers through the public interface alone, earlier versions of the code, and failures."""

from __future__ import annotations

import ast
import io
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import save_file

import autotune
from autotune.check import worker
from autotune.check.worker_process import WORKER, Decoded, Request, Side, WorkerProcess
from autotune.device import fingerprint
from autotune.documents.condition import Condition
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.subnet import Subnet
from autotune.errors import UserError
from autotune.modeling.loading import reference
from autotune.trees.policy import parse_policy
from tests.sample_documents import decoding_profile
from tests.tiny_models import Inputs, Pair


@pytest.fixture
def profile(pair: Pair, tmp_path: Path) -> Path:
    target, draft = (reference(str(path)) for path in (pair.target_folder, pair.draft_folder))
    decoding_profile(target, draft, hardware=fingerprint("cpu")).save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def request(inputs: Inputs, folder: Path) -> Request:
    path = folder / "inputs.safetensors"
    save_file({name: value.contiguous() for name, value in inputs.items()}, path)
    return Request("prompt", "sha", path, {"max_new_tokens": 20, "temperature": 0.0}, "prompt", 0)


def served(profile: Path, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    """The worker's answers, in this process."""
    answers = io.StringIO()
    lines = io.StringIO("".join(json.dumps(one) + "\n" for one in requests))
    worker.serve(lines, answers, {"profile": str(profile), "device": "cpu"})
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_answers_agree_with_the_decoder(profile: Path, prompts: dict[str, Inputs], tmp_path: Path) -> None:
    one = request(prompts["image"], tmp_path)
    fields = {"inputs": str(one.inputs), "settings": one.settings, "task": one.task}
    ready, tuned, plain = served(profile, {**fields, "plain": False}, {**fields, "plain": True})
    assert Path(ready["ready"]) == Path(autotune.__file__).parent
    stats = autotune.load(profile, device="cpu").generate(**prompts["image"], **one.settings).stats
    found = Decoded.model_validate(tuned)
    assert found.accepted_lengths == stats.accepted_lengths and sum(found.accepted_lengths) > 0
    assert (found.target_forwards, found.draft_forwards) == (stats.target_forwards, stats.draft_forwards)
    assert found.verified_nodes == sum(stats.verified_nodes) and found.plain_steps == 0
    assert found.new_tokens == 20 and found.decode_ms > 0 < found.first_token_ms
    other = Decoded.model_validate(plain)
    assert other.tokens_sha256 == found.tokens_sha256
    assert (other.target_forwards, other.draft_forwards) == (19, 0)


def test_a_worker_process_decodes_and_reports_failures(
    profile: Path, prompts: dict[str, Inputs], tmp_path: Path
) -> None:
    """A real process: the tokens of plain decoding, and an error as one line."""
    one = request(prompts["image"], tmp_path)
    process = WorkerProcess(Side("head", "this code", profile), device="cpu", log=tmp_path / "log")
    try:
        tuned, plain = (process.decode(one, plain=plain) for plain in (False, True))
        assert tuned.tokens_sha256 == plain.tokens_sha256 and tuned.draft_forwards > plain.draft_forwards == 0
        with pytest.raises(UserError, match=r"head.*gone\.safetensors"):
            process.decode(replace(one, inputs=tmp_path / "gone.safetensors"), plain=False)
    finally:
        process.close()


def test_plain_decoding_steps_as_the_profile_does(profile: Path) -> None:
    """With its mode, sizes and threads: an eager baseline would flatter a compiled draft."""
    steps = {"mode": "fixed", "capture_sizes": (1, 8, 160), "threads": 1}
    DecodingProfile.load(profile).model_copy(update=steps).save(profile)
    side = worker.SideDecoder(str(profile), "cpu")
    assert (
        {name: getattr(side.plain, name) for name in steps}
        == {name: getattr(side.tuned, name) for name in steps}
        == steps
    )


def test_its_clock_runs_from_the_first_token_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 1.1, 1.5, 1.6, 1.75])
    monkeypatch.setattr(worker.time, "perf_counter", lambda: next(times))
    watch = worker.Stopwatch()
    for tokens in ("the prompt", "its first token", "the next"):
        watch.put(tokens)
    watch.end()
    assert watch.first_token_ms == pytest.approx(500.0) and watch.decode_ms == pytest.approx(250.0)


def test_an_error_is_an_answer(profile: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (answer,) = served(tmp_path / "gone.json")
    assert answer["error"].startswith("UserError: ") and "gone.json: no such file" in answer["error"]
    assert "Traceback" in capfd.readouterr().err, "for the log"
    ready, broken = served(profile, {"plain": False})
    assert "ready" in ready and broken["error"] == "KeyError: 'inputs'"


def test_it_uses_only_the_public_interface() -> None:
    """Other versions of autotune run it too."""
    names = set()
    for node in ast.walk(ast.parse(WORKER.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert all(module == "autotune" or not module.startswith("autotune") for module in modules)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "autotune":
            names.add(node.attr)
    assert names - {"__file__"} <= set(autotune.__all__)


def test_options_that_an_earlier_version_lacks_are_left_out() -> None:
    def old(input_ids: Any, streamer: Any = None) -> None: ...

    assert worker._accepted({"workload": "sort", "streamer": 1}, old) == {"streamer": 1}


# ----------------------------------------------------------------------------------------------------- earlier versions


def test_an_earlier_version_is_given_the_profile_with_its_former_keys(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for versions before ``runner`` became ``mode``, and ``buckets`` became ``capture_sizes``."""
    loaded: list[dict[str, Any]] = []

    class Earlier:
        threads, runner, buckets, target_model = 2, "graph", (1, 8), "model"

        def __init__(
            self, target: Any, draft: Any, runner: str = "eager", buckets: Any = (), threads: Any = None
        ) -> None:
            self.options = (target, draft, runner, buckets, threads)

    def load(path: str, *, device: str) -> Any:
        content = json.loads(Path(path).read_text())
        if content.get("schema") != "autotune.decoding-profile/1" or not {"runner", "buckets"} <= set(content):
            raise UserError("newer than this program reads")
        loaded.append(content)
        return Earlier("model", "draft")

    DecodingProfile.load(profile).model_copy(update={"mode": "cuda-graph", "capture_sizes": (1, 8)}).save(profile)
    monkeypatch.setattr(autotune, "load", load, raising=False)
    monkeypatch.setattr(autotune, "Decoder", Earlier, raising=False)
    side = worker.SideDecoder(str(profile), "cpu")
    assert (loaded[0]["runner"], loaded[0]["buckets"]) == ("graph", [1, 8]) and "mode" not in loaded[0]
    assert side.plain.options == ("model", None, "graph", (1, 8), 2)
    profile.write_text("{}")
    with pytest.raises(UserError, match="newer than this program reads"):
        worker.SideDecoder(str(profile), "cpu")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[DecodingProfile]:
    """The profiles that a stand-in for versions of schema 2 has read. It refuses keys that later versions added."""
    later = {key for keys in worker.LATER_KEYS.values() for key in keys} | {"contention"}
    found: list[DecodingProfile] = []

    def load(path: str, *, device: str) -> Any:
        text = Path(path).read_text()
        if json.loads(text)["schema"] != "autotune.decoding-profile/2":
            raise UserError("newer than this program reads")
        if unknown := [key for key in later if f'"{key}"' in text]:
            raise UserError(f"unknown key {unknown[0]!r}")
        found.append(DecodingProfile.load(path))
        return SimpleNamespace(target_model="model")

    monkeypatch.setattr(autotune, "load", load, raising=False)
    monkeypatch.setattr(autotune, "Decoder", lambda target, draft: None, raising=False)
    return found


def profile_of(tree: dict[str, Any], **subnet: Any) -> DecodingProfile:
    document = decoding_profile(tree=tree)
    point, choice = document.point, document.point.draft
    assert choice is not None
    choice = choice.model_copy(update={"subnet": Subnet(**subnet)})
    return document.model_copy(update={"points": [point.model_copy(update={"draft": choice})]})


def test_keys_that_an_earlier_version_refuses_are_left_out(loaded: list[DecodingProfile], tmp_path: Path) -> None:
    """At the values that mean what it does. Everything else reaches it: read by this version, the profile is the same."""
    tagged = profile_of({"policy": "chain", "depth": 2})
    first = tagged.point.model_copy(update={"when": Condition(workload="read")})
    documents = [
        decoding_profile(draft=None),
        tagged.model_copy(update={"points": [first, tagged.point]}),
        profile_of({"policy": "chain", "depth": 2}, heads=0.5, injection_layer=9, visual_keep=0.25),
        profile_of({"policy": "sage", "k": 4, "below_threshold": "drop"}),
        profile_of({"policy": "wetap", "budget": 16, "nucleus": "all"}),
    ]
    for document in documents:
        document.save(tmp_path / "profile.json")
        worker.SideDecoder(str(tmp_path / "profile.json"), "cpu")
    assert loaded == documents


def test_a_key_that_an_earlier_version_needs_is_named(loaded: list[DecodingProfile], tmp_path: Path) -> None:
    document = decoding_profile()
    seeing = document.point.model_copy(update={"when": Condition(has_image=True)})
    with_image = document.model_copy(update={"points": [seeing, document.point]})
    cases = [
        (profile_of({"policy": "sage"}), 'tree.below_threshold is "leaf"', '"drop"'),
        (profile_of({"policy": "sage", "below_threshold": "drop", "threshold": 0.2}), "tree.threshold is 0.2", "0.1"),
        (profile_of({"policy": "wetap"}), 'tree.nucleus is "top_k"', '"all"'),
        (profile_of({"policy": "chain"}, operator="pool"), 'draft.subnet.operator is "pool"', "null"),
        (with_image, "when.has_image is true", "null"),
    ]
    for document, value, earlier in cases:
        document.save(tmp_path / "profile.json")
        with pytest.raises(UserError) as refused:
            worker.SideDecoder(str(tmp_path / "profile.json"), "cpu")
        assert str(refused.value) == (
            f"points.0.{value}, and versions without that key do what is now {earlier}; compare with a version that has it"
        )
    assert loaded == []


def test_later_keys_have_the_defaults_of_this_version() -> None:
    """A profile may leave them out."""
    for name, keys in worker.LATER_KEYS.items():
        records: dict[str, Any] = {"subnet": Subnet(), "when": Condition()}
        present = records[name] if name in records else parse_policy({"policy": name})
        expected = {key: worker.LATER_DEFAULTS.get(key, earlier) for key, earlier in keys.items()}
        assert present.model_dump(include=set(keys)) == expected


REVISIONS = {1: "5dbff644fed7111f750ecb309bd8477407e77b90", 2: "bf0b2167607addf204adb1e9b9d11fa4ccc1cba9"}
"""Versions of autotune by the newest schema that they read."""
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.parametrize("schema", [1, 2])
def test_earlier_versions_decode_with_todays_profiles(
    profile: Path, prompts: dict[str, Inputs], tmp_path: Path, schema: int
) -> None:
    """In a real process with the code of that commit."""
    revision = REVISIONS[schema]
    archive = subprocess.run(["git", "archive", revision, "autotune"], cwd=REPOSITORY, capture_output=True)
    if archive.returncode != 0:
        pytest.skip("this clone does not have the commit")
    code = tmp_path / "earlier"
    code.mkdir()
    subprocess.run(["tar", "-x", "-C", str(code)], input=archive.stdout, check=True)
    side = Side(name="base", label=revision[:10], profile=profile, code=code)
    process = WorkerProcess(side, device="cpu", log=tmp_path / "base.log")
    wanted = request(prompts["image"], tmp_path)
    tuned, plain = (process.decode(wanted, plain=plain) for plain in (False, True))
    process.close()
    fields = {"inputs": str(wanted.inputs), "settings": wanted.settings, "task": wanted.task, "plain": False}
    _, current = served(profile, fields)
    assert tuned.tokens_sha256 == plain.tokens_sha256 == current["tokens_sha256"]
    assert tuned.accepted_lengths == current["accepted_lengths"]


# --------------------------------------------------------------------------------------------------- separate processes


def stub(folder: Path, body: str) -> Path:
    """A package named autotune with this content."""
    (folder / "autotune").mkdir(parents=True)
    (folder / "autotune" / "__init__.py").write_text(body)
    return folder


STUB = """
print("a library that prints")
class Model: device = "cpu"
class Decoder:
    target_model = Model()
    def __init__(self, target=None, draft=None): ...
def load(profile, device):
    {load}
"""


def process(code: Path, folder: Path) -> WorkerProcess:
    side = Side(name="base", label="main (0123456789)", profile=folder / "profile.json", code=code)
    return WorkerProcess(side, device="cpu", log=folder / "base.log")


def test_a_process_runs_the_code_of_its_side(tmp_path: Path) -> None:
    made = process(stub(tmp_path, STUB.format(load="return Decoder()")), tmp_path)
    made.wait()
    made.close()
    assert made._process.returncode == 0
    assert "a library that prints" in (tmp_path / "base.log").read_text(), "in the log, not in the answers"
    side = Side(name="base", label="x", profile=tmp_path / "p.json", code=tmp_path)
    other = WorkerProcess(side, device="cpu", log=tmp_path / "base.log")
    other.side = Side(name="base", label="x", profile=tmp_path / "p.json", code=tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"the base, x, imports autotune from .*, not from .*elsewhere"):
        other.wait()
    other.close()


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ("raise ValueError('no such' + chr(10) + 'profile')", "ValueError: no such profile"),
        ("import os; os._exit(3)", "a library that prints"),
    ],
)
def test_a_base_that_cannot_load_fails_in_one_line(load: str, message: str, tmp_path: Path) -> None:
    made = process(stub(tmp_path, STUB.format(load=load)), tmp_path)
    with pytest.raises(UserError) as caught:
        made.wait()
    made.close()
    assert str(caught.value) == (
        f"the base, main (0123456789), cannot decode with the profile: {message}; see its log {tmp_path / 'base.log'}"
    )
