"""Finds the fit of draft, token tree and hardware for speculative decoding of vision-language models, and decodes with
it.

Importing does nothing: torch is loaded when a decoder is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.errors import UserError
    from autotune.runtime.decoder import Decoder
    from autotune.runtime.load import load
    from autotune.runtime.stats import DecodingOutput, DecodingStats

__all__ = ["Decoder", "DecodingOutput", "DecodingStats", "UserError", "load"]

_HOMES = {
    "Decoder": "autotune.runtime.decoder",
    "DecodingOutput": "autotune.runtime.stats",
    "DecodingStats": "autotune.runtime.stats",
    "UserError": "autotune.errors",
    "load": "autotune.runtime.load",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'autotune' has no attribute {name!r}")
