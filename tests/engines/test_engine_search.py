"""A search in llama-server: its replay against a transcript of the real one, its stages with a small one, and its bad
input.
"""

from __future__ import annotations

import json
import os
import random
import re
import struct
import subprocess
import sys
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from autotune.cli.main import main
from autotune.documents.answer import answer_of_engine
from autotune.documents.engine_profile import OPTIONS, TYPES, EngineProfile, ServedAnswer, Speculation
from autotune.engines import llama_server
from autotune.engines.engine import EngineServer
from autotune.engines.engine_search import recommended, speculation_space
from autotune.engines.llama_server import PRICED_BY, LlamaEngine, llama_arguments
from autotune.engines.ngram_drafters import POOL_FACTOR, POOL_SLOTS, KnownRequest, iterated
from autotune.engines.ngram_replay import FirstDrafter, replay_speculation, total
from autotune.engines.server import running
from autotune.files import user_cache
from autotune.modeling.gguf import find_gguf
from tests.engines.recorded_llama import ASKED, CONTEXT, LIMIT, PROMPTS, TRANSCRIPT
from tests.report.test_page import Page
from tests.sample_documents import confirmed_arm

ONE_SLOT = ("--parallel", "1")
TRANSCRIBED = json.loads(TRANSCRIPT.read_text())
SCRIPT = """#!{python}
import sys
sys.path.insert(0, {root!r})
from tests.sample_documents import confirmed_arm
from tests.engines.recorded_llama import serve
serve(sys.argv[1:])
"""


def recorded_requests() -> list[KnownRequest]:
    rows = [{key: value for key, value in row.items() if key != "text"} for row in TRANSCRIBED["prompts"]]
    return [KnownRequest(ServedAnswer(**row)) for row in (*rows[:ASKED], *rows[:2])]


@pytest.mark.parametrize("server", TRANSCRIBED["servers"], ids=lambda server: server["speculations"][0]["type"])
def test_replay_gives_the_counts_of_the_real_server(server: dict) -> None:
    replays = replay_speculation([Speculation(**one) for one in server["speculations"]], recorded_requests(), CONTEXT)
    assert [[one.counts.drafted, one.counts.accepted] for one in replays] == server["counts"]
    assert total(one.counts for one in replays).verifications == server["verifications"]


def test_the_transcript_has_every_type_and_drafts_that_were_accepted() -> None:
    by_type = {server["speculations"][0]["type"]: 0 for server in TRANSCRIBED["servers"]}
    for server in TRANSCRIBED["servers"]:
        by_type[server["speculations"][0]["type"]] += sum(accepted for _, accepted in server["counts"])
    assert list(by_type) == TYPES["llama.cpp"] and all(by_type.values()) and len(TRANSCRIBED["servers"]) >= 10


def obvious_simple(tokens: list[int], length: int, n: int, m: int) -> list[int]:
    wanted = tokens[length - n + 1 : length + 1]
    for start in range(length - n - 1, 0, -1) if length > n + m + 1 else ():
        if tokens[start : start + n] == wanted:
            draft = tokens[start + n : length][:m]
            return draft if len(draft) >= n else []
    return []


def obvious_pool(pool: dict[int, int], tokens: list[int], n: int, most: int) -> list[int]:
    tokens = list(tokens)
    for index in range(most):
        token = pool.get(hash_of(tokens[-n:]))
        if token is None:
            return tokens[len(tokens) - index :] if index else []
        tokens.append(token)
    return tokens[-most:]


def hash_of(tokens: list[int]) -> int:
    value = 0
    for token in tokens:
        value = value * POOL_FACTOR + token
    return value % POOL_SLOTS


@pytest.mark.parametrize("seed", range(3))
def test_fast_drafts_are_those_of_the_obvious_rules(seed: int) -> None:
    draw = random.Random(seed)
    tokens = [draw.randrange(3) for _ in range(150)]
    request = KnownRequest(ServedAnswer(prompt_tokens=tokens[:50], tokens=tokens[50:], limit=100))
    for n, m in ((1, 4), (2, 3), (3, 8), (5, 5)):
        simple, mod = (
            FirstDrafter([Speculation(type=name, options=options)])
            for name, options in (
                ("ngram-simple", {"size-n": n, "size-m": m}),
                ("ngram-mod", {"n-match": n, "n-min": 0, "n-max": m}),
            )
        )
        mod.begin(request)
        pool = {hash_of(tokens[i : i + n]): tokens[i + n] for i in range(50 - n)}
        for length in range(50, 83 - n):  # later the pool takes in what was generated
            assert simple.draft(request, length) == obvious_simple(tokens, length, n, m)
            assert mod.draft(request, length) == obvious_pool(pool, tokens[: length + 1], n, m)


