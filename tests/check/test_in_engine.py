"""A check of an engine's profile, with a backend whose servers are not real."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autotune.check.job import run_check
from autotune.check.result import CheckResult
from autotune.check.settings import CheckSettings
from autotune.console import Console
from autotune.documents.decoded import Decoded, tokens_key
from autotune.documents.decoding_profile import DecodingProfile, Evidence, OperatingPoint
from autotune.documents.deployment import Deployment
from autotune.documents.speculation import OPTIONS, Speculation
from autotune.engines.backend import Backend
from autotune.errors import ArmFailed, NotComparable, UserError
from autotune.evaluation.arms import Arm
from autotune.machine.container import num_cores
from autotune.machine.device import cpu_fingerprint
from autotune.workloads.prompt import WorkloadPrompt
from tests.sample_documents import DEVICE, TARGET, decoding_profile, write_workload

SPECULATION = Speculation(type="ngram-mod", options=OPTIONS["ngram-mod"])
TOKENS = [5, 6, 7, 8, 9]


@dataclass
class FakeEngine:
    """Decodes every prompt into the same tokens: half as fast plainly; with 9 draft tokens, of which 3 are accepted.
    The backends that it makes are copies with the deployment of a profile.
    """

    ms: dict[str, float] = field(default_factory=lambda: {"off": 200.0, "tuned": 100.0})
    edits: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Changes of the answers of servers with speculation, by prompt."""
    predicted: tuple[int, int, int] = (2, 9, 3)
    dies: bool = False
    precision: str = "float32"
    deployment: Any = None
    commands: list[str | None] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    running: int = 0
    build: str = "b"
    refuses: bool = False

    def __call__(self, profile: DecodingProfile, *, command: str | None, console: Console) -> Backend:
        self.commands.append(command)
        deployment = profile.point.deployment
        if deployment is None or deployment.command[-1] == "gone":
            raise UserError("gone: no such executable; put llama-server on the PATH")
        return cast(Backend, replace(self, deployment=deployment))

    def record(self, prompts: Sequence[WorkloadPrompt]) -> Any:
        assert self.running == 0, "recording starts a server of its own"
        return SimpleNamespace(answers=[FakeServer(self, "off").decode(prompt) for prompt in prompts])

    def replay(self, configuration: Any, recorded: Any) -> Any:
        return SimpleNamespace(counts=[self.predicted] * len(recorded.answers))

    @contextmanager
    def arm(self, configuration: Speculation | None) -> Iterator[Arm]:
        if configuration and self.refuses:
            raise UserError("no such type")
        self.started.append(self.deployment.command[-1] if configuration else "off")
        self.running += 1
        yield FakeServer(self, self.started[-1])
        self.running -= 1

    def deploy(self, configuration: Speculation | None) -> Deployment:
        return cast(Deployment, self.deployment.model_copy(update={"build": self.build, "speculation": configuration}))


class FakeServer(Arm):
    name = key = "server"

    def __init__(self, engine: FakeEngine, command: str) -> None:
        self.engine, self.command = engine, command

    def decode(self, prompt: WorkloadPrompt) -> Decoded:
        if self.engine.dies:
            raise ArmFailed("llama-server: ended with code 1")
        known: dict[str, Any] = {"arm": self.key, "prompt": prompt.name, "prompt_sha256": prompt.sha256}
        known |= {"tokens": TOKENS, "decode_ms": self.engine.ms[self.command]}
        if self.command != "off":
            known |= {"rounds": 2, "verified_nodes": 9, "accepted_lengths": [3]}
            known |= self.engine.edits.get(prompt.name, {})
        return Decoded(**known, tokens_sha256=tokens_key(known["tokens"]), new_tokens=len(known["tokens"]))


