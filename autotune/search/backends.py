"""The table of backends, the choice among them by ``--backend`` and ``--set``, and the arms of a profile in whatever
backend it is for. Loads no torch before the runtime's profiles are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from inspect import Parameter, signature
from typing import Any

from autotune.console import Console
from autotune.documents.decoding_profile import AR, TUNED, DecodingProfile
from autotune.documents.deployment import RUNTIME
from autotune.documents.option_fields import option_name
from autotune.engines.backend import Backend
from autotune.engines.engine import EngineBackend
from autotune.engines.llama_cpp import LlamaBackend
from autotune.engines.vllm import VllmBackend
from autotune.errors import UserError, nearest
from autotune.evaluation.arms import Arm
from autotune.search.runtime_backend import RuntimeBackend
from autotune.study.search_settings import SearchSettings, is_of_backend

OF_ENGINES = {
    *("backends", "changes", "target", "drafts", "workload", "workload_format", "max_new_tokens", "temperature"),
    *("chat_template_kwargs", "budget_s", "study", "seed", "output", "requests_at_once", "any_weights"),
    *("has_default_drafts", "num_tune_prompts", "num_evaluate_prompts", "folder"),
}
"""Settings of a search without the runtime."""
BACKENDS: dict[str, type[Backend]] = {
    RuntimeBackend.name: RuntimeBackend,
    LlamaBackend.name: LlamaBackend,
    VllmBackend.name: VllmBackend,
}
"""This program and those beside it, by name."""


@dataclass(frozen=True)
class BackendChoice:
    """A backend, the model that it loads, and its own options."""

    label: str
    """The backend as the user names it, ``NAME`` or ``NAME=MODEL``."""
    name: str
    model: str
    options: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the backend's constructor, such as ``command``, ``url`` and ``draft``."""


def backend_options() -> dict[str, list[str]]:
    """The options of every backend that ``--set NAME:OPTION=VALUE`` sets: those that its constructor names."""
    options: dict[str, list[str]] = {}
    for name, backend in BACKENDS.items():
        named = [one.name for one in signature(backend).parameters.values() if one.kind is Parameter.KEYWORD_ONLY]
        options[name] = [option for option in named if option not in ("console", "seed")]
    return options


def choose_backends(settings: SearchSettings, *, is_plan: bool = False) -> list[BackendChoice]:
    """The backends of a search in the order of the command line; without any, the runtime. A draft is for the runtime,
    or else for every engine.

    Raises:
        UserError: an unknown backend or option, an option without its backend, a backend twice with one model, several
            drafts for engines, or an option that no backend of the search has.
    """
    known = backend_options()
    options = _options_by_backend(settings.changes, known)
    choices: list[BackendChoice] = []
    for text in settings.backends or (RUNTIME,):
        name, _, model = text.partition("=")
        if name not in known:
            raise UserError(f"--backend {text}: no such backend; {nearest(name, known)}")
        choice = BackendChoice(text, name, model or settings.target, options.get(name, {}))
        if (name, choice.model) in [(other.name, other.model) for other in choices]:
            raise UserError(
                f"--backend {text}: {name} is given twice with the model {choice.model}; give each model once"
            )
        choices.append(choice)
    names = list(dict.fromkeys(choice.name for choice in choices))
    for name in options:
        if name not in names:
            raise UserError(f"--set {name}:...: this search has no backend {name}; add --backend {name}")
    _refuse_options(settings, names, len(choices), is_plan=is_plan)
    if RUNTIME in names or not settings.drafts:
        return choices
    if len(settings.drafts) > 1:
        raise UserError(f"--draft: an engine tunes one draft model; got {', '.join(settings.drafts)}; give one")
    draft = {"draft": settings.drafts[0]}
    return [replace(one, options={**draft, **one.options}) if "draft" in known[one.name] else one for one in choices]


def _refuse_options(settings: SearchSettings, names: Sequence[str], num_backends: int, *, is_plan: bool) -> None:
    refused = ["--plan"] if is_plan and settings.backends else []
    if RUNTIME not in names:
        given = [name for name in settings.model_dump(exclude_defaults=True) if name not in OF_ENGINES]
        refused += [f"--{option_name(name, SearchSettings.model_fields[name])}" for name in given]
        refused += [f"--set {change}" for change in settings.changes if not is_of_backend(change)]
    if refused:
        raise UserError(f"{refused[0]}: not an option of {' or '.join(names)}; drop it, or search the runtime alone")
    if num_backends == 1 and settings.any_weights:
        raise UserError("--any-weights chooses among backends; name several with --backend")
    if [*names] == [RUNTIME] and settings.requests_at_once:
        raise UserError("--requests-at-once: the runtime serves one request at a time; add --backend llama.cpp or vllm")
    if num_backends > 1 and (settings.gpu or settings.random_weights):
        raise UserError("--gpu: backends race each other on this machine; give --device, or leave --backend out")


def _options_by_backend(changes: Sequence[str], known: Mapping[str, Collection[str]]) -> dict[str, dict[str, str]]:
    options: dict[str, dict[str, str]] = {}
    for change in filter(is_of_backend, changes):
        word, _, value = change.partition("=")
        name, _, option = word.partition(":")
        if name not in known:
            raise UserError(f"--set {change}: no such backend; {nearest(name, known)}")
        if option not in known[name]:
            hint = nearest(option, known[name]) if known[name] else "drop it"
            raise UserError(f"--set {change}: the backend {name} has no option {option!r}; {hint}")
        if not value:
            raise UserError(f"--set {change}: has no value; write {word}=VALUE")
        options.setdefault(name, {})[option] = value
    for name, values in options.items():
        if "url" in values and len(values) > 1:
            raise UserError(
                f"--set {name}:url: a server that runs keeps its settings; leave {name}:{sorted(values)[0]} out"
            )
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
