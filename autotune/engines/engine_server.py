"""A client of an engine's server over HTTP, with errors in one line. Loads no torch."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from autotune.documents.speculation import Milliseconds, Natural, Speculation
from autotune.engines.process import ENDING_S, open_url
from autotune.engines.served import Served, require_served
from autotune.errors import UserError, reading
from autotune.strict_parsing import parse_json
from autotune.workloads.chat import Message
from autotune.workloads.prompt import WorkloadPrompt

ANSWER_TIMEOUT_S = 600.0  # of one request
ASK_TIMEOUT_S = 20.0  # of a question about the engine
MOST_BYTES = 1 << 26  # of a reply
TEXT, NATURAL, TOKENS = TypeAdapter[str](str), TypeAdapter[int](Natural), TypeAdapter[list[int]](list[Natural])
TIMES = TypeAdapter[list[float]](list[Milliseconds])
OBJECT = TypeAdapter[dict[str, Any]](dict[str, Any])
T = TypeVar("T")
ADVICE = "give the address of a serving engine, such as http://localhost:8000"

SAMPLE = re.compile(
    r"^((?:vllm|llamacpp):(?:(?:spec_decode|generation|prefix_cache)\w+_total|num_requests_waiting))(?:\{.*\})? (\S+)",
    re.MULTILINE,
)


def text_chat(prompt: WorkloadPrompt) -> dict[str, Any]:
    """A prompt without images as a chat of OpenAI's API."""
    content, variables = prompt.content, prompt.settings.chat_template_kwargs
    chat = [Message(role="user", content=content)] if isinstance(content, str) else content
    messages = [{"role": message.role, "content": message.text} for message in chat]
    return {"messages": messages, **({"chat_template_kwargs": variables} if variables else {})}