def test_a_cleared_server_forgets_and_one_that_serves_on_does_not() -> None:
    answer = ServedAnswer(prompt_tokens=list(range(1, 41)), tokens=list(range(41, 141)), limit=100)
    one = [Speculation(type="ngram-mod", options={"n-match": 4, "n-min": 0, "n-max": 8})]
    for is_cleared, accepted in ((False, True), (True, False)):
        _, again = replay_speculation(one, [KnownRequest(answer), KnownRequest(answer)], CONTEXT, is_cleared=is_cleared)
        assert (again.counts.accepted > 0) == accepted


def test_drafts_are_cut_to_what_the_request_may_still_generate() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8] * 4
    request = KnownRequest(ServedAnswer(prompt_tokens=tokens, tokens=[1, 2, 3, 4], limit=4))
    one = [Speculation(type="ngram-mod", options={"n-match": 2, "n-min": 0, "n-max": 64})]
    assert replay_speculation(one, [request], CONTEXT)[0].drafts == [(2, 2)]


def test_equal_counts_of_a_cache_are_ordered_as_the_hash_table_of_the_server_orders_them() -> None:
    assert iterated([1, 2, 3]) == [3, 2, 1]
    assert iterated([1, 2, 14]) == [2, 14, 1]  # 14 is in the bucket of 1
    assert iterated(range(14)) == [13, *range(13)]  # inserted again, in reverse, in 29 buckets


def test_the_space_holds_each_setting_once_and_the_defaults() -> None:
    settings = speculation_space(LlamaEngine, TYPES["llama.cpp"])
    assert len({one.label for one in settings}) == len(settings) > 800
    assert all(Speculation(type=name, options=OPTIONS[name]) in settings for name in TYPES["llama.cpp"])


@pytest.mark.parametrize(("low", "is_chosen"), [(1.02, True), (0.98, False)])
def test_speculation_is_recommended_only_where_its_interval_lies_above_1(low: float, is_chosen: bool) -> None:
    slow = Speculation(type="ngram-mod", options=OPTIONS["ngram-mod"])
    fast = Speculation(type="ngram-cache")
    chosen = recommended(
        [
            confirmed_arm(None, 1.0, (1.0, 1.0)),
            confirmed_arm(slow, 0.7, (0.6, 0.8)),
            confirmed_arm(fast, 1.05, (low, 1.15)),
        ]
    )
    assert chosen == (fast if is_chosen else None)


# -------- search


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model's file, a workload, and an executable that plays the transcript back."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF metadata tokenizer.chat_template")
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text, "max_new_tokens": LIMIT}) + "\n" for text in PROMPTS)
    )
    script = tmp_path / "llama-server"
    script.write_text(SCRIPT.format(python=sys.executable, root=str(Path(__file__).parents[2])))
    script.chmod(0o755)
    monkeypatch.setattr(llama_server, "SIZES", (2, 4, 12))
    monkeypatch.setattr(llama_server, "LENGTHS", (4, 16, 48))
    monkeypatch.setattr(EngineServer, "cpu_ms", lambda server: 0.0)  # what it takes to play back says nothing
    return tmp_path


