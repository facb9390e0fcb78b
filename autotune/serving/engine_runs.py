"""Runs in llama-server for a search: answers and prices recorded once, the self-test, and the confirmation. Loads no torch."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autotune.console import Console
from autotune.documents.engine_profile import (
    OPTIONS,
    Clock,
    ConfirmedArm,
    NgramType,
    PricedStep,
    ServedAnswer,
    Speculation,
    SpeculationCounts,
    arguments_of,
)
from autotune.errors import UserError
from autotune.evaluation.summary import bootstrap_ratio
from autotune.files import append_line, content_key, read_lines
from autotune.serving.llama_server import EngineCommand, LlamaServer, started_llama
from autotune.serving.ngram_drafters import KnownRequest
from autotune.serving.ngram_replay import RequestReplay, replay_speculation, total
from autotune.serving.verification_prices import VerificationPrices, measure_verifications, time_of
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload

SELF_TEST = 4  # prompts
DISAGREEMENT = 0.05  # between speedups of wall and of CPU time, above which other processes used the machine
OFF, DEFAULT = "off", "--spec-default"
DEFAULT_SETTINGS = Speculation(type="ngram-mod", options=OPTIONS["ngram-mod"])
Arms = Mapping[str, Sequence[Speculation]]
Replayed = tuple[ServedAnswer, RequestReplay]


@dataclass(frozen=True)
class EngineRecord:
    """Runs of one model, build and command, in a folder: an interrupted search repeats at most one prompt, or the prices."""

    folder: Path

    @property
    def served(self) -> Path:
        """Self-test and confirmation of the search that runs; see ``serve_in_turns``."""
        return self.folder / "served.jsonl"

    def answers(self, server: LlamaServer, workload: Workload, console: Console) -> list[ServedAnswer]:
        """The plain answers, recorded once; the first are asked for again, to see whether they repeat."""
        path, prompts = self.folder / "answers.jsonl", workload.prompts
        known = {line["prompt"]: line["answer"] for line in read_lines(path) if "answer" in line}
        with console.stage("plain answers of the engine") as update:
            for number, prompt in enumerate(prompts, start=1):
                if prompt.sha256 not in known:
                    known[prompt.sha256] = server.ask(prompt).model_dump()
                    append_line(path, {"prompt": prompt.sha256, "answer": known[prompt.sha256]})
                update(number, len(prompts), "")
        found = [ServedAnswer.model_validate(known[prompt.sha256]) for prompt in prompts]
        again = [server.ask(prompt).tokens for prompt in prompts[:SELF_TEST]]
        differing = sum(tokens != answer.tokens for tokens, answer in zip(again, found, strict=False))
        console.say(
            f"plain      {sum(len(answer.tokens) for answer in found)} tokens of {len(found)} prompts, in {self.folder}; asked again, "
            f"{differing} of {len(again)} answers differ"
        )
        return found

    def prices(
        self, server: LlamaServer, answers: Sequence[ServedAnswer], console: Console, seed: int
    ) -> list[PricedStep]:
        """Prices after the shortest and the longest prompt, measured once."""
        path, prompts = self.folder / "prices.jsonl", sorted((answer.prompt_tokens for answer in answers), key=len)
        ends = prompts[:: max(1, len(prompts) - 1)]
        key = content_key(ends)
        known = [line["steps"] for line in read_lines(path) if line.get("prompts") == key]
        if not known:
            with console.stage("prices of forward passes") as update:
                steps = measure_verifications(server, ends, prompts[0][-1], update, seed=seed)
            known = [[step.model_dump() for step in steps]]
            append_line(path, {"prompts": key, "steps": known[0]})
        return [PricedStep.model_validate(step) for step in known[-1]]


def require_served(prompts: Sequence[WorkloadPrompt]) -> None:
    """Refuse prompts that a server of text at temperature 0 does not decode."""
    for prompt in prompts:
        if prompt.pixels:
            raise UserError(f"{prompt.name}: has an image, and n-grams are tuned on text; leave such prompts out")
        if prompt.settings.temperature > 0:
            raise UserError(f"{prompt.name}: engines are tuned at temperature 0; set the prompt's temperature to 0")


def with_replays(answers: Sequence[ServedAnswer], speculations: Sequence[Speculation], context: int) -> list[Replayed]:
    """Answers of a new server, beside their replay."""
    return list(zip(answers, replay_speculation(speculations, list(map(KnownRequest, answers)), context), strict=True))


def is_exact(answer: ServedAnswer, replayed: RequestReplay) -> bool:
    return (answer.drafted, answer.accepted) == (replayed.counts.drafted, replayed.counts.accepted)


@dataclass(frozen=True)
class Served:
    """Answers of one arm in the order of the prompts, and what its servers counted: a search that goes on starts a new one."""

    by_server: list[list[ServedAnswer]]
    counts: SpeculationCounts
    context: int

    @property
    def answers(self) -> list[ServedAnswer]:
        return list(itertools.chain(*self.by_server))

    def with_replays(self, speculations: Sequence[Speculation]) -> list[Replayed]:
        return [row for answers in self.by_server for row in with_replays(answers, speculations, self.context)]


def serve_in_turns(
    start: Callable[[], Mapping[str, LlamaServer]],
    arms: Arms,
    workload: Workload,
    stage: tuple[str, Console],
    *,
    seed: int = 0,
    record: Path | None = None,
) -> dict[str, Served]:
    """Answers of every arm's server to the prompts, in turns and in random order.

    Args:
        start: starts the servers, in a new state. It is called unless the record holds all prompts.
        stage: its name, and the console that shows it.
        record: keeps a prompt once every arm has answered it; those that it holds are not served again.
    """
    prompts, order = workload.prompts, random.Random(seed)
    key = content_key([{name: arguments_of(one) for name, one in arms.items()}, [prompt.sha256 for prompt in prompts]])
    rows = [row for row in read_lines(record) if row.get("key") == key] if record else []
    servers, process = start() if len(rows) < len(prompts) else {}, os.urandom(8).hex()
    with stage[1].stage(stage[0]) as update:
        for prompt in prompts[len(rows) :]:
            answers = {name: servers[name].ask(prompt).model_dump() for name in order.sample(list(arms), len(arms))}
            counts = {name: server.counts().model_dump() for name, server in servers.items()}
            contexts = {name: server.context for name, server in servers.items()}
            rows.append({"key": key, "process": process, "answers": answers, "counts": counts, "contexts": contexts})
            if record:
                append_line(record, rows[-1])
            update(len(rows), len(prompts), "")
    lives = [list(life) for _, life in itertools.groupby(rows, key=lambda row: row["process"])]
    return {
        name: Served(
            [[ServedAnswer.model_validate(row["answers"][name]) for row in life] for life in lives],
            total(SpeculationCounts.model_validate(life[-1]["counts"][name]) for life in lives),
            rows[0]["contexts"][name],
        )
        for name in arms
    }


def self_test(
    command: EngineCommand, types: Sequence[NgramType], answers: Sequence[ServedAnswer], console: Console
) -> dict[NgramType, str]:
    """Types whose counts differ from the replay's, with the reason, by a server for each."""
    left_out: dict[NgramType, str] = {}
    for one in (Speculation(type=name, options=TESTED[name]) for name in types):
        with started_llama(command, [one]) as server:
            found = [server.answer(answer.prompt_tokens, answer.limit) for answer in answers[:SELF_TEST]]
            rows, counted = with_replays(found, [one], server.context), server.counts()
        predicted = total(replayed.counts for _, replayed in rows)
        if counted != predicted or not all(is_exact(*row) for row in rows):
            left_out[one.type] = (
                f"{counted.drafted} tokens drafted and {counted.accepted} accepted in {counted.verifications} verifications, predicted "
                f"{predicted.drafted}, {predicted.accepted} and {predicted.verifications}"
            )
            console.say(
                f"self-test  {one.label}: {left_out[one.type]}: the build has another rule, and the type is left out"
            )
    if len(left_out) == len(types):
        raise UserError(
            "the engine's counts differ from the replay's in every type; use the build that docs/engines.md names"
        )
    return left_out


