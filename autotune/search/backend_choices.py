"""The backends of a search, by ``--backend NAME[=MODEL]`` and ``--set NAME:OPTION=VALUE``. Loads no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.documents.deployment import RUNTIME
from autotune.errors import UserError, nearest


@dataclass(frozen=True)
class BackendChoice:
    """A backend, the model that it loads, and its own options."""

    name: str
    model: str
    options: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the backend's constructor, such as ``command``, ``url`` and ``draft``."""
    has_own_model: bool = False
    """Whether the model was named for this backend, and is not ``--target``."""

    @property
    def label(self) -> str:
        return f"{self.name}={self.model}" if self.has_own_model else self.name


def choose_backends(
    given: Sequence[str], changes: Sequence[str], target: str, known: Mapping[str, Collection[str]]
) -> list[BackendChoice]:
    """The backends in the order of the command line; without any, the runtime.

    Args:
        given: values of ``--backend``.
        changes: values of ``--set``; those of the search space are left out.
        known: the options of every backend, by name.

    Raises:
        UserError: an unknown backend or option, an option without its backend, or a backend twice with one model.
    """
    options = _options_by_backend(changes, known)
    choices: list[BackendChoice] = []
    for text in given or (RUNTIME,):
        name, _, model = text.partition("=")
        if name not in known:
            raise UserError(f"--backend {text}: no such backend; {nearest(name, known)}")
        choice = BackendChoice(name, model or target, options.get(name, {}), bool(model))
        if (name, choice.model) in [(other.name, other.model) for other in choices]:
            raise UserError(
                f"--backend {text}: {name} is given twice with the model {choice.model}; give each model once"
            )
        choices.append(choice)
    for name in options:
        if name not in [choice.name for choice in choices]:
            raise UserError(f"--set {name}:...: this search has no backend {name}; add --backend {name}")
    return choices


def is_of_backend(change: str) -> bool:
    """Whether a value of ``--set`` is an option of a backend, and not a dimension of the search space."""
    return ":" in change.partition("=")[0]


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
