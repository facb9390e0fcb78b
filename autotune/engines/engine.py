"""The interface of serving engines that a search tunes: servers that it starts, and requests whose speculation and time
are counted. No torch.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from autotune.documents.engine_profile import (
    OPTIONS,
    TYPES,
    EngineName,
    ModelType,
    ServedAnswer,
    Speculation,
    SpeculationCounts,
    SpeculationType,
)
from autotune.documents.provenance import ModelReference
from autotune.engines.client import EngineHttp
from autotune.engines.server import running
from autotune.errors import UserError
from autotune.files import user_cache
from autotune.workloads.chat import Message
from autotune.workloads.prompt import WorkloadPrompt


def text_chat(prompt: WorkloadPrompt) -> dict[str, Any]:
    """A prompt without images as a chat of OpenAI's API."""
    content, variables = prompt.content, prompt.settings.chat_template_kwargs
    chat = [Message(role="user", content=content)] if isinstance(content, str) else content
    messages = [{"role": message.role, "content": message.text} for message in chat]
    return {"messages": messages, **({"chat_template_kwargs": variables} if variables else {})}


class EngineServer(EngineHttp, ABC):
    """A client of one server, which sends one request at a time unless it streams.

    Raises:
        UserError: nothing answers at ``url``, or it is another program.
    """

    build: str
    """The server's own name of its build."""
    alias: object
    """The model's name there."""
    context: int
    """Tokens of a request."""
    speculations: Sequence[Speculation] = ()
    """The settings of a server that was started here."""
    process: subprocess.Popen[bytes] | None = None
    """None of a server that was not started here."""
    priced_by: ClassVar[str]
    """Arguments with which a server drafts as ``verify`` needs."""
    longest: ClassVar[int]
    """Most tokens of a verification that is priced."""
    spins_s: ClassVar[float] = 0.0
    """Time after an answer for which the server keeps a core busy without work."""

    @property
    def keeps_answers(self) -> bool:
        """Whether drafts follow from all earlier answers, so that every request changes those of later ones."""
        return any(one.type == "suffix" for one in self.speculations)

    @property
    def has_draft(self) -> bool:
        """Whether a draft model drafts before every pass."""
        return any(one.model for one in self.speculations)

    def ask(self, prompt: WorkloadPrompt, other: EngineServer | None = None) -> ServedAnswer:
        """The answer to a prompt, with its continuation by the server, or by the ``other`` one."""
        answer = self.answer(self.prompt_tokens(prompt), prompt.settings.max_new_tokens)
        return answer.model_copy(update={"beyond": (other or self).continuation(answer)})

    def continuation(self, answer: ServedAnswer) -> list[int]:
        """The tokens that follow an answer, of an engine whose drafts reach there."""
        return []

    @abstractmethod
    def prompt_tokens(self, prompt: WorkloadPrompt) -> list[int]:
        """The tokens of a prompt after the model's chat template."""

    @abstractmethod
    def answer(self, tokens: list[int], limit: int) -> ServedAnswer:
        """Decode one prompt greedily. Reading it takes none of the time."""

    @abstractmethod
    def verify(self, prompt: list[int], n: int) -> ServedAnswer:
        """A request that is exactly one verification of ``n`` tokens after its first token, in a server that drafts as
        ``priced_by`` says; or one that drafted another number of tokens than n - 1.
        """

    @abstractmethod
    def stream(self, answer: ServedAnswer) -> tuple[list[int], list[float]]:
        """Decode the prompt of an answer as one of several requests: tokens, and seconds from the request to each part
        of the reply.
        """

    @abstractmethod
    def text(self, tokens: list[int]) -> str:
        """The text of tokens."""

    @abstractmethod
    def counts(self) -> SpeculationCounts:
        """Counts of the answers of a server that was started here."""

    def cpu_ms(self) -> float:
        """CPU time of the threads of the server and its workers; 0 if they are not on this machine."""
        nanoseconds, waiting = 0, [str(self.process.pid)] if self.process else []
        while waiting:
            for thread in Path(f"/proc/{waiting.pop()}/task").glob("*"):
                with suppress(OSError, ValueError, IndexError):  # a thread that has ended, whose time is not in the sum
                    nanoseconds += int((thread / "schedstat").read_text().split()[0])
                    waiting += (thread / "children").read_text().split()
        return nanoseconds / 1e6


