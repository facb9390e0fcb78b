"""Files that other programs read a profile's settings from: a table of formats and their templates. Loads no torch."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from autotune.console import Console
from autotune.documents.decoding_profile import DecodingProfile
from autotune.documents.deployment import RUNTIME, Deployment
from autotune.documents.draft_kinds import TOKEN_DRAFTS, WHOLE_MODELS
from autotune.engines.runtime_export import chain_of, vllm_deployment
from autotune.errors import UserError
from autotune.trees.chain import ChainPolicy
from autotune.trees.limits import MAX_MATCH

TEMPLATES = Path(__file__).with_name("templates")
LONG_NAMES = {
    **{"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"},
    **{"-q": "--quantization", "-ep": "--enable-expert-parallel", "-dcp": "--decode-context-parallel-size"},
    **{"-cc": "--compilation-config", "-ac": "--attention-config"},
}
"""vLLM's short options: its file has long names alone."""
NUMBER_OR_OBJECT = re.compile(r"-?\d+(\.\d+)?|\{.*\}", re.DOTALL)
HUB_FOLDER = re.compile(r".*/models--(.+)/snapshots/[^/]+")
"""A model of the Hugging Face Hub in its cache."""


@dataclass(frozen=True)
class Export:
    """A profile that is written for another program."""

    profile: DecodingProfile
    """Located, see ``DecodingProfile.located``."""
    console: Console
    draft_tokens: int | None
    """Length of the chain of a profile of the runtime; None: its own."""
    models: Path
    """Folder for models that vLLM does not load as they are."""

    @cached_property
    def deployment(self) -> Deployment:
        """The profile's own, or one in vLLM for a profile of the runtime."""
        return self.profile.point.deployment or vllm_deployment(
            self.profile, self.console, draft_tokens=self.draft_tokens, models=self.models
        )

    @cached_property
    def chain(self) -> ChainPolicy:
        """The chain of a profile of the runtime, for transformers' ``generate``."""
        return chain_of(self.profile, self.draft_tokens, "generate", self.console)

    @cached_property
    def options(self) -> dict[str, list[str]]:
        """The model, and the values of each option of the deployment's command, by names without dashes; vLLM's short
        options without a long name keep their dash.
        """
        name, values = "model", {"model": [self.deployment.command[2]]}
        for word in self.deployment.command[3:]:
            if word.startswith("-") and not word[1:2].isdigit():
                option, _, value = LONG_NAMES.get(word, word).partition("=")
                name = option.removeprefix("--") if self.deployment.backend == "vllm" else option.lstrip("-")
                values.setdefault(name, []).extend([value] if value else [])
            else:
                values[name].append(word)
        return values

    @property
    def name(self) -> str:
        """The target's name without its owner, revision and suffix."""
        return Path(self.profile.target.id.partition("@")[0]).name.removesuffix(".gguf")

    @property
    def label(self) -> str:
        """A name for objects of Kubernetes."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.deployment.backend}-{self.name}".lower())[:50].strip("-")

    @cached_property
    def inside(self) -> dict[str, str]:
        """Names of the models inside of a container by their paths here: ids of the Hugging Face Hub, or files of a
        volume.
        """
        speculation = self.deployment.speculation
        paths = [self.deployment.command[2], speculation.model if speculation else ""]
        local = [path for path in paths if path and (Path(path).is_absolute() or Path(path).exists())]
        hubs = {path: HUB_FOLDER.fullmatch(path) for path in local}
        return {path: hub[1].replace("--", "/") if hub else f"/models/{Path(path).name}" for path, hub in hubs.items()}

    def moved(self, word: str) -> str:
        """A word of the command with the models' names inside of a container, also where it is JSON."""
        for path, name in self.inside.items():
            word = name if word == path else word.replace(json.dumps(path), json.dumps(name))
        return word


def value_of(values: Sequence[str]) -> Any:
    """A number or an object, text, a list of texts, or true for an option without a value."""
    if len(values) == 1:
        return json.loads(values[0]) if NUMBER_OR_OBJECT.fullmatch(values[0]) else values[0]
    return list(values) or True


@dataclass(frozen=True)
class Format:
    """A kind of files."""

    template: str
    """In ``templates/``. It refuses settings that the format does not express."""
    backends: Sequence[str]
    """Backends whose profiles it expresses; none for all."""
    is_measured: bool = True
    """Whether this project runs the program that reads it."""


FORMATS = {
    "command": Format("command.sh", ()),
    "vllm-yaml": Format("vllm.yaml", ("vllm", RUNTIME)),
    "llama-ini": Format("llama.ini", ("llama.cpp",)),
    "generation-config": Format("generation_config.json", ("vllm", "llama.cpp", RUNTIME)),
    "sglang-json": Format("sglang.json", ("vllm", RUNTIME), is_measured=False),
    "sglang-by-load": Format("sglang-by-load.json", ("vllm",), is_measured=False),
    "k8s": Format("k8s.yaml", ("vllm", "llama.cpp", RUNTIME), is_measured=False),
}


def exported_text(name: str, export: Export) -> str:
    """The text of a format.

    Raises:
        UserError: the format does not express the profile.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    def refuse(reason: str) -> NoReturn:
        raise UserError(f"--as {name}: {reason}; choose another format, or leave --as out for the command")

    def say(note: str) -> None:
        export.console.say(f"- {note}")

    form, backend = FORMATS[name], export.profile.backend
    if form.backends and backend not in form.backends:
        refuse(f"expresses profiles of {' and '.join(form.backends)}, and this is one of {backend}")
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.globals |= {
        **{"refuse": refuse, "say": say, "join": shlex.join, "value_of": value_of},
        **{"token_drafts": TOKEN_DRAFTS, "whole_models": WHOLE_MODELS, "MAX_MATCH": MAX_MATCH},
    }
    text = environment.get_template(form.template).render(export=export, profile=export.profile)
    if not form.is_measured:
        say("not measured there: autotune does not run the program that reads this")
    return text
