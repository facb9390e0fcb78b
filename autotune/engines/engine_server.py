"""A client of an engine's server. Loads no torch."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.documents.speculation import Speculation
from autotune.engines.http import EngineHttp
from autotune.engines.process import ENDING_S
from autotune.engines.served import Served
from autotune.errors import UserError
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
    speculation: Speculation | None = None
    """The settings of a server that was started here."""
    process: subprocess.Popen[bytes] | None = None
    """None of a server that was not started here."""
    priced_by: str
    """Arguments with which a server drafts as ``verify`` needs."""
    longest: int
    """Most tokens of a verification that is priced."""

    @property
    def has_draft(self) -> bool:
        """Whether a draft model drafts before every pass."""
        return self.speculation is not None and bool(self.speculation.model)

    def ask(self, prompt: WorkloadPrompt) -> Served:
        """Decode one prompt greedily. Reading it takes none of the time."""
        answer = self.answer(self.prompt_tokens(prompt), prompt.settings.max_new_tokens, prompt)
        named = {"prompt": prompt.name, "prompt_sha256": prompt.sha256, "task": prompt.settings.task}
        return answer.model_copy(update=named)

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
    def stream(self, answer: Served, prompt: WorkloadPrompt | None = None) -> tuple[list[int], list[float]]:
        """Decode the prompt of an answer as one of several requests: tokens, and seconds from the request to each part
        of the reply.
        """

    @abstractmethod
    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""

    def failure(self, error: UserError) -> str:
        """Why a request failed: the server's end, or the error."""
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = self.process.wait(ENDING_S)
                return (
                    f"the server ended while it was used, with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
                )
        return str(error)

    def cpu_ms(self) -> float:
        """CPU time of the threads of the server and its workers; 0 if they are not on this machine."""
        nanoseconds, waiting = 0, [str(self.process.pid)] if self.process else []
        while waiting:
            for thread in Path(f"/proc/{waiting.pop()}/task").glob("*"):
                with suppress(OSError, ValueError, IndexError):  # a thread that has ended, whose time is not in the sum
                    nanoseconds += int((thread / "schedstat").read_text().split()[0])
                    waiting += (thread / "children").read_text().split()
        return nanoseconds / 1e6
