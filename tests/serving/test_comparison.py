"""``autotune bench-server`` against a small engine with real speculative rounds, and every error message."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("torch", exc_type=ImportError)

from transformers import AutoProcessor

from autotune.cli.main import main
from autotune.documents.decoding_profile import DecodingProfile
from autotune.drafters.independent import IndependentDraft
from autotune.export.document import EXPORT
from autotune.modeling.loading import reference
from autotune.modeling.target import Target
from autotune.runtime.decoder import Decoder
from autotune.serving import comparison
from tests.sample_documents import DRAFT, decoding_profile, write_image, write_workload
from tests.serving.exports import DEPTH, write_export
from tests.serving.small_engine import SmallEngine, running
from tests.tiny_models import Pair

SETTINGS = {"method": "draft_model", "model": "draft", "num_speculative_tokens": DEPTH}
SPECULATION = "--speculative-config"
COMMAND = shlex.join(["vllm", "serve", "served", SPECULATION, json.dumps(SETTINGS)])


@pytest.fixture(scope="module")
def world(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile with its exports, a workload of text and images, and one of sampled prompts."""
    folder = tmp_path_factory.mktemp("serving")
    target, draft = (reference(str(path)) for path in (pair.target_folder, pair.draft_folder))
    decoding_profile(target, draft).save(folder / "profile.json")
    write_export(folder / "exports" / "vllm", target, draft, SETTINGS, command=COMMAND)
    image = [write_image(folder / "0.png", 0)]
    lines: list[dict[str, Any]] = [
        {"prompt": "Count to ten, then stop.", "task": "count"},
        {"prompt": "Read the digits row by row.", "images": image, "task": "read"},
        {"turns": ["How many?", "And in row 2?"], "task": "turns"},
        {"prompt": "Row 2?", "images": image, "task": "read"},
    ]
    write_workload(folder, [{"split": "evaluate", "max_new_tokens": 16, **line} for line in lines])
    sampled = {"prompt": "Count.", "split": "evaluate", "temperature": 0.7}
    write_workload(folder, [sampled], name="sampled.jsonl")
    return folder


def engine_of(pair: Pair, *, depth: int = DEPTH, **given: str) -> SmallEngine:
    """An engine that runs a chain of the tiny draft; with ``depth`` 0, plain decoding."""
    draft = IndependentDraft(pair.draft) if depth > 0 else None
    if draft is not None:
        draft.reads_placeholders = True
    tree = {"policy": "chain", "depth": depth} if depth > 0 else None
    decoder = Decoder(Target(pair.target), draft, tree=tree)
    return SmallEngine(decoder, AutoProcessor.from_pretrained(pair.target_folder), **given)


@pytest.fixture(scope="module")
def address(pair: Pair) -> Iterator[str]:
    """A server with the exported settings; tests that change it make their own."""
    with running(engine_of(pair)) as url:
        yield url


def bench(
    world: Path, url: str, *options: object, workload: str = "workload.jsonl", folder: Path | None = None
) -> Result:
    """Run the bench with the profile of ``folder``, if it has one, and the export there."""
    exported = folder or world / "exports" / "vllm"
    profile = next(path for path in (exported / "profile.json", world / "profile.json") if path.exists())
    words = [profile, "--engine", url, "--export", exported, "--workload", world / workload, *options]
    return CliRunner().invoke(main, ["bench-server", *map(str, words)])


def assert_refused(result: Result, *messages: str) -> None:
    """Exit code 2 and one line that holds the messages, after what was reported before."""
    assert result.exit_code == 2, result.output
    last = result.stderr.strip().splitlines()[-1]
    for message in messages:
        assert message in last, last


# -------- comparison