TESTED: dict[NgramType, dict[str, int]] = {
    "ngram-simple": {"size-n": 3, "size-m": 8},
    "ngram-map-k": {"size-n": 3, "size-m": 8},
    "ngram-map-k4v": {"size-n": 3, "size-m": 8, "min-hits": 1},
    "ngram-mod": {"n-match": 4, "n-min": 1, "n-max": 8},
    "ngram-cache": {},
}
"""Settings that draft often."""


def confirm(
    command: EngineCommand,
    arms: Arms,
    workload: Workload,
    prices: VerificationPrices,
    console: Console,
    *,
    seed: int,
    record: Path | None = None,
) -> tuple[list[ConfirmedArm], dict[str, Served]]:
    """Serve prompts with every arm, in turns and in random order, each in a new server of its own; prints a table.

    Returns the arms in their order, and their answers by name.
    """
    with ExitStack() as stack:
        runs = serve_in_turns(
            lambda: {name: stack.enter_context(started_llama(command, one)) for name, one in arms.items()},
            arms,
            workload,
            ("confirmation in turns", console),
            seed=seed,
            record=record,
        )
    confirmed = compared(arms, runs, prices)
    if confirmed[0].clock != "wall":
        console.say(
            f"speedups of wall and of CPU time differ by more than {DISAGREEMENT:.0%}, because other processes used the machine: those of CPU "
            "time are given"
        )
    console.table(
        f"Confirmed on {len(workload.prompts)} held-out prompts, {confirmed[0].clock} time",
        ["settings", "predicted", "measured", "95 %", "tokens per step", "counts = predicted", "plain's answer"],
        [
            [
                name,
                *(f"{value:.2f}x" for value in (arm.predicted, arm.measured)),
                "{:.2f} to {:.2f}".format(*arm.ci95),
                f"{arm.tokens_per_step:.2f}",
                *(f"{number}/{arm.prompts}" for number in (arm.exact, arm.identical)),
            ]
            for name, arm in zip(arms, confirmed, strict=True)
        ],
    )
    return confirmed, runs


