"""The base of a comparison, a git revision or another profile: its side, its counts, and its time beside the head's."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from autotune.check.exact import Counts, compare, judge
from autotune.check.launch import Launch, Request, Side, WorkerProcess
from autotune.check.local_run import LocalRun, not_repeated, skipped
from autotune.check.pairs import PairRunner
from autotune.check.result import BASE_COUNTS, TIME, Gate, Timing
from autotune.check.revision import checked_out
from autotune.check.sequential import Design
from autotune.check.timed import judge_machine, judge_time, run_looks, timing_of
from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile
from autotune.errors import NotComparable
from autotune.files import WORKSPACE, content_key, read_json, sha256_of, write_bytes

CHECKS = WORKSPACE / "checks"


@dataclass(frozen=True)
class Sides:
    """Base and head, and what they decode by."""

    base: Side
    head: Side
    base_profile: DecodingProfile
    head_profile: DecodingProfile
    is_aa: bool

    @property
    def decode_alike(self) -> bool:
        """Whether both profiles choose the same drafts and trees: else counts are others by design, and time
        decides.
        """
        mine, others = (
            [point.model_dump(exclude={"predicted", "measured", "fallback"}) for point in profile.points]
            for profile in (self.base_profile, self.head_profile)
        )
        return mine == others

    @property
    def are_equal(self) -> bool:
        """Whether the same code decodes by the same choices in the same environment."""
        base, head = self.base_profile, self.head_profile
        return (
            self.decode_alike
            and (base.mode, base.capture_sizes, base.threads) == (head.mode, head.capture_sizes, head.threads)
            and [point.fallback for point in base.points] == [point.fallback for point in head.points]
            and self.base.python == self.head.python
            and code_hash(self.base) == code_hash(self.head)
        )

    @property
    def are_lossless(self) -> bool:
        return all(point.lossless for profile in (self.base_profile, self.head_profile) for point in profile.points)

    def key(self, here: LocalRun, seed: int, device: str) -> str:
        """Names the pairs of a comparison: the same command goes on with them."""
        profiles = [
            profile.model_dump(mode="json", exclude={"evidence"}) for profile in (self.base_profile, self.head_profile)
        ]
        codes = [code_hash(self.base), code_hash(self.head), self.base.what, self.is_aa]
        return content_key([*codes, *profiles, here.workload.sha256, seed, device])


# What a side decodes with, below its folder: the package, and the models beside it or, where it is installed, inside.
CODE = ("autotune/**/*.py", "drafts/**/*.safetensors", "drafts/**/*.json", "autotune/_data/drafts/**/*.safetensors")


def code_hash(side: Side) -> str:
    """Of everything that a side decodes with."""
    return sha256_of(*sorted(path for pattern in CODE for path in side.code.glob(pattern)))


@contextmanager
def open_sides(against: str | None, profile: Path, folder: Path) -> Iterator[Sides]:
    """The base, which is a profile where a file of that name exists and a git revision otherwise, or the head again for
    None.

    Raises:
        UserError: it is neither, or cannot be read or built.
        NotComparable: it decodes another target, in another precision, or for another device.

    """
    head_profile = DecodingProfile.load(profile)
    head = Side(name="head", what="as it is here", profile=_lean(profile, folder / "head.json"))
    if against is None:
        yield Sides(replace(head, name="base"), head, head_profile, head_profile, is_aa=True)
    elif Path(against).is_file():
        base_profile = DecodingProfile.load(Path(against))
        base = replace(head, name="base", what=against, profile=_lean(Path(against), folder / "base.json"))
        head = replace(head, what=str(profile))
        yield _comparable(Sides(base, head, base_profile, head_profile, is_aa=False), against, profile)
    else:
        with checked_out(against, profile, head, folder) as base:
            base_profile = DecodingProfile.load(base.profile)
            base = replace(base, profile=_lean(base.profile, folder / "base.json"))
            yield _comparable(Sides(base, head, base_profile, head_profile, is_aa=False), against, profile)


def _lean(source: Path, path: Path) -> Path:
    """Copy a profile in the schema version that it has, which the code beside it reads, without its evidence."""
    write_bytes(path, json.dumps({**read_json(source), "evidence": {}}).encode())
    return path


def _comparable(sides: Sides, against: str, profile: Path) -> Sides:
    base, head = sides.base_profile, sides.head_profile
    for what, of_base, of_head, is_same in (
        ("target", base.target.id, head.target.id, base.target.sha256 == head.target.sha256),
        ("precision", base.precision, head.precision, base.precision == head.precision),
        ("device", base.hardware.key, head.hardware.key, base.hardware.key == head.hardware.key),
    ):
        if not is_same:
            other = " of other weights" if of_base == of_head else ""
            raise NotComparable(
                f"--against {against}: its {what} is {of_base}{other}, that of {profile} is {of_head}; compare profiles of the same {what}"
            )
    return sides


def write_requests(here: LocalRun, processor: Any, folder: Path) -> list[Request]:
    """The workload's prompts as workers take them, processed once for both sides."""
    folder.mkdir(parents=True, exist_ok=True)
    requests = []
    for number, (prompt, run) in enumerate(zip(here.workload.prompts, here.runs, strict=True)):
        path = folder / f"{number}.safetensors"
        save_file({name: value.contiguous() for name, value in prompt.inputs(processor).items()}, path)
        requests.append(
            Request(prompt.name, prompt.sha256, path, prompt.settings.generation, prompt.settings.task, run.point)
        )
    return requests


