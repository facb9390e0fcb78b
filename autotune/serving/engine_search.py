"""``autotune search --engine llama.cpp``: the fastest n-gram speculation of a llama-server, or that it should be off. Loads no torch.

The server records plain answers once, its drafts are replayed from the tokens, and its own forward passes are the prices; only the
best settings are served, in turns with none and with the engine's own default.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autotune.console import Console
from autotune.device import cpu_fingerprint
from autotune.documents.engine_profile import (
    OPTIONS,
    ConfirmedArm,
    CountedAnswer,
    EngineProfile,
    NgramType,
    PricedStep,
    ServedAnswer,
    Speculation,
    SpeculationCounts,
)
from autotune.documents.provenance import ModelReference, stamp
from autotune.errors import UserError
from autotune.evaluation.summary import bootstrap_ratio
from autotune.files import WORKSPACE, append_line, content_key, known_sha256_of, read_lines, require_writable
from autotune.modeling.gguf import find_gguf
from autotune.serving.llama_server import (
    EXECUTABLE,
    EngineCommand,
    LlamaServer,
    TimedAnswer,
    find_engine,
    require_chat_template,
    started_llama,
)
from autotune.serving.ngram_replay import Request, RequestReplay, replay, total
from autotune.serving.verification_prices import (
    PRICED_TOKENS,
    PRICING,
    Clock,
    VerificationPrices,
    choose_clock,
    measure_verifications,
    refitted,
    time_of,
)
from autotune.workloads.formats import Format
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload, load_workload

TUNE_PROMPTS, EVALUATE_PROMPTS = 24, 18
SELF_TEST = 4  # prompts
FINALISTS = 2  # besides the engine's default and no speculation: six server starts in all
LEAST_GAIN = 0.99  # a setting below it is never recommended
OFF, DEFAULT = "off", "--spec-default"
DEFAULT_SETTINGS = Speculation(type="ngram-mod", options=OPTIONS["ngram-mod"])
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24)
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)


@dataclass(frozen=True)
class EngineSearchSettings:
    """Settings of a search in an engine, as the user gives them."""

    target: str
    workload: str
    workload_format: Format | None = None
    engine_command: str | None = None
    url: str | None = None
    max_new_tokens: int | None = None
    output: Path = Path("profile.json")
    seed: int = 0
    folder: Path = WORKSPACE


def space(types: Sequence[NgramType]) -> list[Speculation]:
    """Every setting that is replayed."""
    pairs = [{"size-n": n, "size-m": m} for n in SIZES for m in LENGTHS]
    options: dict[NgramType, list[dict[str, int]]] = {
        "ngram-simple": [pair for pair in pairs if pair["size-m"] >= pair["size-n"]],  # shorter ones draft nothing
        "ngram-map-k": pairs,
        "ngram-map-k4v": [pair | {"min-hits": hits} for pair in pairs for hits in (1, 2, 3)],
        "ngram-mod": [
            {"n-match": n, "n-min": least, "n-max": most}
            for n in (*SIZES, 20)
            for least in (0, 1, 2, 4, 8, 48)
            for most in (*LENGTHS, 64)
            if least <= most
        ],
        "ngram-cache": [{}],
    }
    defaults = [Speculation(type=one, options=OPTIONS[one]) for one in types]
    listed = [Speculation(type=one, options=chosen) for one in types for chosen in options[one]]
    return list({one.label: one for one in (*defaults, *listed)}.values())


def search_engine(settings: EngineSearchSettings, console: Console) -> EngineProfile:
    """Tune a llama-server, and write an engine profile.

    Raises:
        UserError: the engine, the model or the workload cannot be used; what was recorded is kept.
    """
    require_writable(settings.output)
    model = find_gguf(settings.target)
    if model is None:
        raise UserError(f"--target {settings.target}: llama.cpp loads GGUF files; give one, or a folder with one")
    tune, held_out = (
        _prompts(settings, split, number) for split, number in (("tune", TUNE_PROMPTS), ("evaluate", EVALUATE_PROMPTS))
    )  # type: ignore[arg-type]
    command = None
    if settings.url is None:
        command = find_engine(settings.engine_command, model)
        if "--chat-template" not in " ".join(command.arguments):
            require_chat_template(model)
        types = command.types()
    else:
        types = list(OPTIONS)
    left_out = {name: "the build does not have it" for name in OPTIONS if name not in types}
    target = ModelReference(id=settings.target, sha256=known_sha256_of(model))
    with ExitStack() as stack:
        server = stack.enter_context(started_llama(command)) if command else LlamaServer(settings.url or "")
        build, context = command.build if command else server.build, server.context
        record = _Record(settings, target, build, command)
        plain = record.answers(server, tune, console)
        requests = [Request(timed.answer) for timed in plain]
        evaluated = [(server.prompt_tokens(prompt), prompt) for prompt in held_out.prompts]
    longest = max(len(request.tokens) for request in requests)
    with ExitStack() as stack:
        if command:
            tested = [one for one in PRICING if one.type in types]
            server = stack.enter_context(started_llama(command, tested))
            served = _serve(server, tune, console, "self-test and served steps", tested, context)
            left_out |= _self_test(server, served, tested, command, plain, console, context)
        else:
            served = []
            console.say("the server's settings cannot be changed: its counts are not tested, and nothing is confirmed")
        steps = record.prices(server, [timed.answer for timed in plain], console)
    types = [name for name in types if name not in left_out]
    prices = _priced(steps, plain, served, requests, longest, console)
    ranked = _rank(space(types), requests, prices, context, longest, console)
    if command is None:
        profile_arms: list[ConfirmedArm] = []
        best, answers = ranked[0][1], []
        verdict = f"{best.label} is predicted at {ranked[0][0]:.2f}x; not confirmed: run autotune search without --url"
        chosen = best if ranked[0][0] > 1 else None
    else:
        arms = _arms(ranked)
        profile_arms, answers_of = confirm(command, arms, evaluated, prices, settings.seed, context, console)
        chosen, verdict = decide(profile_arms)
        tried = [arm for arm in profile_arms if arm.speculation is not None]
        fastest = max(tried, key=lambda arm: arm.measured).speculation
        best = chosen or fastest or DEFAULT_SETTINGS
        answers = answers_of[best.label]
    profile = EngineProfile(
        provenance=stamp(),
        engine="llama.cpp",
        build=build,
        target=target,
        arguments=list(command.arguments if command else ()),
        command=command.words([chosen] if chosen else []) if command else [EXECUTABLE, "-m", str(model)],
        speculation=chosen,
        verdict=verdict,
        workload=tune.name,
        workload_sha256=tune.sha256,
        hardware=cpu_fingerprint(os.cpu_count() or 1),
        context=context,
        is_confirmed=command is not None,
        left_out={str(name): reason for name, reason in left_out.items()},
        prices=steps,
        price_factor=prices.factor,
        arms=profile_arms,
        checked=best,
        answers=answers,
    )
    profile.save(settings.output)
    console.say(f"=> {verdict}")
    console.say(f"start it with: {profile.shown_command}")
    console.say(f"written to {settings.output}; autotune check {settings.output} compares a server's counts with it")
    return profile


def _prompts(settings: EngineSearchSettings, split: str, number: int) -> Workload:
    loaded = load_workload(settings.workload, split, format=settings.workload_format)  # type: ignore[arg-type]
    chosen = loaded.first_turns().cut(number, settings.max_new_tokens)
    for prompt in chosen.prompts:
        if prompt.pixels:
            raise UserError(f"{prompt.name}: has an image, and speculation by n-grams is tuned on text; leave it out")
        if prompt.settings.temperature > 0:
            raise UserError(f"{prompt.name}: engines are tuned at temperature 0; set its temperature to 0")
    return chosen


# ------------------------------------------------------------------------------------------------------------- recording


@dataclass(frozen=True)
class _Record:
    """Answers and prices of one model, build and command, kept on disk: an interrupted search repeats at most one request."""

    settings: EngineSearchSettings
    target: ModelReference
    build: str
    command: EngineCommand | None

    @property
    def folder(self) -> Path:
        arguments = list(self.command.arguments) if self.command else [self.settings.url]
        return self.settings.folder / "engines" / content_key([self.target.sha256, self.build, arguments])

    def answers(self, server: LlamaServer, workload: Workload, console: Console) -> list[TimedAnswer]:
        """The server's plain answers, recorded once; a few are asked for again, to see whether they repeat."""
        path = self.folder / "answers.jsonl"
        known = {line.pop("key"): line for line in read_lines(path) if "key" in line}
        found: list[TimedAnswer] = []
        with console.stage("plain answers of the engine") as update:
            for number, prompt in enumerate(workload.prompts, start=1):
                if prompt.sha256 in known:
                    line = known[prompt.sha256]
                    answer = ServedAnswer(**line["answer"])
                    found.append(TimedAnswer(answer, 0, 0, line["wall_ms"], line["cpu_ms"] or math.nan))
                else:
                    timed = _asked(server, prompt)
                    cpu_ms = None if math.isnan(timed.cpu_ms) else timed.cpu_ms
                    line = {"answer": timed.answer.model_dump(), "wall_ms": timed.wall_ms, "cpu_ms": cpu_ms}
                    append_line(path, {"key": prompt.sha256, **line})
                    found.append(timed)
                update(number, len(workload.prompts), "")
        again = [_asked(server, prompt).answer.tokens for prompt in workload.prompts[:SELF_TEST]]
        differing = sum(tokens != timed.answer.tokens for tokens, timed in zip(again, found, strict=False))
        console.say(
            f"plain      {sum(len(timed.answer.tokens) for timed in found)} tokens of {len(found)} prompts in {self.folder}; "
            f"asked again, {differing} of {len(again)} answers differ"
        )
        return found

    def prices(self, server: LlamaServer, answers: Sequence[ServedAnswer], console: Console) -> list[PricedStep]:
        """Prices of forward passes after the shortest and the longest prompt, measured once."""
        path = self.folder / "prices.jsonl"
        prompts = sorted((answer.prompt_tokens for answer in answers), key=len)
        ends = [prompts[0], prompts[-1]] if len(prompts[-1]) > len(prompts[0]) else prompts[:1]
        key = content_key(ends)
        lines = [line for line in read_lines(path) if line.get("key") == key]
        if not lines:
            rare = prompts[0][-1]
            with console.stage("prices of forward passes") as update:
                steps = measure_verifications(server, ends, rare, update, seed=self.settings.seed)
            lines = [{"key": key, "steps": [step.model_dump() for step in steps]}]
            append_line(path, *lines)
        return [PricedStep(**step) for step in lines[-1]["steps"]]


