"""Arms of a profile for the verbs: the runtime's decoders, or servers of its engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.deployment import RUNTIME
from autotune.evaluation.bench import BenchArms
from autotune.modeling.loading import Dtype
from autotune.search.backends import arms_of, restored_backend
from autotune.search.engine_loads import LoadServers, deployed_loads
from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload


@contextmanager
def compared_arms(
    source: Path,
    profile: DecodingProfile,
    prompts: Workload,
    console: Console,
    *,
    names: Sequence[str] | None,
    draft: str | None,
    device: str,
    dtype: Dtype | None,
    engine_command: str | None,
) -> Iterator[tuple[BenchArms, str]]:
    """The arms that a profile is compared with, and the device. Servers run inside the context.

    Args:
        source: file of the profile.
        names: of arms beside plain decoding and the profile; None: those that the backend compares by default.
    """
    if profile.backend == RUNTIME:
        from autotune.evaluation.bench_arms import runtime_arms

        yield runtime_arms(source, prompts, console, names=names, draft=draft, device=device, dtype=dtype)
        return
    has_default = names is None or profile.evidence.best_default in names
    with arms_of(profile, command=engine_command, console=console, with_default=has_default) as arms:
        yield BenchArms(list(arms.values()), prompts.first_turns()), "cpu"


def measured_loads(
    profile: DecodingProfile, prompts: Workload, loads: Sequence[int], command: str | None, console: Console
) -> list[dict[str, Any]]:
    """Figures of the profile's engine, and of no speculation, for each number of requests at once."""
    if not loads or profile.point.deployment is None:
        return []
    backend = restored_backend(profile, command=command, console=console)
    servers = LoadServers(backend, backend.record(prompts.prompts), console)
    return [
        result.model_dump(mode="json")
        for result in deployed_loads(servers, loads, profile.point.deployment.speculation)
    ]


def answers(
    source: Path,
    profile: DecodingProfile,
    prompts: Sequence[WorkloadPrompt],
    command: str | None,
    *,
    device: str,
    dtype: Dtype | None,
    prints: bool,
) -> Iterator[dict[str, Any]]:
    """Decode prompts one after the other with the profile's backend; yields the text of each answer, its statistics and
    a summary line.

    Args:
        source: file of the profile.
        command: of an engine: executable with further arguments in place of the profile's.
        prints: print each answer to standard output, too.
    """
    if profile.backend == RUNTIME:
        from autotune.evaluation.answers import answer_prompts

        yield from answer_prompts(source, prompts, device=device, dtype=dtype, prints=prints)
        return
    backend, point = restored_backend(profile, command=command), profile.point
    assert point.deployment is not None
    with backend.arm(point.deployment.speculation) as arm:
        for prompt in prompts:
            decoded = arm.decode(prompt)
            text = arm.text(decoded).strip()
            if prints:
                click.echo(text)
            rate = 1e3 * (decoded.new_tokens - 1) / max(decoded.decode_ms, 1e-9)
            counts = f"{decoded.accepted_tokens} of {decoded.verified_nodes} draft tokens accepted"
            yield {
                "prompt": prompt.settings.text,
                "text": text,
                "lossless": point.verification.is_lossless,
                "perplexity": None,
                "stats": decoded.model_dump(mode="json"),
                "summary": f"{decoded.new_tokens} tokens in {decoded.decode_ms:.0f} ms ({rate:.0f} tokens/s, {counts})",
            }
