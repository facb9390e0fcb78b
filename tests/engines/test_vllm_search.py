"""A search in vLLM: its replay against a transcript of the real one, its stages with a small one, and its bad input."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import sys
import threading
from collections import Counter
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image
from pydantic import ValidationError

from autotune.console import Console
from autotune.documents.engine_profile import (
    OPTIONS,
    TYPES,
    EngineProfile,
    PricedStep,
    ServedAnswer,
    Speculation,
    SpeculationCounts,
    SpeculationType,
)
from autotune.engines import engine_runs, vllm_server
from autotune.engines.engine import EngineServer
from autotune.engines.engine_runs import serve_in_turns
from autotune.engines.engine_search import speculation_space
from autotune.engines.ngram_drafters import KnownRequest
from autotune.engines.ngram_replay import FirstDrafter, RequestReplay, replay_speculation, total
from autotune.engines.server import running
from autotune.engines.verification_prices import VerificationPrices, served_prices
from autotune.engines.vllm_export import vllm_arguments
from autotune.engines.vllm_server import PRICED_BY, VllmEngine
from autotune.files import user_cache
from autotune.workloads.prompt import Prompt, WorkloadPrompt
from tests.engines.recorded_llama import ASKED, CONTEXT, LIMIT, PROMPTS
from tests.engines.recorded_vllm import COMMAND, TRANSCRIPT
from tests.engines.test_engine_search import autotune, said

TRANSCRIBED = json.loads(TRANSCRIPT.read_text())
SCRIPT = """#!{python}
import sys
sys.path.insert(0, {root!r})
from tests.engines.recorded_llama import serve
from tests.engines.recorded_vllm import RecordedVllm
serve(sys.argv[1:], RecordedVllm)
"""


def lookup(shortest: int, longest: int, k: int) -> Speculation:
    return Speculation(type="ngram", options=dict(zip(OPTIONS["ngram"], (shortest, longest, k), strict=True)))


@pytest.mark.parametrize("server", TRANSCRIBED["servers"], ids=lambda server: str(server["speculations"][0]["options"]))
def test_replay_gives_the_counts_of_the_real_server(server: dict) -> None:
    rows = [{key: value for key, value in row.items() if key != "text"} for row in TRANSCRIBED["prompts"]]
    requests = [KnownRequest(ServedAnswer(**row)) for row in (*rows[:ASKED], *rows[:2])]
    replays = replay_speculation([Speculation(**one) for one in server["speculations"]], requests, CONTEXT)
    assert [[one.counts.drafted, one.counts.accepted] for one in replays] == server["counts"]
    assert total(one.counts for one in replays).verifications == server["verifications"]


def test_the_transcript_has_drafts_that_were_accepted() -> None:
    accepted = [sum(one for _, one in server["counts"]) for server in TRANSCRIBED["servers"]]
    assert len(accepted) >= 6 and all(accepted)


def obvious(tokens: list[int], shortest: int, longest: int, k: int) -> list[int]:
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n :][:k]
    return []


@pytest.mark.parametrize("seed", range(3))
def test_fast_drafts_are_those_of_the_obvious_rule(seed: int) -> None:
    draw = random.Random(seed)
    tokens = [draw.randrange(3) for _ in range(80)]
    request = KnownRequest(ServedAnswer(prompt_tokens=tokens[:10], tokens=tokens[10:50], beyond=tokens[50:], limit=40))
    for numbers in ((1, 1, 3), (2, 4, 8), (5, 5, 2), (1, 12, 30)):
        drafter = FirstDrafter([lookup(*numbers)])
        for length in range(1, 60):
            assert drafter.draft(request, length) == obvious(tokens[: length + 1], *numbers)


def test_drafts_are_accepted_beyond_the_end_of_an_answer() -> None:
    """As vLLM counts them: it cuts a draft to the context alone, and an answer after it was verified."""
    tokens = [1, 2, 3, 4, 5, 6, 7, 8] * 4
    for beyond, context, drafts in (
        ([5, 6, 7, 8, 3], CONTEXT, [(8, 7)]),
        ([5, 6], CONTEXT, [(8, 5)]),
        ([5, 6, 7, 8, 3], 36, [(2, 2)]),
    ):
        answer = ServedAnswer(prompt_tokens=tokens, tokens=[1, 2, 3, 4], limit=4, beyond=beyond, is_ended=True)
        (replayed,) = replay_speculation([lookup(2, 2, 8)], [KnownRequest(answer)], context)
        assert replayed.drafts[:1] == drafts and replayed.num_tokens == 3


class SuffixTrie:
    """Suffixes of texts token by token, as the obvious tree: a node's children in the order that arctic-inference's
    linked lists keep.
    """

    def __init__(self, depth: int) -> None:
        self.depth, self.root = depth, Node()
        self.ends: list[Node] = []

    def append(self, token: int) -> None:
        self.root.count += 1
        self.ends = [node.child(token) for node in [*self.ends, self.root][-self.depth :]]

    def best(self, context: list[int], factor: float, least: float, most: int) -> tuple[float, list[int]]:
        best = (0.0, list[int]())
        for n in range(1, len(context)):
            node: Node | None = self.root
            for token in context[-n:]:
                node = node and next((one for one in node.children if one.token == token), None)
            if node is None:
                break
            score, probability, draft = np.float32(0), np.float32(1), list[int]()
            while len(draft) < min(most, int(n * factor + 1e-6)) and node.children:
                probability *= np.float32(node.children[0].count) / np.float32(node.count)
                node = node.children[0]
                if probability < np.float32(least):
                    break
                score += probability
                draft.append(node.token)
            if score >= best[0]:
                best = (float(score), draft)
        return best


class Node:
    def __init__(self, token: int = -1) -> None:
        self.token, self.count, self.children = token, 0, list[Node]()

    def child(self, token: int) -> Node:
        """The child whose count grows by one, in its new place: at the head of the group of siblings that it joins or
        leaves.
        """
        place = next((place for place, one in enumerate(self.children) if one.token == token), len(self.children))
        if place == len(self.children):
            self.children.append(Node(token))
        child = self.children[place]
        child.count += 1
        if child.count > 1 and place and self.children[place - 1].count <= child.count:
            level = self.children[place - 1].count
            del self.children[place]
            self.children.insert(next(at for at, one in enumerate(self.children) if one.count == level), child)
        return child


@pytest.mark.parametrize("seed", range(4))
def test_suffix_drafts_are_those_of_a_tree_of_suffixes(seed: int) -> None:
    """In the request and in all answers, over several requests, each with what was accepted beyond its end."""
    draw = random.Random(seed)
    for depth, factor, least, most in itertools.product((4, 24), (0.5, 2.0), (0.05, 0.3), (3, 24)):
        words = dict(zip(OPTIONS["suffix"], (depth, factor, least, most), strict=True))
        drafter, shared, drafted = FirstDrafter([Speculation(type="suffix", options=words)]), SuffixTrie(depth), 0
        for _ in range(3):
            size, first = 40, draw.randrange(1, 10)
            tokens = [draw.randrange(draw.choice((2, 4))) for _ in range(size)]
            request = KnownRequest(ServedAnswer(prompt_tokens=tokens[:first], tokens=tokens[first:], limit=99))
            own, length, accepted = SuffixTrie(depth), first, 0
            shared.ends = []
            for token in tokens[:first]:
                own.append(token)
            drafter.begin(request)
            read = first
            while length + 1 < size:
                for token in tokens[read : length + 1]:
                    own.append(token)
                    shared.append(token)
                read, context = length + 1, tokens[: length + 1][-depth:]
                drafts = [tree.best(context, factor, least, most) for tree in (own, shared)]
                expected = drafts[0][1] if drafts[0][0] >= drafts[1][0] else drafts[1][1]
                found = drafter.draft(request, length)
                assert found == expected
                drafted += len(found)
                accepted = next(
                    (n for n, pair in enumerate(zip(found, tokens[length + 1 :], strict=False)) if pair[0] != pair[1]),
                    0,
                )
                if found:
                    drafter.accept(accepted)
                length += accepted + 1
            for token in tokens[read : length + 1]:
                shared.append(token)
        assert drafted > 20


class Answering:
    """A server that answers at once."""

    context, keeps_answers = 64, False

    def __init__(self, spins_s: float) -> None:
        self.spins_s, self.num_asked = spins_s, 0

    def ask(self, prompt: WorkloadPrompt, other: object) -> ServedAnswer:
        self.num_asked += 1
        return ServedAnswer(prompt_tokens=[1], tokens=[1], limit=1)

    def counts(self) -> SpeculationCounts:
        return SpeculationCounts(verifications=0, drafted=0, accepted=0)


def test_the_next_server_is_asked_when_the_last_one_has_stopped_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[float]()

    class Asked(Answering):
        def ask(self, prompt: WorkloadPrompt, other: object) -> ServedAnswer:
            events.append(0.0)
            return super().ask(prompt, other)

    monkeypatch.setattr(engine_runs, "time", SimpleNamespace(sleep=events.append))
    servers: dict[str, Any] = dict.fromkeys(("off", "on"), Asked(1.2))
    prompts = [WorkloadPrompt("", Prompt(prompt=text), ()) for text in "abc"]
    serve_in_turns(servers, {"off": (), "on": ()}, prompts, "turns", Console())
    assert events == [0.0, 1.2] * 6, "every answer is followed by a pause"


PRICES = VerificationPrices([PricedStep(tokens=n, context=1, wall_ms=[1.0], cpu_ms=[0.0]) for n in (1, 2)], "wall")


class Timed(Answering):
    """A server whose answers take one of several times in turn."""

    build, speculations = "", ()

    def __init__(self, *ms: float) -> None:
        super().__init__(0.0)
        self.ms = itertools.cycle(ms)

    def ask(self, prompt: WorkloadPrompt, other: object) -> ServedAnswer:
        return ServedAnswer(prompt_tokens=[1], tokens=[2] * 3, limit=3, wall_ms=next(self.ms))


@pytest.mark.parametrize(
    ("ms", "stops_early", "asked"),
    [((5.0,), True, 4), ((20.0,), True, 4), ((8.0, 12.5), True, 10), ((5.0,), False, 10)],
    ids=("faster", "slower", "uncertain", "never"),
)
def test_a_confirmation_stops_once_its_interval_is_clear(
    ms: tuple[float, ...], stops_early: bool, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_runs, "LOOKS", range(4, 100, 2))
    servers: dict[str, Any] = {"off": Timed(10.0), "on": Timed(*ms)}
    prompts = [WorkloadPrompt("", Prompt(prompt=text), ()) for text in "abcdefghij"]
    arms, _ = engine_runs.confirm(
        servers, {"off": [], "on": [lookup(2, 4, 3)]}, prompts, PRICES, Console(), seed=0, stops_early=stops_early
    )
    assert [arm.prompts for arm in arms] == [asked] * 2


@pytest.mark.parametrize(
    ("ms", "timed", "measured"), [((5.0, 5.0, 5.0, 50.0, 5.0), 8, 2.0), ((8.0, 11.0), 10, 10 / 9.5)]
)
def test_prompts_that_were_disturbed_do_not_count_for_times(
    ms: tuple[float, ...], timed: int, measured: float, capsys: pytest.CaptureFixture[str]
) -> None:
    servers: dict[str, Any] = {"off": Timed(10.0), "on": Timed(*ms)}
    prompts = [WorkloadPrompt("", Prompt(prompt=text), ()) for text in "abcdefghij"]
    arms, _ = engine_runs.confirm(servers, {"off": [], "on": [lookup(2, 4, 3)]}, prompts, PRICES, Console(), seed=0)
    assert [(arm.timed, arm.prompts, arm.exact) for arm in arms] == [(timed, 10, 10)] * 2
    assert arms[1].measured == pytest.approx(measured)
    said = " ".join(capsys.readouterr().err.split())
    assert ("prompts that do not count for times (a request took 1.5 times the usual): 2" in said) == (timed == 8)


def test_answers_of_one_token_count_for_times() -> None:
    servers: dict[str, Any] = {"off": Timed(10.0), "on": Timed(5.0)}
    short = ServedAnswer(prompt_tokens=[1], tokens=[2], limit=1, wall_ms=3.0)
    for server in servers.values():
        longer, turns = server.ask, itertools.count()
        server.ask = lambda *asked, longer=longer, turns=turns: longer(*asked) if next(turns) % 3 else short
    prompts = [WorkloadPrompt("", Prompt(prompt=text), ()) for text in "abcdefghi"]
    arms, _ = engine_runs.confirm(servers, {"off": [], "on": [lookup(2, 4, 3)]}, prompts, PRICES, Console(), seed=0)
    assert [arm.timed for arm in arms] == [9, 9]


def test_the_record_of_another_draft_model_is_not_taken(tmp_path: Path) -> None:
    prompts = [WorkloadPrompt("", Prompt(prompt=text), ()) for text in "abc"]
    server: Any = Answering(0.0)
    for model, asked in (("a", 3), ("a", 3), ("b", 6)):
        arms = {"chain": [chain(8).model_copy(update={"model": model})]}
        serve_in_turns({"chain": server}, arms, prompts, "turns", Console(), record=tmp_path / "served.jsonl")
        assert server.num_asked == asked, model


def test_the_space_holds_each_setting_once_and_the_default() -> None:
    settings = speculation_space(VllmEngine, TYPES["vllm"])
    assert len({one.label for one in settings}) == len(settings) > 500
    assert {one.type for one in settings if one.is_default} == set(TYPES["vllm"])
    with pytest.raises(ValidationError, match="prompt_lookup_min is at most prompt_lookup_max"):
        lookup(5, 4, 1)


def chain(k: int) -> Speculation:
    return Speculation(type="draft_model", options={"num_speculative_tokens": k}, model="draft")


def rounds_of(is_right: list[bool], first: int, k: int, *, is_cut: bool) -> list[tuple[int, int]]:
    """Draft tokens and accepted ones of each round of a chain, by the obvious loop: ``is_right`` says of each token
    whether the draft proposes it.
    """
    found, place, size = [], first, len(is_right)
    while place < size - 1:
        accepted, drafted = 0, min(k, size - place - 2) if is_cut else k
        while accepted < drafted and place + accepted + 1 < size and is_right[place + accepted + 1]:
            accepted += 1
        found += [(drafted, accepted)] if drafted else []
        place += accepted + 1
    return found


@pytest.mark.parametrize("kind", ["draft_model", "draft-simple"])
@pytest.mark.parametrize("seed", range(4))
def test_short_chains_are_replayed_exactly_from_the_rounds_of_a_long_one(seed: int, kind: SpeculationType) -> None:
    """The token after a round whose drafts were all accepted is unknown, and counts as proposed. llama.cpp cuts a draft
    to what the request may still generate.
    """
    draw, first, size, is_cut = random.Random(seed), 4, 200, kind == "draft-simple"
    is_right = [draw.random() < 0.85 for _ in range(size)]
    place = first
    for drafted, accepted in (long := rounds_of(is_right, first, 8, is_cut=is_cut)):
        place += accepted + 1
        if accepted == drafted and place < size:
            is_right[place] = True
    drafted, accepted = map(sum, zip(*long, strict=True))
    answer = ServedAnswer(
        prompt_tokens=[1] * first,
        tokens=[2] * (size - first),
        limit=size - first,
        rounds=long,
        drafted=drafted,
        accepted=accepted,
    )
    assert (8, 8) in long and (8, 0) in long
    (option,) = OPTIONS[kind]
    for k in range(1, 9):
        one = Speculation(type=kind, options={option: k}, model="draft")
        (replayed,) = replay_speculation([one], [KnownRequest(answer)], CONTEXT)
        assert replayed.drafts == rounds_of(is_right, first, k, is_cut=is_cut), k


def test_requests_at_once_share_a_pass_and_pay_its_parts() -> None:
    """Beyond the longest verification that was priced, time grows as between the last three."""
    ms = {1: 10.0, 4: 10.0, 8: 12.0, 16: 20.0, 32: 40.0}
    steps = [PricedStep(tokens=n, context=100, wall_ms=[one], cpu_ms=[one]) for n, one in ms.items()]
    one = VerificationPrices(steps, "wall", draft_ms=(2.0, 1.0))
    four = replace(one, at_once=4)
    assert [four.ms(n, 100) for n in (1, 2, 8)] == [10.0 / 4, 12.0 / 4, 40.0 / 4]
    slope = (40.0 - 12.0) / 24
    assert four.ms(12, 100) == pytest.approx((40.0 + 16 * slope) / 4) and one.ms(48, 100) == four.ms(12, 100) * 4
    answer = ServedAnswer(prompt_tokens=[1], tokens=[2] * 9, limit=9, rounds=[(2, 1)] * 4, drafted=8, accepted=4)
    (replayed,) = replay_speculation([chain(2)], [KnownRequest(answer)], CONTEXT)
    rounds = replayed.counts.verifications
    assert sum(one.pricer(64)(replayed)) == pytest.approx(rounds * (10.0 + 2.0 + 2 * 1.0))
    assert sum(four.pricer(64)(replayed)) == pytest.approx(rounds * (one.ms(12, 100) + 2.0 + 2 * 1.0) / 4)


@pytest.mark.parametrize("has_one_loop", [True, False])
def test_prices_have_the_factors_of_served_requests(has_one_loop: bool) -> None:
    """Plain passes of 9 ms and verifications of 22 ms, which were priced at 10 and 20; one request was disturbed, and a
    step without speculation takes 8 ms where the engine runs another loop then.
    """
    steps = [PricedStep(tokens=n, context=1, wall_ms=[ms], cpu_ms=[0.0]) for n, ms in ((1, 10.0), (3, 20.0))]
    plain_ms = 9.0 if has_one_loop else 8.0
    off = [(ServedAnswer(prompt_tokens=[1], tokens=[2] * 9, limit=9, wall_ms=8 * plain_ms), 0)] * 4
    served = [
        (ServedAnswer(prompt_tokens=[1], tokens=[2] * (plain + verified + 1), limit=99, wall_ms=ms), verified)
        for plain, verified in ((8, 4), (4, 8), (6, 6), (9, 3), (3, 9))
        for ms in (9.0 * plain + 22.0 * verified,)
    ]
    served.append((served[0][0].model_copy(update={"wall_ms": 1e4}), 4))
    rows = [
        [
            (
                one,
                RequestReplay(
                    [(2, 0)] * verified, Counter({(1, 0): len(one.tokens) - 1 - verified, (3, 0): verified}), 9
                ),
            )
            for one, verified in part
        ]
        for part in (off, served)
    ]
    found = served_prices(VerificationPrices(steps, "wall"), *rows, has_one_loop=has_one_loop)
    assert (found.step_factor, found.factor) == pytest.approx((0.9, 1.1), rel=0.01)
    assert found.ms(1, 1) * found.plain_factor == pytest.approx(plain_ms, rel=0.01)
    few = served_prices(VerificationPrices(steps, "wall"), rows[0], rows[1][:2], has_one_loop=has_one_loop)
    assert few.factor == few.step_factor == (0.9 if has_one_loop else 1.0)
    assert few.ms(1, 1) * few.plain_factor == pytest.approx(plain_ms)


# -------- search


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model's folder, a workload, and an executable that plays the transcript back."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    write_prompts(tmp_path)
    script = tmp_path / "vllm"
    script.write_text(SCRIPT.format(python=sys.executable, root=str(Path(__file__).parents[2])))
    script.chmod(0o755)
    monkeypatch.setattr(vllm_server, "SIZES", (1, 2, 4))
    monkeypatch.setattr(vllm_server.VllmServer, "spins_s", 0.0)
    monkeypatch.setattr(EngineServer, "cpu_ms", lambda server: 0.0)  # what it takes to play back says nothing
    return tmp_path


def write_prompts(folder: Path) -> None:
    lines = (json.dumps({"prompt": text, "max_new_tokens": LIMIT}) + "\n" for text in PROMPTS)
    (folder / "prompts.jsonl").write_text("".join(lines))


def searched(folder: Path, *words: str, server: str = "", target: str = "model") -> Result:
    where = ("--target", target, "--workload", "prompts.jsonl", "--engine-command", f"{folder / 'vllm'} {server}")
    return autotune("search", "--engine", "vllm", *where, *words)


def test_a_search_confirms_counts_and_check_run_and_bench_take_its_profile(folder: Path) -> None:
    done = searched(folder, "--requests-at-once", "2")
    assert done.exit_code == 0, done.output
    profile = EngineProfile.load("profile.json")
    assert profile.engine == "vllm" and profile.build == "0.32.0" and profile.plain_factor > 0
    assert "left out suffix: this vllm does not have it" in said(done) and list(profile.left_out) == ["suffix"]
    assert [arm.label for arm in profile.arms][:2] == ["off", "ngram(4,4,5)"] and len(profile.arms) == 3
    assert all(arm.exact == arm.prompts == arm.identical == 4 and arm.replayed == arm.counts for arm in profile.arms)
    assert profile.arms[-1].counts.drafted > 0 and "4 of 4" in said(done)
    assert profile.command[:3] == [str(folder / "vllm"), "serve", str(folder / "model")]
    assert ("--speculative-config" in profile.command) == (profile.speculation is not None)
    assert "Predicted on the tuning prompts, 2 requests at once" in said(done)
    assert {load.requests_at_once for load in profile.loads} == {2} and profile.loads[0].label == "off"
    assert all(load.identical == load.requests == 8 for load in profile.loads)
    assert autotune("check", "profile.json").exit_code == 0
    other = autotune("check", "profile.json", "--engine-command", f"{folder / 'vllm'} --other-rule")
    assert other.exit_code == 1 and "the build has another rule" in said(other)
    assert autotune("report", "profile.json").exit_code == 0
    assert "ngram" in (folder / "report.html").read_text()
    answered = autotune("run", "profile.json", "--prompt", PROMPTS[0], "--max-new-tokens", str(LIMIT))
    assert answered.exit_code == 0 and "draft tokens accepted" in said(answered)
    benched = autotune("bench", "profile.json", "--workload", "prompts.jsonl", "--json")
    assert benched.exit_code == 0 and len(json.loads(benched.stdout)["arms"]) >= 2


def test_suffixes_are_tuned_beside_n_grams_where_their_package_is_installed(folder: Path) -> None:
    """Their server is asked for answers alone; what follows them is asked of another one."""
    for made in ("bin", "lib/python3.12/site-packages/arctic_inference"):
        (folder / made).mkdir(parents=True)
    (folder / "vllm").rename(folder / "bin" / "vllm")
    command = ("--engine-command", str(folder / "bin" / "vllm"))
    done = searched(folder, *command)
    assert done.exit_code == 0, done.output
    assert "suffix: draft tokens and accepted ones are the predicted in 4 of 4 requests" in said(done)
    profile = EngineProfile.load("profile.json")
    assert profile.num_replayed["suffix"] == 160 and not profile.left_out
    arm = next(arm for arm in profile.arms if arm.speculation and arm.speculation.type == "suffix")
    assert arm.exact == arm.prompts == 4 and arm.counts == arm.replayed and arm.counts.accepted > 0
    assert {type(value) for value in arm.speculation.options.values()} == {int, float}  # as vLLM's validation has it
    other = searched(folder, *command, "--engine-command", f"{folder / 'bin' / 'vllm'} --other-rule")
    assert other.exit_code == 2 and "the counts differ from the replay's in every type" in said(other)


def test_the_chains_of_a_draft_model_are_tuned_beside_the_n_grams(folder: Path) -> None:
    (folder / "draft").mkdir()
    (folder / "draft" / "config.json").write_text('{"draft_vocab_size": 8}')
    done = searched(folder, "--draft", "draft")
    assert done.exit_code == 0, done.output
    assert re.search(r"tokens per pass of eagle3\(1\): (1\.\d\d) by replay of eagle3\(8\), \1 counted", said(done))
    profile = EngineProfile.load("profile.json")
    assert profile.num_replayed["eagle3"] == 8
    arms = {arm.speculation.type: arm for arm in profile.arms if arm.speculation}
    assert set(arms) == {"ngram", "eagle3"}
    arm = arms["eagle3"]
    assert arm.exact is None and arm.prompts == arm.identical and arm.counts == arm.replayed
    assert arm.speculation and arm.speculation.model == str(folder / "draft")
    assert autotune("check", "profile.json").exit_code == 0
    assert autotune("bench", "profile.json", "--workload", "prompts.jsonl").exit_code == 0


def test_answers_of_one_token_are_told_in_one_line(folder: Path) -> None:
    done = searched(folder, "--max-new-tokens", "1")
    assert done.exit_code == 2 and "every answer has one token, and nothing to speculate" in said(done), done.output


@pytest.mark.parametrize(
    ("words", "config", "message"),
    [
        (("--draft", "no"), "", "no: no such model; known: digits/"),
        (("--draft", "draft"), '{"kind": "star"}', "EAGLE-3 heads and mtp heads; this is star; choose another draft"),
        (
            ("--draft", "draft"),
            '{"vocab_size": 7}',
            "the target's 9 tokens, EAGLE-3 heads and mtp heads; this is a model of 7",
        ),
        (("--draft", "draft"), '{"kind": "mtp"}', "vLLM runs mtp heads of Llama and Qwen2 targets, not of gemma3"),
        (("--draft", "a", "--draft", "b"), "", "--draft: a search in vllm tunes one draft model; give one"),
        (
            ("--draft", "draft", "--url", "http://x"),
            '{"vocab_size": 9}',
            "--draft: a server at --url keeps its settings",
        ),
    ],
)
def test_drafts_that_vllm_does_not_run_are_told_in_one_line(
    folder: Path, words: tuple[str, ...], config: str, message: str
) -> None:
    (folder / "model" / "config.json").write_text('{"vocab_size": 9, "model_type": "gemma3"}')
    if config:
        (folder / "draft").mkdir()
        (folder / "draft" / "config.json").write_text(config)
    done = searched(folder, *words)
    assert done.exit_code == 2 and message in said(done), done.output


def test_a_search_goes_on_where_it_was_ended(folder: Path) -> None:
    dead = searched(folder, server="--dies")
    assert dead.exit_code == 2 and "vllm ended while it was used" in said(dead)
    (answers,) = folder.glob(".autotune/engines/*/answers.jsonl")
    recorded = answers.read_text()
    assert len(recorded.splitlines()) == 2
    ended = searched(folder, server="--dies")
    assert ended.exit_code == 2 and answers.read_text().startswith(recorded)
    assert len(answers.read_text().splitlines()) == 4


@pytest.mark.nightly
def test_a_server_that_runs_is_priced_and_not_confirmed(folder: Path) -> None:
    def at(url: str) -> Result:
        where = ("--target", "model", "--workload", "prompts.jsonl", "--url", url)
        return autotune("search", "--engine", "vllm", *where)

    start = (str(folder / "vllm"), "serve", "model", "--served-model-name", "x")
    with running([*start, *vllm_arguments([PRICED_BY])], "vllm") as (url, _):
        assert at(url).exit_code == 0
    profile = EngineProfile.load("profile.json")
    assert profile.speculation and not profile.arms
    with running([*start], "vllm") as (url, _):
        unpriced = at(url)
    assert unpriced.exit_code == 2 and "start the server with --speculative-config" in said(unpriced)


@pytest.mark.parametrize(
    ("server", "target", "message"),
    [
        ("--bogus", "model", "vllm ended when it started: invalid argument: --bogus"),
        ("--port=8080", "model", "--engine-command: --port=8080 is set by the search"),
        ("--speculative_config {}", "model", "--engine-command: --speculative_config is set by the search"),
        ("--served_model_name x", "model", "--engine-command: --served_model_name is set by the search"),
        ("--killed", "model", "vllm ended while it was used: signal 9"),
        ("", "gone", "--target gone: vllm loads a folder with config.json, or an id of the Hugging Face hub; give one"),
        ("", "prompts.jsonl", "--target prompts.jsonl: vllm loads a folder"),
    ],
)
def test_mistakes_are_told_in_one_line(folder: Path, server: str, target: str, message: str) -> None:
    done = searched(folder, server=server, target=target)
    assert done.exit_code == 2 and message in said(done) and len(done.output.splitlines()[-1]) < 400, done.output


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("vllm", b"#!/bin/sh\nexec python3 -m http.server --bind 127.0.0.1 $8\n", "what was started has no /health"),
        ("vllm", b"#!/bin/sh\necho a shell\n", "vllm ended when it started: a shell"),
        ("vllm", b"no program", "cannot be started"),
        ("prompts.jsonl", b'{"prompt": "a", "images": ["red.png"]}\n{"prompt": "b"}\n', "has an image"),
    ],
)
def test_files_that_cannot_be_used_are_told_in_one_line(folder: Path, file: str, content: bytes, message: str) -> None:
    Image.new("RGB", (8, 8)).save(folder / "red.png")
    (folder / file).write_bytes(content)
    done = searched(folder)
    assert done.exit_code == 2 and message in said(done), done.output


def test_a_page_of_another_program_is_no_vllm(folder: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_address[1]}"
        done = autotune("search", "--engine", "vllm", "--target", "model", "--workload", "prompts.jsonl", "--url", url)
        other.shutdown()
    assert done.exit_code == 2 and "/metrics: the engine answers 404" in said(done)


@pytest.mark.nightly
@pytest.mark.long
def test_the_real_server_drafts_as_the_replay_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = user_cache().parent / "autotune-engines" / VllmEngine.built
    executable = os.environ.get("AUTOTUNE_VLLM", str(built))
    if not Path(executable).exists():
        pytest.skip("vLLM is not installed; run make engines ENGINE=vllm")
    from benchmarks.dequantized import main

    assert CliRunner().invoke(main, ["smollm2", str(tmp_path / "model")]).exit_code == 0
    write_prompts(tmp_path)
    monkeypatch.chdir(tmp_path)
    where = ("--target", "model", "--workload", "prompts.jsonl")
    done = autotune("search", "--engine", "vllm", *where, "--engine-command", COMMAND.replace("vllm", executable, 1))
    assert done.exit_code == 0, done.output
    assert all(arm.exact == arm.prompts for arm in EngineProfile.load("profile.json").arms)
    assert autotune("check", "profile.json").exit_code in (0, 4)
