"""The table of backends, the choice among them by ``--backend`` and ``--set``, and the arms of a profile in whatever
backend it is for. Loads no torch before the runtime's profiles are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from inspect import Parameter, signature

from autotune.console import Console
from autotune.documents.decoding_profile import AR, TUNED, DecodingProfile
from autotune.documents.deployment import RUNTIME
from autotune.documents.option_fields import option_name
from autotune.documents.speculation import Speculation
from autotune.engines.backend import Backend
from autotune.engines.engine import EngineBackend
from autotune.engines.llama_cpp import LlamaBackend
from autotune.engines.vllm import VllmBackend
from autotune.errors import UserError, nearest
from autotune.evaluation.arms import Arm
from autotune.study.search_settings import SearchSettings, is_of_backend

OF_ENGINES = {
    *("backends", "changes", "target", "workload", "workload_format", "max_new_tokens", "temperature"),
    *("chat_template_kwargs", "budget_s", "study", "seed", "output", "loads", "any_weights"),
    *("has_default_drafts", "num_tune_prompts", "num_evaluate_prompts", "folder"),
}
"""Settings of a search without the runtime."""
URL = re.compile(r"[^=]*:url=")  # begins a value of --set that names a server that runs
BACKENDS: dict[str, type[Backend]] = {LlamaBackend.name: LlamaBackend, VllmBackend.name: VllmBackend}
"""The engines, by name. The runtime is this program."""


@dataclass(frozen=True)
class BackendChoice:
    """A backend, the model that it loads, and its own options."""

    label: str
    """The backend as the user names it, ``NAME`` or ``NAME=MODEL``."""
    name: str
    model: str
    options: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the backend's constructor, such as ``command``, ``url`` and ``draft``."""


def choose_backends(settings: SearchSettings, *, is_plan: bool = False) -> list[BackendChoice]:
    """The backends of a search in the order of the command line; without any, the runtime.

    Raises:
        UserError: an unknown backend or option, an option without its backend, a backend twice with one model, or an
            option that no backend of the search has.
    """
    known, options = [RUNTIME, *BACKENDS], _options_by_backend(settings.changes)
    choices: dict[tuple[str, str], BackendChoice] = {}
    for text in settings.backends or (RUNTIME,):
        name, _, model = text.partition("=")
        if name not in known:
            raise UserError(f"--backend {text}: no such backend; {nearest(name, known)}")
        choice = BackendChoice(text, name, model or settings.target, options.get(name, {}))
        if (name, choice.model) in choices:
            raise UserError(
                f"--backend {text}: {name} is given twice with the model {choice.model}; give each model once"
            )
        choices[name, choice.model] = choice
    names = list(dict.fromkeys(name for name, _ in choices))
    for name in options:
        if name not in names:
            raise UserError(f"--set {name}:...: this search has no backend {name}; add --backend {name}")
    _refuse_options(settings, names, len(choices), is_plan=is_plan)
    return list(choices.values())


def _refuse_options(settings: SearchSettings, names: Sequence[str], num_backends: int, *, is_plan: bool) -> None:
    refused = ["--plan"] if is_plan and settings.backends else []
    if RUNTIME not in names:
        given = [name for name in settings.model_dump(exclude_defaults=True) if name not in OF_ENGINES]
        refused += [f"--{option_name(name, SearchSettings.model_fields[name])}" for name in given]
        refused += [f"--set {change}" for change in settings.changes if not is_of_backend(change)]
    is_elsewhere = names == [RUNTIME] or any(map(URL.match, settings.changes))
    rules = (
        (
            refused,
            f"{''.join(refused[:1])}: not an option of {' or '.join(names)}; drop it, or search the runtime alone",
        ),
        (
            num_backends == 1 and settings.any_weights,
            "--any-weights chooses among backends; name several with --backend",
        ),
        (
            settings.loads and is_elsewhere,
            "--load: the runtime serves one request at a time, and a server that runs is not measured; "
            "let --backend llama.cpp or vllm start its servers",
        ),
        (
            num_backends > 1 and (settings.gpu or settings.random_weights),
            "--gpu: backends race each other on this machine; give --device, or leave --backend out",
        ),
    )
    for is_broken, rule in rules:
        if is_broken:
            raise UserError(rule)


def _options_by_backend(changes: Sequence[str]) -> dict[str, dict[str, str]]:
    """The values of ``--set NAME:OPTION=VALUE``. The options of a backend are those of its constructor."""
    options: dict[str, dict[str, str]] = {}
    known = [
        f"{name}:{option.name}"
        for name, backend in BACKENDS.items()
        for option in signature(backend).parameters.values()
        if option.kind is Parameter.KEYWORD_ONLY and option.name not in ("console", "seed")
    ]
    for change in filter(is_of_backend, changes):
        word, _, value = change.partition("=")
        if word not in known or not value:
            raise UserError(f"--set {change}: no option of a backend, NAME:OPTION=VALUE; {nearest(word, known)}")
        name, _, option = word.partition(":")
        options.setdefault(name, {})[option] = value
    return options


def restored_backend(
    profile: DecodingProfile, *, command: str | None = None, console: Console | None = None
) -> Backend:
    """The engine that a profile deploys.

    Args:
        command: executable with further arguments in place of the profile's.

    Raises:
        UserError: this program does not know the engine, it is not installed, or the model is another one.
    """
    name, deployment = profile.backend, profile.point.deployment
    if name not in BACKENDS or deployment is None:
        raise UserError(f"the profile is for {name}, no engine of this program; {nearest(name, BACKENDS)}")
    options = {} if command is None else {"command": command}
    return BACKENDS[name].restored(deployment, console=console, **options)


def found_engines() -> list[str]:
    """Names of the engines whose programs are on this machine."""
    names = []
    for name, backend in BACKENDS.items():
        with suppress(UserError):
            if issubclass(backend, EngineBackend) and backend.find(None):
                names.append(name)
    return names


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
        named: dict[str, Arm] = {AR: arms.plain}
        if decoder.draft is not None:
            named[TUNED] = DecoderArm(TUNED, decoder, arms, key=f"{TUNED}-{profile.content_hash}")
        yield named
        return
    backend, deployment = restored_backend(profile, command=command, console=console), profile.point.deployment
    configurations: dict[str, Speculation | None] = {AR: None}
    if with_default:
        default = profile.evidence.best_default
        configurations |= {c.label: c for c in backend.configurations() if c.label == default}
    if deployment is not None and deployment.speculation is not None:
        configurations[TUNED] = deployment.speculation
    with ExitStack() as stack:
        yield {name: named_arm(stack, backend, c, name) for name, c in configurations.items()}


def named_arm(stack: ExitStack, backend: Backend, configuration: Speculation | None, name: str) -> Arm:
    """Start the arm of a configuration, which ends with the stack, under a name.

    Raises:
        UserError: it does not start.
    """
    arm: Arm = stack.enter_context(backend.arm(configuration))
    arm.name = name
    return arm
