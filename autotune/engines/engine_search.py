"""``autotune search --engine``: the fastest speculation of a serving engine, or that it should be off. Loads no torch.

The engine records plain answers once, its n-gram drafts are replayed from their tokens, a draft model's chains from the
rounds of the longest, and its own forward passes are the prices. Only the best settings are served, in turns with none
and with the engine's default.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from autotune.console import Console
from autotune.documents.engine_profile import (
    OPTIONS,
    TYPES,
    ConfirmedArm,
    EngineName,
    EngineProfile,
    PredictedSettings,
    PricedStep,
    ServedAnswer,
    ServedLoad,
    Speculation,
    SpeculationType,
)
from autotune.documents.provenance import stamp
from autotune.engines.engine import EngineServer, ServingEngine
from autotune.engines.engine_runs import (
    OFF,
    SELF_TEST,
    ArmRuns,
    Arms,
    confirm,
    is_exact,
    labelled,
    measure_loads,
    require_served,
    self_test,
    serve_in_turns,
    with_replays,
)
from autotune.engines.llama_server import LlamaEngine
from autotune.engines.ngram_drafters import KnownRequest
from autotune.engines.ngram_replay import CONTEXT_STEP, Replayed, RequestReplay, replay_speculation, total
from autotune.engines.verification_prices import (
    VerificationPrices,
    clock_of,
    measure_verifications,
    served_prices,
    with_draft,
)
from autotune.engines.vllm_server import VllmEngine
from autotune.errors import UserError
from autotune.evaluation.summary import bootstrap_ratio
from autotune.files import WORKSPACE, content_key
from autotune.machine.container import num_cores
from autotune.machine.device import cpu_fingerprint
from autotune.replay.degenerate_answers import degenerate_answers
from autotune.study.outputs import choose_output, settings_key
from autotune.study.storage import PROFILE
from autotune.workloads.formats import Format
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload, WorkloadSplit, load_workload

ENGINES: dict[EngineName, type[ServingEngine]] = {engine.name: engine for engine in (LlamaEngine, VllmEngine)}
NUM_PROMPTS: dict[WorkloadSplit, int] = {"tune": 24, "evaluate": 60}
SHOWN = 3  # fastest settings of a type, and of all


@dataclass(frozen=True)
class EngineSearchSettings:
    """Settings of a search in an engine, as the user gives them."""

    engine: EngineName
    target: str
    workload: str
    workload_format: Format | None = None
    engine_command: str | None = None
    url: str | None = None
    max_new_tokens: int | None = None
    draft: str | None = None
    """A draft model whose chains are tuned beside the n-grams."""
    requests_at_once: Sequence[int] = ()
    """Numbers of requests at a time that no speculation and the chosen settings serve in the end."""
    output: Path | None = None
    """None: the first of profile.json, profile-2.json, ... that holds no other search's result."""
    seed: int = 0

    @property
    def key(self) -> str:
        """Hash of what determines the result."""
        return settings_key({**asdict(self), "output": None}, self.workload)

    def with_output(self) -> EngineSearchSettings:
        """The settings with the file that the profile is written to."""
        return replace(self, output=choose_output(self.output, PROFILE, self.key))


def speculation_space(engine: type[ServingEngine], types: Sequence[SpeculationType]) -> list[Speculation]:
    """Every setting of some types that is replayed, each once."""
    return list({one.label: one for one in engine.space() if one.type in types}.values())