def _asked(server: LlamaServer, prompt: WorkloadPrompt) -> TimedAnswer:
    return server.answer(server.prompt_tokens(prompt), prompt.settings.max_new_tokens, task=prompt.settings.task)


# ------------------------------------------------------------------------------------------------------------- self-test


@dataclass(frozen=True)
class _Served:
    """A request in a server that speculates, beside its replay."""

    timed: TimedAnswer
    replayed: RequestReplay

    @property
    def is_exact(self) -> bool:
        counts = self.replayed.counts
        return (counts.drafted, counts.accepted) == (self.timed.drafted, self.timed.accepted)


def _serve(
    server: LlamaServer, workload: Workload, console: Console, name: str, tested: Sequence[Speculation], context: int
) -> list[_Served]:
    found = []
    with console.stage(name) as update:
        for number, prompt in enumerate(workload.prompts, start=1):
            found.append(_asked(server, prompt))
            update(number, len(workload.prompts), "")
    return _beside(found, tested, context)


def _beside(found: Sequence[TimedAnswer], tested: Sequence[Speculation], context: int) -> list[_Served]:
    replays = replay(tested, [Request(timed.answer) for timed in found], context) if tested else []
    return [_Served(*pair) for pair in zip(found, replays, strict=True)]


def _self_test(
    server: LlamaServer,
    served: Sequence[_Served],
    tested: Sequence[Speculation],
    command: EngineCommand,
    plain: Sequence[TimedAnswer],
    console: Console,
    context: int,
) -> dict[NgramType, str]:
    """Types whose counts are not the replay's, with the reason. One server of all types tests them together; where it differs, a
    server for each type finds out which.
    """
    exact = sum(one.is_exact for one in served)
    counts, predicted = server.counts(), total(one.replayed.counts for one in served)
    console.say(
        f"self-test  {len(tested)} types in one server: drafted and accepted tokens equal the replay's in {exact} of {len(served)} "
        f"requests; {counts.verifications} verifications counted, {predicted.verifications} predicted"
    )
    if exact == len(served) and counts == predicted:
        return {}
    left_out: dict[NgramType, str] = {}
    for one in tested:
        with started_llama(command, [one]) as alone:
            found = [
                alone.answer(timed.answer.prompt_tokens, timed.answer.limit, task=timed.answer.task)
                for timed in plain[:SELF_TEST]
            ]
            beside = _beside(found, [one], context)
            counts, predicted = alone.counts(), total(row.replayed.counts for row in beside)
        if counts != predicted or not all(row.is_exact for row in beside):
            left_out[one.type] = (
                f"{one.label}: {counts.drafted} tokens drafted and {counts.accepted} accepted in {counts.verifications} verifications, and "
                f"replay says {predicted.drafted}, {predicted.accepted} and {predicted.verifications}"
            )
            lost = f"its {len(space([one.type]))} settings are left out; this build has another rule of drafting"
            console.say(f"self-test  {left_out[one.type]}: {lost}")
    if len(left_out) == len(OPTIONS):
        raise UserError("the counts of every type differ from the replay's; use the build that docs/engines.md names")
    return left_out


