"""A server of an engine as an arm of a comparison. Loads no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from autotune.documents.decoded import Decoded
from autotune.errors import ArmFailed, UserError
from autotune.workloads.prompt import WorkloadPrompt


class Server(Protocol):
    """What an arm asks of a server's client."""

    def ask(self, prompt: WorkloadPrompt) -> Decoded:
        """Decode one prompt greedily. Reading it takes none of the time."""

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""

    def failure(self, error: UserError) -> str:
        """Why a request failed: the server's end, or the error."""


@dataclass
class EngineArm:
    """Decodes prompts in a server, one at a time: an ``evaluation.arms.Arm``."""

    name: str
    """Unique within a comparison; who compares arms of several backends may change it."""
    key: str
    """Hash of the backend, the model, the arguments and the configuration."""
    keeps_state: bool
    """Whether drafts follow from earlier requests."""
    server: Server
    pause_s: float = 0.0
    """Time after an answer for which the server keeps a core busy without work."""

    def prepare(self, prompts: Sequence[WorkloadPrompt]) -> None:
        """Nothing: the server is warm, as requests read their prompts beforehand."""

    def decode(self, prompt: WorkloadPrompt) -> Decoded:
        """
        Raises:
            ArmFailed: the server has ended, or refuses the prompt.
        """
        try:
            served = self.server.ask(prompt)
        except UserError as error:
            raise ArmFailed(self.server.failure(error)) from None
        time.sleep(self.pause_s)
        return Decoded(**{name: getattr(served, name) for name in Decoded.model_fields} | {"arm": self.key})

    def text(self, answer: Decoded) -> str:
        """The text of an answer's tokens."""
        return self.server.text(answer.tokens)
