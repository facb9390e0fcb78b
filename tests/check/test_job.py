"""``autotune check``: when a profile passes, fails or cannot be judged."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.check import in_runtime, worker
from autotune.check.job import run_check
from autotune.check.result import BASE_COUNTS, COUNTS, LOSSLESS, SPEEDUP, TIME, CheckResult, Gate
from autotune.check.settings import CheckSettings
from autotune.check.versions import Version
from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import TUNED, DecodingProfile, Evidence
from autotune.documents.provenance import stamp
from autotune.errors import NotComparable
from autotune.evaluation.arms import Arm
from autotune.evaluation.runtime_arms import DecoderArm
from autotune.files import read_lines
from autotune.machine.device import fingerprint
from autotune.modeling import sharded
from autotune.modeling.loading import reference
from autotune.runtime import generate_args
from autotune.runtime import load as loading
from autotune.runtime.points import LoadedPoint
from autotune.runtime.rounds import Round
from autotune.search.backends import restored_backend
from autotune.trees.tree import Ints
from autotune.trees.verification import WetapVerification
from autotune.workloads.prompt import WorkloadPrompt
from tests.sample_documents import DEVICE, decoding_profile, write_workload
from tests.tiny_models import Pair


@pytest.fixture
def world(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lossless profile, a lossy one that accepts anything, and a workload."""
    target, draft = (reference(str(path)) for path in (pair.target_folder, pair.draft_folder))
    here: dict[str, Any] = {"visual_keep": 1.0, "hardware": fingerprint("cpu")}
    decoding_profile(target, draft, **here).save(tmp_path / "lossless.json")
    lossy = {"verification": WetapVerification(threshold=1e-9)}
    changed(tmp_path, "lossy.json", point=lossy)
    write_workload(tmp_path, [{"prompt": "Go on.", "split": "evaluate", "max_new_tokens": 12}] * 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # takes longer in the heap of pytest than decoding
    return tmp_path


def changed(world: Path, name: str, point: Mapping[str, Any] | None = None, **fields: Any) -> DecodingProfile:
    """Write the lossless profile with other fields, and with other fields of its point."""
    profile = DecodingProfile.load(world / "lossless.json")
    other = profile.model_copy(update={"point": profile.point.model_copy(update=point or {}), **fields})
    other.save(world / name)
    return other


def check(profile: str, **settings: Any) -> CheckResult:
    known: dict[str, Any] = {"workloads": ("workload.jsonl",), "num_prompts": 2, "device": "cpu"}
    return run_check(CheckSettings(profile=Path(profile), **{**known, **settings}), Console(), restored_backend)


def gates(result: CheckResult) -> dict[str, Gate]:
    return {gate.name: gate for gate in result.gates}


def answer_wrongly(monkeypatch: pytest.MonkeyPatch, edit: Callable[[list[int]], list[int]]) -> None:
    """Change the tokens of the profile's answers."""
    generate = DecoderArm.generate

    def wrong(self: DecoderArm, inputs: Any, settings: Any) -> Any:
        tokens, stats = generate(self, inputs, settings)
        return (tokens if self.name != TUNED else edit(tokens)), stats

    monkeypatch.setattr(DecoderArm, "generate", wrong)


@pytest.mark.parametrize(
    ("profile", "min_speedup", "edit", "identical", "exit_code", "verdict"),
    [
        ("lossless", None, None, 2, 0, "passed"),
        ("lossless", None, lambda tokens: [*tokens[:-1], 0], 0, 1, "failed: the output differs from plain decoding"),
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
    result = check(f"{profile}.json", min_speedup=min_speedup, junit=world / "new" / "j.xml")
    assert (result.exit_code, result.workloads[0].identical_outputs) == (exit_code, identical)
    assert result.verdict.startswith(verdict) and result.lossless is (profile == "lossless")
    assert [*gates(result)] == [LOSSLESS, COUNTS, *([SPEEDUP] if min_speedup else [])]
    assert (world / "new" / "j.xml").exists() and not [*world.rglob("*.md")], "only requested files are written"
    assert gates(result)[COUNTS].summary.startswith(f"{profile}.json was not measured: no evidence to compare")
    err = capsys.readouterr().err
    assert ("LOSSY profile" in err) is (profile == "lossy")
    changes = rf"changed since {profile}\.json was made: torch 2 -> \S+, transformers 5 -> \S+; what this costs "
    assert re.search(changes, err), "libraries that changed since the search are named"


def test_later_turns_follow_the_target_s_answers(world: Path) -> None:
    row = {"question_id": 1, "category": "writing", "turns": ["Go on.", "And then?", "Stop."]}
    turns = ["question.jsonl:2/turn-1", "question.jsonl:2/turn-2"]
    for second, checked in (
        ("On.", turns),
        ("On and on. " * 400, turns[:1]),
    ):  # the longer one does not fit the context
        write_workload(world, [row, {**row, "turns": ["Go.", second]}], name="question.jsonl")
        result = check("lossless.json", workloads=("question.jsonl",), num_prompts=4, max_new_tokens=12)
        assert result.verdict == "passed" and result.workloads[0].identical_outputs == len(checked)
        assert [prompt.prompt for prompt in result.workloads[0].prompts] == checked


def test_in_reduced_precision_a_near_tie_passes_and_is_reported(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some answers in bfloat16 differ after a near tie and pass; a different token at a clear margin fails."""
    NUM = 8
    prompts = [{"prompt": f"Go on with number {n}.", "split": "evaluate", "max_new_tokens": 60} for n in range(NUM)]
    write_workload(world, prompts)
    load_model = sharded.load_model
    monkeypatch.setattr(sharded, "load_model", lambda name, **options: load_model(name, **options).bfloat16())
    result = check("lossless.json", num_prompts=NUM)
    (workload,) = result.workloads
    assert workload.identical_outputs < NUM == workload.num_prompts, "nothing differs: the test proves nothing"
    assert len(workload.divergences) == NUM - workload.identical_outputs
    assert all(": a near tie" in divergence and "margin" in divergence for divergence in workload.divergences)
    assert (result.verdict, result.exit_code, gates(result)[LOSSLESS].verdict) == ("passed", 0, "warned")
    assert "output differs at token" in capsys.readouterr().err

    answer_wrongly(monkeypatch, lambda tokens: [*tokens[:3], 5, *tokens[4:]])
    result = check("lossless.json", num_prompts=1)
    assert result.exit_code == 1 and any(": not a tie" in divergence for divergence in result.workloads[0].divergences)


# -------- evidence


def write_evidence(world: Path, **fields: Any) -> DecodingProfile:
    """The lossless profile, with evidence measured now on this device, as ``proven.json``."""
    prompts = check("lossless.json").workloads[0].prompts
    assert sum(prompt.accepted_tokens for prompt in prompts) > 5, "nothing is accepted: the test proves nothing"
    workload = DecodingProfile.load(world / "lossless.json").workload.model_copy(update={"name": "workload.jsonl"})
    known = {"evidence": Evidence(prompts=prompts), "provenance": stamp(), "workload": workload}
    return changed(world, "proven.json", **{**known, **fields})


def accept_less(monkeypatch: pytest.MonkeyPatch, longest: Callable[[], int] = lambda: 1) -> None:
    """Keep only the first tokens of every accepted path: still lossless, with lower accepted lengths."""
    verify = Round.verify

    def cut_verify(rounds: Round, request: generate_args.Request, point: LoadedPoint) -> tuple[Ints, int]:
        path, token = verify(rounds, request, point)
        if len(path) <= (length := longest()):
            return path, token
        return path[:length], int(point.grower.tree.token[path[length]])

    monkeypatch.setattr(Round, "verify", cut_verify)


@pytest.mark.filterwarnings("ignore:.*tuned on cpu/An abacus/1")
@pytest.mark.parametrize(
    ("fields", "is_random", "verdict", "summary"),
    [
        ({}, False, "failed", "worse counts"),
        ({"hardware": DEVICE}, False, "warned", "advisory only: the profile's evidence was made on cpu/An abacus/1"),
        ({}, True, "skipped", "counts are not reproducible"),
    ],
)
def test_a_lower_accepted_length_fails_without_timing_where_counts_repeat(
    fields: dict[str, Any], is_random: bool, verdict: str, summary: str, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts of another device, and counts that differ the second time, do not fail."""
    write_evidence(world, **fields)
    assert check("proven.json").verdict == "passed"
    calls = iter(range(10_000))
    accept_less(monkeypatch, lambda: 1 + (is_random and next(calls) % 5 == 0))
    monkeypatch.setattr(in_runtime, "WorkerProcess", object)
    against = "lossless.json" if verdict == "failed" else None
    result = check("proven.json", against=against)
    assert (result.exit_code, gates(result)[COUNTS].verdict) == (int(verdict == "failed"), verdict)
    assert summary in gates(result)[COUNTS].summary
    assert against is None or gates(result)[TIME].summary == "decided without timing"


def test_prompts_without_evidence_are_not_comparable_without_another_gate(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another workload, prompts of the search's workload that have changed, and a chat template that was repaired."""
    write_evidence(world)
    prompts = [{"prompt": "Something else.", "split": "evaluate", "max_new_tokens": 20}]
    write_workload(world, prompts, name="other.jsonl")
    with pytest.raises(NotComparable, match=r"1 of the first 1 are not those of the search on workload.jsonl"):
        check("proven.json", workloads=("other.jsonl",))
    both = check("proven.json", workloads=("workload.jsonl", "other.jsonl"), min_speedup=0.001)
    assert [one.verdict for one in both.gates if one.name == COUNTS] == ["passed", "skipped"]
    assert [one.name for one in both.workloads] == ["workload.jsonl", "other.jsonl"]
    load = loading.load_processor

    def repaired(name: str) -> Any:
        processor = load(name)
        processor.chat_template = "Please: " + processor.chat_template
        return processor

    with (
        monkeypatch.context() as patch,
        pytest.raises(NotComparable, match=r"2 of the first 2 are .* chat template, .* has changed"),
    ):
        patch.setattr(loading, "load_processor", repaired)
        check("proven.json")
    write_workload(world, prompts * 2)
    with pytest.raises(NotComparable, match=r"prompts of workload.jsonl: 2 of the first 2 are not those of the search"):
        check("proven.json")


def test_the_profile_s_own_prompts_are_checked_by_default(world: Path) -> None:
    """Also from another folder, and if they are in a file of another name. The search's limit of the answers holds."""
    profile, prompts = write_evidence(world), check("lossless.json", max_new_tokens=9).workloads[0].prompts
    workload = profile.workload.model_copy(update={"max_new_tokens": 9})
    profile.model_copy(update={"evidence": Evidence(prompts=prompts), "workload": workload}).save(world / "proven.json")
    (world / "prompts.jsonl").write_bytes((world / "workload.jsonl").read_bytes())
    for own in ((), ("prompts.jsonl",)):
        result = check("proven.json", workloads=own)
        assert gates(result)[COUNTS].summary.startswith("2 of 2 prompts have the same")
    (world / "elsewhere").mkdir()
    for name in ("workload.jsonl", "proven.json"):
        (world / name).rename(world / "elsewhere" / name)
    assert check("elsewhere/proven.json", workloads=()).verdict == "passed"


# -------- against


class InProcess(Arm, AbstractContextManager["InProcess"]):
    """A worker without a process, whose counts are real and whose times are given."""

    launched: list[str]

    def __init__(self, version: Version, inputs: Path, options: Any, log: Path) -> None:
        self.inputs, self.decoder = inputs, autotune.load(version.profile, **options)
        self.launched.append(version.name)

    def __exit__(self, *_: object) -> None: ...

    def decode(self, prompt: WorkloadPrompt) -> Decoded:
        request = {
            "inputs": str(self.inputs / f"{prompt.sha256}.safetensors"),
            "settings": {**prompt.settings.generation},
        }
        answer = {**worker.decode(self.decoder, request), "decode_ms": 100.0 + len(self.launched) % 7}
        return Decoded(arm="", prompt=prompt.name, prompt_sha256=prompt.sha256, **answer)


@pytest.mark.parametrize(
    ("point", "fields", "counts", "launches"),
    [
        ({}, {}, "passed", ["base"]),  # the same code and choices: nothing to time
        ({}, {"threads": 3}, "passed", ["base", *["base", "head", "head", "base"] * 5, "base", "head"]),
        ({"tree": decoding_profile(tree={"policy": "chain", "depth": 2}).point.tree}, {}, "skipped", None),
    ],
    ids=["equal", "other threads", "another tree"],
)
def test_against_another_profile(
    point: dict[str, Any],
    fields: dict[str, Any],
    counts: str,
    launches: list[str] | None,
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counts are compared between the same trees; equal versions are not timed."""
    changed(world, "base.json", point, **fields)
    monkeypatch.setattr(InProcess, "launched", [], raising=False)
    monkeypatch.setattr(in_runtime, "WorkerProcess", InProcess)
    result = check("lossless.json", against="base.json")
    assert (result.exit_code, result.against) == (0, "base.json")
    assert (gates(result)[BASE_COUNTS].verdict, gates(result)[TIME].verdict) == (counts, "passed"), result.gates
    assert (result.workloads[0].timing is None) is (launches == ["base"])
    assert launches is None or InProcess.launched == launches


@pytest.mark.parametrize("aspect", ["target", "precision", "device"])
def test_a_base_with_another_target_precision_or_device_is_not_comparable(
    aspect: str, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before models are loaded."""
    target = DecodingProfile.load(world / "lossless.json").target.model_copy(update={"sha256": "f" * 64})
    fields = {"target": {"target": target}, "precision": {"precision": "bfloat16"}, "device": {"hardware": DEVICE}}
    changed(world, "base.json", **fields[aspect])
    monkeypatch.setattr(loading, "load_target", None)
    message = rf"--against base.json: its {aspect} is .*; compare profiles with the same {aspect}"
    with pytest.raises(NotComparable, match=message):
        check("lossless.json", against="base.json")


@pytest.mark.nightly
def test_real_processes_decode_in_pairs(world: Path) -> None:
    """Two processes with different trees: even with a tiny budget five pairs are decoded and kept."""
    changed(world, "base.json", {"tree": decoding_profile(tree={"policy": "chain", "depth": 2}).point.tree})
    result = check("lossless.json", against="base.json", budget_s=1.0)
    found = gates(result)
    assert (result.exit_code, found[LOSSLESS].verdict, found[TIME].verdict) == (3, "passed", "inconclusive")
    assert found[TIME].summary.startswith("--budget 1s: the first analysis, at 55 pairs, takes about ")
    (ledger,) = (world / ".autotune" / "checks").glob("*.jsonl")
    assert len(read_lines(ledger)) == 10 and all(row["decode_ms"] > 0 for row in read_lines(ledger))