# ------------------------------------------------------------------------------------------------------ prices and choice


def _priced(
    steps: Sequence[PricedStep],
    plain: Sequence[TimedAnswer],
    served: Sequence[_Served],
    requests: Sequence[Request],
    longest: int,
    console: Console,
) -> VerificationPrices:
    """Prices by the clock that other processes disturb least, refitted to the requests that were served."""
    shares = [timed.cpu_ms / timed.wall_ms for timed in plain if timed.wall_ms > 0]
    clock: Clock = (
        "cpu" if shares and np.median(shares) > 0.5 and all(min(step.cpu_ms) > 0 for step in steps) else "wall"
    )
    prices = VerificationPrices(steps, clock)
    plain_pairs = list(zip(plain, replay_off(requests), strict=True))
    factor = refitted(prices, plain_pairs, [(one.timed, one.replayed) for one in served if one.is_exact], longest)
    middle = float(np.median([step.context for step in steps]))
    one = prices.ms(1, int(middle))
    shown = ", ".join(f"{n}: {prices.ms(n, int(middle)) / one:.1f}" for n in PRICED_TOKENS if n in (2, 4, 8, 16, 64))
    console.say(
        f"prices     a verification of n tokens takes, in plain steps ({clock} time), {shown}; times {factor:.2f} in served requests"
    )
    return replace(prices, factor=factor)