def search_engine(settings: EngineSearchSettings, console: Console) -> EngineProfile:
    """Tune an engine, and write its profile.

    Raises:
        UserError: the engine, the model or the workload cannot be used; what was recorded is kept.
    """
    key = settings.key
    output = choose_output(settings.output, PROFILE, key)
    kind = ENGINES[settings.engine]
    if (found := kind.find_model(settings.target, local_only=settings.url is not None)) is None:
        raise UserError(f"--target {settings.target}: {kind.name} loads {kind.models}; give one")
    (model, target), types, engine = found, list(TYPES[kind.name]), None
    chains = kind.chains(settings.draft, model) if settings.draft else []
    tune, held_out = _prompts(settings, "tune"), _prompts(settings, "evaluate")
    if settings.url is None:
        engine = kind.find(settings.engine_command, model)
        types = engine.types()
    elif settings.requests_at_once or chains:
        option = "--draft" if chains else "--requests-at-once"
        raise UserError(f"{option}: a server at --url keeps its settings; leave one of the two out")
    left_out = {name: "the build does not have it" for name in TYPES[kind.name] if name not in types}
    if left_out:
        console.say(f"left out   {', '.join(left_out)}: this {kind.program} does not have it (docs/engines.md)")
    tested = [one for one in kind.pricing if one.type in types]
    with ExitStack() as stack:
        server = stack.enter_context(engine.started()) if engine else kind.server(settings.url or "")
        build, where = (engine.build_of(server), engine.arguments) if engine else (server.build, (settings.url,))
        first = server.prompt_tokens(tune.prompts[0])  # by the engine's chat template and tokenizer
        folder = WORKSPACE / "engines" / content_key([target.sha256 or target.id, build, list(where), first])
        plain, again = _plain(server, tune.prompts, folder, console)
    unfinished = folder / "served.jsonl"
    with ExitStack() as stack:
        served: list[Replayed] = []
        if engine:
            alone = [name for name in types if name not in {one.type for one in tested}]
            tests = {"all types in one server" if len(tested) > 1 else f"{tested[0].type}": tested}
            tests |= {name: [Speculation(type=name, options=OPTIONS[name])] for name in alone}
            servers = {name: stack.enter_context(engine.started(one)) for name, one in tests.items()}
            runs, differing = self_test(engine, tests, servers, tune.prompts, console, unfinished)
            left_out |= differing
            server = next(iter(servers.values()))
            served = [row for one in runs.values() for row in one.rows if is_exact(*row)]
        asked = sorted((answer.prompt_tokens for answer in plain.answers), key=len)
        with console.stage("prices of forward passes") as update:  # after the shortest and the longest prompt
            steps = measure_verifications(server, asked[:: max(1, len(asked) - 1)], update, seed=settings.seed)
    one_loop = kind.has_one_loop or engine is None  # a server at --url drafts in its plain answers too
    prices = _prices(steps, with_replays(again, [], plain.context), served, console, has_one_loop=one_loop)
    space = speculation_space(kind, [name for name in types if name not in left_out])
    long = None
    if engine and chains:
        prices, long = _draft_prices(engine, chains, tune.prompts, prices, console, unfinished)
        space += chains
    replayed = _replayed(space, plain, long, console)
    fastest = _fastest(replayed, plain, prices, console)
    arms: list[ConfirmedArm] = []
    loads: list[ServedLoad] = []
    best = fastest[0].speculation
    answers: list[ServedAnswer] = []
    if engine:
        default = best_default(fastest)
        others = [one.speculation for one in fastest if one.speculation != default]
        finalists = [default, *others[:1], *[one for one in others if one.type != others[0].type][:1]]
        by_name: Arms = {OFF: []} | {one.label: [one] for one in finalists}
        arms, runs = confirm(
            engine, by_name, held_out.prompts, prices, console, seed=settings.seed, record=unfinished, stops_early=True
        )
        chosen = recommended(arms)
        best = chosen or max(arms[1:], key=lambda arm: arm.counts.drafted).speculation or default
        answers = max(runs[best.label].by_server, key=len)[:SELF_TEST]
        for size in settings.requests_at_once:
            at_once = _fastest(replayed, plain, replace(prices, at_once=size), console)[0].speculation
            shown: Arms = {OFF: [], best.label: [best], at_once.label: [at_once]}
            loads += measure_loads(engine, shown, [*plain.answers, *runs[OFF].answers], size, console)
    else:
        chosen = best if fastest[0].speedup > 1 else None
    profile = EngineProfile(
        provenance=stamp(settings_key=key),
        engine=kind.name,
        build=build,
        target=target,
        arguments=list(engine.arguments) if engine else [],
        command=(engine or kind(Path(kind.program), model, ())).words([chosen] if engine and chosen else []),
        speculation=chosen,
        workload=tune.name,
        workload_sha256=tune.sha256,
        hardware=cpu_fingerprint(num_cores()),
        context=plain.context,
        left_out=left_out,
        num_replayed=dict(Counter(one.type for one in space)),
        fastest=fastest,
        prices=steps,
        price_factor=prices.factor,
        step_factor=prices.step_factor,
        plain_factor=prices.plain_factor,
        draft_ms=prices.draft_ms,
        arms=arms,
        loads=loads,
        checked=best,
        answers=answers,
        counts=total(replayed.counts for _, replayed in with_replays(answers, [best], plain.context)),
    )
    for path in (output, folder / f"profile-{key}.json"):
        profile.save(path)
    unfinished.unlink(missing_ok=True)  # the next search measures anew
    console.say(f"start it with: {shlex.join(profile.command)}")
    console.say(f"written to {output}")
    return profile


