"""Backends of engines, played back from transcripts: recording, the self-test, draft models, requests at once, and bad
input.
"""

from __future__ import annotations

import json
import math
import re
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from autotune.console import Console
from autotune.documents.decoding_profile import AR
from autotune.documents.speculation import DEEPEST, OPTIONS, Speculation
from autotune.engines import engine
from autotune.engines.engine import EngineBackend
from autotune.engines.llama_cpp import LlamaBackend
from autotune.engines.process import running
from autotune.engines.replay import KEEPS_STATE
from autotune.engines.self_test import SELF_TEST
from autotune.engines.vllm import VllmBackend, vllm_arguments
from autotune.errors import ArmFailed, UserError
from autotune.modeling.gguf import find_gguf
from autotune.search.backends import found_engines
from autotune.search.engine_tuning import tune_engine
from autotune.study.search_settings import SearchSettings
from autotune.workloads.pixels import Video
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from tests.engines import recorded_llama
from tests.engines.conftest import llama, running_here, vllm
from tests.engines.recorded_llama import LIMIT, PROMPTS, DraftModel

ENGINES = pytest.mark.parametrize("start", [llama, vllm])
Start = Callable[..., EngineBackend]


IMAGE = Image.new("RGB", (8, 8))


def draft_of(config: dict[str, Any]) -> dict[str, Any]:
    """Options of a draft model with a config."""
    return {"draft": "draft", "file": ("draft/config.json", json.dumps(config).encode())}


def write_draft(folder: Path, architecture: str, name: str = "draft", more: bytes = b"more") -> None:
    """A GGUF file, of which only the architecture and sizes are read."""
    key, value = b"general.architecture", architecture.encode()
    (folder / f"{name}.gguf").write_bytes(b"GGUF" + key + struct.pack("<IQ", 8, len(value)) + value + more)


def records(folder: Path) -> list[str]:
    return [line for file in folder.glob(".autotune/engines/*/*.jsonl") for line in file.read_text().splitlines()]


@ENGINES
def test_what_was_recorded_is_kept_where_an_engine_dies(
    folder: Path, prompts: list[WorkloadPrompt], start: Start
) -> None:
    backend = start(folder, "--dies")
    for recorded in (2, 4):
        with pytest.raises(UserError, match=f"{backend.program} ended while it was used"):
            backend.record(prompts)
        assert len(records(folder)) == recorded


@ENGINES
def test_few_prompts_are_recorded_where_there_is_no_time(
    folder: Path, prompts: list[WorkloadPrompt], start: Start
) -> None:
    recorded = start(folder).record(prompts, until=time.monotonic())
    assert len(recorded.answers) == len(recorded.prompts) == 4
    for until, samples in ((time.monotonic(), {1, 3}), (math.inf, {3, 9})):  # of long verifications, and of short ones
        assert {len(step.wall_ms) for step in start(folder).price(recorded, until=until).priced} == samples


@ENGINES
@pytest.mark.parametrize(("switch", "end"), [("--dies", "exit code 3"), ("--killed", "signal 9")])
def test_an_arm_whose_server_ends_leaves_the_race_in_one_line(
    folder: Path, prompts: list[WorkloadPrompt], start: Start, switch: str, end: str
) -> None:
    message = f"^the server ended while it was used, with {end}$"
    with start(folder, switch).arm(None) as arm, pytest.raises(ArmFailed, match=message):
        for prompt in prompts:
            arm.decode(prompt)


