"""A recommended engine in use: its counts checked against a profile's, prompts answered, and its speed measured again. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.console import Console
from autotune.documents.engine_profile import EngineProfile, SpeculationCounts
from autotune.errors import NotComparable, UserError
from autotune.files import known_sha256_of
from autotune.modeling.gguf import find_gguf
from autotune.serving.engine_search import DEFAULT, DEFAULT_SETTINGS, OFF, confirm
from autotune.serving.llama_server import EngineCommand, find_engine, started_llama
from autotune.serving.ngram_replay import Request, replay, total
from autotune.serving.verification_prices import VerificationPrices
from autotune.workloads.prompt import WorkloadPrompt


def engine_of(profile: EngineProfile, source: Path, given: str | None) -> EngineCommand:
    """The engine of a profile: the command that it names, or ``--engine-command``.

    Raises:
        UserError: there is none, or the model's file is another one.
    """
    model = find_gguf(profile.target.id) or Path(profile.target.id)
    if not model.exists() or known_sha256_of(model) != profile.target.sha256:
        raise UserError(f"{source}: {profile.target.id} is not the GGUF file that it was tuned for; restore that file")
    if given is None and Path(profile.command[0]).exists():
        return EngineCommand(Path(profile.command[0]), model.resolve(), tuple(profile.arguments))
    return find_engine(given, model)


def check_engine(source: Path, given: str | None, console: Console) -> int:
    """Compare a profile's counts with a replay of its answers, and with a new server's; returns the exit code.

    Raises:
        NotComparable: the server's answers differ from the profile's, so that its counts may.
        UserError: the engine cannot be started.
    """
    profile = EngineProfile.load(source)
    if not profile.answers:
        raise UserError(f"{source}: holds no counts, because it was made with --url; search again without --url")
    recorded = [one.counts for one in profile.answers]
    requests = [Request(one.answer) for one in profile.answers]
    replayed = [one.counts for one in replay([profile.checked], requests, profile.context)]
    same = sum(a == b for a, b in zip(recorded, replayed, strict=True))
    console.say(
        f"replay: counts of {same} of {len(recorded)} recorded answers are the profile's ({profile.checked.label})"
    )
    with started_llama(engine_of(profile, source, given), [profile.checked]) as server:
        served, counted = [], []
        for one in profile.answers:
            before = server.counts()
            answer = one.answer
            served.append(
                server.answer(answer.prompt_tokens, answer.limit, task=answer.task).answer.tokens == answer.tokens
            )
            counted.append(_since(server.counts(), before))
    equal = sum(a == b for a, b in zip(recorded, counted, strict=True))
    console.say(
        f"server: {sum(served)} of {len(served)} answers and {equal} of {len(recorded)} counts are the profile's"
    )
    if not all(served):
        raise NotComparable(
            f"{source}: {served.count(False)} of {len(served)} answers differ from those of the search, by which counts may differ; run the "
            "build, threads and machine of the search"
        )
    if same == equal == len(recorded):
        console.say("passed")
        return 0
    was, now = total(recorded), total(counted)
    console.say(
        f"failed: {was.drafted} tokens drafted and {was.accepted} accepted in {was.verifications} verifications at the search, now "
        f"{now.drafted}, {now.accepted} and {now.verifications}: the build drafts by another rule; search again"
    )
    return 1


def _since(now: SpeculationCounts, before: SpeculationCounts) -> SpeculationCounts:
    return SpeculationCounts(**{name: value - getattr(before, name) for name, value in now.model_dump().items()})


def answer_in_engine(
    source: Path, prompts: Sequence[WorkloadPrompt], given: str | None = None
) -> Iterator[dict[str, Any]]:
    """Start the engine as its profile recommends, and answer prompts; yields texts with their counts and times."""
    profile = EngineProfile.load(source)
    with started_llama(
        engine_of(profile, source, given), [profile.speculation] if profile.speculation else []
    ) as server:
        for prompt in prompts:
            timed = server.answer(server.prompt_tokens(prompt), prompt.settings.max_new_tokens)
            tokens = timed.answer.tokens
            text = str(server.read_json("/detokenize", {"tokens": tokens}).get("content", ""))
            rate = 1e3 * (len(tokens) - 1) / max(timed.wall_ms, 1e-9)
            summary = (
                f"{len(tokens)} tokens, {rate:.1f} tokens/s, {timed.accepted} of {timed.drafted} draft tokens accepted"
            )
            yield {"prompt": prompt.name, "text": text, "tokens": tokens, "summary": summary}


def bench_engine(
    source: Path, prompts: Sequence[WorkloadPrompt], given: str | None, console: Console
) -> list[dict[str, Any]]:
    """Measure a profile's settings, the engine's default and no speculation in turns; returns the arms as JSON."""
    profile = EngineProfile.load(source)
    command, one = engine_of(profile, source, given), profile.speculation or profile.checked
    with started_llama(command) as server:
        asked = [(server.prompt_tokens(prompt), prompt) for prompt in prompts]
    arms = {OFF: None, DEFAULT: DEFAULT_SETTINGS, one.label: one}
    prices = VerificationPrices(
        profile.prices, "cpu" if all(min(step.cpu_ms) > 0 for step in profile.prices) else "wall", profile.price_factor
    )
    measured, _ = confirm(command, arms, asked, prices, 0, profile.context, console)
    return [arm.model_dump(mode="json") for arm in measured]
