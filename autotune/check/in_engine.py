"""A check of an engine's profile: its server and a plain one are started and compared. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from autotune.check.comparison import Contender, require_comparable
from autotune.check.decoded_workload import DecodedWorkload, decode_all
from autotune.check.result import REPLAY, Gate, GateVerdict
from autotune.check.revision import worktree
from autotune.check.settings import CheckSettings
from autotune.console import Console
from autotune.documents.decoded import Decoded
from autotune.documents.decoding_profile import AR, TUNED, DecodingProfile
from autotune.documents.deployment import Deployment
from autotune.documents.speculation import Speculation
from autotune.engines.backend import Backend
from autotune.files import content_key, sha256_of
from autotune.machine.container import num_cores
from autotune.machine.device import cpu_fingerprint
from autotune.workloads.workload import Workload

ROUNDING = "a batch of tokens rounds otherwise than one token"


Restore = Callable[..., Backend]
"""Finds the backend of a profile, with another executable and arguments if ``command`` names them
(``search.backends.restored_backend``).
"""


def decode_in_engine(
    profile: DecodingProfile,
    workload: Workload,
    evidence: list[Decoded] | str,
    backend: Backend,
    seed: int,
    console: Console,
) -> DecodedWorkload:
    """Decode a workload in new servers, with the profile's speculation and without.

    Raises:
        UserError: a server does not start, or ends.
    """
    configuration = _deployment(profile).speculation
    with ExitStack() as stack:
        arms = [stack.enter_context(backend.arm(None))]
        if configuration is not None:
            arms.append(stack.enter_context(backend.arm(configuration)))
        for name, arm in zip((AR, TUNED), arms, strict=False):
            arm.name = name
        decoded = decode_all(arms, workload, seed, console)
    plain, runs = decoded[0], decoded[-1]
    gates = []
    if configuration is not None and not configuration.model:  # chains of a model are replayed approximately
        gates.append(_replay_gate(workload, runs, backend, configuration))
    return DecodedWorkload(
        workload=workload,
        profile=profile,
        runs=runs,
        plain=plain,
        seed=seed,
        divergences={
            run.prompt: f"token {_first_difference(run, other)}"
            for run, other in zip(runs, plain, strict=True)
            if run.tokens != other.tokens
        },
        evidence=evidence,
        precision=backend.precision,
        hardware=cpu_fingerprint(num_cores()),
        rounding=ROUNDING,
        gates=gates,
    )


def _first_difference(run: Decoded, other: Decoded) -> int:
    pairs = zip(run.tokens, other.tokens, strict=False)
    shorter = min(len(run.tokens), len(other.tokens))
    return next((number for number, (one, two) in enumerate(pairs) if one != two), shorter)


def _replay_gate(workload: Workload, runs: Sequence[Decoded], backend: Backend, configuration: Speculation) -> Gate:
    """The gate on the counts compared with the replay's, by which the search has chosen. Drafts follow from earlier
    answers too, so that a difference only warns where answers differ from plain decoding's.
    """
    recorded = backend.record(workload.prompts)
    counts = backend.replay(configuration, recorded).counts
    compared, different = 0, []
    for run, plain, predicted in zip(runs, recorded.answers, counts, strict=True):
        counted = run.rounds, run.verified_nodes, run.accepted_tokens
        if run.tokens_sha256 == plain.tokens_sha256:
            compared += 1
            if counted != tuple(predicted):
                texts = ["{} verifications, {} drafted, {} accepted".format(*row) for row in (counted, predicted)]
                different.append(f"{run.prompt}: {texts[0]}; predicted are {texts[1]}")
    verdict: GateVerdict = "passed"
    if different:
        tolerated = getattr(backend, "tolerated_mismatches", 0.0) * compared
        verdict = "warned" if compared < len(runs) or len(different) <= tolerated else "failed"
    summary = f"{compared - len(different)} of {compared} prompts with plain decoding's answer have the replay's counts"
    return Gate(name=REPLAY, workload=workload.name, verdict=verdict, summary=summary, details=different)


def _deployment(profile: DecodingProfile) -> Deployment:
    deployment = profile.point.deployment
    assert deployment is not None, "a profile of the runtime"
    return deployment


# -------- sides


def open_engines(
    settings: CheckSettings,
    profile: DecodingProfile,
    backend: Backend,
    restore: Restore,
    folder: Path,
    console: Console,
) -> tuple[Contender, Contender]:
    """Base and head as servers. The base is deployed by the profile ``--against``, or by the checked profile's file in
    a git revision.
    """
    against = str(settings.against)
    if Path(against).is_file():
        label, base = against, DecodingProfile.load(Path(against)).located(Path(against))
    else:
        with worktree(against, folder) as found:
            label, base = found.label, DecodingProfile.load(found.beside(settings.profile)).located(settings.profile)
    require_comparable(base, profile, label)  # before the base's engine is looked for
    return _contender(label, base, restore(base, command=None, console=console)), _contender(
        str(settings.profile), profile, backend
    )


def _contender(label: str, profile: DecodingProfile, backend: Backend) -> Contender:
    configuration = _deployment(profile).speculation
    command, model = backend.deploy(configuration).command, backend.model
    program = sha256_of(Path(command[0])) if Path(command[0]).is_file() else ""
    key = content_key([command, program, model.sha256 or model.id])
    return Contender(label, key, profile, lambda _: backend.arm(configuration))
