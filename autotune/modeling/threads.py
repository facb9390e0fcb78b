"""How many CPU threads a step uses: a forward of a few tokens is over before a second thread has woken up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def limited_threads(number: int | None) -> Iterator[None]:
    """Inside, torch uses that many threads; None leaves them as they are."""
    before = torch.get_num_threads()
    if number is None or number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