def replay_off(requests: Sequence[Request]) -> list[RequestReplay]:
    """The requests without speculation."""
    off = Speculation(
        type="ngram-simple", options={"size-n": 1024, "size-m": 1024}
    )  # drafts after 2,049 tokens at the earliest
    return replay([off], requests, 0)


def _rank(
    settings: Sequence[Speculation],
    requests: Sequence[Request],
    prices: VerificationPrices,
    context: int,
    longest: int,
    console: Console,
) -> list[tuple[float, Speculation]]:
    """Predicted speedups over plain decoding, fastest first; requests come in their order, in one server."""
    price = prices.pricer(PRICED_TOKENS[-1] + 1, longest)
    plain = [sum(price(one)) for one in replay_off(requests)]
    ranked: list[tuple[float, Speculation, list[float], float]] = []
    with console.stage(f"replay of {len(settings)} settings") as update:
        for number, one in enumerate(settings, start=1):
            replays = replay([one], requests, context)
            times = [sum(price(replayed)) for replayed in replays]
            steps = sum(sum(replayed.steps.values()) for replayed in replays)
            per_step = sum(replayed.num_tokens for replayed in replays) / max(1, steps)
            ranked.append((sum(plain) / max(sum(times), 1e-9), one, times, per_step))
            update(number, len(settings), "")
    ranked.sort(key=lambda row: -row[0])
    shown = [*ranked[:3], *(row for row in ranked[3:] if row[1] == DEFAULT_SETTINGS)]
    rows = []
    for speedup, one, times, per_step in shown:
        low, high = bootstrap_ratio(np.array(plain), np.array(times))
        rows.append([one.label, f"{speedup:.2f}x", f"{low:.2f} to {high:.2f}", f"{per_step:.2f}"])
    console.table("Predicted on the tuning prompts", ["settings", "speedup", "95 %", "tokens per step"], rows)
    return [(speedup, one) for speedup, one, *_ in ranked]


