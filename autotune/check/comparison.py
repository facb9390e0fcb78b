"""Base and head: the two sides of a comparison, their counts and their times."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.check.counts import compare_counts, counts_gate
from autotune.check.local_run import LocalRun
from autotune.check.pairs import PairRunner
from autotune.check.result import BASE_COUNTS, TIME, Gate, Timing
from autotune.check.revision import checked_out
from autotune.check.sequential import Design
from autotune.check.timing import TooFewPairs, run_pairs, time_gate, timing_of
from autotune.check.worker_process import Launch, Side, WorkerProcess, WorkerRequest
from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.provenance import beside
from autotune.errors import NotComparable
from autotune.files import WORKSPACE, content_key, read_json, sha256_of, write_bytes
from autotune.modeling.loading import Dtype
from autotune.modeling.weight_files import save_tensors

CHECKS = WORKSPACE / "checks"
# Files that a side decodes with: the package, and the bundled models next to it or, if installed, inside it.
CODE = ("autotune/**/*.py", "drafts/**/*.safetensors", "drafts/**/*.json", "autotune/_data/drafts/**/*.safetensors")


@dataclass(frozen=True)
class Sides:
    base: Side
    head: Side
    profiles: tuple[DecodingProfile, DecodingProfile]

    @property
    def have_same_trees(self) -> bool:
        """Whether both profiles choose the same drafts and trees; otherwise their counts differ by design."""
        base, head = (
            [point.model_dump(exclude={"predicted", "measured", "fallback"}) for point in profile.points]
            for profile in self.profiles
        )
        return base == head

    @property
    def are_equal(self) -> bool:
        """Whether code, environment and everything that profiles choose are the same."""
        base, head = (
            (profile.mode, profile.capture_sizes, profile.threads, [point.fallback for point in profile.points])
            for profile in self.profiles
        )
        same_program = self.base.python == self.head.python and code_hash(self.base) == code_hash(self.head)
        return self.have_same_trees and base == head and same_program

    def key(self, run: LocalRun, seed: int) -> str:
        """Key of the comparison's pairs: the same command continues with them."""
        profiles = [profile.model_dump(mode="json", exclude={"evidence"}) for profile in self.profiles]
        codes = [code_hash(self.base), code_hash(self.head), self.base.label, self.head.dtype]
        return content_key([*codes, *profiles, run.workload.sha256, seed, run.hardware.key])


def code_hash(side: Side) -> str:
    return sha256_of(*sorted(path for pattern in CODE for path in side.code.glob(pattern)))


@contextmanager
def open_sides(against: str, profile: Path, folder: Path, dtype: Dtype | None = None) -> Iterator[Sides]:
    """Base and head. The base is the profile ``against`` if that is a file, otherwise a git revision."""
    head_profile = DecodingProfile.load(profile)
    copy = _without_evidence(profile, folder / "head.json")
    head = Side(name="head", label="the current version", profile=copy, dtype=dtype)
    opened: AbstractContextManager[Side] = checked_out(against, profile, head, folder)
    if Path(against).is_file():
        opened = nullcontext(replace(head, name="base", label=against, profile=Path(against)))
        head = replace(head, label=str(profile))
    with opened as base:
        profiles = DecodingProfile.load(base.profile), head_profile
        base = replace(base, profile=_without_evidence(base.profile, folder / "base.json"))
        _require_comparable(profiles, against, profile)
        yield Sides(base, head, profiles)


def _without_evidence(profile: Path, copy: Path) -> Path:
    """Copy a profile without its evidence, which the code of the base may not know, with paths of models beside it."""
    content = {**read_json(profile), "evidence": {}}
    for model in (content["target"], *(point["draft"] for point in content["points"] if point["draft"])):
        model["id"] = beside(profile, model["id"])
    write_bytes(copy, json.dumps(content).encode())
    return copy


def _require_comparable(profiles: tuple[DecodingProfile, DecodingProfile], against: str, profile: Path) -> None:
    base, head = profiles
    for aspect, of_base, of_head, is_same in (
        ("target", base.target.id, head.target.id, base.target.sha256 == head.target.sha256),
        ("precision", base.precision, head.precision, base.precision == head.precision),
        ("device", base.hardware.key, head.hardware.key, base.hardware.key == head.hardware.key),
    ):
        if not is_same:
            weights = " with other weights" if of_base == of_head else ""
            raise NotComparable(
                f"--against {against}: its {aspect} is {of_base}{weights}, that of {profile} is {of_head}; compare profiles "
                f"with the same {aspect}"
            )


