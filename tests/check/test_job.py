"""``autotune check``: when a profile passes, fails or cannot be judged."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune.check import in_runtime
from autotune.check.job import run_check
from autotune.check.result import TIME, CheckResult, Gate
from autotune.check.settings import CheckSettings
from autotune.check.worker import SideDecoder
from autotune.check.worker_process import Side
from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import TUNED, DecodingProfile, Evidence
from autotune.documents.fingerprint import Fingerprint
from autotune.documents.provenance import stamp
from autotune.errors import NotComparable
from autotune.evaluation.arms import Arm
from autotune.evaluation.runtime_arms import DecoderArm
from autotune.files import read_lines
from autotune.machine.device import fingerprint
from autotune.modeling.loading import reference
from autotune.runtime import generate_args
from autotune.runtime import load as loading
from autotune.runtime.points import LoadedPoint
from autotune.runtime.rounds import Round
from autotune.trees.fallback import RoundPrice
from autotune.trees.tree import Ints
from autotune.trees.verification import WetapVerification
from autotune.workloads.prompt import WorkloadPrompt
from tests.sample_documents import DEVICE, decoding_profile, write_workload
from tests.tiny_models import Pair


@pytest.fixture
def world(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lossless profile, a lossy one that accepts anything, and a workload."""
    target, draft = (reference(str(path)) for path in (pair.target_folder, pair.draft_folder))
    lossless = decoding_profile(target, draft, visual_keep=1.0, hardware=fingerprint("cpu"))
    lossless.save(tmp_path / "lossless.json")
    verification = {"verification": WetapVerification(threshold=1e-9), "lossless": False}
    lossy = lossless.model_copy(update={"point": lossless.point.model_copy(update=verification)})
    lossy.save(tmp_path / "lossy.json")
    write_workload(tmp_path, [{"prompt": "Go on.", "split": "evaluate", "max_new_tokens": 12}] * 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # takes longer in the heap of pytest than decoding
    return tmp_path


def check(profile: str, **settings: Any) -> CheckResult:
    known: dict[str, Any] = {"workloads": ("workload.jsonl",), "num_prompts": 2, "device": "cpu"}
    return run_check(CheckSettings(profile=Path(profile), **{**known, **settings}), Console())


def verdicts(result: CheckResult) -> dict[str, str]:
    """Verdicts by gate."""
    return {gate.name: gate.verdict for gate in result.gates}


def gate(result: CheckResult, name: str) -> Gate:
    (found,) = [gate for gate in result.gates if gate.name == name]
    return found


def answer_wrongly(monkeypatch: pytest.MonkeyPatch, edit: Callable[[list[int]], list[int]]) -> None:
    """Change the tokens of the profile's answers."""
    generate = DecoderArm.generate

    def wrong(self: DecoderArm, inputs: Any, settings: Any) -> Any:
        tokens, stats = generate(self, inputs, settings)
        return (tokens if self.name != TUNED else edit(tokens)), stats

    monkeypatch.setattr(DecoderArm, "generate", wrong)


def end_wrongly(tokens: list[int]) -> list[int]:
    return [*tokens[:-1], 0]


@pytest.mark.parametrize(
    ("profile", "min_speedup", "edit", "identical", "exit_code", "verdict"),
    [
        ("lossless", None, None, 2, 0, "passed"),
        ("lossless", None, end_wrongly, 0, 1, "failed: the output differs from plain decoding"),
        ("lossy", None, None, 0, 0, "passed"),
        ("lossless", 0.001, None, 2, 0, "passed"),
        ("lossless", 1000.0, None, 2, 1, "failed: the speedup is below 1000: "),
    ],
)
def test_outcomes(
    profile: str,
    min_speedup: float | None,
    edit: Any,
    identical: int,
    exit_code: int,
    verdict: str,
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if edit is not None:
        answer_wrongly(monkeypatch, edit)
    found = check(f"{profile}.json", min_speedup=min_speedup, junit=world / "new" / "j.xml")
    assert (found.exit_code, found.workloads[0].identical_outputs) == (exit_code, identical)
    assert found.verdict.startswith(verdict) and found.lossless is (profile == "lossless")
    assert (world / "new" / "j.xml").exists() and not [*world.rglob("*.md")], "only requested files are written"
    assert gate(found, "counts").summary == (
        f"{profile}.json was not measured: no evidence to compare counts with; search on this device, or give --against"
    )
    err = capsys.readouterr().err
    assert ("LOSSY profile" in err) is (profile == "lossy")
    changes = rf"changed since {profile}\.json was made: torch 2 -> \S+, transformers 5 -> \S+; what this costs "
    assert re.search(changes, err), "libraries that changed since the search are named"


def test_later_turns_are_checked_too(world: Path) -> None:
    """They follow the target's answers."""
    row = {"question_id": 1, "category": "writing", "turns": ["Go on.", "And then?", "Stop."]}
    rows = [row, {**row, "turns": ["Go.", "On."]}]
    write_workload(world, rows, name="question.jsonl")
    settings = {"workloads": ("question.jsonl",), "num_prompts": 4, "max_new_tokens": 12}
    found = check("lossless.json", **settings)
    assert found.verdict == "passed" and found.workloads[0].identical_outputs == 2
    assert [prompt.prompt for prompt in found.workloads[0].prompts] == [
        "question.jsonl:2/turn-1",
        "question.jsonl:2/turn-2",
    ]
    write_workload(world, [row, {**row, "turns": ["Go.", "On and on. " * 400]}], name="question.jsonl")
    (prompt,) = check("lossless.json", **settings).workloads[0].prompts
    assert prompt.prompt == "question.jsonl:2/turn-1", "a turn that does not fit the target's context is left out"


def test_in_reduced_precision_a_near_tie_passes_and_is_reported(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some answers in bfloat16 differ after a near tie and pass; a different token at a clear margin fails."""
    NUM = 8
    prompts = [{"prompt": f"Go on with number {n}.", "split": "evaluate", "max_new_tokens": 60} for n in range(NUM)]
    write_workload(world, prompts)
    load_model = loading.load_model
    monkeypatch.setattr(loading, "load_model", lambda name, **options: load_model(name, **options).bfloat16())
    found = check("lossless.json", num_prompts=NUM)
    (workload,) = found.workloads
    assert workload.identical_outputs < NUM == workload.num_prompts, "nothing differs: the test proves nothing"
    assert len(workload.divergences) == NUM - workload.identical_outputs
    assert all(": a near tie" in divergence and "margin" in divergence for divergence in workload.divergences)
    assert (found.verdict, found.exit_code, gate(found, "lossless").verdict) == ("passed", 0, "warned")
    assert "output differs at token" in capsys.readouterr().err

    answer_wrongly(monkeypatch, lambda tokens: [*tokens[:3], 5, *tokens[4:]])
    found = check("lossless.json", num_prompts=1)
    assert found.exit_code == 1 and any(": not a tie" in divergence for divergence in found.workloads[0].divergences)


# -------- evidence


def write_evidence(world: Path, name: str = "proven.json", **fields: Any) -> DecodingProfile:
    """The lossless profile, with evidence measured now on this device."""
    profile = DecodingProfile.load(world / "lossless.json")
    prompts = check("lossless.json").workloads[0].prompts
    assert sum(prompt.accepted_tokens for prompt in prompts) > 5, "nothing is accepted: the test proves nothing"
    known = {
        "evidence": Evidence(prompts=prompts),
        "provenance": stamp(),
        "workload": profile.workload.model_copy(update={"name": "workload.jsonl"}),
    }
    found = profile.model_copy(update={**known, **fields})
    found.save(world / name)
    return found


def accept_less(monkeypatch: pytest.MonkeyPatch, longest: Callable[[], int] = lambda: 1) -> None:
    """Keep only the first tokens of every accepted path: still lossless, with lower accepted lengths."""
    verify = Round.verify

    def cut_verify(rounds: Round, request: generate_args.Request, point: LoadedPoint) -> tuple[Ints, int]:
        path, token = verify(rounds, request, point)
        if len(path) <= (length := longest()):
            return path, token
        return path[:length], int(point.grower.tree.token[path[length]])

    monkeypatch.setattr(Round, "verify", cut_verify)


def test_a_lower_accepted_length_fails_without_timing(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_evidence(world)
    assert verdicts(check("proven.json")) == {"lossless": "passed", "counts": "passed"}
    accept_less(monkeypatch)
    monkeypatch.setattr(in_runtime, "WorkerProcess", None)
    found = check("proven.json", against="lossless.json")
    assert found.exit_code == 1
    assert verdicts(found) == {"lossless": "passed", "counts": "failed", "time against the base": "skipped"}
    assert "worse counts" in found.verdict and "accepted tokens" in gate(found, "counts").details[0]


@pytest.mark.filterwarnings("ignore:.*tuned on cpu/An abacus/1")
@pytest.mark.parametrize(
    ("fields", "is_random", "verdict", "summary"),
    [
        ({"hardware": DEVICE}, False, "warned", "advisory only: the profile's evidence was made on cpu/An abacus/1"),
        ({}, True, "skipped", "counts are not reproducible"),
    ],
)
def test_counts_that_do_not_gate(
    fields: dict[str, Any], is_random: bool, verdict: str, summary: str, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts of another device, and counts that differ the second time."""
    write_evidence(world, **fields)
    calls = iter(range(10_000))
    accept_less(monkeypatch, lambda: 1 + (is_random and next(calls) % 5 == 0))
    found = check("proven.json")
    assert (found.exit_code, gate(found, "counts").verdict) == (0, verdict)
    assert summary in gate(found, "counts").summary


@pytest.mark.parametrize("writes_date", [False, True])
def test_files_of_the_target_that_changed(world: Path, writes_date: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat template that was repaired is told in one line; one that writes the date leaves the counts out."""
    write_evidence(world)
    load = loading.load_processor

    def changed(name: str) -> Any:
        processor = load(name)
        processor.chat_template = "{# strftime_now #}" * writes_date + "Please: " + processor.chat_template
        return processor

    monkeypatch.setattr(loading, "load_processor", changed)
    message = r"target's files make other tokens, .* of 2 of 2 prompts .*\(first: workload.jsonl:1\): its chat template"
    if writes_date:
        found = gate(check("proven.json"), "counts")
        assert found.verdict == "skipped" and re.search(message, found.summary)
        return
    with pytest.raises(NotComparable, match=message) as error:
        check("proven.json")
    assert "\n" not in str(error.value)


def test_prompts_without_evidence_are_not_comparable_without_another_gate(world: Path) -> None:
    """Another workload, and prompts of the search's workload that have changed."""
    write_evidence(world)
    prompts = [{"prompt": "Something else.", "split": "evaluate", "max_new_tokens": 20}]
    write_workload(world, prompts, name="other.jsonl")
    with pytest.raises(NotComparable, match=r"its evidence is about workload.jsonl"):
        check("proven.json", workloads=("other.jsonl",))
    both = check("proven.json", workloads=("workload.jsonl", "other.jsonl"), min_speedup=0.001)
    assert [one.verdict for one in both.gates if one.name == "counts"] == ["passed", "skipped"]
    assert [one.name for one in both.workloads] == ["workload.jsonl", "other.jsonl"]
    write_workload(world, prompts * 2)
    changed = (
        r"proven.json has no evidence about these prompts of workload.jsonl: 2 of the first 2 prompts have changed"
    )
    with pytest.raises(NotComparable, match=changed):
        check("proven.json", min_speedup=0.1)


# -------- against


class InProcess(Arm):
    """A worker without a process: its counts are real and decoded once, its times are set by the test."""

    decoded: dict[tuple[str, str], Decoded]
    launched: list[str]
    slowdown = 0.0
    edit: Any = None

    def __init__(self, side: Side, requests: Mapping[str, Path], **_: Any) -> None:
        self.side, self.requests = side, requests
        self.launched.append(side.name)

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None: ...

    def decode(self, prompt: WorkloadPrompt) -> Decoded:
        key = (self.side.profile.read_text(), prompt.name)  # the content, whatever its path
        if key not in self.decoded:
            fields = {"inputs": str(self.requests[prompt.name]), "settings": prompt.settings.generation}
            answer = SideDecoder(str(self.side.profile), {"device": "cpu"}).decode(fields)
            self.decoded[key] = Decoded(arm="", prompt=prompt.name, prompt_sha256=prompt.sha256, **answer)
        jitter = 0.001 * (len(self.launched) % 7)
        ms = 100.0 * (1 + jitter) * (1 + type(self).slowdown * (self.side.name == "head"))
        found = self.decoded[key].model_copy(update={"decode_ms": ms})
        return type(self).edit(self.side, found) if type(self).edit else found


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> type[InProcess]:
    fresh = type("Fresh", (InProcess,), {"decoded": {}, "launched": []})
    monkeypatch.setattr(in_runtime, "WorkerProcess", fresh)
    return fresh


def changed(world: Path, name: str, **fields: Any) -> None:
    DecodingProfile.load(world / "lossless.json").model_copy(update=fields).save(world / name)


def test_a_slower_head_fails(world: Path, workers: type[InProcess]) -> None:
    tree = {"policy": "chain", "depth": 2}
    profile = DecodingProfile.load(world / "lossless.json")
    target, draft = profile.target, profile.point.draft
    assert draft is not None
    other = decoding_profile(target, draft, tree=tree, hardware=fingerprint("cpu"))  # type: ignore[arg-type]
    changed(world, "base.json", point=other.point)
    workers.slowdown = 0.08
    found = check("lossless.json", against="base.json")
    assert (found.exit_code, found.against) == (1, "base.json")
    expected = {"lossless": "passed", "counts": "skipped", "counts of the base": "skipped"}
    assert verdicts(found) == {**expected, "time against the base": "failed"}
    timing = found.workloads[0].timing
    assert timing is not None and timing.slowdown == pytest.approx(0.08, abs=0.01) and len(timing.head_ms) == 55
    (ledger,) = (world / ".autotune" / "checks").glob("*.jsonl")
    assert len(ledger.read_text().splitlines()) == 110 and "-" in ledger.stem, (
        "renamed, so that the next check measures again"
    )
    workers.slowdown = 0.0
    assert verdicts(check("lossless.json", against="base.json"))["time against the base"] == "passed"


def test_equal_sides_need_no_timing(world: Path, workers: type[InProcess]) -> None:
    changed(world, "base.json", workload=DecodingProfile.load(world / "lossless.json").workload)
    found = check("lossless.json", against="base.json")
    assert found.exit_code == 0 and verdicts(found)["counts of the base"] == "passed"
    assert "nothing to time" in gate(found, "time against the base").summary
    assert workers.launched == ["base"], "once, for the counts"
    for steps in ({"threads": 3}, {"mode": "fixed", "capture_sizes": (1, 8, 64)}):
        changed(world, "other.json", **steps)
        found = check("lossless.json", against="other.json")
        assert verdicts(found)["counts of the base"] == "passed", "the same trees"
        assert found.workloads[0].timing is not None, "but other modes"


def test_a_head_that_accepts_less_than_its_base_fails_without_timing(world: Path, workers: type[InProcess]) -> None:
    """The base has better counts; it decodes twice, because counts that are not reproducible do not gate."""

    def better(side: Side, found: Decoded) -> Decoded:
        update = {"target_forwards": found.target_forwards - 1, "draft_forwards": found.draft_forwards - 3}
        return found.model_copy(update=update)

    workers.edit = better
    found = check("lossless.json", against="lossless.json")
    assert (found.exit_code, verdicts(found)["counts of the base"]) == (1, "failed")
    assert gate(found, "time against the base").summary == "decided without timing"
    assert workers.launched == ["base", "base"]
    numbers = iter(range(1000))
    workers.edit = lambda side, found: found.model_copy(update={"target_forwards": 1 + next(numbers) % 3})
    assert "are not reproducible" in gate(check("lossless.json", against="lossless.json"), "counts of the base").summary


@pytest.mark.parametrize("what", ["target", "precision", "device"])
def test_a_base_with_another_target_precision_or_device_is_not_comparable(
    what: str, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before models are loaded."""
    profile = DecodingProfile.load(world / "lossless.json")
    fields = {
        "target": {"target": profile.target.model_copy(update={"sha256": "f" * 64})},
        "precision": {"precision": "bfloat16"},
        "device": {"hardware": Fingerprint(name="slate", kind="cpu", model="A slate", num_cores=1, memory_bytes=1)},
    }[what]
    changed(world, "base.json", **fields)
    monkeypatch.setattr(loading, "load_model", None)
    with pytest.raises(
        NotComparable, match=rf"--against base.json: its {what} is .*; compare profiles with the same {what}"
    ):
        check("lossless.json", against="base.json")


def test_sides_that_answer_differently_are_not_comparable(world: Path, workers: type[InProcess]) -> None:
    """The same trees and target, but a different answer: the exact counts find it first."""
    point = DecodingProfile.load(world / "lossless.json").point
    priced = point.model_copy(update={"fallback": RoundPrice(round_steps=1.0, level_steps=0.1, node_steps=0.0)})
    changed(world, "base.json", point=priced)
    workers.edit = lambda side, found: found.model_copy(update={"tokens_sha256": side.name})
    found = check("lossless.json", against="base.json")
    assert (found.exit_code, verdicts(found)["counts of the base"]) == (1, "failed")
    assert "different answer" in gate(found, "counts of the base").details[0]
    deeper = decoding_profile(
        tree={"policy": "chain", "depth": 2}
    ).point.tree  # other trees: counts are skipped, and times are compared
    changed(world, "base.json", point=point.model_copy(update={"tree": deeper}))
    with pytest.raises(NotComparable, match=r"workload.jsonl:\d: base and head answer differently"):
        check("lossless.json", against="base.json")


def test_the_profile_s_own_prompts_are_checked_by_default(world: Path) -> None:
    """Also from another folder, and if they are in a file of another name. The search's limit of the answers holds."""
    found, prompts = write_evidence(world), check("lossless.json", max_new_tokens=9).workloads[0].prompts
    workload = found.workload.model_copy(update={"max_new_tokens": 9})
    found.model_copy(update={"evidence": Evidence(prompts=prompts), "workload": workload}).save(world / "proven.json")
    (world / "prompts.jsonl").write_bytes((world / "workload.jsonl").read_bytes())
    for own in ((), ("prompts.jsonl",)):
        assert gate(check("proven.json", workloads=own), "counts").summary.startswith("2 of 2 prompts have the same")
    (world / "elsewhere").mkdir()
    for name in ("workload.jsonl", "proven.json"):
        (world / name).rename(world / "elsewhere" / name)
    assert check("elsewhere/proven.json", workloads=()).verdict == "passed"


@pytest.mark.nightly
def test_real_processes_decode_in_pairs(world: Path) -> None:
    """Two processes with different trees: even with a tiny budget five pairs are decoded and kept."""
    point = DecodingProfile.load(world / "lossless.json").point
    deeper = decoding_profile(tree={"policy": "chain", "depth": 2}).point.tree
    changed(world, "base.json", point=point.model_copy(update={"tree": deeper}))
    result = check("lossless.json", against="base.json", budget_s=1.0)
    assert (result.exit_code, verdicts(result)["lossless"], gate(result, TIME).verdict) == (3, "passed", "inconclusive")
    assert gate(result, TIME).summary.startswith("--budget 1s: the first analysis, at 55 pairs, takes about ")
    (ledger,) = (world / ".autotune" / "checks").glob("*.jsonl")
    runs = [
        Decoded.model_validate({k: v for k, v in row.items() if k in Decoded.model_fields})
        for row in read_lines(ledger)
    ]
    assert len(runs) == 10 and all(run.decode_ms > 0 for run in runs)