def profile(speculation: Speculation | None = SPECULATION, word: str = "tuned", **fields: Any) -> DecodingProfile:
    deployment = Deployment(
        backend="llama.cpp", model=TARGET, command=["llama-server", word], speculation=speculation, build="b"
    )
    point = OperatingPoint(draft=None, tree=None, deployment=deployment, predicted=None, measured=None)
    document = decoding_profile(hardware=cpu_fingerprint(num_cores()))
    workload = document.workload.model_copy(update={"name": "workload.jsonl"})
    known = {"point": point, "precision": "float32", "workload": workload}
    return document.model_copy(update={**known, **fields})


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile with the evidence of the engine as it is."""
    monkeypatch.chdir(tmp_path)
    prompts = [{"prompt": f"Go on, {n}.", "split": "evaluate", "max_new_tokens": 12} for n in range(5)]
    write_workload(tmp_path, prompts)
    profile().save(tmp_path / "profile.json")
    known = check(FakeEngine()).workloads[0]
    plain_token_ms = [ms / (len(TOKENS) - 1) for ms in known.plain_ms]
    profile(evidence=Evidence(prompts=known.prompts, plain_token_ms=plain_token_ms)).save(tmp_path / "profile.json")
    return tmp_path


def check(engine: FakeEngine, **settings: Any) -> CheckResult:
    return run_check(CheckSettings(profile=Path("profile.json"), **settings), Console(), engine)


FIRST = "workload.jsonl:1"


@pytest.mark.parametrize(
    ("engine", "settings", "expected", "exit_code"),
    [
        (FakeEngine(), {}, "passed passed passed passed", 0),
        (FakeEngine(), {"min_speedup": 1.9}, "passed passed passed passed passed", 0),
        (FakeEngine(), {"min_speedup": 2.1}, "passed passed passed failed skipped", 1),
        # Another answer than plain decoding's and the search's: a batch rounds otherwise.
        (FakeEngine(edits={FIRST: {"tokens": [5, 6, 1, 8, 9]}}), {}, "warned warned warned passed", 0),
        # The same answers with other drafts: the build has another rule.
        (FakeEngine(edits={FIRST: {"verified_nodes": 8}}), {}, "passed failed failed skipped", 1),
        (FakeEngine(predicted=(2, 9, 4)), {}, "passed passed failed skipped", 1),
    ],
)
def test_gates(engine: FakeEngine, settings: dict[str, Any], expected: str, exit_code: int, world: Path) -> None:
    found = check(engine, junit=world / "check.xml", **settings)
    assert " ".join(gate.verdict for gate in found.gates) == expected, found.gates
    assert found.exit_code == exit_code and found.hardware == cpu_fingerprint(num_cores())
    assert found.workloads[0].speedup == 2.0 and 'tests="' in (world / "check.xml").read_text()
    num_launches = 0 if exit_code else 11
    assert engine.started.count("off") == engine.started.count("tuned") == 1 + num_launches, "a new server of each"


@pytest.mark.parametrize(
    ("ms", "changes", "verdict", "text"),
    [
        ({"off": 400.0, "tuned": 200.0}, {}, "passed", "0.0 % since the profile"),
        ({"off": 200.0, "tuned": 115.0}, {}, "failed", "time over plain decoding's +15.0 % since the profile"),
        ({"off": 200.0, "tuned": 115.0}, {"hardware": DEVICE}, "skipped", "measured on cpu/An abacus/1"),
        ({"off": 200.0, "tuned": 115.0}, {"evidence": None}, "skipped", "for 0 of these prompts, and 5 are needed"),
    ],
)
def test_times_are_compared_with_those_of_the_profile(
    ms: dict[str, float], changes: dict[str, Any], verdict: str, text: str, world: Path
) -> None:
    """The ratio of two times on one machine: a slow machine is no regression. Other devices have other ratios."""
    known = DecodingProfile.load("profile.json")
    without = known.evidence.model_copy(update={"plain_token_ms": []})
    known.model_copy(update={**changes, "evidence": changes.get("evidence", known.evidence) or without}).save(
        "profile.json"
    )
    found = check(FakeEngine(ms=ms))
    assert found.gates[-1].verdict == verdict and text in found.gates[-1].summary, found.gates[-1]
    assert found.exit_code == (verdict == "failed") and (found.workloads[0].timing is None) is (verdict == "skipped")


@pytest.mark.parametrize(
    ("engine", "error", "message"),
    [
        (FakeEngine(build="b2"), None, ""),
        (
            FakeEngine(build="b2", refuses=True),
            NotComparable,
            "^no such type; .*build b of llama.cpp, and build b2 runs",
        ),
        (FakeEngine(refuses=True), UserError, "^no such type$"),
        (
            FakeEngine(build="b2", edits={f"workload.jsonl:{n}": {"tokens": [1, 2, 3, 8, 9]} for n in range(1, 6)}),
            NotComparable,
            "build b2 runs; it answers every prompt otherwise",
        ),
    ],
)
def test_another_build_is_named_and_checked_where_counts_compare(
    engine: FakeEngine, error: type[UserError] | None, message: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=message) if error else nullcontext():  # type: ignore[attr-defined]
        assert check(engine).verdict == "passed"
    named = "the profile was measured with build b of llama.cpp, and build b2 runs"
    assert (named in capsys.readouterr().err) is (engine.build == "b2")


def test_a_profile_that_decodes_plainly_needs_one_server(world: Path) -> None:
    profile(None).save(world / "profile.json")
    engine = FakeEngine()
    found = check(engine)
    assert [gate.verdict for gate in found.gates] == ["passed", "skipped"] and engine.started == ["off"]
    assert found.workloads[0].speedup == 1.0


def test_every_workload_has_new_servers(world: Path) -> None:
    """Drafts follow from earlier answers."""
    engine = FakeEngine()
    (world / "other.jsonl").write_bytes((world / "workload.jsonl").read_bytes())
    assert check(engine, workloads=("workload.jsonl", "other.jsonl")).verdict == "passed"
    assert engine.started[:4] == ["off", "tuned"] * 2


@pytest.mark.parametrize(
    ("tuned_ms", "verdict", "exit_code"), [(110.0, "failed", 1), (100.0, "passed", 0), (90.0, "passed", 0)]
)
def test_time_against_another_command(tuned_ms: float, verdict: str, exit_code: int, world: Path) -> None:
    """The servers are started again every five pairs, and ``--engine-command`` holds for the checked profile alone."""
    profile(word="base").save(world / "base.json")
    engine = FakeEngine(ms={"off": 200.0, "tuned": tuned_ms, "base": 100.0})
    found = check(engine, against="base.json", engine_command="llama-server --new")
    assert [gate.verdict for gate in found.gates[-2:]] == ["skipped", verdict], found.gates
    assert (found.exit_code, found.against) == (exit_code, "base.json")
    assert engine.commands == ["llama-server --new", None]
    assert engine.started.count("base") == 11 and engine.started.count("tuned") == 1 + 11


def test_against_the_profile_at_a_revision(world: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", *words], check=True, capture_output=True)

    git("init", "-q")
    git("add", "profile.json")
    git("commit", "-qm", "tuned")
    engine = FakeEngine(ms={"off": 200.0, "tuned": 100.0, "faster": 80.0})
    found = check(engine, against="HEAD")
    assert found.gates[-1].summary.endswith("nothing to time") and engine.started == ["off", "tuned"]
    profile(word="faster").save(world / "profile.json")
    found = check(engine, against="HEAD")
    assert found.gates[-1].verdict == "passed" and "head -20.0 % time" in found.gates[-1].summary
    assert str(found.against).startswith("HEAD (") and engine.started.count("tuned") == 1 + 11


@pytest.mark.parametrize(
    ("engine", "base", "error", "message"),
    [
        (FakeEngine(dies=True), None, UserError, "^llama-server: ended with code 1"),
        (FakeEngine(), profile(word="gone"), UserError, "^gone: no such executable"),
        (FakeEngine(), profile(word="base", precision="Q4_1"), NotComparable, "its precision is Q4_1"),
        (FakeEngine(), decoding_profile(), NotComparable, "its backend is runtime, that of .* is llama.cpp"),
    ],
)
def test_refusals(
    engine: FakeEngine, base: DecodingProfile | None, error: type[UserError], message: str, world: Path
) -> None:
    (base or profile()).save(world / "base.json")
    with pytest.raises(error, match=message) as caught:
        check(engine, against=base and "base.json")
    assert "\n" not in str(caught.value) and type(caught.value) is error