def compared(arms: Arms, runs: Mapping[str, Served], prices: VerificationPrices) -> list[ConfirmedArm]:
    """Speedups of runs over those without speculation, in time per token, beside their predictions.

    The clock is the wall's, unless a speedup in CPU time is another one; then other processes used the machine, and it is the CPU's.
    """
    rows = {name: served.with_replays(arms[name]) for name, served in runs.items()}
    answers = {name: served.answers for name, served in runs.items()}
    price = prices.pricer(max(len(one.prompt_tokens) + len(one.tokens) for found in answers.values() for one in found))

    def per_token(name: str, ms: Callable[[ServedAnswer, RequestReplay], float]) -> float:
        return sum(ms(*row) for row in rows[name]) / max(1, sum(replayed.num_tokens for _, replayed in rows[name]))

    def speedup(name: str, clock: Clock) -> float:
        both = [per_token(one, lambda answer, _: time_of(clock)(answer)) for one in (OFF, name)]
        return both[0] / max(both[1], 1e-9)

    disagreements = [abs(speedup(name, "wall") / max(speedup(name, "cpu"), 1e-9) - 1) for name in arms]
    clock: Clock = "cpu" if prices.clock == "cpu" and max(disagreements) > DISAGREEMENT else "wall"
    predicted = {name: per_token(name, lambda _, replayed: sum(price(replayed))) for name in arms}
    confirmed = []
    for name, speculations in arms.items():
        times = [np.array([time_of(clock)(answer) for answer in answers[one]]) for one in (OFF, name)]
        units = [np.array([max(1.0, len(answer.tokens) - 1) for answer in answers[one]]) for one in (OFF, name)]
        replayed_counts = total(replayed.counts for _, replayed in rows[name])
        arm = ConfirmedArm(
            label=speculations[0].label if speculations else OFF,
            speculation=speculations[0] if speculations else None,
            predicted=predicted[OFF] / predicted[name],
            measured=speedup(name, clock),
            ci95=bootstrap_ratio(*times, above_units=units[0], below_units=units[1]),
            clock=clock,
            tokens_per_step=1 / per_token(name, lambda _, replayed: sum(replayed.steps.values())),
            replayed=replayed_counts,
            counts=runs[name].counts,
            # Verifications are counted for all requests together.
            exact=sum(is_exact(*row) for row in rows[name]) if replayed_counts == runs[name].counts else 0,
            identical=sum(a.tokens == b.tokens for a, b in zip(answers[name], answers[OFF], strict=True)),
            prompts=len(answers[name]),
        )
        confirmed.append(arm)
    return confirmed
