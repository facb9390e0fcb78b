"""A tuned engine in use: its counts checked against its profile's, prompts answered, and its speed measured again.
Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.console import Console
from autotune.documents.engine_profile import EngineProfile, ServedLoad
from autotune.engines.engine import ServingEngine
from autotune.engines.engine_runs import OFF, ArmRuns, Arms, confirm, measure_loads, require_served
from autotune.engines.engine_search import ENGINES, best_default
from autotune.engines.verification_prices import prices_of
from autotune.errors import NotComparable, UserError
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload


def engine_of(profile: EngineProfile, given: str | None) -> ServingEngine:
    """The engine of a profile: the command that it names, or ``--engine-command``.

    Raises:
        UserError: there is none, or the model is another one.
    """
    kind, target = ENGINES[profile.engine], profile.target
    found = kind.find_model(target.id)
    if found is None or not found[1].is_same(target):
        raise UserError(f"{target.id}: not the model that the profile was tuned for; restore its files")
    if given is None and Path(profile.command[0]).exists():
        return kind(Path(profile.command[0]), found[0], tuple(profile.arguments))
    return kind.find(given, found[0])


def check_engine(source: Path, given: str | None, console: Console) -> int:
    """Compare a profile's counts with a replay of its answers, and with those of a new server; returns the exit code.

    Raises:
        NotComparable: the server's answers differ from the profile's, so that its counts may.
        UserError: the profile holds no counts, or the engine cannot be started.
    """
    profile = EngineProfile.load(source)
    if not profile.answers:
        raise UserError(f"{source}: holds no counts, because it was made with --url; search again without --url")
    known = ArmRuns([profile.checked], [profile.answers], profile.counts, profile.context)
    is_replayed = known.exact == len(profile.answers)
    with engine_of(profile, given).started([profile.checked]) as server:
        served = [server.answer(answer.prompt_tokens, answer.limit) for answer in profile.answers]
        counted = server.counts()
    differing = sum(a.tokens != b.tokens for a, b in zip(served, profile.answers, strict=True))
    if differing:
        raise NotComparable(
            f"{source}: {differing} of {len(served)} answers are not those of the search, and counts follow from answers; use its build, "
            "arguments and machine, or search again"
        )
    is_counted = counted == profile.counts and all(
        (a.drafted, a.accepted) == (b.drafted, b.accepted) for a, b in zip(served, profile.answers, strict=True)
    )
    console.say(
        f"replay of {profile.checked.label}: {'passed' if is_replayed else 'failed: its rules differ from those of the search'}"
    )
    console.say(
        f"counts of the server: passed: {counted.text}"
        if is_counted
        else f"counts of the server: failed: {counted.text}; at the search {profile.counts.text}: the build has another rule; search again"
    )
    return int(not (is_replayed and is_counted))


def answer_in_engine(
    source: Path, prompts: Sequence[WorkloadPrompt], given: str | None = None
) -> Iterator[dict[str, Any]]:
    """Start the engine as its profile recommends, and answer prompts; yields texts with their counts."""
    profile = EngineProfile.load(source)
    require_served(prompts)
    with engine_of(profile, given).started([profile.speculation] if profile.speculation else ()) as server:
        for prompt in prompts:
            answer = server.ask(prompt)
            text = server.text(answer.tokens)
            rate = 1e3 * (len(answer.tokens) - 1) / max(answer.wall_ms, 1e-9)
            summary = f"{len(answer.tokens)} tokens, {rate:.1f} tokens/s, {answer.accepted} of {answer.drafted} draft tokens accepted"
            yield {"prompt": prompt.name, "text": text, "summary": summary, **answer.model_dump(mode="json")}


def bench_engine(
    source: Path, workload: Workload, console: Console, *, engine_command: str | None, requests_at_once: Sequence[int]
) -> dict[str, Any]:
    """Measure a profile's settings, the engine's default and no speculation in turns; returns the figures as JSON."""
    profile = EngineProfile.load(source)
    require_served(workload.prompts)
    one = profile.speculation or profile.checked
    engine, loads = engine_of(profile, engine_command), list[ServedLoad]()
    arms: Arms = {OFF: []} | {settings.label: [settings] for settings in (best_default(profile.fastest), one)}
    measured, runs = confirm(engine, arms, workload.prompts, prices_of(profile), console, seed=0)
    for size in requests_at_once:
        loads += measure_loads(engine, {OFF: [], one.label: [one]}, runs[OFF].answers, size, console)
    return {
        name: [row.model_dump(mode="json") for row in rows] for name, rows in (("arms", measured), ("loads", loads))
    }