def _prompts(settings: EngineSearchSettings, split: WorkloadSplit) -> Workload:
    loaded = load_workload(settings.workload, split, format=settings.workload_format).first_turns()
    require_served(loaded.prompts)
    return loaded.cut(NUM_PROMPTS[split], settings.max_new_tokens)


def _plain(
    server: EngineServer, prompts: Sequence[WorkloadPrompt], folder: Path, console: Console
) -> tuple[ArmRuns, list[ServedAnswer]]:
    """The plain answers, recorded once; the longest are asked for again, to see whether they repeat, and for times of
    today.
    """
    stage, record = "plain answers of the engine", folder / "answers.jsonl"
    plain = serve_in_turns({OFF: server}, {OFF: []}, prompts, stage, console, record=record)[OFF]
    if all(len(answer.tokens) == 1 for answer in plain.answers):
        raise UserError("every answer has one token, and nothing to speculate; give other prompts or --max-new-tokens")
    answers = [answer.tokens for answer in plain.answers]
    if warning := degenerate_answers(answers, [answer.limit for answer in plain.answers]):
        console.say(f"answers    {warning}")
    longest = sorted(zip(prompts, plain.answers, strict=True), key=lambda pair: -len(pair[1].tokens))[:SELF_TEST]
    again = [server.ask(prompt) for prompt, _ in longest]
    differing = sum(one.tokens != answer.tokens for one, (_, answer) in zip(again, longest, strict=True))
    console.say(
        f"plain      {sum(len(answer.tokens) for answer in plain.answers)} tokens of {len(prompts)} prompts, in {folder}; asked again, "
        f"{differing} of {len(again)} answers differ"
    )
    return plain, again


def _prices(
    steps: Sequence[PricedStep],
    plain: Sequence[Replayed],
    served: Sequence[Replayed],
    console: Console,
    *,
    has_one_loop: bool,
) -> VerificationPrices:
    """Prices in CPU time where the engine computes on the CPU, refitted to the requests that were served."""
    prices = served_prices(VerificationPrices(steps, clock_of(steps)), plain, served, has_one_loop=has_one_loop)
    context = float(np.median([step.context for step in steps]))
    most = max(step.tokens for step in steps)
    shown = [f"{n}: {prices.ms(n, context) / prices.ms(1, context):.1f}" for n in (2, 4, 8, 16, most)]
    console.say(
        f"prices     a verification of n tokens takes, in plain steps, {', '.join(shown)} ({prices.clock} time; verifications take "
        f"{prices.factor:.2f} times what they take alone, steps {prices.step_factor:.2f})"
        + ("" if has_one_loop else f"; a step without speculation {prices.plain_factor:.2f}")
    )
    return prices


