"""Backends that are serving engines: servers that are started, answers that are recorded, replayed and priced. Loads no
torch.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
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
from autotune.documents.speculation import DEEPEST, OPTIONS, ModelType, Options, Speculation
from autotune.engines.backend import Backend, EngineArm
from autotune.engines.chains import pairs_of, replay_chain, require_replayed, with_all_depths
from autotune.engines.engine_server import EngineServer
from autotune.engines.loads import serve_load
from autotune.engines.prices import PRICED_TOKENS, EnginePrices, Pairs, measure_verifications, served_prices, with_draft
from autotune.engines.process import built_here, running
from autotune.engines.replay import KEEPS_STATE, EngineRecorded, EngineSteps, replay_speculation, replayed_pairs
from autotune.engines.served import Served, require_served
from autotune.errors import UserError
from autotune.files import WORKSPACE, append_line, content_key, read_lines
from autotune.replay.degenerate_answers import degenerate_answers
from autotune.workloads.prompt import WorkloadPrompt

OFF = "off"
FEWEST_PROMPTS = 4  # are recorded, whatever time that takes
AGAIN = 4  # prompts that are asked again
SELF_TEST = 12  # prompts


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
        chains, chains_again, left_out = dict[str, Sequence[Served]](), dict[str, Sequence[Served]](), dict[str, str]()
        for kind, head in self.heads.items():
            try:
                with self.started(head) as server:
                    answered = self._recorded(server, prompts, folder, until)
                    chains_again[kind] = [server.ask(prompts[number]) for number in longest if number < len(answered)]
                    chains[kind] = answered
            except UserError as error:
                left_out[kind] = str(error)
                self.console.say(f"draft      {kind} is left out: {error}")
        return replace(recorded, chains=chains, chains_again=chains_again, left_out=left_out)

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
        """Passes are priced in a server of the self-test, whose requests are answered before."""
        left_out, served = dict(recorded.left_out), list[Any]()
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
        for kind in recorded.chains:
            try:
                prices = with_draft(prices, self.heads[kind], self._chain_pairs(self.heads[kind], recorded))
            except UserError as error:
                left_out[kind] = str(error)
                self.console.say(f"self-test  {kind} is left out: {error}")
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
        exact = [(answer, replayed) for answer, replayed in pairs if answer.draft_counts == replayed.counts]
        counted, predicted = (
            "{} verifications, {} drafted, {} accepted".format(*map(sum, zip(*rows, strict=True)))
            for rows in ([answer.draft_counts for answer, _ in pairs], [replayed.counts for _, replayed in pairs])
        )
        self.console.say(
            f"self-test  {tested.type}: counts are the predicted in {len(exact)} of {len(pairs)} requests; {counted}"
        )
        if len(exact) < (1 - self.tolerated_mismatches) * len(pairs):
            raise UserError(f"the build has another rule: {counted}; predicted are {predicted}")
        return exact

    def _chain_pairs(self, head: Speculation, recorded: EngineRecorded) -> dict[int, Pairs]:
        """Requests of servers at depth 1 and at the greatest beside their replay, by depth.

        Raises:
            UserError: the server at depth 1 drafts otherwise than the replay says, or does not start.
        """
        first = head.at_depth(1) or head
        with self.started(first) as server:
            answers = [server.ask(prompt) for prompt in recorded.prompts[:SELF_TEST]]
        tested = pairs_of(first, answers, recorded)
        self.console.say(f"self-test  {first.label}: {require_replayed(tested)}")
        return {1: tested, head.depth or 1: pairs_of(head, recorded.chains_again[head.type], recorded)}

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
        with self.started(configuration) as server:
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
