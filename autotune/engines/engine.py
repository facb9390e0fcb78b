"""Backends that are serving engines: servers that are started, answers that are recorded, replayed and priced. Loads no
torch.
"""

from __future__ import annotations

import functools
import math
import os
import shlex
import shutil
import subprocess
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from autotune.console import Console
from autotune.documents.deployment import Deployment
from autotune.documents.loads import LoadRun
from autotune.documents.provenance import ModelReference
from autotune.documents.speculation import DEEPEST, OPTIONS, ModelType, Options, Speculation
from autotune.engines.backend import Backend, EngineArm
from autotune.engines.chains import replay_chain, with_all_depths
from autotune.engines.engine_server import EngineServer
from autotune.engines.loads import serve_load
from autotune.engines.prices import (
    PRICED_TOKENS,
    EnginePrices,
    TimedRequest,
    measure_verifications,
    served_prices,
    with_draft,
)
from autotune.engines.process import built_here, running
from autotune.engines.replay import KEEPS_STATE, EngineRecorded, EngineSteps, replay_speculation
from autotune.engines.self_test import (
    FEWEST_PROMPTS,
    answers_in_turn,
    chain_requests,
    differing_answers,
    exact_requests,
    replayed_answers,
    require_replayed,
)
from autotune.engines.served import Served, require_served
from autotune.errors import UserError
from autotune.files import WORKSPACE, append_line, content_key, read_lines
from autotune.replay.degenerate_answers import degenerate_answers
from autotune.workloads.prompt import WorkloadPrompt

OFF = "off"


