"""A tuned engine in use: its counts checked against its profile's, prompts answered, and its speed measured again. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.console import Console
from autotune.documents.engine_profile import EngineProfile, ServedLoad
from autotune.errors import NotComparable, UserError
from autotune.files import known_sha256_of
from autotune.modeling.gguf import find_gguf
from autotune.serving.client import TEXT
from autotune.serving.engine_runs import DEFAULT, DEFAULT_SETTINGS, OFF, ArmRuns, confirm, measure_loads, require_served
from autotune.serving.llama_server import EngineCommand, find_engine, started_llama
from autotune.serving.verification_prices import VerificationPrices, clock_of
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload


def engine_of(profile: EngineProfile, given: str | None) -> EngineCommand:
    """The engine of a profile: the command that it names, or ``--engine-command``.

    Raises:
        UserError: there is none, or the model's file is another one.
    """
    model = find_gguf(profile.target.id)
    if model is None or known_sha256_of(model) != profile.target.sha256:
        raise UserError(f"{profile.target.id}: not the GGUF file that the profile was tuned for; restore that file")
    if given is None and Path(profile.command[0]).exists():
        return EngineCommand(Path(profile.command[0]), model.resolve(), tuple(profile.arguments))
    return find_engine(given, model)


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
    with started_llama(engine_of(profile, given), [profile.checked]) as server:
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
    with started_llama(engine_of(profile, given), [profile.speculation] if profile.speculation else ()) as server:
        for prompt in prompts:
            answer = server.ask(prompt)
            with server.reply_of("/detokenize"):
                reply = server.read_json("/detokenize", {"tokens": answer.tokens})
                text = TEXT.validate_python(reply["content"], strict=True)
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
    prices = VerificationPrices(profile.prices, clock_of(profile.prices), profile.price_factor)
    arms = {OFF: [], DEFAULT: [DEFAULT_SETTINGS], one.label: [one]}
    command, loads = engine_of(profile, engine_command), list[ServedLoad]()
    measured, runs = confirm(command, arms, workload.prompts, prices, console, seed=0)
    if requests_at_once:
        loads = measure_loads(command, {OFF: [], one.label: [one]}, runs[OFF].answers, requests_at_once, console)
    return {
        name: [row.model_dump(mode="json") for row in rows] for name, rows in (("arms", measured), ("loads", loads))
    }