def _draft_prices(
    engine: ServingEngine,
    chains: Sequence[Speculation],
    prompts: Sequence[WorkloadPrompt],
    prices: VerificationPrices,
    console: Console,
    record: Path,
) -> tuple[VerificationPrices, ArmRuns]:
    """The prices with those of a draft model, and the answers with its longest chain, from which the others are
    replayed; a short chain tests the replay.
    """
    arms = {one.label: [one] for one in (chains[0], chains[-1])}
    short, long = serve_in_turns(engine, arms, prompts, "rounds of the draft model", console, record=record).values()
    prices = with_draft(prices, [short.rows, long.rows])
    replays = replay_speculation(short.speculations, list(map(KnownRequest, long.answers)), long.context)
    per_pass = [
        sum(one.num_tokens for one in rows) / sum(sum(one.steps.values()) for one in rows)
        for rows in (replays, [replayed for _, replayed in short.rows])
    ]
    console.say(
        f"draft      tokens per pass of {short.speculations[0].label}: {per_pass[0]:.2f} by replay of {long.speculations[0].label}, "
        f"{per_pass[1]:.2f} counted; drafting takes {prices.draft_ms[0]:.1f} ms and {prices.draft_ms[1]:.1f} ms for each token"
    )
    return prices, long


def _replayed(
    settings: Sequence[Speculation], plain: ArmRuns, long: ArmRuns | None, console: Console
) -> list[tuple[Speculation, list[RequestReplay]]]:
    """Every setting with its replays of the prompts in their order in one server: along the plain answers, or, of a
    draft model's chains, along those of the ``long`` one.
    """
    known = [[KnownRequest(answer) for answer in runs.answers] for runs in (plain, long or plain)]
    replayed = []
    with console.stage(f"replay of {len(settings)} settings", len(settings)) as update:
        for number, one in enumerate(settings, start=1):
            replayed.append((one, replay_speculation([one], known[1 if one.model else 0], plain.context)))
            update(number, len(settings), "")
    return replayed


def _fastest(
    replayed: Sequence[tuple[Speculation, Sequence[RequestReplay]]],
    plain: ArmRuns,
    prices: VerificationPrices,
    console: Console,
) -> list[PredictedSettings]:
    """The fastest settings of each type and its default; prints the best and the best default."""
    off = [one for _, one in plain.rows]
    price = prices.pricer(
        CONTEXT_STEP
        * max(unit for rows in (off, *(found for _, found in replayed)) for one in rows for _, unit in one.steps)
    )
    tokens = np.array([max(1, one.num_tokens) for one in off])
    plain_ms = prices.plain_factor * np.array([sum(price(one)) for one in off])
    times = {
        one.label: tokens * np.array([sum(price(row)) / max(1, row.num_tokens) for row in rows])
        for one, rows in replayed
    }
    best = sorted((one for one, _ in replayed), key=lambda one: times[one.label].sum())
    by_type = {name: [one for one in best if one.type == name] for name in OPTIONS}
    fastest = [
        PredictedSettings(
            speculation=one,
            speedup=float(plain_ms.sum() / times[one.label].sum()),
            ci95=bootstrap_ratio(plain_ms, times[one.label]),
        )
        for one in best
        if one in by_type[one.type][:SHOWN] or one.is_default
    ]
    shown = [one for place, one in enumerate(fastest) if place < SHOWN or one.speculation == best_default(fastest)]
    rows = [[labelled(one.speculation), f"{one.speedup:.2f}x", "{:.2f} to {:.2f}".format(*one.ci95)] for one in shown]
    at_once = f", {prices.at_once} requests at once" if prices.at_once > 1 else ""
    console.table(f"Predicted on the tuning prompts{at_once}", ["settings", "speedup", "95 %"], rows)
    return fastest


def best_default(fastest: Sequence[PredictedSettings]) -> Speculation:
    """The fastest of the types' defaults by prediction."""
    return next(one.speculation for one in fastest if one.speculation.is_default)


def recommended(arms: Sequence[ConfirmedArm]) -> Speculation | None:
    """The settings of the fastest arm, if its interval lies above 1; None: leave speculation off."""
    best = max(arms[1:], key=lambda arm: arm.measured)
    return best.speculation if best.ci95[0] > 1.0 else None
