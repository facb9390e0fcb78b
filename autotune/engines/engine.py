"""Backends that are serving engines: servers that are started, answers that are recorded, replayed and priced. Loads no
torch.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from autotune.console import Console
from autotune.documents.deployment import Deployment
from autotune.documents.loads import LoadRun
from autotune.documents.provenance import ModelReference
from autotune.documents.speculation import OPTIONS, ModelType, Speculation
from autotune.engines.backend import Backend, EngineArm
from autotune.engines.engine_server import EngineServer
from autotune.engines.loads import serve_load
from autotune.engines.prices import PRICED_TOKENS, EnginePrices, Pairs, measure_verifications, served_prices
from autotune.engines.process import running
from autotune.engines.replay import (
    KEEPS_STATE,
    ChainSteps,
    EngineRecorded,
    EngineSteps,
    replay_speculation,
    replayed_pairs,
)
from autotune.engines.served import Served, require_served
from autotune.errors import UserError
from autotune.files import WORKSPACE, append_line, content_key, read_lines, user_cache
from autotune.replay.degenerate_answers import degenerate_answers
from autotune.workloads.prompt import WorkloadPrompt

OFF = "off"
FEWEST_PROMPTS = 4  # are recorded, whatever time that takes
AGAIN = 4  # prompts that are asked again
SELF_TEST = 12  # prompts
CHAINS = (1, 3, 5, 8)  # tokens of a draft model's chains; 3 is the default


class EngineBackend(Backend):
    """A serving engine with a model: an executable and the user's arguments, or a server that runs at ``url``.

    Args:
        target: the model that the engine loads.
        command: executable and arguments of every server; None: the one on the PATH, or that ``make engines`` built.
        url: of a server that runs, whose settings stay.
        draft: a draft model, whose chains are tuned beside the n-grams.

    Raises:
        UserError: the executable or a model is not here, the engine does not load it, or the command sets what the
            search sets.
    """

    program: ClassVar[str]
    """The executable's name."""
    install: ClassVar[str]
    """How to get the program, for error messages."""
    models: ClassVar[str]
    """The models that it loads, for error messages."""
    server: ClassVar[type[EngineServer]]
    own_arguments: ClassVar[Sequence[str]]
    """Arguments that the search sets, besides ``--spec*``."""
    tested: ClassVar[Sequence[Speculation]]
    """Settings of the servers whose counts are compared with the replay's, one for each type. Passes are priced in the
    first one's.
    """
    space: ClassVar[dict[str, Sequence[tuple[float, ...]]]]
    """Values of the options that are replayed beside the defaults, by type."""
    tolerated_mismatches: ClassVar[float] = 0.0
    """The share of requests whose counts may differ from the replay's."""
    has_one_loop: ClassVar[bool] = True
    """Whether a pass without speculation takes the same time in a server that speculates."""
    pause_s: ClassVar[float] = 0.0
    """Time after an answer for which a server keeps a core busy without work."""
    has_server_per_load: ClassVar[bool] = False
    """Whether a server is started for a number of requests, because that sets its memory."""

    def __init__(
        self,
        target: str,
        *,
        command: str | None = None,
        url: str | None = None,
        draft: str | None = None,
        console: Console | None = None,
        seed: int = 0,
    ) -> None:
        if url is not None and (command or draft):
            option = "command" if command else "draft"
            raise UserError(
                f"--set {self.name}:url: a server that runs keeps its settings; leave {self.name}:{option} out"
            )
        if (loadable := self.find_model(target, local_only=url is not None)) is None:
            raise UserError(f"{target}: {self.name} loads {self.models}; give one")
        self.target, self.model = loadable
        self.url, self.is_fixed = url, url is not None
        self.console, self.seed, self.build = console or Console(), seed, ""
        self.executable, self.arguments = self.find(command) if url is None else (Path(self.program), [])
        self.precision = self.read_model()
        self.chains = list[Speculation]()
        if draft is not None:
            kind, path = self.find_draft(draft, self.target)
            (option,) = OPTIONS[kind]
            self.chains = [Speculation(type=kind, options={option: k}, model=f"{path}") for k in CHAINS]

    @classmethod
    def restored(cls, deployment: Deployment, *, command: str | None = None, **options: Any) -> Self:
        """With the executable that the profile names, or that of ``command``."""
        if command is None and Path(deployment.command[0]).exists():
            command = shlex.join([deployment.command[0], *deployment.arguments])
        backend = cls(deployment.model.id, command=command, **options)
        if not backend.model.is_same(deployment.model):
            raise UserError(f"{deployment.model.id}: not the model that the profile was tuned for; restore its files")
        return backend

    @classmethod
    def find(cls, command: str | None) -> tuple[Path, list[str]]:
        """The executable and the user's arguments."""
        words = shlex.split(command or cls.program) or [""]
        executable = shutil.which(words[0])
        if (
            executable is None and words[0] == cls.program
        ):  # which ``make engines`` of this project's sources may have built
            executable = shutil.which(user_cache().parent / "autotune-engines" / cls.name / "bin" / cls.program)
        if executable is None:
            raise UserError(
                f"{words[0] or 'command'}: no such executable; {cls.install}, or give --set {cls.name}:command=..."
            )
        for word in words[1:]:
            if word.startswith("--spec") or word.partition("=")[0].replace("_", "-") in cls.own_arguments:
                raise UserError(f"{cls.name}:command: {word} is set by the search; leave it out")
        return Path(executable).resolve(), words[1:]

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

    @abstractmethod
    def read_model(self) -> str:
        """The precision of the weights.

        Raises:
            UserError: the file cannot be served.
        """

    @abstractmethod
    def words(self, speculation: Speculation | None) -> list[str]:
        """The command that starts the engine."""

    @abstractmethod
    def own_words(self, alias: str, at_once: int, longest: int) -> list[str]:
        """Arguments that the search adds: of a server for ``at_once`` requests of at most ``longest`` tokens, or 0 for
        any.
        """

    def build_of(self, server: EngineServer) -> str:
        return server.build

    @contextmanager
    def started(
        self, speculation: Speculation | None = None, at_once: int = 1, longest: int = 0
    ) -> Iterator[EngineServer]:
        """A server in a new state, see ``process.running``, or the one at the URL."""
        if self.url is not None:
            server = self.server(self.url)
            self.build = server.build
            yield server
            return
        alias = f"autotune-{os.urandom(8).hex()}"
        words = [*self.words(speculation), *self.own_words(alias, at_once, longest)]
        with running(words, self.program) as (url, process):
            server = self.server(url)
            server.process, server.speculation = process, speculation
            if server.alias != alias:
                raise UserError(
                    f"{url}: another program took this port while {self.program} started; give the command again"
                )
            self.build = self.build_of(server)
            yield server

    def configurations(self) -> list[Speculation]:
        speculations = [
            Speculation(type=kind, options=dict(zip(OPTIONS[kind], values, strict=True)))
            for kind, rows in self.space.items()
            for values in (OPTIONS[kind].values(), *rows)
        ]
        return list({speculation.label: speculation for speculation in [*speculations, *self.chains]}.values())

    def record(self, prompts: Sequence[WorkloadPrompt], until: float = math.inf) -> EngineRecorded:
        require_served(prompts, reads_images=self.server.reads_images)
        with self.started(None) as server:
            first = server.prompt_tokens(prompts[0])  # by the engine's chat template and tokenizer
            where = [self.model.sha256 or self.model.id, self.build, self.url, self.arguments, first]
            folder = WORKSPACE / "engines" / content_key(where)
            answers = self._recorded(server, prompts, folder, until)
            if all(len(answer.tokens) == 1 for answer in answers):
                raise UserError(
                    "every answer has one token, and nothing to speculate; give other prompts or --max-new-tokens"
                )
            prompts = prompts[: len(answers)]
            longest = sorted(range(len(prompts)), key=lambda number: -len(answers[number].tokens))[:AGAIN]
            again = [server.ask(prompts[number]) for number in longest]
            recorded = EngineRecorded(prompts, answers, again, server.context)
        if warning := degenerate_answers([answer.tokens for answer in answers], [answer.limit for answer in answers]):
            self.console.say(f"answers    {warning}")
        differing = sum(answer.tokens != answers[number].tokens for answer, number in zip(again, longest, strict=True))
        self.console.say(
            f"plain      {sum(len(answer.tokens) for answer in answers)} tokens of {len(prompts)} prompts, in {folder}; asked again, "
            f"{differing} of {len(again)} answers differ"
        )
        chains = dict[str, Sequence[Served]]()
        for chain in self.chains:
            with self.started(chain) as server:
                chains[chain.key] = self._recorded(server, prompts, folder, until)
        return replace(recorded, chains=chains)

    def _recorded(
        self, server: EngineServer, prompts: Sequence[WorkloadPrompt], folder: Path, until: float
    ) -> list[Served]:
        """Answers that do not depend on their order, recorded once."""
        label = server.speculation.key if server.speculation else "plain"
        file, answers = folder / f"{label}.jsonl", list[Served]()
        known = {row["prompt_sha256"]: row for row in read_lines(file)}
        with self.console.stage("answers of the engine", len(prompts)) as update:
            for number, prompt in enumerate(prompts, start=1):
                if number > FEWEST_PROMPTS and time.monotonic() > until:
                    break
                if prompt.sha256 not in known:
                    answer = server.ask(prompt)
                    if server.speculation is None:
                        answer = answer.model_copy(update={"beyond": server.continuation(answer, prompt)})
                    known[prompt.sha256] = answer.model_dump(mode="json", exclude_unset=True)
                    append_line(file, known[prompt.sha256])
                answers.append(Served.model_validate(known[prompt.sha256]))
                update(number, len(prompts))
        return answers

    def price(self, recorded: EngineRecorded, until: float = math.inf) -> EnginePrices:
        """Passes are priced in a server of the self-test, whose requests are answered before."""
        left_out, served = dict[str, str](), list[Any]()
        with ExitStack() as stack:
            pricing = stack.enter_context(self.started(self.tested[0]))
            for tested in () if self.is_fixed else self.tested:
                try:
                    served += self._self_test(tested, pricing, recorded)
                except UserError as error:
                    left_out[tested.type] = str(error)
                    self.console.say(f"self-test  {tested.type} is left out: {error}")
            asked = sorted((answer.prompt_tokens for answer in recorded.answers), key=len)
            ends = asked[:: max(1, len(asked) - 1)]  # after the shortest and the longest prompt
            with self.console.stage("prices of forward passes") as update:
                steps = measure_verifications(pricing, ends, update, seed=self.seed, until=until)
        has_one_loop = self.has_one_loop or self.is_fixed  # a server at a URL drafts in its plain answers too
        plain = replayed_pairs(None, recorded.again, recorded.context)
        prices = served_prices(EnginePrices(steps, left_out), plain, served, has_one_loop=has_one_loop)
        self.console.say(f"prices     {prices.text()}")
        return prices

    def _self_test(self, tested: Speculation, pricing: EngineServer, recorded: EngineRecorded) -> Pairs:
        """Requests of a new server whose counts are the replay's, beside it.

        Raises:
            UserError: these are too few, or the build does not have the type.
        """
        with nullcontext(pricing) if tested == self.tested[0] else self.started(tested) as server:
            answers = [server.ask(prompt) for prompt in recorded.prompts[:SELF_TEST]]
        following = [pricing.continuation(*pair) for pair in zip(answers, recorded.prompts, strict=False)]
        answers = [a.model_copy(update={"beyond": beyond}) for a, beyond in zip(answers, following, strict=True)]
        pairs = replayed_pairs(tested, answers, recorded.context)
        exact = [(answer, replayed) for answer, replayed in pairs if answer.counts == replayed.counts]
        counted, predicted = (
            "{} verifications, {} drafted, {} accepted".format(*map(sum, zip(*rows, strict=True)))
            for rows in ([answer.counts for answer, _ in pairs], [replayed.counts for _, replayed in pairs])
        )
        self.console.say(
            f"self-test  {tested.type}: counts are the predicted in {len(exact)} of {len(pairs)} requests; {counted}"
        )
        if len(exact) < (1 - self.tolerated_mismatches) * len(pairs):
            raise UserError(f"the build has another rule: {counted}; predicted are {predicted}")
        return exact

    def replay(self, configuration: Speculation | None, recorded: EngineRecorded) -> EngineSteps | ChainSteps:
        """Along the plain answers. The answers of a draft model's chain were recorded in servers of its own."""
        new_tokens = [len(answer.tokens) - 1 for answer in recorded.answers]
        if configuration is not None and configuration.is_chain:
            return ChainSteps(recorded.chains[configuration.key], new_tokens)
        replays = replay_speculation(configuration, recorded.known, recorded.context)
        return EngineSteps(configuration, replays, new_tokens)

    @contextmanager
    def arm(self, configuration: Speculation | None) -> Iterator[EngineArm]:
        with self.started(configuration) as server:
            key = [self.name, self.model.sha256 or self.model.id, self.build, self.arguments]
            yield EngineArm(
                name=configuration.label if configuration else OFF,
                key=content_key([*key, configuration and configuration.key]),
                keeps_state=configuration is not None and configuration.type in KEEPS_STATE,
                server=server,
                pause_s=self.pause_s,
            )

    def deploy(self, configuration: Speculation | None) -> Deployment:
        return Deployment(
            backend=self.name,
            model=self.model,
            command=self.words(configuration),
            arguments=self.arguments,
            speculation=configuration,
            build=self.build,
        )

    def at_loads(
        self, configuration: Speculation | None, recorded: EngineRecorded, loads: Sequence[int]
    ) -> Iterator[LoadRun]:
        """One server for all loads, unless it drafts from earlier answers or has a place for each request."""
        answers, label = recorded.answers, configuration.label if configuration else OFF
        longest = (
            max(len(answer.prompt_tokens) + answer.limit for answer in answers) + PRICED_TOKENS[-1]
        )  # with a draft
        keeps_state = configuration is not None and configuration.type in KEEPS_STATE
        is_alone = keeps_state or self.has_server_per_load
        with ExitStack() as servers:
            server = None
            for load in sorted(loads):
                try:
                    if server is None or is_alone:
                        servers.close()
                        server = servers.enter_context(self.started(configuration, load, longest))
                    yield serve_load(
                        server, answers, recorded.prompts, load, label, repeats=not keeps_state, seed=self.seed
                    )
                except UserError as error:
                    yield LoadRun(label=label, at_once=load, failure=str(error))
