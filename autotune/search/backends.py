"""The table of backends, and the arms of a profile in whatever backend it is for. Loads no torch before the runtime's
profiles are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from inspect import Parameter, signature
from typing import Any

from autotune.console import Console
from autotune.documents.decoding_profile import AR, TUNED, DecodingProfile
from autotune.documents.deployment import RUNTIME
from autotune.engines.backend import Backend
from autotune.engines.engine import EngineBackend
from autotune.engines.llama_cpp import LlamaBackend
from autotune.engines.vllm import VllmBackend
from autotune.errors import UserError, nearest
from autotune.evaluation.arms import Arm
from autotune.search.backend_choices import BackendChoice
from autotune.search.runtime_backend import RuntimeBackend

BACKENDS: dict[str, type[Backend]] = {
    RuntimeBackend.name: RuntimeBackend,
    LlamaBackend.name: LlamaBackend,
    VllmBackend.name: VllmBackend,
}
"""This program and those beside it, by name."""


def backend_options() -> dict[str, list[str]]:
    """What ``--set NAME:OPTION=VALUE`` sets of every backend: the options that its constructor names."""
    options: dict[str, list[str]] = {}
    for name, backend in BACKENDS.items():
        named = [one.name for one in signature(backend).parameters.values() if one.kind is Parameter.KEYWORD_ONLY]
        options[name] = [option for option in named if option not in ("console", "seed")]
    return options


def make_backend(choice: BackendChoice, *, console: Console, seed: int = 0) -> Backend:
    """The backend of a choice.

    Raises:
        UserError: it is not installed, or does not load the model.
    """
    make: Callable[..., Backend] = BACKENDS[choice.name]
    return make(choice.model, console=console, seed=seed, **choice.options)


def restored_backend(
    profile: DecodingProfile, *, command: str | None = None, console: Console | None = None
) -> Backend:
    """The engine that a profile deploys.

    Args:
        command: executable with further arguments in place of the profile's.

    Raises:
        UserError: this program does not know the engine, it is not installed, or the model is another one.
    """
    deployment = profile.point.deployment
    assert deployment is not None, "the runtime is no engine"
    name = deployment.backend
    if name not in BACKENDS:
        raise UserError(f"the profile is for {name}, no backend of this program; {nearest(name, BACKENDS)}")
    backend = BACKENDS[name]
    if issubclass(backend, EngineBackend):
        return backend.restored(deployment, command=command, console=console)
    make: Callable[..., Backend] = backend
    return make(deployment.model.id, console=console, **({} if command is None else {"command": command}))


def found_engines() -> list[str]:
    """Names of the engines whose programs are on this machine."""
    found = []
    for name, backend in BACKENDS.items():
        with suppress(UserError):
            if issubclass(backend, EngineBackend) and backend.find(None):
                found.append(name)
    return found


@contextmanager
def arms_of(
    profile: DecodingProfile,
    *,
    device: str = "auto",
    command: str | None = None,
    console: Console | None = None,
    with_default: bool = False,
) -> Iterator[dict[str, Arm]]:
    """The arms of a profile by name: ``AR`` decodes plainly, and ``TUNED`` as the profile says, unless that is plain
    decoding. Servers run inside the context.

    Args:
        device: of the runtime.
        command: of an engine: executable with further arguments in place of the profile's.
        with_default: also yield an engine's best default, by its label.

    Raises:
        UserError: the models or the engine cannot be loaded.
    """
    if profile.backend == RUNTIME:
        from autotune.evaluation.runtime_arms import DecoderArm, RuntimeArms
        from autotune.runtime.load import load

        decoder = load(profile, device=device, context_tokens=0, console=console)
        arms = RuntimeArms(decoder)
        found: dict[str, Arm] = {AR: arms.plain}
        if decoder.draft is not None:
            found[TUNED] = DecoderArm(TUNED, decoder, arms, key=f"{TUNED}-{profile.content_hash}")
        yield found
        return
    backend, deployment = restored_backend(profile, command=command, console=console), profile.point.deployment
    configurations: dict[str, Any] = {AR: None}
    if with_default:
        labels = {c.label: c for c in backend.configurations()}
        name = profile.evidence.best_default or ""
        configurations |= {name: labels[name]} if name in labels else {}
    if deployment is not None and deployment.speculation is not None:
        configurations[TUNED] = deployment.speculation
    with ExitStack() as stack:
        started: dict[str, Arm] = {name: stack.enter_context(backend.arm(c)) for name, c in configurations.items()}
        for name, arm in started.items():
            arm.name = name
        yield started