def _arms(ranked: Sequence[tuple[float, Speculation]]) -> dict[str, Speculation | None]:
    """No speculation, the engine's default, the fastest settings, and the fastest of another type."""
    (_, first), *rest = [row for row in ranked if row[1] != DEFAULT_SETTINGS]
    others = [one for _, one in rest if one.type != first.type] or [one for _, one in rest]
    finalists = [first, *others][:FINALISTS]
    return {OFF: None, DEFAULT: DEFAULT_SETTINGS} | {one.label: one for one in finalists}


# ----------------------------------------------------------------------------------------------------------- confirmation


def confirm(
    command: EngineCommand,
    arms: dict[str, Speculation | None],
    prompts: Sequence[tuple[list[int], WorkloadPrompt]],
    prices: VerificationPrices,
    seed: int,
    context: int,
    console: Console,
) -> tuple[list[ConfirmedArm], dict[str, list[CountedAnswer]]]:
    """Serve held-out prompts with every arm, in turns and in random order, each arm in a new server of its own."""
    runs: dict[str, list[TimedAnswer]] = {name: [] for name in arms}
    order = random.Random(seed)
    with ExitStack() as stack, console.stage("confirmation in turns") as update:
        servers = {
            name: stack.enter_context(started_llama(command, [one] if one else [])) for name, one in arms.items()
        }
        for number, (tokens, prompt) in enumerate(prompts, start=1):
            for name in order.sample(list(arms), len(arms)):
                found = servers[name].answer(tokens, prompt.settings.max_new_tokens, task=prompt.settings.task)
                runs[name].append(found)
            update(number, len(prompts), "")
        counts = {name: server.counts() for name, server in servers.items()}
    return confirmed_arms(arms, runs, counts, prices, context, console), {
        one.label: _counted(runs[name], one, context) for name, one in arms.items() if one is not None
    }


def _counted(runs: Sequence[TimedAnswer], one: Speculation, context: int) -> list[CountedAnswer]:
    found = []
    for served in _beside(runs[:SELF_TEST], [one], context):
        verifications = served.replayed.counts.verifications
        counts = SpeculationCounts(
            verifications=verifications, drafted=served.timed.drafted, accepted=served.timed.accepted
        )
        found.append(CountedAnswer(answer=served.timed.answer, counts=counts))
    return found