def autotune(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def said(done: Result) -> str:
    """The output without the line breaks of the console."""
    return " ".join(done.output.split())


def searched(folder: Path, *words: str, server: str = "") -> Result:
    command = f"{folder / 'llama-server'} {server}"
    where = ("--target", "model.gguf", "--workload", "prompts.jsonl", "--engine-command", command)
    return autotune("search", "--engine", "llama.cpp", *where, *words)


def test_a_search_recommends_what_it_confirms_and_check_run_and_bench_take_its_profile(folder: Path) -> None:
    done = searched(folder)
    assert done.exit_code == 0, done.output
    profile = EngineProfile.load("profile.json")
    assert profile.speculation is not None and profile.arms[-2].measured > 1.0
    assert all(arm.exact == arm.prompts == 4 and abs(arm.predicted / arm.measured - 1) < 0.01 for arm in profile.arms)
    assert done.stdout.splitlines() == ["", *answer_of_engine(profile, Path("profile.json"))], "and nothing else"
    assert profile.command[-1].isdigit() and "--spec-type" in profile.command
    assert autotune("check", "profile.json").exit_code == 0
    other = autotune("check", "profile.json", "--engine-command", f"{folder / 'llama-server'} --other-rule")
    assert other.exit_code == 1 and "the build has another rule" in said(other)
    unsteady = autotune("check", "profile.json", "--engine-command", f"{folder / 'llama-server'} --unsteady")
    assert unsteady.exit_code == 4 and "answers are not those of the search" in said(unsteady)
    for source in ("profile.json", str(next(folder.glob(".autotune/engines/*")))):
        assert autotune("report", source).exit_code == 0
        page = Page((folder / "report.html").read_text())
        counted = {
            arm.label: ["{verifications} / {drafted} / {accepted}".format(**arm.counts.model_dump())] * 2
            for arm in profile.arms
        }
        assert {row[0]: row[5:7] for row in page.table("counts predicted")[1:]} == counted
        replayed = sum(int(row[1]) for row in page.table("shown")[1:] if row[1])
        assert replayed == len(speculation_space(LlamaEngine, TYPES["llama.cpp"]))
        assert " ".join(done.stdout.splitlines()[:-1]) in page.text
        assert [row[0] for row in page.table("wall, ms")[1:3]] == ["1", "2"] and "Not measured" in page.text
    answered = autotune("run", "profile.json", "--prompt", PROMPTS[0], "--max-new-tokens", str(LIMIT))
    assert answered.exit_code == 0 and "draft tokens accepted" in said(answered)
    benched = autotune("bench", "profile.json", "--workload", "prompts.jsonl", "--json")
    assert benched.exit_code == 0 and len(json.loads(benched.stdout)["arms"]) == 3


def test_a_search_goes_on_where_it_was_ended(folder: Path) -> None:
    dead = searched(folder, server="--dies")
    assert dead.exit_code == 2 and "llama-server ended while it was used" in said(dead)
    (answers,) = folder.glob(".autotune/engines/*/answers.jsonl")
    assert len(answers.read_text().splitlines()) == 2
    again = searched(folder, server="--dies")
    assert again.exit_code == 2 and len(answers.read_text().splitlines()) == 4


def test_a_search_whose_servers_die_serves_no_prompt_twice(folder: Path) -> None:
    served: list[int] = []
    while (done := searched(folder, server="--dies-drafting")).exit_code:
        assert "llama-server ended while it was used" in said(done)
        (record,) = folder.glob(".autotune/engines/*/served.jsonl")
        served.append(len(record.read_text().splitlines()))
    assert served == [2, 6]  # of four in the self-test, and of four in the confirmation
    profile = EngineProfile.load("profile.json")
    assert all(arm.exact == arm.prompts == 4 and arm.replayed == arm.counts for arm in profile.arms)
    assert not record.exists()
    assert autotune("check", "profile.json").exit_code == 0


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.nightly
def test_a_search_that_was_killed_goes_on_and_leaves_no_server(folder: Path) -> None:
    words = ("--target", "model.gguf", "--workload", "prompts.jsonl", "--engine-command", "./llama-server --slow")
    command = [sys.executable, "-m", "autotune", "search", "--engine", "llama.cpp", *words]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    kept: dict[str, str] = {}
    for file, lines in (("answers", 2), ("served", 2), ("served", 5), ("served", 7)):
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as search:
            deadline = time.monotonic() + 600
            while (
                sum(len(one.read_text().splitlines()) for one in folder.glob(f".autotune/engines/*/{file}.jsonl"))
                < lines
            ):
                assert search.poll() is None and time.monotonic() < deadline
                time.sleep(0.005)
            search.kill()
        records = {one.stem: one.read_text() for one in folder.glob(".autotune/engines/*/*.jsonl")}
        assert all(records[name].startswith(text) for name, text in kept.items())
        kept = records
    assert searched(folder, server="--slow").exit_code == 0
    servers = [int(pid) for pid in (folder / "servers.txt").read_text().split()]
    assert len(servers) >= 10 and not any(map(is_running, servers))
    profile = EngineProfile.load("profile.json")
    assert all(arm.exact == arm.prompts == 4 for arm in profile.arms)


def test_requests_at_once_are_served_by_new_servers_without_speculation_and_as_tuned(folder: Path) -> None:
    assert searched(folder, "--requests-at-once", "1", "--requests-at-once", "4").exit_code == 0
    profile = EngineProfile.load("profile.json")
    for size in (1, 4):
        labels = [one.label for one in profile.loads if one.requests_at_once == size]
        assert labels[:2] == ["off", profile.checked.label] and len(labels) <= 3
    for load in profile.loads:
        assert load.identical == load.requests == 8
        assert load.tokens == sum(len(one["tokens"]) for one in TRANSCRIBED["prompts"])
        assert 0 < load.first_token_ms[0] <= load.first_token_ms[1] < 1e3 * load.seconds
    benched = autotune("bench", "profile.json", "--workload", "prompts.jsonl", "--requests-at-once", "2", "--json")
    assert [one["requests_at_once"] for one in json.loads(benched.stdout)["loads"]] == [2, 2]


@pytest.mark.parametrize(("architecture", "kind"), [("llama", "draft-simple"), ("eagle3", "draft-eagle3")])
def test_the_chains_of_a_draft_model_are_tuned_beside_the_n_grams(folder: Path, architecture: str, kind: str) -> None:
    key, value = b"general.architecture", architecture.encode()
    (folder / "draft.gguf").write_bytes(b"GGUF" + key + struct.pack("<IQ", 8, len(value)) + value + b"more")
    done = searched(folder, "--draft", "draft.gguf")
    assert done.exit_code == 0, done.output
    assert re.search(rf"tokens per pass of {kind}\(1\): (1\.\d\d) by replay of {kind}\(8\), \1 counted", said(done))
    profile = EngineProfile.load("profile.json")
    assert profile.num_replayed[kind] == 8 and len(profile.arms) >= 3
    arm = next(arm for arm in profile.arms if arm.speculation and arm.speculation.type == kind)
    assert arm.exact is None and arm.prompts == arm.identical and arm.counts == arm.replayed
    assert arm.speculation and arm.speculation.model == str(folder / "draft.gguf")
    assert autotune("check", "profile.json").exit_code == 0


@pytest.mark.nightly
def test_a_type_with_another_rule_is_left_out_and_said(folder: Path) -> None:
    done = searched(folder, server="--other-rule")
    assert done.exit_code == 2 and "counts differ from the replay's in every type" in said(done)
    assert said(done).count("the build has another rule, and the type is left out") == 5


def searched_at(url: str) -> Result:
    return autotune(
        "search", "--engine", "llama.cpp", "--target", "model.gguf", "--workload", "prompts.jsonl", "--url", url
    )


@pytest.mark.nightly
def test_a_server_that_runs_is_priced_and_not_confirmed(folder: Path) -> None:
    with running([str(folder / "llama-server"), *ONE_SLOT, *llama_arguments([PRICED_BY])], "llama-server") as (url, _):
        assert searched_at(url).exit_code == 0
    profile = EngineProfile.load("profile.json")
    assert profile.speculation and not profile.arms
    refused = autotune("check", "profile.json")
    assert refused.exit_code == 2 and "holds no counts" in said(refused)
    with running([str(folder / "llama-server"), *ONE_SLOT], "llama-server") as (url, _):
        unpriced = searched_at(url)
    assert unpriced.exit_code == 2 and "start the server with --spec-type ngram-mod" in said(unpriced)


@pytest.mark.nightly
def test_answers_that_do_not_repeat_are_said(folder: Path) -> None:
    assert "asked again, 2 of 4 answers differ" in said(searched(folder, server="--unsteady"))


@pytest.mark.parametrize(
    ("words", "server", "message"),
    [
        ((), "--bogus", "llama-server ended when it started: invalid argument: --bogus"),
        ((), "--port 8080", "--engine-command: --port is set by the search"),
        ((), "--spec-type ngram-mod", "--engine-command: --spec-type is set by the search"),
        (("--draft", "retrieval"), "", "--draft retrieval: llama.cpp drafts with GGUF files"),
        (("--draft", "no.gguf"), "", "no.gguf: no such file"),
        (("--target", "empty.gguf"), "", "empty.gguf: truncated, damaged or no GGUF file"),
        (("--url", "http://127.0.0.1:9"), "", "no engine answers"),
        (("--url", "http://127.0.0.1:9", "--requests-at-once", "4"), "", "leave one of the two out"),
        ((), "--killed", "llama-server ended while it was used: signal 9"),
    ],
)
def test_mistakes_are_told_in_one_line(folder: Path, words: tuple[str, ...], server: str, message: str) -> None:
    (folder / "empty.gguf").touch()
    done = searched(folder, *words, server=server)
    assert done.exit_code == 2 and message in said(done) and len(done.output.splitlines()[-1]) < 400


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.gguf", b"GGUF without", "has no chat template"),
        ("model.gguf", b"something else", "no GGUF file"),
        ("llama-server", b"#!/bin/sh\necho a shell\n", "is no llama-server"),
        ("llama-server", b"#!/bin/sh\necho --spec-type none,draft-simple\n", "one without --spec-type ngram-mod"),
        ("llama-server", b"no program", "cannot be run"),
        ("prompts.jsonl", b'{"prompt": "a", "images": ["red.png"]}\n{"prompt": "b"}\n', "has an image"),
        ("prompts.jsonl", b'{"prompt": "a", "temperature": 1.0}\n{"prompt": "b"}\n', "at temperature 0"),
    ],
)
def test_files_that_cannot_be_used_are_told_in_one_line(folder: Path, file: str, content: bytes, message: str) -> None:
    Image.new("RGB", (8, 8)).save(folder / "red.png")
    (folder / file).write_bytes(content)
    done = searched(folder)
    assert done.exit_code == 2 and message in said(done), done.output


