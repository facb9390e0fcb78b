"""Argument names of ``Decoder`` in the previous version, which are accepted with a warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")
FORMER_NAMES = {"ways": "points", "buckets": "capture_sizes", "runner": "mode"}


def accepts_former_names(init: Callable[P, None]) -> Callable[P, None]:
    """Decorate ``__init__``: a former name of an argument is replaced by its present one."""

    @functools.wraps(init)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        for former, present in FORMER_NAMES.items():
            if former in kwargs:
                warnings.warn(f"Decoder: {former}= is now called {present}=", DeprecationWarning, stacklevel=2)
                value = kwargs.pop(former)
                kwargs[present] = "cuda-graph" if value == "graph" else value
        init(*args, **kwargs)

    return wrapper