def confirmed_arms(
    arms: dict[str, Speculation | None],
    runs: dict[str, list[TimedAnswer]],
    counts: dict[str, SpeculationCounts],
    prices: VerificationPrices,
    context: int,
    console: Console,
) -> list[ConfirmedArm]:
    """Speedups of arms that took turns, beside their predictions on the same prompts; prints a table."""
    off = runs[OFF]
    requests = {name: [Request(timed.answer) for timed in found] for name, found in runs.items()}
    longest = max(len(request.tokens) for found in requests.values() for request in found)
    price = prices.pricer(PRICED_TOKENS[-1] + 1, longest)
    ratios = np.array(
        [
            [sum(map(time_of(clock), off)) / max(sum(map(time_of(clock), found)), 1e-9) for found in runs.values()]
            for clock in ("wall", "cpu")
        ]  # type: ignore[arg-type]
    )
    clock = choose_clock(ratios) if prices.clock == "cpu" else "wall"
    plain_ms = sum(sum(price(one)) for one in replay_off(requests[OFF]))
    confirmed, rows = [], []
    for name, one in arms.items():
        found = runs[name]
        replays = replay([one], requests[name], context) if one else replay_off(requests[name])
        tokens = [np.array([len(timed.answer.tokens) - 1 for timed in row], float) for row in (off, found)]
        times = [np.array([time_of(clock)(timed) for timed in row]) for row in (off, found)]
        low, high = bootstrap_ratio(times[0], times[1], above_units=tokens[0], below_units=tokens[1])
        measured = times[0].sum() / tokens[0].sum() / (times[1].sum() / tokens[1].sum())
        exact = sum(_Served(*pair).is_exact for pair in zip(found, replays, strict=True))
        if total(row.counts for row in replays) != counts[name] and exact == len(found):
            exact = 0  # verifications differ, which the server counts in all only
        arm = ConfirmedArm(
            label=name if one is None else one.label,
            speculation=one,
            predicted=plain_ms / max(sum(sum(price(row)) for row in replays), 1e-9) * tokens[1].sum() / tokens[0].sum(),
            measured=float(measured),
            ci95=(low, high),
            clock=clock,
            tokens_per_step=float(tokens[1].sum() / max(1, sum(sum(row.steps.values()) for row in replays))),
            counts=counts[name],
            exact=exact,
            identical=sum(a.answer.tokens == b.answer.tokens for a, b in zip(found, off, strict=True)),
            prompts=len(found),
        )
        confirmed.append(arm)
        rows.append(
            [
                name if name in (OFF, DEFAULT) else arm.label,
                f"{arm.predicted:.2f}x",
                f"{measured:.2f}x",
                f"{low:.2f} to {high:.2f}",
                f"{arm.tokens_per_step:.2f}",
                f"{exact}/{len(found)}",
                f"{arm.identical}/{len(found)}",
            ]
        )
    if clock == "cpu":
        console.say(
            "other processes used the machine: speedups of wall and CPU time differ by more than 5 %, and those of CPU time are given"
        )
    console.table(
        f"Confirmed on {len(off)} held-out prompts, {clock} time",
        ["settings", "predicted", "measured", "95 %", "tokens per step", "counts = predicted", "plain answers"],
        rows,
    )
    return confirmed


def decide(arms: Sequence[ConfirmedArm]) -> tuple[Speculation | None, str]:
    """The recommended settings and the verdict: off unless the interval of the fastest lies above 1."""
    tried = [arm for arm in arms if arm.speculation is not None]
    best = max(tried, key=lambda arm: arm.measured)
    shown = f"{best.label} {best.measured:.2f}x ({best.ci95[0]:.2f} to {best.ci95[1]:.2f})"
    if best.ci95[0] > 1.0 and best.measured >= LEAST_GAIN:
        return best.speculation, f"{shown} of no speculation"
    worst = min(tried, key=lambda arm: arm.measured)
    return None, f"leave speculation off: {shown} is the fastest that was measured; {worst.label} {worst.measured:.2f}x"