def test_rounds_and_answers_are_those_predicted(world: Path, address: str) -> None:
    """Prompt by prompt, with and without an image, and of the turns of a conversation."""
    result = bench(world, address, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    prompts = found["prompts"]
    assert [one["has_image"] for one in prompts] == [False, True, False, False, True]
    for one in prompts:
        assert one["first_difference"] is None and one["reads_same_prompt"] is True, one
        assert one["rounds"] == one["predicted_rounds"] > 1, one
    assert "5/5" not in result.stderr and "3/3" in result.stderr and "2/2" in result.stderr


def test_an_answer_that_differs_is_named(world: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(pair)
    decode = engine.decode

    def other(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = decode(path, body)
        answer["choices"][0]["token_ids"][4] += 1
        answer["choices"][0]["prompt_token_ids"].append(0)
        return answer

    monkeypatch.setattr(engine, "decode", other)
    with running(engine) as url:
        result = bench(world, url, "--prompts", 1, "--json")
    (one,) = json.loads(result.stdout)["prompts"]
    assert one["first_difference"] == 4 and one["reads_same_prompt"] is False
    assert "differs from token 4 on" in result.stderr and "reads other tokens of 1 prompts" in result.stderr


# -------- engines started


@pytest.fixture
def commands(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Starts the small engine in the place of vLLM, with the draft length of the command; the commands so far."""
    found: list[str] = []

    @contextmanager
    def start(words: Sequence[str], name: str) -> Iterator[tuple[str, None]]:
        found.append(shlex.join(words))
        with running(engine_of(pair, depth=json.loads(words[-2])["num_speculative_tokens"])) as url:
            yield url, None

    monkeypatch.setattr(comparison, "running", start)
    return found


def test_vllm_is_started_with_the_exported_command(world: Path, commands: list[str]) -> None:
    result = bench(world, "vllm", "--engine-command", "sh --enforce-eager", "--json")
    assert result.exit_code == 0, result.output
    (command,) = commands
    program, *words = shlex.split(command)
    assert Path(program).is_absolute() and words == [*shlex.split(COMMAND)[1:], "--enforce-eager"]
    found = json.loads(result.stdout)
    assert all(one["rounds"] == one["predicted_rounds"] for one in found["prompts"])


# -------- errors


def test_engines_that_cannot_be_compared(world: Path, pair: Pair) -> None:
    with running(engine_of(pair, depth=0)) as url:
        message = "the engine drafted 0.00 tokens a round, and the export says 3; start it with"
        assert_refused(bench(world, url), message, COMMAND)
    with running(engine_of(pair, depth=1)) as url:
        assert_refused(bench(world, url), "the engine drafted 1.00 tokens a round, and the export says 3", COMMAND)
    refusing = engine_of(pair)
    refusing.refusal = "max_tokens is too large:\n 16"
    with running(refusing) as url:
        result = bench(world, url)
        assert_refused(result, "/completions: the engine answers 400, max_tokens is too large: 16; look into its log")
    foreign = engine_of(pair)
    foreign.registry = engine_of(pair, depth=0, name="other_engine").registry
    with running(foreign) as url:
        assert_refused(bench(world, url), "its metrics are not vLLM's; give the address of a vLLM")


def test_addresses_where_no_engine_answers(world: Path) -> None:
    url = "http://127.0.0.1:9"
    assert_refused(bench(world, url), f"{url}: no engine answers (", "start it, or check the address")
    for url in ("localhost", "nowhere"):
        assert_refused(bench(world, url), f"{url}: an address begins with http:// or https://; give the address")


def test_tokens_of_other_clients_are_noticed(world: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(pair)
    decode = engine.decode

    def busy(path: str, body: dict[str, Any]) -> dict[str, Any]:
        engine.generated.inc()
        return decode(path, body)

    monkeypatch.setattr(engine, "decode", busy)
    with running(engine) as url:
        assert_refused(bench(world, url), "its counters must be those of this bench alone; stop its other clients")


def test_profiles_and_exports_that_do_not_fit(world: Path, address: str, tmp_path: Path) -> None:
    profile = DecodingProfile.load(world / "profile.json")
    missing = bench(world, address, folder=tmp_path)
    assert_refused(missing, f"{tmp_path / EXPORT}: no such export; run autotune export")
    (point,) = profile.points
    assert point.draft is not None
    draft, settings = reference(point.draft.id), {"method": "draft_model"}
    for name, messages in {
        "target": ("exported for other weights than the ones of", "run autotune export again"),
        "draft": ("its weights have changed since the export; run autotune export again",),
    }.items():
        target = profile.target if name != "target" else DRAFT
        changed = draft if name != "draft" else draft.model_copy(update={"sha256": "0" * 64})
        write_export(tmp_path / name, target, changed, settings, command=COMMAND)
        assert_refused(bench(world, address, folder=tmp_path / name), *messages)


def test_options_and_prompts_that_cannot_be_compared(world: Path, address: str) -> None:
    missing = bench(world, "vllm", "--engine-command", "no/such")
    assert_refused(missing, "no/such: no such executable; run make engines, or name a vllm")
    sampled = bench(world, address, workload="sampled.jsonl")
    assert_refused(sampled, "engines are compared at temperature 0", "--temperature 0")
    assert bench(world, address, "--temperature", 0, workload="sampled.jsonl").exit_code == 0