def write_requests(run: LocalRun, processor: Any, folder: Path) -> list[WorkerRequest]:
    folder.mkdir(parents=True, exist_ok=True)
    requests = []
    for number, (prompt, decoded) in enumerate(zip(run.workload.prompts, run.runs, strict=True)):
        path = folder / f"{number}.safetensors"
        save_tensors(path, prompt.inputs(processor))
        settings = prompt.settings
        requests.append(
            WorkerRequest(prompt.name, prompt.sha256, path, settings.generation, settings.task, decoded.point)
        )
    return requests


@dataclass(frozen=True)
class Comparison:
    sides: Sides
    launch: Launch
    design: Design
    seed: int
    console: Console

    def counts_gate(self, run: LocalRun, requests: list[WorkerRequest]) -> Gate:
        """The gate on the head's counts compared with the base's, measured now on the same device.

        The base decodes every prompt once, and again if that shows a regression, which counts only if the base repeats.
        """
        if not self.sides.have_same_trees:
            return run.skipped_gate(BASE_COUNTS, "the profiles choose other drafts or trees: time decides")
        if run.not_repeated:
            return run.not_repeated_gate(BASE_COUNTS)
        base = self._base_counts(requests)
        comparison = compare_counts(run.runs, base, run.prices)
        gate = counts_gate(
            comparison,
            BASE_COUNTS,
            run.workload.name,
            source=self.sides.base.label,
            tolerance=self.design.tolerance,
            different_answer_reason=None if run.is_exact else f"near ties in {run.precision}",
        )
        again = self._base_counts(requests) if gate.verdict == "failed" else base
        if [run.counts for run in again] != [run.counts for run in base]:
            return run.skipped_gate(BASE_COUNTS, f"the counts of {self.sides.base.label} are not reproducible")
        return gate

    def _base_counts(self, requests: list[WorkerRequest]) -> list[Decoded]:
        worker = self.launch(self.sides.base)
        try:
            return [worker.decode(request, plain=False) for request in requests]
        finally:
            worker.close()

    def time_gate(self, run: LocalRun, requests: list[WorkerRequest], *, budget_s: float) -> tuple[Gate, Timing | None]:
        """The gate on the head's time compared with the base's."""
        sides, workload = self.sides, run.workload.name
        if sides.are_equal:
            same = f"{sides.base.label} has the same code, models, required packages and choices: nothing to time"
            return Gate(name=TIME, workload=workload, verdict="passed", summary=same), None
        are_lossless = all(point.lossless for profile in sides.profiles for point in profile.points)
        ledger = CHECKS / f"{sides.key(run, self.seed)}.jsonl"
        runner = PairRunner(
            sides.base,
            sides.head,
            self.launch,
            [request for request, decoded in zip(requests, run.runs, strict=True) if decoded.new_tokens > 1],
            seed=self.seed,
            ledger=ledger,
            must_agree=run.is_exact and are_lossless,
        )
        if runner.pairs:
            self.console.say(f"continuing after the {len(runner.pairs)} pairs of an earlier run in {ledger}")
        with self.console.stage(f"pairs of {workload}", self.design.max_pairs) as update, runner:
            try:
                outcome = run_pairs(
                    runner, self.design, budget_s=budget_s, report=lambda done: update(done, self.design.max_pairs, "")
                )
            except TooFewPairs as error:
                return Gate(name=TIME, workload=workload, verdict="inconclusive", summary=str(error)), None
        timing = timing_of(runner, outcome, self.design)
        if not outcome.out_of_time:  # the next check must measure again
            ledger.rename(ledger.with_name(f"{ledger.stem}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"))
        return time_gate(timing, outcome, workload), timing


def launcher(device: str) -> Launch:
    CHECKS.mkdir(parents=True, exist_ok=True)
    return lambda side: WorkerProcess(side, device=device, log=CHECKS / f"{side.name}.log")