@dataclass(frozen=True)
class Comparison:
    """Both sides with all that it takes to compare them, workload by workload."""

    sides: Sides
    launch: Launch
    design: Design
    seed: int
    device: str
    """The key of its fingerprint."""
    console: Console

    def judge_counts(self, here: LocalRun, requests: list[Request]) -> Gate:
        """The base decodes every prompt once, and the head's counts are compared: on the same device, minutes apart. A
        regression is believed when the base counts the same once more.
        """
        base = self.sides.base
        if not self.sides.decode_alike:
            return skipped(
                here, BASE_COUNTS, "the profiles choose other drafts or trees, and so other counts: time decides"
            )
        if here.not_repeated:
            return not_repeated(here, BASE_COUNTS)
        then = self._count(base, requests)
        gate = judge(
            compare(here.counts, then, here.prices),
            gate=BASE_COUNTS,
            workload=here.workload.name,
            than=f"with {base.what}",
            tolerance=self.design.tolerance,
            answers_may_differ=None if here.is_exact else f"near ties of {here.precision}",
        )
        if gate.verdict == "failed" and self._count(base, requests) != then:
            return skipped(here, BASE_COUNTS, f"counts cannot gate here: those of {base.what} are others every time")
        return gate

    def _count(self, side: Side, requests: list[Request]) -> list[Counts]:
        worker = self.launch(side)
        try:
            return [Counts.of_decoded(request.name, worker.decode(request, plain=False)) for request in requests]
        finally:
            worker.close()

    def judge_time(self, here: LocalRun, requests: list[Request], *, budget_s: float) -> tuple[Gate, Timing | None]:
        """Pairs of base and head until a look decides; A/A until the cap or the budget, for its noise is what is asked
        for.
        """
        sides, name = self.sides, here.workload.name
        if sides.are_equal and not sides.is_aa:
            same = f"{sides.base.what} has the same code, models, packages and choices: nothing to time"
            return Gate(name=TIME, workload=name, verdict="passed", summary=same), None
        ledger = CHECKS / f"{sides.key(here, self.seed, self.device)}.jsonl"
        decoded = [request for request, run in zip(requests, here.runs, strict=True) if run.new_tokens > 1]
        runner = PairRunner(
            sides.base,
            sides.head,
            self.launch,
            decoded,
            seed=self.seed,
            ledger=ledger,
            must_agree=here.is_exact and sides.are_lossless,
        )
        if runner.pairs:
            self.console.say(f"going on behind the {len(runner.pairs)} pairs of an earlier run in {ledger}")
        with self.console.stage(f"pairs of {name}") as update, runner:
            outcome = run_looks(
                runner,
                self.design,
                budget_s=budget_s,
                stops_early=not sides.is_aa,
                report=lambda done: update(done, self.design.cap, ""),
            )
        timing = timing_of(runner, outcome, self.design)
        if not outcome.out_of_time:  # decided: the next check measures anew
            ledger.rename(ledger.with_name(f"{ledger.stem}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"))
        if sides.is_aa:
            return judge_machine(timing, outcome, name, self.design), timing
        return judge_time(timing, outcome, name), timing


def launcher(device: str) -> Launch:
    """Launches sides as processes, whose words go to a log for each side."""
    CHECKS.mkdir(parents=True, exist_ok=True)
    return lambda side: WorkerProcess(side, device=device, log=CHECKS / f"{side.name}.log")
