"""Verbs with the profile of an engine: they answer, measure and serve as with one of the runtime, or refuse."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from autotune.cli.main import main
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.provenance import ModelReference
from autotune.documents.speculation import OPTIONS, Speculation
from tests.cli.processes import start_command
from tests.engine_profiles import engine_profile
from tests.engines.conftest import llama
from tests.engines.recorded_llama import LIMIT, PROMPTS
from tests.serve.servers import get, url_of, wait_for

TUNED = Speculation(type="ngram-mod", options=OPTIONS["ngram-mod"] | {"n-match": 4, "n-min": 0})
DEFAULT = Speculation(type="ngram-simple", options=OPTIONS["ngram-simple"])
RUN = ("run", "profile.json", "--prompt", PROMPTS[0], "--max-new-tokens", str(LIMIT))
BENCH = ("bench", "profile.json", "--workload", "prompts.jsonl")


def save_profile(folder: Path, *words: str, switches: str = "") -> DecodingProfile:
    """Write ``profile.json``, whose engine plays a transcript back, with further words in its command."""
    deployment = llama(folder, switches).deploy(TUNED)
    deployment = deployment.model_copy(update={"command": [*deployment.command, *words]})
    profile = engine_profile(speculation=TUNED, best_default=DEFAULT.label)
    point = profile.point.model_copy(update={"deployment": deployment})
    profile = profile.model_copy(update={"point": point, "target": deployment.model})
    profile.save(folder / "profile.json")
    return profile


@pytest.fixture
def profile(folder: Path) -> DecodingProfile:
    rows = [{"prompt": text, "max_new_tokens": LIMIT} for text in PROMPTS]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Image.new("RGB", (8, 8), "red").save("red.png")
    return save_profile(folder)


def autotune(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def printed(*words: str) -> Any:
    done = autotune(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_prompts_are_answered_with_their_counts(profile: DecodingProfile) -> None:
    answer = printed(*RUN)
    assert answer["prompt"] == PROMPTS[0] and answer["lossless"] and answer["perplexity"] is None
    assert answer["text"] == " ".join(map(str, answer["stats"]["tokens"])) and len(answer["stats"]["tokens"]) <= LIMIT
    counts = f"{sum(answer['stats']['accepted_lengths'])} of {answer['stats']['verified_nodes']} draft tokens accepted)"
    assert answer["summary"].endswith(counts) and answer["stats"]["verified_nodes"] > 0
    shown = autotune(*RUN)
    assert shown.exit_code == 0 and shown.stdout.strip() == answer["text"] and counts in shown.stderr
    assert [one["prompt"] for one in printed("run", "profile.json", "--workload", "prompts.jsonl")] == list(
        PROMPTS[1::2]
    )


def test_plain_the_best_default_and_the_profile_are_compared_as_arms_of_the_runtime_are(
    profile: DecodingProfile, folder: Path
) -> None:
    found = printed(*BENCH, "--table", "runs.csv", "--load", "2")
    assert [arm["name"] for arm in found["arms"]] == ["ar", DEFAULT.label, "tuned"] == list(found["runs"])
    assert all(arm["identical_outputs"] == arm["num_prompts"] == len(PROMPTS) // 2 for arm in found["arms"])
    assert found["arms"][-1]["tokens_per_round"] > found["arms"][0]["speedup"] == 1.0
    (load,) = found["loads"]
    assert (load["at_once"], load["depth"], load["depths"]) == (2, TUNED.depth, [0, TUNED.depth])
    assert [load[name]["label"] for name in ("chosen", "off")] == [TUNED.label, "off"]
    assert load["ratio"][1] <= load["ratio"][0] <= load["ratio"][2]
    assert (folder / "runs.csv").read_text().count("\n") == 1 + 3 * len(PROMPTS) // 2
    assert list(printed(*BENCH, "--arms", "ar")["runs"]) == ["ar", "tuned"]


REFUSED = {
    "run": [
        ((*RUN, "--device", "cpu"), "--device: not an option for a profile of llama.cpp; leave it out"),
        ((*RUN, "--dtype", "float32"), "--dtype: not an option"),
        ((*RUN, "--temperature", "1"), "engines are tuned at temperature 0"),
        ((*RUN, "--image", "red.png"), "has an image; llama.cpp is tuned on text"),
        ((*RUN, "--engine-command", "nowhere"), "nowhere: no such executable"),
    ],
    "bench": [
        ((*BENCH, "--arms", "hf"), "--arms hf: no such arm of llama.cpp"),
        ((*BENCH, "--draft", "retrieval"), "--draft: not an option"),
        ((*BENCH, "--temperature", "1"), "engines are tuned at temperature 0"),
    ],
    "others": [
        (("serve", "profile.json", "--max-waiting", "3"), "--max-waiting: not an option"),
        (("serve", "profile.json", "--chat-template-kwargs", "{}"), "--chat-template-kwargs: not an option"),
        (("serve", "profile.json", "--host", "0.0.0.0"), "other machines can reach this address, which needs a key"),
        (("export", "profile.json", "--draft-tokens", "3"), "--draft-tokens: not an option"),
        (("report", "profile.json", "--study", "x"), "--study: not an option"),
    ],
}


@pytest.mark.parametrize("verb", REFUSED)
def test_what_an_engine_does_not_have_is_refused_in_a_line(profile: DecodingProfile, verb: str) -> None:
    for words, message in REFUSED[verb]:
        done = autotune(*words)
        assert done.exit_code == 2 and message in done.stderr.splitlines()[-1], (words, done.output)
        assert done.stdout == "", words


def test_a_target_that_vllm_does_not_load_is_named(folder: Path) -> None:
    from tests.sample_documents import DRAFT, decoding_profile

    decoding_profile(ModelReference(id="model.gguf", sha256=""), DRAFT).save(folder / "runtime.json")
    done = autotune("export", "runtime.json")
    assert done.exit_code == 2 and "model.gguf: vLLM loads a folder with config.json" in done.stderr


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_engine_is_served_until_a_signal_or_its_end(
    folder: Path, is_killed: bool, profile: DecodingProfile
) -> None:
    """Under its own address and the target's name."""
    save_profile(folder, "--parallel", "1")
    process = start_command("serve", "profile.json", "--port", "0", "--json", folder=folder, log=folder / "log")
    try:
        url = url_of(process, folder / "log")
        assert get(url, "/props")[1]["model_alias"] == "model.gguf"
        (engine,) = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        os.kill(engine if is_killed else process.pid or 0, signal.SIGTERM)
        process.join(60)
        said = (folder / "log.err").read_text().splitlines()
        assert process.exitcode == (2 if is_killed else 0), said
        assert said[-1].startswith("autotune: llama.cpp ended while it was used: signal 15" if is_killed else url), said
        wait_for(lambda: not Path(f"/proc/{engine}").exists())
    finally:
        process.kill()
