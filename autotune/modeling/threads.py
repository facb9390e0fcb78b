"""Limits the CPU threads of a step: a forward pass of a few tokens ends before a second thread has started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def limited_threads(number: int | None) -> Iterator[None]:
    """Limit torch to ``number`` threads inside the context; None changes nothing."""
    before = torch.get_num_threads()
    if number is None or number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