@ENGINES
def test_answers_that_do_not_repeat_are_said(
    folder: Path, prompts: list[WorkloadPrompt], start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = start(folder, "--unsteady")
    backend.price(backend.record(prompts))
    assert re.search("[1-8] of 8 plain answers differ from the recorded", capsys.readouterr().err)


@ENGINES
def test_the_self_test_finds_one_type_of_two(
    folder: Path, prompts: list[WorkloadPrompt], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = start(folder)
    recorded, started = backend.record(prompts), backend.started
    tested, other = backend.tested
    monkeypatch.setattr(type(backend), "started", lambda self, one=None, *rest: started(tested if one else one, *rest))
    prices = backend.price(recorded)
    assert list(prices.left_out) == [other.type] and "; predicted are " in prices.left_out[other.type]


@ENGINES
def test_a_type_that_the_build_lacks_is_left_out(folder: Path, prompts: list[WorkloadPrompt], start: Start) -> None:
    backend = start(folder, "--lacks-second")
    prices = backend.price(backend.record(prompts))
    assert (
        list(prices.left_out) == [backend.tested[1].type] and "no such type" in prices.left_out[backend.tested[1].type]
    )


@pytest.mark.parametrize(
    ("architecture", "kind", "switch"),
    [
        ("llama", "draft-simple", ""),
        ("eagle3", "draft-eagle3", ""),
        ("dflash", "draft-dflash", ""),
        ("", "eagle3", ""),
        ("", "eagle3", "--old"),
    ],
)
def test_every_depth_of_a_chain_is_replayed_from_one_recording(
    folder: Path, prompts: list[WorkloadPrompt], architecture: str, kind: str, switch: str
) -> None:
    """Exactly, because the draft reads the text alone; also from a build whose replies have no counts."""
    write_draft(folder, architecture)
    backend = llama(folder, draft="draft.gguf") if architecture else vllm(folder, switch, draft="draft")
    prompts = prompts[: 4 if switch else None]
    chains = [chain for chain in backend.configurations() if chain.type == kind]
    assert [chain.depth for chain in chains] == list(range(1, DEEPEST + 1))
    recorded = backend.record(prompts)
    assert len(records(folder)) == 2 * len(prompts)
    assert backend.record(prompts).chains == recorded.chains and len(records(folder)) == 2 * len(prompts)
    prices = backend.price(recorded)
    assert kind not in prices.left_out
    for chain in chains if not switch else chains[::3]:
        with backend.arm(chain) as arm:
            counts = [arm.decode(prompt).draft_counts for prompt in prompts]
        assert counts == list(backend.replay(chain, recorded).counts) and not arm.keeps_state, chain.label
        assert prices.ms(backend.replay(chain, recorded)).shape == (len(prompts),)
    few = backend.record(prompts, until=time.monotonic())
    assert len(few.answers) == 4 == len(few.chains[kind])
    deployed = backend.deploy(chains[0]).speculation
    assert deployed is not None and deployed.model.endswith("draft.gguf" if architecture else "draft")


@pytest.mark.parametrize(("promised", "deepest"), [({"num_nextn_predict_layers": 1}, 8), ({"num_mtp_layers": 3}, 3)])
def test_heads_are_found_in_the_files_of_a_target_and_beside_them(
    folder: Path, promised: dict[str, int], deepest: int
) -> None:
    """The given draft takes the place of one of its type."""
    sizes = {"hidden_size": 64, "vocab_size": 9, "model_type": "llama"}
    head = {**sizes, "draft_vocab_size": 8}
    for name, config in {"model": sizes | promised, "head": head, "other": head | {"hidden_size": 65}}.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "model.safetensors").touch()
    found = vllm(folder).heads
    assert {kind: Path(head.model).name for kind, head in found.items()} == {"mtp": "", "eagle3": "head"}
    assert [head.depth for head in found.values()] == [deepest, 8]
    assert (
        vllm(folder, draft="draft").heads["eagle3"].model.endswith("draft")
        and not VllmBackend.restored(vllm(folder).deploy(None)).heads
    )


def test_heads_are_found_in_a_gguf_file_and_beside_it(folder: Path) -> None:
    sized = b"llama.embedding_length\4\0\0\0\x40\0\0\0"
    assert not llama(folder).heads
    content = (folder / "model.gguf").read_bytes() + sized + b"llama.nextn_predict_layers\4\0\0\0\1\0\0\0"
    (folder / "model.gguf").write_bytes(content)
    for name, architecture, more in (
        ("a", "eagle3", sized),
        ("b", "dflash", sized),
        ("c", "eagle3", b""),
        ("d", "llama", sized),
    ):
        write_draft(folder, architecture, name, more)
    found = llama(folder).heads
    assert list(found) == ["draft-mtp", "draft-eagle3", "draft-dflash"]
    assert [Path(head.model).name for head in found.values()] == ["", "a.gguf", "b.gguf"]
    assert llama(folder).words(found["draft-mtp"])[-4:] == ["--spec-type", "draft-mtp", "--spec-draft-n-max", "8"]


def test_a_draft_costs_time_that_is_linear_in_its_tokens(folder: Path, prompts: list[WorkloadPrompt]) -> None:
    """The stand-in takes a fiftieth of a step for each draft token, and nothing more for a draft."""
    write_draft(folder, "llama")
    backend = llama(folder, draft="draft.gguf")
    recorded = backend.record(prompts)
    prices = backend.price(recorded)
    for chain in backend.heads["draft-simple"], *backend.configurations()[-6:-1:2]:
        with backend.arm(chain) as arm:
            spent = sum(arm.decode(prompt).decode_ms for prompt in prompts)
        assert prices.ms(backend.replay(chain, recorded)).sum() == pytest.approx(spent, rel=0.02)


def test_a_head_that_the_build_refuses_is_left_out_and_what_was_recorded_stays(
    folder: Path, prompts: list[WorkloadPrompt], capsys: pytest.CaptureFixture[str]
) -> None:
    backend = vllm(folder, "--lacks-drafts", draft="draft")
    recorded = backend.record(prompts)
    assert len(records(folder)) == len(prompts) and "left out   eagle3: " in capsys.readouterr().err
    prices = backend.price(recorded)
    assert list(prices.left_out) == ["eagle3"] and "the head is of another model" in prices.left_out["eagle3"]


def test_a_chain_whose_short_drafts_differ_from_the_recording_is_left_out(
    folder: Path, prompts: list[WorkloadPrompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_draft(folder, "llama")
    backend = llama(folder, draft="draft.gguf")
    recorded = backend.record(prompts)
    monkeypatch.setattr(DraftModel, "draft", lambda *_: [-1])
    assert "drafts otherwise than at depth 8" in backend.price(recorded).left_out["draft-simple"]


def test_counts_that_contradict_the_tokens_are_refused(folder: Path, prompts: list[WorkloadPrompt]) -> None:
    recorded = vllm(folder, "--lies", draft="draft").record(prompts)
    assert "counts 9 verifications that accepted 45; start a vLLM of" in recorded.left_out["eagle3"]


@ENGINES
def test_clients_share_a_server_in_a_closed_loop(
    folder: Path, prompts: list[WorkloadPrompt], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real threads: repeated prompts find nothing of their own in the prefix cache."""
    monkeypatch.setattr(recorded_llama, "PART_S", 0.003)
    backend = start(folder)
    recorded = backend.record(prompts)
    shared = Counter(str(answer.prompt_tokens[:8]) for answer in recorded.answers)
    hits = 8 * (len(prompts) - len(shared)) / sum(len(answer.prompt_tokens) for answer in recorded.answers)
    assert hits > 0
    stateless = next(one for one in backend.configurations() if one.type not in KEEPS_STATE)
    for configuration in (None, stateless):
        one, four = backend.at_loads(configuration, recorded, (1, 4))
        for run, sent in ((one, len(prompts)), (four, 2 * len(prompts))):
            assert run.identical == len(run.tokens) == len(run.seconds) == sent and not run.failure
            assert run.label == (configuration.label if configuration else "off") and run.hit_rate == pytest.approx(
                hits
            )
            assert 0 < len(run.latencies) <= sent - run.at_once and min(map(min, run.latencies)) >= 0
            assert run.at_once * sum(run.tokens) / sum(run.seconds) > 100 * run.at_once
        assert sum(one.tokens) < sum(four.tokens)


@ENGINES
def test_a_server_that_drafts_from_answers_sees_no_prompt_twice(
    folder: Path, prompts: list[WorkloadPrompt], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded_llama, "PART_S", 0.003)
    backend = start(folder)
    keeps_state = next(one for one in backend.configurations() if one.type in KEEPS_STATE)
    two, eight = backend.at_loads(keeps_state, backend.record(prompts), (2, 8))
    assert len(two.tokens) == len(prompts) and not eight.tokens
    assert eight.failure == "it drafts from earlier answers, and needs 16 prompts; there are 8"


@pytest.mark.parametrize(
    ("start", "switch", "failure"),
    [
        (vllm, "--full", "the server lets up to 3 of them wait"),
        (vllm, "--dies", "the server ended while it was used, with exit code 3"),
        (llama, "--dies", "the server ended while it was used|not the reply of a serving engine .KeyError: 'timings'"),
        (llama, "--bogus", "llama-server ended when it started: invalid argument: --bogus"),
    ],
)
def test_a_load_that_a_server_does_not_hold_has_the_reason(
    folder: Path, prompts: list[WorkloadPrompt], start: Start, switch: str, failure: str
) -> None:
    recorded = start(folder).record(prompts)
    runs = list(start(folder, switch).at_loads(None, recorded, (2,)))
    assert [(run.at_once, run.tokens) for run in runs] == [(2, [])] and re.search(failure, runs[0].failure)


@ENGINES
def test_a_deployment_is_restored_with_its_arguments(
    folder: Path, prompts: list[WorkloadPrompt], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the engine of this machine, if the profile's own is not here."""
    backend = start(folder, "--unsteady")
    tuned = backend.configurations()[0]
    with backend.arm(tuned) as arm:
        text = arm.text(arm.decode(prompts[0]))
    deployed = backend.deploy(tuned)
    again = type(backend).restored(deployed)
    assert text and again.arguments == ["--unsteady"] and again.words(tuned) == deployed.command and deployed.build
    monkeypatch.setenv("PATH", str(folder / "bin"))
    elsewhere = deployed.model_copy(update={"command": ["/elsewhere/engine", *deployed.command[1:]]})
    assert type(backend).restored(elsewhere).words(tuned) == deployed.command
    moved = deployed.model_copy(update={"model": deployed.model.model_copy(update={"sha256": "9"})})
    with pytest.raises(UserError, match="not the model that the profile was tuned for; restore its files"):
        type(backend).restored(moved)


def test_precision_is_that_of_the_weights_or_of_the_command(folder: Path) -> None:
    assert llama(folder).precision == "Q4_1" and vllm(folder).precision == "bfloat16"
    assert vllm(folder).words(None)[-2:] == ["--dtype", "bfloat16"]
    for words in ("--dtype float32", "--dtype=float32"):
        assert vllm(folder, words).precision == "float32" and "bfloat16" not in vllm(folder, words).words(None)


def test_options_of_the_command_line_have_the_types_that_vllm_validates() -> None:
    _, config = vllm_arguments(Speculation(type="suffix", options=OPTIONS["suffix"]))
    assert [type(value) for value in list(json.loads(config).values())[1:]] == [int, float, float, int]


@ENGINES
def test_a_server_at_a_url_is_priced_and_not_measured(
    folder: Path, prompts: list[WorkloadPrompt], start: Start
) -> None:
    backend = start(folder)
    target = "model" if backend.name == "vllm" else "model.gguf"
    for tested in (backend.tested[0], None):
        words = [*backend.words(tested), *backend.own_words("x", 1, 0)]
        with running(words, backend.program) as (url, _):
            fixed = type(backend)(target, url=url)
            recorded = fixed.record(prompts)
            if tested is None:
                with pytest.raises(UserError, match="start the server with --spec"):
                    fixed.price(recorded)
                continue
            assert fixed.is_fixed and len(fixed.price(recorded).ms(fixed.replay(tested, recorded))) == len(prompts)
    with pytest.raises(UserError, match="no engine answers"):
        type(backend)(target, url="http://127.0.0.1:9").record(prompts)
    with pytest.raises(UserError, match="keeps its settings"):
        type(backend)(target, url="http://127.0.0.1:9", draft="x")


@pytest.mark.parametrize(
    ("start", "given", "message"),
    [
        (llama, {"switches": "--bogus"}, "llama-server ended when it started: invalid argument: --bogus"),
        (vllm, {"switches": "--bogus"}, "vllm ended when it started: invalid argument: --bogus"),
        (llama, {"switches": "--killed"}, "llama-server ended while it was used: signal 9"),
        (vllm, {"switches": "--killed"}, "vllm ended while it was used: signal 9"),
        (llama, {"switches": "--port 8080"}, "llama.cpp:command: --port is set by the search"),
        (llama, {"switches": "--spec-type ngram-mod"}, "llama.cpp:command: --spec-type is set by the search"),
        (vllm, {"switches": "--port=8080"}, "vllm:command: --port=8080 is set by the search"),
        (vllm, {"switches": "--speculative_config {}"}, "--speculative_config is set by the search"),
        (vllm, {"switches": "--served_model_name x"}, "--served_model_name is set by the search"),
        (llama, {"draft": "retrieval"}, "--draft retrieval: llama.cpp drafts with GGUF files"),
        (llama, {"draft": "no.gguf"}, "no.gguf: no such file"),
        (vllm, {"draft": "no"}, "no: no such model; known: digits/"),
        (llama, {"file": ("model.gguf", b"GGUF without")}, "has no chat template"),
        (llama, {"file": ("model.gguf", b"something else")}, "no GGUF file"),
        (llama, {"file": ("model.gguf", b"")}, "truncated, damaged or no GGUF file"),
        (llama, {"file": ("bin/llama-server", b"#!/bin/sh\necho a shell\n")}, "ended when it started: a shell"),
        (llama, {"file": ("bin/llama-server", b"no program")}, "cannot be started"),
        (vllm, {"prompt": {"max_new_tokens": 1}}, "every answer has one token, and nothing to speculate"),
        (llama, {"prompt": {"temperature": 1.0}}, "engines are tuned at temperature 0"),
        (llama, {"prompt": {"images": ["x"]}, "media": IMAGE}, "0: has an image; llama.cpp is tuned on text"),
        (vllm, {"media": Video(np.zeros((1, 2, 2, 3), np.uint8), 1.0)}, "0: has a video; llama.cpp is tuned on text"),
        (vllm, draft_of({"kind": "star"}), "EAGLE-3 heads and mtp heads; this is star; choose another draft"),
        (vllm, draft_of({"vocab_size": 7}), "the target's 9 tokens, EAGLE-3 heads and mtp heads; this is a model of 7"),
        (vllm, draft_of({"kind": "mtp"}), "vLLM runs mtp heads of Llama and Qwen2 targets, not of gemma3"),
        (vllm, draft_of({"vocab_size": 9, "rope_scaling": {"mrope_section": [1]}}), "has M-RoPE positions"),
    ],
)
def test_mistakes_are_told_in_one_line(
    folder: Path, start: Start, given: dict[str, Any], message: str, prompts: list[WorkloadPrompt]
) -> None:
    path, content = given.pop("file", ("other", b""))
    (folder / path).write_bytes(content)
    settings = {"prompt": PROMPTS[0], "max_new_tokens": LIMIT} | given.pop("prompt", {})
    media = [given.pop("media")] if "media" in given else []
    asked = [
        WorkloadPrompt("0", Prompt(**settings), tuple(media)),
        *(prompts[1:] if settings["max_new_tokens"] > 1 else ()),
    ]
    with pytest.raises(UserError) as caught:
        start(folder, **given).record(asked)
    assert message in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_models_that_an_engine_does_not_load_are_named(folder: Path) -> None:
    for target in ("gone", "model.gguf"):
        with pytest.raises(UserError, match=f"{target}: vllm loads a folder with config.json, or an id of the Hugging"):
            VllmBackend(target, command=str(folder / "bin" / "vllm"))
    with pytest.raises(UserError, match=r"no-server: no such executable; install llama\.cpp .*:command="):
        LlamaBackend("model.gguf", command="no-server")


def test_another_program_at_the_port_is_told_before_it_is_asked(
    folder: Path, prompts: list[WorkloadPrompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running([str(folder / "bin" / "llama-server"), "--parallel", "1", "--alias", "x"], "llama-server") as (url, _):
        monkeypatch.setattr("socket.socket.getsockname", lambda _: ("127.0.0.1", int(url.rpartition(":")[2])))
        # The server that was started may end before or after the other one answers.
        with pytest.raises(UserError, match=r"Address already in use|another program took this port"):
            llama(folder).record(prompts)
    assert not records(folder)


@pytest.mark.nightly
def test_the_real_server_drafts_as_the_replay_says(
    tmp_path: Path, prompts: list[WorkloadPrompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "llama.cpp" not in found_engines():
        pytest.skip("llama-server is not built; run make engines")
    model = find_gguf("smollm2")
    assert model is not None
    monkeypatch.chdir(tmp_path)
    backend = LlamaBackend(str(model), command="llama-server -t 1", draft=str(model))
    recorded = backend.record(prompts)
    assert not backend.price(recorded).left_out and len(prompts) <= SELF_TEST
    # Its own draft is right but for rounding, and two tokens come of a verification.
    first = backend.heads["draft-simple"].at_depth(1)
    rounds, drafted, accepted = map(sum, zip(*backend.replay(first, recorded).counts, strict=True))
    assert drafted == rounds and accepted > 0.9 * drafted


@ENGINES
def test_one_plain_server_answers_for_the_whole_tuning(
    folder: Path, prompts: list[WorkloadPrompt], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started once while it is kept open, and ends with that."""
    plain, open_now = list[str](), set[str]()

    @contextmanager
    def watched(words: Sequence[str], name: str) -> Iterator[tuple[str, Any]]:
        with running_here(words, name) as (url, process):
            if not any(word.startswith("--spec") for word in words):
                plain.append(url)
            open_now.add(url)
            yield url, process
            open_now.remove(url)

    monkeypatch.setattr(engine, "running", watched)
    backend = start(folder)
    rows = [{"prompt": text, "max_new_tokens": LIMIT} for text in PROMPTS]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = SearchSettings(target=backend.target, workload="prompts.jsonl")
    profile = tune_engine(backend, settings, 60.0, folder, Console())
    assert len(plain) == 1 and not open_now and profile.evidence.compared[0].name == AR
    for _ in range(2):
        with backend.arm(None) as arm:
            assert open_now == {arm.server.url}
    assert len(plain) == 3