class EngineServer(ABC):
    """A client of one server, which sends one request at a time unless it streams.

    Raises:
        UserError: nothing answers at ``url``, or it is another program.
    """

    build: str
    """The server's own name of its build."""
    alias: str
    """The model's name there."""
    context: int
    """Tokens of a request."""
    speculation: Speculation | None = None
    """The settings of a server that was started here."""
    process: subprocess.Popen[bytes] | None = None
    """None of a server that was not started here."""
    priced_by: str
    """Arguments with which a server drafts as ``verify`` needs."""
    longest: int
    """Most tokens of a verification that is priced."""
    reads_images: bool = False
    """Whether prompts with images are served; else they are refused."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"{url}: an address begins with http:// or https://; {ADVICE}")

    @property
    def is_chain(self) -> bool:
        """Whether a model or a head drafts before every pass."""
        return self.speculation is not None and self.speculation.is_chain

    def reply_of(self, path: str) -> AbstractContextManager[None]:
        """Inside the context, a reply is read, whose form no server has to keep."""
        return reading(f"{self.url}{path}: not the reply of a serving engine", ADVICE)

    def read_json(self, path: str, body: dict[str, Any] | None = None, advice: str = ADVICE) -> dict[str, Any]:
        content = self.read(path, body, advice)
        with self.reply_of(path):
            return OBJECT.validate_python(parse_json(content.decode()))

    def value(
        self,
        path: str,
        kind: TypeAdapter[T],
        *keys: str | int,
        body: dict[str, Any] | None = None,
        advice: str = ADVICE,
    ) -> T:
        """The value at some keys of a reply, which has to be of a kind."""
        content: Any = self.read_json(path, body, advice)
        with self.reply_of(path):
            for key in keys:
                content = content[key]
            return kind.validate_python(content, strict=True)

    def read(self, path: str, body: dict[str, Any] | None = None, advice: str = ADVICE) -> bytes:
        return b"".join(self.lines(path, body, advice))

    def metrics(self, advice: str = ADVICE) -> Counter[str]:
        """The counters of speculation, of tokens and of waiting requests by name, summed over the engine's replicas."""
        text, counters = self.read("/metrics", advice=advice).decode(errors="replace"), Counter[str]()
        with self.reply_of("/metrics"):
            for name, value in SAMPLE.findall(text):
                counters[name] += int(float(value))
            TOKENS.validate_python(list(counters.values()))
        return counters

    def streamed(self, path: str, body: dict[str, Any]) -> Iterator[tuple[dict[str, Any], float]]:
        """Parts of a reply, and seconds from the request to each."""
        started = time.perf_counter()
        for line in self.lines(path, body | {"stream": True}, "look into its log"):
            if line.startswith(b"data: {"):
                second = time.perf_counter() - started
                with self.reply_of(path):
                    part = parse_json(line[6:].decode())
                yield part, second

    def lines(self, path: str, body: dict[str, Any] | None, advice: str) -> Iterator[bytes]:
        """Lines of a reply as they come."""
        content, timeout_s = (None, ASK_TIMEOUT_S) if body is None else (json.dumps(body).encode(), ANSWER_TIMEOUT_S)
        try:
            request = urllib.request.Request(self.url + path, content, {"Content-Type": "application/json"})
            with open_url(request, timeout_s) as response:
                left = MOST_BYTES
                while line := response.readline(left + 1):
                    if (left := left - len(line)) < 0:
                        raise HTTPException(f"its reply is longer than {MOST_BYTES} bytes")
                    yield line
                if response.length:
                    raise HTTPException("its reply is cut short")
        except urllib.error.HTTPError as error:
            raise UserError(f"{self.url}{path}: the engine answers {error.code}{_message(error)}; {advice}") from None
        except (OSError, ValueError, HTTPException) as error:  # refused, timed out, cut short, no HTTP, or no address
            reason = (
                f"{self.url}: no engine answers ({getattr(error, 'reason', error)}); start it, or check the address"
            )
            raise UserError(self._end() or reason) from None

    def ask(self, prompt: WorkloadPrompt) -> Served:
        """Decode one prompt greedily. Reading it takes none of the time.

        Raises:
            UserError: the server fails, or does not decode such prompts (``require_served``).
        """
        require_served([prompt], reads_images=self.reads_images)
        answer = self.answer(self.prompt_tokens(prompt), prompt.settings.max_new_tokens, prompt)
        return answer.model_copy(
            update={"prompt": prompt.name, "prompt_sha256": prompt.sha256, "task": prompt.settings.task}
        )

    @abstractmethod
    def prompt_tokens(self, prompt: WorkloadPrompt) -> list[int]:
        """The tokens of a prompt after the model's chat template."""

    @abstractmethod
    def answer(self, tokens: list[int], limit: int, prompt: WorkloadPrompt | None = None) -> Served:
        """Decode the tokens of a prompt greedily; ``prompt`` has its images, if any."""

    def continuation(self, answer: Served, prompt: WorkloadPrompt | None = None) -> list[int]:
        """The tokens that follow an answer, of an engine whose drafts reach there."""
        return []

    @abstractmethod
    def verify(self, prompt: list[int], n: int) -> Served:
        """A request that is exactly one verification of ``n`` tokens after its first token, in a server that drafts as
        ``priced_by`` says; or one that drafted another number of tokens than n - 1.
        """

    @abstractmethod
    def verified(self, tokens: list[int]) -> Served:
        """A request whose second token, and those after it, come of a verification, in a server that drafts chains."""

    @abstractmethod
    def stream(
        self, answer: Served, prompt: WorkloadPrompt | None = None, cache: str = ""
    ) -> tuple[list[int], list[float]]:
        """Decode the prompt of an answer as one of several requests: tokens, and seconds from the request to each part
        of the reply.

        Args:
            cache: name of the pass over the prompts, ``LOAD.NUMBER``: the prefix cache has nothing of an earlier one.
        """

    @abstractmethod
    def under_load(self) -> tuple[int, int, int]:
        """Requests that wait now, and of all prompts that were streamed, tokens that were in the prefix cache, and all
        tokens; 0 for what the engine does not say.
        """

    @abstractmethod
    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""

    def _end(self) -> str:
        """How a server that was started here has ended; empty if it has not."""
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = self.process.wait(ENDING_S)
                cause = f"signal {-code}" if code < 0 else f"exit code {code}"
                return f"the server ended while it was used, with {cause}"
        return ""

    def cpu_ms(self) -> float:
        """CPU time of the threads of the server and its workers; 0 if they are not on this machine."""
        nanoseconds, waiting = 0, [str(self.process.pid)] if self.process else []
        while waiting:
            for thread in Path(f"/proc/{waiting.pop()}/task").glob("*"):
                with suppress(OSError, ValueError, IndexError):  # a thread that has ended, whose time is not in the sum
                    nanoseconds += int((thread / "schedstat").read_text().split()[0])
                    waiting += (thread / "children").read_text().split()
        return nanoseconds / 1e6


def _message(error: urllib.error.HTTPError) -> str:
    """The message of an error in one line after a comma, as OpenAI's API has it; empty for a reply without."""
    with suppress(OSError, HTTPException, ValueError, TypeError, LookupError, AttributeError):
        content = parse_json(error.read(MOST_BYTES).decode())
        return ", " + " ".join(str(content.get("error", content)["message"]).split())[:400]
    return ""
