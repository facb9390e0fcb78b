"""The text of an answer while it is decoded: whole characters only, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CONTEXT_TOKENS = 8  # of the prompt, on which it depends whether the answer begins with a space


class AnswerText:
    """Collects the tokens of an answer. As a stopping criterion of generate, it ends the answer with the token that
    completes a stop string.

    Args:
        ends: tokens that end an answer, and are no part of its text.
        shows_special: whether the text has the names of special tokens.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        ends: Sequence[int] = (),
        *,
        shows_special: bool = False,
    ) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._ends, self._shows_special = frozenset(ends), shows_special
        self._tokens = list(prompt[-CONTEXT_TOKENS:])
        self._begin, self._end = 0, len(self._tokens)  # of the tokens before those whose text is not complete
        self._num_read = len(prompt)
        self._pending = ""  # what may be the beginning of a stop string
        self.is_stopped = False

    def __call__(self, input_ids: Tensor, _scores: Any) -> Tensor:
        """Whether a text [1, tokens] has ended; it grows from call to call."""
        self._add(input_ids[0, self._num_read :].tolist())
        self._num_read = input_ids.shape[1]
        return torch.tensor([self.is_stopped])

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens. With stop strings that has been done, one by one, when they were asked for."""
        if not self._stops:
            self._add(tokens)

    def _add(self, tokens: Sequence[int], *, is_last: bool = False) -> None:
        self._tokens += [token for token in tokens if token not in self._ends]
        before, text = self._decode(self._begin, self._end), self._decode(self._begin, None)
        if len(text) > len(before) and (is_last or not text.endswith("\N{REPLACEMENT CHARACTER}")):
            self._begin, self._end = self._end, len(self._tokens)
            self._pending += text[len(before) :]
            ends = [end for stop in self._stops if (end := self._pending.find(stop)) >= 0]
            if ends and not self.is_stopped:
                self.is_stopped, self._pending = True, self._pending[: min(ends)]

    def take(self, *, is_last: bool = False) -> str:
        """The text since the last call, but for what may be the beginning of a stop string."""
        if is_last and not self.is_stopped:
            self._add([], is_last=True)
        sizes = [n for stop in self._stops for n in range(1, len(stop)) if self._pending.endswith(stop[:n])]
        end = len(self._pending) - (0 if is_last or self.is_stopped else max(sizes, default=0))
        text, self._pending = self._pending[:end], self._pending[end:]
        return text

    def _decode(self, begin: int, end: int | None) -> str:
        return str(self._tokenizer.decode(self._tokens[begin:end], skip_special_tokens=not self._shows_special))