def test_another_program_at_the_port_is_told_before_it_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running([str(folder / "llama-server"), *ONE_SLOT], "llama-server") as (url, _):
        monkeypatch.setattr("socket.socket.getsockname", lambda _: ("127.0.0.1", int(url.rpartition(":")[2])))
        done = searched(folder)
    # The server that was started may end before or after the other one answers.
    assert done.exit_code == 2 and re.search("Address already in use|another program took this port", said(done))
    assert not list(folder.glob(".autotune/engines/*/*.jsonl"))


def test_a_page_of_another_program_is_no_engine(folder: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        done = searched_at(f"http://127.0.0.1:{other.server_address[1]}")
        other.shutdown()
    assert done.exit_code == 2 and "/props: the engine answers 404" in said(done)


def test_a_profile_refuses_images_and_sampling(folder: Path) -> None:
    assert searched(folder).exit_code == 0
    Image.new("RGB", (8, 8)).save("red.png")
    (folder / "other.jsonl").write_text('{"prompt": "a", "images": ["red.png"]}\n')
    for words, message in (
        (("bench", "profile.json", "--workload", "other.jsonl", "--whole"), "has an image"),
        (("bench", "profile.json", "--workload", "prompts.jsonl", "--temperature", "1"), "at temperature 0"),
        (("run", "profile.json", "--prompt", PROMPTS[0], "--temperature", "1"), "at temperature 0"),
        (("run", "profile.json", "--prompt", PROMPTS[0], "--image", "red.png"), "has an image"),
    ):
        done = autotune(*words)
        assert done.exit_code == 2 and message in said(done), done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--engine", "llama.cpp"), "needs --target"),
        (("--url", "http://127.0.0.1:9"), "add --engine llama.cpp or vllm"),
    ],
)
def test_options_of_an_engine_go_together(words: tuple[str, ...], message: str) -> None:
    done = autotune("search", *words)
    assert done.exit_code == 2 and message in said(done)


@pytest.mark.nightly
def test_the_real_server_drafts_as_the_replay_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (user_cache().parent / "autotune-engines" / LlamaEngine.built).exists():
        pytest.skip("llama-server is not built; run make engines")
    model = find_gguf("smollm2")
    assert model is not None
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text, "max_new_tokens": LIMIT}) + "\n" for text in PROMPTS)
    )
    monkeypatch.chdir(tmp_path)
    os.environ.pop("LLAMA_ARG_SPEC_TYPE", None)
    where = ("--target", str(model), "--workload", "prompts.jsonl", "--engine-command", "llama-server -t 1")
    done = autotune("search", "--engine", "llama.cpp", "--draft", str(model), *where)
    assert done.exit_code == 0, done.output
    arms = EngineProfile.load("profile.json").arms
    assert all(arm.exact == arm.prompts for arm in arms if arm.exact is not None)
    # Its own draft is right but for rounding, and two tokens come of a verification.
    assert re.search(r"per pass of draft-simple\(1\): (2.00|1.9\d) by replay of .*, (2.00|1.9\d) counted", said(done))
    assert autotune("check", "profile.json").exit_code in (0, 4)
