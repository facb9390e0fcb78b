"""``autotune search --engine llama.cpp``: the fastest n-gram speculation of a llama-server, or that it should be off. Loads no torch.

The server records plain answers once, its drafts are replayed from their tokens, and its own forward passes are the prices. Only the
best settings are served, in turns with none and with the engine's default.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autotune.console import Console
from autotune.device import cpu_fingerprint
from autotune.documents.engine_profile import (
    OPTIONS,
    ConfirmedArm,
    EngineProfile,
    NgramType,
    PredictedSettings,
    PricedStep,
    ServedAnswer,
    ServedLoad,
    Speculation,
)
from autotune.documents.provenance import ModelReference, stamp
from autotune.errors import UserError
from autotune.evaluation.summary import bootstrap_ratio
from autotune.files import WORKSPACE, content_key, known_sha256_of, require_writable
from autotune.modeling.gguf import find_gguf, require_chat_template
from autotune.serving.engine_runs import (
    DEFAULT,
    DEFAULT_SETTINGS,
    OFF,
    SELF_TEST,
    ArmRuns,
    Replayed,
    confirm,
    is_exact,
    measure_loads,
    recorded_prices,
    require_served,
    self_test,
    serve_in_turns,
    with_replays,
)
from autotune.serving.llama_server import EXECUTABLE, LlamaServer, find_engine, started_llama
from autotune.serving.ngram_drafters import KnownRequest
from autotune.serving.ngram_replay import replay_speculation, total
from autotune.serving.verification_prices import PRICED_TOKENS, PRICING, VerificationPrices, clock_of, served_factor
from autotune.study.document import PROFILE
from autotune.workloads.formats import Format
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload, WorkloadSplit, load_workload

NUM_PROMPTS: dict[WorkloadSplit, int] = {"tune": 24, "evaluate": 18}
SHOWN = 3  # fastest settings of a type, and of all
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
    requests_at_once: Sequence[int] = ()
    """Numbers of requests at a time that no speculation and the chosen settings serve in the end."""
    output: Path = Path("profile.json")
    seed: int = 0


def speculation_space(types: Sequence[NgramType]) -> list[Speculation]:
    """Every setting that is replayed, the defaults first."""
    pairs = [{"size-n": n, "size-m": m} for n in SIZES for m in LENGTHS]
    pools = [(n, least, most) for n in (*SIZES, 20) for least in (0, 1, 2, 4, 8, 48) for most in (*LENGTHS, 64)]
    options: dict[NgramType, list[dict[str, int]]] = {
        "ngram-simple": [pair for pair in pairs if pair["size-m"] >= pair["size-n"]],  # shorter ones draft nothing
        "ngram-map-k": pairs,
        "ngram-map-k4v": [pair | {"min-hits": hits} for pair in pairs for hits in (1, 2, 3)],
        "ngram-mod": [{"n-match": n, "n-min": least, "n-max": most} for n, least, most in pools if least <= most],
        "ngram-cache": [],
    }
    found = [Speculation(type=name, options=one) for name in types for one in (OPTIONS[name], *options[name])]
    return list({one.label: one for one in found}.values())


def search_engine(settings: EngineSearchSettings, console: Console) -> EngineProfile:
    """Tune a llama-server, and write an engine profile.

    Raises:
        UserError: the engine, the model or the workload cannot be used; what was recorded is kept.
    """
    require_writable(settings.output)
    model = find_gguf(settings.target)
    if model is None:
        raise UserError(f"--target {settings.target}: llama.cpp loads GGUF files; give one, or a folder with one")
    tune, held_out = _prompts(settings, "tune"), _prompts(settings, "evaluate")
    target = ModelReference(id=settings.target, sha256=known_sha256_of(model))
    types, command = list(OPTIONS), None
    if settings.url is None:
        command = find_engine(settings.engine_command, model)
        if "--chat-template" not in " ".join(command.arguments):
            require_chat_template(model)
        types = command.types()
    elif settings.requests_at_once:
        raise UserError("--requests-at-once: a server at --url keeps its settings; leave one of the two out")
    left_out = {name: "the build does not have it" for name in OPTIONS if name not in types}
    tested = [one for one in PRICING if one.type in types]
    with ExitStack() as stack:
        server = stack.enter_context(started_llama(command)) if command else LlamaServer(settings.url or "")
        build, where = (command.build, command.arguments) if command else (server.build, (settings.url,))
        folder = WORKSPACE / "engines" / content_key([target.sha256, build, list(where)])
        plain = _plain(server, tune.prompts, folder, console)
    unfinished = folder / "served.jsonl"
    with ExitStack() as stack:
        served: list[Replayed] = []
        if command:
            server = stack.enter_context(started_llama(command, tested))
            name, stage = "all types", "self-test"
            asked = serve_in_turns({name: server}, {name: tested}, tune.prompts, stage, console, record=unfinished)[
                name
            ]
            counted, predicted = asked.counts.verifications, asked.replayed.verifications
            served = [row for row in asked.rows if is_exact(*row)]
            console.say(
                f"self-test  all types in one server: draft tokens and accepted ones are the predicted in {len(served)} of "
                f"{len(asked.rows)} requests; {counted} verifications, {predicted} predicted"
            )
            if asked.exact < len(asked.rows):
                left_out |= self_test(command, tested, tune.prompts, console)
        asked_prompts = [answer.prompt_tokens for answer in plain.answers]
        steps = recorded_prices(server, asked_prompts, folder / "prices.jsonl", console, settings.seed)
    prices, types = _prices(steps, plain.rows, served, console), [name for name in types if name not in left_out]
    fastest, arms, loads = _fastest(types, plain, prices, console), list[ConfirmedArm](), list[ServedLoad]()
    best, answers = fastest[0].speculation, list[ServedAnswer]()
    if command:
        others = [one.speculation for one in fastest if one.speculation != DEFAULT_SETTINGS]
        finalists = [*others[:1], *[one for one in others if one.type != others[0].type][:1]]
        by_name = {OFF: [], DEFAULT: [DEFAULT_SETTINGS]} | {one.label: [one] for one in finalists}
        arms, runs = confirm(command, by_name, held_out.prompts, prices, console, seed=settings.seed, record=unfinished)
        chosen, verdict = recommend(arms)
        busiest = max(arms[1:], key=lambda arm: arm.counts.drafted)
        best = chosen or busiest.speculation or DEFAULT_SETTINGS
        answers = max(runs[DEFAULT if best == DEFAULT_SETTINGS else best.label].by_server, key=len)[:SELF_TEST]
        if settings.requests_at_once:
            shown = {OFF: [], best.label: [best]}
            loads = measure_loads(command, shown, runs[OFF].answers, settings.requests_at_once, console)
    else:
        chosen, gain = best if fastest[0].speedup > 1 else None, f"{fastest[0].speedup:.2f}x of no speculation"
        verdict = (
            f"{best.label} is predicted at {gain}, which --url does not confirm: a running server keeps its settings"
        )
    profile = EngineProfile(
        provenance=stamp(),
        engine="llama.cpp",
        build=build,
        target=target,
        arguments=list(command.arguments) if command else [],
        command=command.words([chosen] if chosen else []) if command else [EXECUTABLE, "-m", str(model)],
        speculation=chosen,
        verdict=verdict,
        workload=tune.name,
        workload_sha256=tune.sha256,
        hardware=cpu_fingerprint(os.cpu_count() or 1),
        context=plain.context,
        left_out=left_out,
        num_replayed=dict(Counter(one.type for one in speculation_space(types))),
        fastest=fastest,
        prices=steps,
        price_factor=prices.factor,
        arms=arms,
        loads=loads,
        checked=best,
        answers=answers,
        counts=total(replayed.counts for _, replayed in with_replays(answers, [best], plain.context)),
    )
    for path in (settings.output, folder / PROFILE):
        profile.save(path)
    unfinished.unlink(missing_ok=True)  # the next search measures anew
    console.say(f"=> {verdict}")
    console.say(f"start it with: {shlex.join(profile.command)}")
    console.say(f"written to {settings.output}")
    return profile


def _prompts(settings: EngineSearchSettings, split: WorkloadSplit) -> Workload:
    loaded = load_workload(settings.workload, split, format=settings.workload_format).first_turns()
    require_served(loaded.prompts)
    return loaded.cut(NUM_PROMPTS[split], settings.max_new_tokens)


def _plain(server: LlamaServer, prompts: Sequence[WorkloadPrompt], folder: Path, console: Console) -> ArmRuns:
    """The plain answers, recorded once; the first are asked for again, to see whether they repeat."""
    stage, record = "plain answers of the engine", folder / "answers.jsonl"
    plain = serve_in_turns({OFF: server}, {OFF: []}, prompts, stage, console, record=record)[OFF]
    again = [server.ask(prompt).tokens for prompt in prompts[:SELF_TEST]]
    differing = sum(tokens != answer.tokens for tokens, answer in zip(again, plain.answers, strict=False))
    console.say(
        f"plain      {sum(len(answer.tokens) for answer in plain.answers)} tokens of {len(prompts)} prompts, in {folder}; asked again, "
        f"{differing} of {len(again)} answers differ"
    )
    return plain


def _prices(
    steps: Sequence[PricedStep], plain: Sequence[Replayed], served: Sequence[Replayed], console: Console
) -> VerificationPrices:
    """Prices in CPU time where the engine computes on the CPU, refitted to the requests that were served (``served_factor``)."""
    prices = VerificationPrices(steps, clock_of(steps))
    prices = replace(prices, factor=served_factor(prices, plain, served))
    context = float(np.median([step.context for step in steps]))
    shown = [
        f"{n}: {prices.ms(n, context) / prices.ms(1, context):.1f}" for n in PRICED_TOKENS if n in (2, 4, 8, 16, 64)
    ]
    console.say(
        f"prices     a verification of n tokens takes, in plain steps, {', '.join(shown)} ({prices.clock} time; {prices.factor:.2f} times what "
        "it takes alone)"
    )
    return prices


def _fastest(
    types: Sequence[NgramType], plain: ArmRuns, prices: VerificationPrices, console: Console
) -> list[PredictedSettings]:
    """The fastest settings of each type and its default, for the prompts in their order in one server; prints the best."""
    requests = [KnownRequest(answer) for answer in plain.answers]
    price = prices.pricer(max(len(request.tokens) for request in requests))
    plain_ms = np.array([sum(price(replayed)) for _, replayed in plain.rows])
    times, settings = dict[str, NDArray[np.float64]](), speculation_space(types)
    with console.stage(f"replay of {len(settings)} settings") as update:
        for number, one in enumerate(settings, start=1):
            replays = replay_speculation([one], requests, plain.context)
            times[one.label] = np.array([sum(price(replayed)) for replayed in replays])
            update(number, len(settings), "")
    best = sorted(settings, key=lambda one: times[one.label].sum())
    by_type = {name: [one for one in best if one.type == name] for name in types}
    fastest = [
        PredictedSettings(
            speculation=one,
            speedup=float(plain_ms.sum() / times[one.label].sum()),
            ci95=bootstrap_ratio(plain_ms, times[one.label]),
        )
        for one in best
        if one in by_type[one.type][:SHOWN] or one.options == OPTIONS[one.type]
    ]
    shown = [one for place, one in enumerate(fastest) if place < SHOWN or one.speculation == DEFAULT_SETTINGS]
    rows = [[one.speculation.label, f"{one.speedup:.2f}x", "{:.2f} to {:.2f}".format(*one.ci95)] for one in shown]
    console.table("Predicted on the tuning prompts", ["settings", "speedup", "95 %"], rows)
    return fastest


def recommend(arms: Sequence[ConfirmedArm]) -> tuple[Speculation | None, str]:
    """The recommended settings and the verdict: off unless the interval of the fastest arm lies above 1."""
    best, worst = (pick(arms[1:], key=lambda arm: arm.measured) for pick in (max, min))
    shown = f"{best.label} {best.measured:.2f}x ({best.ci95[0]:.2f} to {best.ci95[1]:.2f})"
    if best.ci95[0] > 1.0:
        return best.speculation, f"{shown} of no speculation"
    return None, f"leave speculation off: the fastest that was measured is {shown}; {worst.label} {worst.measured:.2f}x"
