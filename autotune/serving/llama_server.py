"""llama.cpp's ``llama-server``: finding it, starting it, and requests whose time and speculation it counts. Loads no torch."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from autotune.documents.engine_profile import (
    OPTIONS,
    NgramType,
    ServedAnswer,
    Speculation,
    SpeculationCounts,
    arguments_of,
)
from autotune.errors import UserError
from autotune.files import known_sha256_of, user_cache
from autotune.serving.client import TEXT, TIMES, TOKENS, EngineHttp
from autotune.serving.server import running
from autotune.strict_parsing import parse_json
from autotune.workloads.prompt import Message, WorkloadPrompt

EXECUTABLE = "llama-server"
BUILT = Path("autotune-engines") / "llama.cpp" / "bin" / EXECUTABLE  # in the user's cache: made by ``make engines``
FIXED = ("--metrics", "--cache-ram", "0")
"""Arguments of every server: counters; no prompts of former requests."""
ONE_SLOT = ("--parallel", "1")
"""The replay follows its state."""
OWN_ARGUMENTS = ("-m", "--model", "-a", "--alias", "-np", "--parallel", "--host", "--port")
PRICED_BY: NgramType = "ngram-mod"
COUNTERS = {"verifications": "drafts", "drafted": "draft_tokens", "accepted": "accepted_tokens"}


@dataclass(frozen=True)
class EngineCommand:
    """A llama-server with a model, and the arguments of the user."""

    executable: Path
    model: Path
    arguments: tuple[str, ...]

    def words(self, speculations: Sequence[Speculation] = ()) -> list[str]:
        return [str(self.executable), "-m", str(self.model), *self.arguments, *arguments_of(speculations)]

    @property
    def build(self) -> str:
        """SHA-256 of the executable and the libraries next to it: builds from a source archive have no version."""
        libraries = sorted(path for path in self.executable.parent.glob("lib*.so*") if not path.is_symlink())
        return known_sha256_of(self.executable, *libraries)

    def types(self) -> list[NgramType]:
        """The n-gram types that the build has, by its help.

        Raises:
            UserError: another program, or a build without the type by which passes are priced.
        """
        try:
            done = subprocess.run([self.executable, "--help"], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            raise UserError(f"{self.executable}: cannot be run ({error}); name a {EXECUTABLE}") from None
        names = set(re.findall(r"[\w-]+", done.stdout.partition("--spec-type")[2].partition("\n--")[0]))
        if PRICED_BY not in names:
            raise UserError(
                f"{self.executable}: is no {EXECUTABLE}, or one without --spec-type {PRICED_BY}; build b11434 or newer: make engines"
            )
        return [name for name in OPTIONS if name in names]


def find_engine(command: str | None, model: Path) -> EngineCommand:
    """The server of ``--engine-command``, by default the one on the PATH or the one that ``make engines`` built.

    Raises:
        UserError: there is none, or the command sets what the search sets.
    """
    words = shlex.split(command or EXECUTABLE) or [""]
    built = user_cache().parent / BUILT
    found = shutil.which(words[0]) or (built if words[0] == EXECUTABLE and built.exists() else None)
    if found is None:
        raise UserError(
            f"{words[0] or '--engine-command'}: no such executable; run make engines, or name a {EXECUTABLE}"
        )
    if own := [word for word in words[1:] if word in OWN_ARGUMENTS or word.startswith("--spec")]:
        raise UserError(f"--engine-command: {own[0]} is set by the search; leave it out")
    return EngineCommand(Path(found).resolve(), model.resolve(), tuple(words[1:]))


class LlamaServer(EngineHttp):
    """A client of one llama-server, whose first slot it uses.

    Raises:
        UserError: nothing answers at ``url``, or it is no llama-server.
    """

    def __init__(self, url: str, process: subprocess.Popen[bytes] | None = None) -> None:
        super().__init__(url)
        self.process = process
        props = self.read_json("/props")
        with self.reply_of("/props"):
            (self.context,) = TOKENS.validate_python([props["default_generation_settings"]["n_ctx"]], strict=True)
            self.build = TEXT.validate_python(props["build_info"], strict=True)
        self.alias = props.get("model_alias")

    def prompt_tokens(self, prompt: WorkloadPrompt) -> list[int]:
        """The tokens of a prompt after the model's chat template."""
        content = prompt.content
        chat = [Message(role="user", content=content)] if isinstance(content, str) else content
        messages = [{"role": message.role, "content": message.text} for message in chat]
        with self.reply_of("/apply-template"):
            reply = self.read_json("/apply-template", {"messages": messages}, "check its chat template")
            text = TEXT.validate_python(reply["prompt"], strict=True)
        request = {"content": text, "add_special": True, "parse_special": True}
        with self.reply_of("/tokenize"):
            tokens = self.read_json("/tokenize", request, "check its version")["tokens"]
            return TOKENS.validate_python(tokens, strict=True)

    def ask(self, prompt: WorkloadPrompt) -> ServedAnswer:
        return self.answer(self.prompt_tokens(prompt), prompt.settings.max_new_tokens)

    def answer(self, tokens: list[int], limit: int, *, forced: int | None = None) -> ServedAnswer:
        """Decode one prompt greedily, after a request that only reads it: from nothing, so that no answer depends on the order of
        prompts, and outside the CPU time.

        Args:
            forced: a token that every position is made to choose, without such a request.
        """
        bias = {} if forced is None else {"logit_bias": [[forced, 1e4]]}
        request = {"prompt": tokens, "temperature": 0.0, "return_tokens": True, "id_slot": 0}
        if forced is None:
            self.read_json("/completion", request | {"n_predict": 1, "cache_prompt": False}, "look into its log")
        before = self._cpu_ms()
        reply = self.read_json("/completion", request | bias | {"n_predict": limit}, "look into its log")
        spent = max(0.0, self._cpu_ms() - before)  # the time of a thread that ended is not in the sum
        with self.reply_of("/completion"):
            timings = reply["timings"]
            times = [timings["predicted_ms"], timings["prompt_ms"]]
            wall_ms, prompt_ms = TIMES.validate_python(times, strict=True)
            return ServedAnswer(
                prompt_tokens=tokens,
                tokens=reply["tokens"],
                limit=limit,
                is_ended=reply["stop_type"] == "eos",
                drafted=timings.get("draft_n", 0),
                accepted=timings.get("draft_n_accepted", 0),
                wall_ms=wall_ms,
                cpu_ms=spent * wall_ms / max(wall_ms + prompt_ms, 1e-9),
            )

    def stream(self, answer: ServedAnswer) -> tuple[list[int], list[float]]:
        """Decode the prompt of an answer as one of several requests: tokens, and seconds from the request to each part of the reply."""
        request = {"prompt": answer.prompt_tokens, "n_predict": answer.limit, "temperature": 0.0, "return_tokens": True}
        tokens, seconds, started = list[int](), list[float](), time.perf_counter()
        for line in self.lines("/completion", request | {"cache_prompt": False, "stream": True}, "look into its log"):
            if line.startswith(b"data: "):
                with self.reply_of("/completion"):
                    tokens += TOKENS.validate_python(parse_json(line[6:].decode())["tokens"], strict=True)
                seconds.append(time.perf_counter() - started)
        return tokens, seconds

    def counts(self) -> SpeculationCounts:
        """Counts of all requests since the start of a server that was started here; zeros of another one.

        Raises:
            UserError: the server exposes no metrics.
        """
        if self.process is None:
            return SpeculationCounts(**dict.fromkeys(COUNTERS, 0))
        text = self.read("/metrics", advice="start it with --metrics").decode(errors="replace")
        values = {
            name: re.search(rf"^llamacpp:spec_decode_num_{counter}_total (\S+)$", text, re.MULTILINE)
            for name, counter in COUNTERS.items()
        }
        with self.reply_of("/metrics"):
            return SpeculationCounts(**{name: int(float(found[1])) if found else 0 for name, found in values.items()})

    def _cpu_ms(self) -> float:
        nanoseconds = 0
        for path in Path(f"/proc/{self.process.pid}/task").glob("*/schedstat") if self.process else ():
            with suppress(OSError, ValueError, IndexError):  # a thread that has ended
                nanoseconds += int(path.read_text().split()[0])
        return nanoseconds / 1e6


@contextmanager
def started_llama(
    command: EngineCommand, speculations: Sequence[Speculation] = (), slots: Sequence[str] = ONE_SLOT
) -> Iterator[LlamaServer]:
    """Start a llama-server in a new state; see ``server.running``."""
    alias = f"autotune-{os.urandom(8).hex()}"
    with running([*command.words(speculations), *FIXED, *slots, "--alias", alias], EXECUTABLE) as (url, process):
        server = LlamaServer(url, process)
        if server.alias != alias:
            raise UserError(f"{url}: another program took this port while {EXECUTABLE} started; give the command again")
        yield server
