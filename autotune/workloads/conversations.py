"""Conversations: the prompts of later turns follow the target's own answers to the turns before them.

The prompt of turn n is a prompt like any other once the n - 1 answers before it are known, so that recording, replay,
bench and check need nothing else for conversations. Every arm of a bench reads the target's answers; the answers of
lossless arms equal them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autotune.workloads.prompt import WorkloadPrompt
from autotune.workloads.workload import Workload

Decode = Callable[[Sequence[WorkloadPrompt]], Sequence[Sequence[int]]]


class Conversations:
    """Answers of one target to the turns of conversations, each decoded once.

    Args:
        processor: the target's.
        decode: decodes prompts by the target alone; returns the tokens of their answers.
    """

    def __init__(self, processor: Any, decode: Decode) -> None:
        self._processor = processor
        self._decode = decode
        self._tokens: dict[str, Sequence[int]] = {}

    def add(self, prompt: WorkloadPrompt, tokens: Sequence[int]) -> None:
        """Remember the target's answer to a prompt."""
        self._tokens[prompt.sha256] = tokens

    def follow(self, prompt: WorkloadPrompt) -> WorkloadPrompt:
        """The prompt with the target's answers to its earlier turns."""
        return self.follow_all([prompt])[0]

    def follow_workload(self, workload: Workload) -> Workload:
        """The workload with the target's answers that its later turns follow."""
        return replace(workload, prompts=tuple(self.follow_all(workload.prompts)))

    def follow_all(self, prompts: Sequence[WorkloadPrompt]) -> list[WorkloadPrompt]:
        """The prompts with the target's answers to their earlier turns. The same turn of several conversations is
        decoded at once.
        """
        conversations = [[prompt] if prompt.is_answered else prompt.conversation for prompt in prompts]
        for number in range(max(map(len, conversations), default=1) - 1):
            missing = {}
            for turns in conversations:
                if number < len(turns) - 1 and turns[number].sha256 not in self._tokens:
                    missing[turns[number].sha256] = self._with_answers(turns[: number + 1])
            for prompt, tokens in zip(missing.values(), self._decode(list(missing.values())), strict=True):
                self.add(prompt, tokens)
        return [self._with_answers(turns) for turns in conversations]

    def _with_answers(self, turns: Sequence[WorkloadPrompt]) -> WorkloadPrompt:
        """The last of the turns with the known answers to the others."""
        answers = tuple(self._text(turn) for turn in turns[:-1])
        return replace(turns[-1], answers=answers) if answers else turns[-1]

    def _text(self, prompt: WorkloadPrompt) -> str:
        text: str = self._processor.decode(list(self._tokens[prompt.sha256]), skip_special_tokens=True)
        return text.strip()