@dataclass(frozen=True)
class ServingEngine(ABC):
    """An engine's executable with a model, and the arguments of the user."""

    executable: Path
    model: str
    arguments: tuple[str, ...]

    name: ClassVar[EngineName]
    program: ClassVar[str]
    """The executable's name."""
    built: ClassVar[Path]
    """Where ``make engines`` of this project's sources puts it, in the user's cache."""
    install: ClassVar[str]
    """How to get the program, for error messages."""
    models: ClassVar[str]
    """The models that it loads, for error messages."""
    server: ClassVar[type[EngineServer]]
    own_arguments: ClassVar[Sequence[str]]
    """Arguments that the search sets, besides ``--spec*``."""
    pricing: ClassVar[Sequence[Speculation]]
    """Settings of the server whose drafts are tested and whose passes are priced."""
    tolerated_mismatches: ClassVar[float] = 0.0
    """The share of requests whose counts may differ from the replay's: tokens beyond an answer's end are rounded
    otherwise when asked for.
    """
    has_one_loop: ClassVar[bool] = True
    """Whether a pass without speculation takes the same time in a server that speculates."""

    @classmethod
    def find(cls, command: str | None, model: str) -> Self:
        """The engine of ``--engine-command``, by default the one on the PATH or the one that ``make engines`` built.

        Raises:
            UserError: there is none, or the command sets what the search sets.
        """
        words = shlex.split(command or cls.program) or [""]
        built = user_cache().parent / "autotune-engines" / cls.built
        found = shutil.which(words[0]) or (built if words[0] == cls.program and built.exists() else None)
        if found is None:
            raise UserError(
                f"{words[0] or '--engine-command'}: no such executable; {cls.install}, or give --engine-command or --url"
            )
        for word in words[1:]:
            if word.startswith("--spec") or word.partition("=")[0].replace("_", "-") in cls.own_arguments:
                raise UserError(f"--engine-command: {word} is set by the search; leave it out")
        return cls(Path(found).resolve(), model, tuple(words[1:]))

    @classmethod
    @abstractmethod
    def find_model(cls, target: str, *, local_only: bool = False) -> tuple[str, ModelReference] | None:
        """The name that the engine is given for a target, and the target's weights; None if it cannot load them.

        Args:
            local_only: download nothing, because the engine runs elsewhere.

        Raises:
            UserError: there is no such model on the Hugging Face Hub.
        """

    @classmethod
    @abstractmethod
    def find_draft(cls, draft: str, target: str) -> tuple[ModelType, Path]:
        """How the engine drafts with a model, and the file or folder that it loads.

        Raises:
            UserError: it does not draft with it.
        """

    @classmethod
    def chains(cls, draft: str, target: str) -> list[Speculation]:
        """Chains of 1 to 8 tokens of a draft model."""
        kind, path = cls.find_draft(draft, target)
        (option,) = OPTIONS[kind]
        return [Speculation(type=kind, options={option: k}, model=f"{path}") for k in range(1, 9)]

    @classmethod
    @abstractmethod
    def space(cls) -> list[Speculation]:
        """Every setting that is replayed, the defaults of a type first."""

    @abstractmethod
    def words(self, speculations: Sequence[Speculation] = ()) -> list[str]:
        """The command that starts the engine, for one or several types; none switch speculation off."""

    @abstractmethod
    def own_words(self, alias: str, at_once: int, longest: int) -> list[str]:
        """Arguments that the search adds: of a server for ``at_once`` requests of at most ``longest`` tokens, or 0 for
        any.
        """

    def types(self) -> list[SpeculationType]:
        """The types that the build has.

        Raises:
            UserError: another program, or a build without a type by which passes are priced.
        """
        return list(TYPES[self.name])

    def build_of(self, server: EngineServer) -> str:
        return server.build

    @contextmanager
    def started(
        self, speculations: Sequence[Speculation] = (), at_once: int = 1, longest: int = 0
    ) -> Iterator[EngineServer]:
        """Start a server in a new state; see ``server.running``."""
        alias = f"autotune-{os.urandom(8).hex()}"
        words = [*self.words(speculations), *self.own_words(alias, at_once, longest)]
        with running(words, self.program) as (url, process):
            server = self.server(url)
            server.process, server.speculations = process, speculations
            if server.alias != alias:
                raise UserError(
                    f"{url}: another program took this port while {self.program} started; give the command again"
                )
            yield server
