"""The timed steps of an unfinished cost table, kept in a JSON Lines file as they come."""

from __future__ import annotations

import math
from pathlib import Path

from pydantic import ValidationError

from autotune.files import Document, append_line, read_lines

Samples = list[tuple[str, int, int, float]]
"""(part, tokens, KV length, ms) per sample."""


class TimedJob(Document):
    """The samples of a job, and the plain steps before and after it."""

    plain_ms: tuple[float, float]
    samples: Samples
    draft: int | None = None
    """Index of the draft whose rounds were timed; None for plain steps."""

    @property
    def reference_ms(self) -> float:
        """The plain step that the samples are relative to: the geometric mean of both."""
        return math.sqrt(self.plain_ms[0] * self.plain_ms[1])


class Block(Document):
    """Consecutive jobs of one process."""

    jobs: list[TimedJob]


class LogHeader(Document):
    """The first line of a log."""

    threads: int | None
    """CPU threads of all steps; None for torch's default."""


class BlockLog:
    """Blocks of samples of one table, from which an interrupted measurement continues.

    Samples are multiples of the plain steps before and after them, so blocks of another hour, when the machine was
    faster or slower, serve as well as new ones.

    Args:
        path: file of the log, named by all that determines the sizes and the models.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: LogHeader | None = None
        self.blocks: list[Block] = []
        for line in read_lines(path):
            try:
                if "threads" in line:
                    self.header = LogHeader.model_validate(line, strict=False)
                else:
                    self.blocks.append(Block.model_validate(line, strict=False))
            except ValidationError:  # of another version
                continue
        if self.header is None:
            self.blocks = []

    def begin(self, header: LogHeader) -> None:
        """Write the first line."""
        self.header = header
        append_line(self.path, header.model_dump(mode="json"))

    def append(self, block: Block) -> None:
        """Keep a block."""
        append_line(self.path, block.model_dump(mode="json"))