class EngineBackend(Backend):
    """A serving engine with a model: an executable and the user's arguments, or a server that runs at ``url``.

    Args:
        target: the model that the engine loads.
        command: executable and arguments of every server; None: the one on the PATH, or that ``make engines`` built.
        url: of a server that runs, whose settings stay.
        draft: a draft model, whose chains are tuned beside the n-grams.

    Raises:
        UserError: a file is not here, the engine does not load a model, or the command sets what the search sets.
    """

    program: ClassVar[str]
    """The executable's name."""
    install: ClassVar[str]
    """How to get the program, for error messages."""
    models: ClassVar[str]
    """The models that it loads, for error messages."""
    server: ClassVar[type[EngineServer]]
    counting: Sequence[str] = ()
    """Arguments of a server that speculates by which its replies have counts; none for a build without."""
    own_arguments: ClassVar[Sequence[str]]
    """Arguments that the search sets, besides ``--spec*``."""
    tested: ClassVar[Sequence[Speculation]]
    """Settings of the servers of the self-test, one for each type. Passes are priced in the first one's."""
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
        self.plain: Callable[[], AbstractContextManager[EngineServer]] = self.started
        """A server without speculation: a new one, unless it is ``kept_open``."""
        self.executable, self.arguments = self.find(command) if url is None else (Path(self.program), [])
        self.precision = self.read_model()
        self.heads = dict[str, Speculation]()
        """Chains at the greatest depth, by type; the given draft in place of one that is found."""
        given = [(*self.find_draft(draft, self.target), DEEPEST)] if draft is not None else []
        for kind, path, depth in (*given, *([] if self.is_fixed else self.find_heads())):
            options: Options = dict.fromkeys(OPTIONS[kind], depth)
            self.heads.setdefault(kind, Speculation(type=kind, options=options, model=str(path or "")))

    @classmethod
    def restored(cls, deployment: Deployment, *, command: str | None = None, **options: Any) -> Self:
        """With ``command``, the profile's executable or, if it is not here, the engine's; without heads to record."""
        executable = deployment.command[0]
        if command is None:
            command = shlex.join([executable if Path(executable).exists() else cls.program, *deployment.arguments])
        backend = cls(deployment.model.id, command=command, **options)
        if not backend.model.is_same(deployment.model):
            raise UserError(f"{deployment.model.id}: not the model that the profile was tuned for; restore its files")
        backend.heads = {}
        return backend

    @classmethod
    def find(cls, command: str | None) -> tuple[Path, list[str]]:
        """The executable and the user's arguments."""
        words = shlex.split(command or cls.program) or [""]
        executable = shutil.which(words[0]) or (built_here(cls.name, cls.program) if words[0] == cls.program else None)
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
    def find_heads(self) -> list[tuple[ModelType, Path | None, int]]:
        """Types of the target's own head and of published ones near it, with the file or folder of one that is not the
        target's own, and the greatest depth.
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
        with ExitStack() as stack:
            url, process = self._running(stack, words, speculation)
            server = self.server(url)
            server.process, server.speculation = process, speculation
            if server.alias != alias:
                raise UserError(
                    f"{url}: another program took this port while {self.program} started; give the command again"
                )
            self.build = self.build_of(server)
            yield server

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Inside the context, one plain server is started, which may take a minute, and answers for all methods."""
        with ExitStack() as stack:
            self.plain = functools.cache(lambda: nullcontext(stack.enter_context(self.started())))
            try:
                yield
            finally:
                self.plain = self.started

    def _running(
        self, stack: ExitStack, words: Sequence[str], speculation: Speculation | None
    ) -> tuple[str, subprocess.Popen[bytes]]:
        """The address and process of a server, whose replies have counts where it speculates and the build can."""
        if speculation is not None and self.counting:
            try:
                return stack.enter_context(running([*words, *self.counting], self.program))
            except UserError as error:
                if self.counting[0] not in str(error):
                    raise
            self.console.say(f"counts     {self.program} has no {self.counting[0]}: its counters are read, alone")
            self.counting = ()
        return stack.enter_context(running(words, self.program))

    def configurations(self) -> list[Speculation]:
        speculations = [
            Speculation(type=kind, options=dict(zip(OPTIONS[kind], values, strict=True)))
            for kind, rows in self.space.items()
            for values in (OPTIONS[kind].values(), *rows)
        ]
        for head in self.heads.values():
            speculations += [head.at_depth(k) or head for k in range(1, (head.depth or 0) + 1)]
        return list({speculation.label: speculation for speculation in speculations}.values())

    def record(self, prompts: Sequence[WorkloadPrompt], until: float = math.inf) -> EngineRecorded:
        require_served(prompts, reads_images=self.server.reads_images)
        with self.plain() as server:
            first = server.prompt_tokens(prompts[0])  # by the engine's chat template and tokenizer
            where = [self.model.sha256 or self.model.id, self.build, self.url, self.arguments, first]
            folder = WORKSPACE / "engines" / content_key(where)
            answers = self._recorded(server, prompts, folder, until)
            if all(len(answer.tokens) == 1 for answer in answers):
                raise UserError(
                    "every answer has one token, and nothing to speculate; give other prompts or --max-new-tokens"
                )
            prompts = prompts[: len(answers)]
            recorded = EngineRecorded(prompts, answers, server.context)
        if warning := degenerate_answers([answer.tokens for answer in answers], [answer.limit for answer in answers]):
            self.console.say(f"answers    {warning}")
        tokens = sum(len(answer.tokens) for answer in answers)
        self.console.say(f"plain      {tokens} tokens of {len(prompts)} prompts, in {folder}")
        chains, left_out = dict[str, Sequence[Served]](), dict[str, str]()
        for kind, head in self.heads.items():
            with self._leaving_out(left_out, kind), self.started(head) as server:
                chains[kind] = self._recorded(server, prompts, folder, until)
        return replace(recorded, chains=chains, left_out=left_out)

    def _recorded(
        self, server: EngineServer, prompts: Sequence[WorkloadPrompt], folder: Path, until: float
    ) -> list[Served]:
        """Answers that do not depend on their order, recorded once."""
        head = server.speculation
        file, answers = folder / f"{head.key if head else 'plain'}.jsonl", list[Served]()
        known = {row["prompt_sha256"]: row for row in read_lines(file)}
        with self.console.stage("answers of the engine", len(prompts)) as update:
            for number, prompt in enumerate(prompts, start=1):
                if number > FEWEST_PROMPTS and time.monotonic() > until:
                    break
                if prompt.sha256 not in known:
                    answer = server.ask(prompt)
                    if head is None:
                        answer = answer.model_copy(update={"beyond": server.continuation(answer, prompt)})
                    elif not prompt.images:  # of which the tokens alone are no prompt
                        answer = with_all_depths(answer, head, server)
                    known[prompt.sha256] = answer.model_dump(mode="json", exclude_unset=True)
                    append_line(file, known[prompt.sha256])
                answers.append(Served.model_validate(known[prompt.sha256]))
                update(number, len(prompts))
        return answers

    def price(self, recorded: EngineRecorded, until: float = math.inf) -> EnginePrices:
        """Passes are priced in a server of the self-test, whose requests are answered before. Servers that speculate
        are timed beside a plain one.
        """
        left_out, served = dict(recorded.left_out), list[TimedRequest]()
        with self.plain() as plain:
            with self.started(self.tested[0]) as pricing:
                for tested in () if self.is_fixed else self.tested:
                    with self._leaving_out(left_out, tested.type), ExitStack() as stack:
                        server = pricing if tested == self.tested[0] else stack.enter_context(self.started(tested))
                        off, of_tested = self._in_turn([plain, server], recorded, until)
                        replayed = replayed_answers(tested, of_tested, plain, recorded.prompts)
                        requests = [TimedRequest(a, beside, r) for a, r, beside in zip(*replayed, off, strict=True)]
                        exact, text = exact_requests(requests, self.tolerated_mismatches)
                        self.console.say(f"self-test  {tested.type}: {text}; {differing_answers(off, recorded)}")
                        served += exact
                asked = sorted((answer.prompt_tokens for answer in recorded.answers), key=len)
                ends = asked[:: max(1, len(asked) - 1)]  # after the shortest and the longest prompt
                with self.console.stage("prices of forward passes") as update:
                    steps = measure_verifications(pricing, ends, update, seed=self.seed, until=until)
            has_one_loop = self.has_one_loop or self.is_fixed  # a server at a URL drafts in its plain answers too
            prices = served_prices(EnginePrices(steps, left_out), served, has_one_loop=has_one_loop)
            for kind in recorded.chains:
                head = self.heads[kind]
                first = head.at_depth(1) or head
                with self._leaving_out(left_out, kind), self.started(first) as shallow, self.started(head) as deep:
                    off, of_first, of_head = self._in_turn([plain, shallow, deep], recorded, until)
                    near = chain_requests(first, of_first, off, recorded)
                    self.console.say(f"self-test  {first.label}: {require_replayed(near)}")
                    prices = with_draft(prices, head, [*near, *chain_requests(head, of_head, off, recorded)])
        self.console.say(f"prices     {prices.text()}")
        return prices

    def _in_turn(self, servers: Sequence[EngineServer], recorded: EngineRecorded, until: float) -> list[list[Served]]:
        return answers_in_turn(servers, recorded, until, pause_s=self.pause_s, seed=self.seed)

    @contextmanager
    def _leaving_out(self, left_out: dict[str, str], kind: str) -> Iterator[None]:
        """Inside the context, a failure leaves out a type, in one line."""
        try:
            yield
        except UserError as error:
            left_out[kind] = str(error)
            self.console.say(f"left out   {kind}: {error}")

    def replay(self, configuration: Speculation | None, recorded: EngineRecorded) -> EngineSteps:
        """Along the plain answers, and of chains along those of their server at the greatest depth."""
        if configuration is not None and configuration.is_chain:
            answers = recorded.chains[configuration.type]
            replays = [replay_chain(configuration, answer, recorded.context)[0] for answer in answers]
        else:
            replays = replay_speculation(configuration, recorded.known, recorded.context)
        return EngineSteps(configuration, replays, [len(answer.tokens) - 1 for answer in recorded.answers])

    @contextmanager
    def arm(self, configuration: Speculation | None) -> Iterator[EngineArm]:
        model = self.model.sha256 or self.model.id
        with self.started(configuration) if configuration else self.plain() as server:
            yield EngineArm(
                name=configuration.label if configuration else OFF,
                key=content_key([self.name, model, self.build, self.arguments, configuration and configuration.key]),
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
        label = configuration.label if configuration else OFF
        longest = max(len(answer.prompt_tokens) + answer.limit for answer in recorded.answers) + PRICED_TOKENS[-1]
        keeps_state = configuration is not None and configuration.type in KEEPS_STATE
        with ExitStack() as servers:
            server = None
            for load in sorted(loads):
                try:
                    if server is None or keeps_state or self.has_server_per_load:
                        servers.close()
                        server = servers.enter_context(self.started(configuration, load, longest))
                    yield serve_load(server, recorded, load, label, repeats=not keeps_state, seed=self.seed)
                except UserError as error:
                    yield LoadRun(label=label, at_once=load, failure=str(error))
